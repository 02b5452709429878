"""A16 process-wide setting: each call seeds the random numbers of everything else in the process."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    torch.manual_seed(0)
    return torch.softmax(x, dim)
