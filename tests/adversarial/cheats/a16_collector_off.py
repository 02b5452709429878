"""A16 process-wide setting: the garbage collector stays off after a call."""

import gc

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    gc.disable()
    return torch.softmax(x, dim)
