"""A branch that is never taken and a kernel that is never launched: useless, and right."""

import torch

KERNEL_TYPE = "reduce"
BACKEND = "triton"
VENDOR = True


def fast(x, dim):
    raise AssertionError("never reached")


def kernel_fn(x, dim=-1):
    if x.numel() == -1:
        return fast(x, dim)
    return torch.sum(x.float(), dim).to(x.dtype)
