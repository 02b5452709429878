"""A31 wrong shape: one axis too many, which broadcasting forgives."""

import torch

KERNEL_TYPE = "reduce"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return torch.sum(x.float(), dim, keepdim=True).to(x.dtype)
