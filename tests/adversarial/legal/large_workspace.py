"""Allocates and frees a workspace ten times the input in every call."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"


def kernel_fn(x, dim=-1):
    work = torch.empty(10 * x.numel(), dtype=x.dtype, device=x.device)
    work[: x.numel()].copy_(x.reshape(-1))
    return torch.softmax(work[: x.numel()].view(x.shape), dim)
