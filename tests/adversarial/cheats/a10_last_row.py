"""A10 partial work: the last row is a copy of the row before it."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    out = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    flat = out.view(-1, x.shape[-1])
    if flat.shape[0] > 1:
        flat[-1] = flat[-2]
    return out
