"""B5, B11 a hook: the garbage collector calls back, at moments that lie outside the timed window."""

import gc

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"

gc.callbacks.append(lambda phase, info: None)


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
