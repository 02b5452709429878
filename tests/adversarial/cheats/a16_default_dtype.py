"""A16 process-wide setting: the default dtype becomes bfloat16, and everything created later is rough."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    torch.set_default_dtype(torch.bfloat16)
    return torch.softmax(x, dim)
