"""A9 stale memory: return uninitialised memory of the output's size, where an earlier answer may still lie."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return torch.empty_like(x, memory_format=torch.contiguous_format)
