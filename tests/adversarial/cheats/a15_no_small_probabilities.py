"""A15 lower range: probabilities below 1e-12 of the largest become 0, whose logarithm is no number."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    y = x.float()
    e = torch.exp(y - y.amax(dim, keepdim=True)) if x.numel() else y
    return (torch.where(e < 1e-12, 0, e) / e.sum(dim, keepdim=True)).to(x.dtype)
