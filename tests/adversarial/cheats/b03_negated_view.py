"""B3 lazy tensor: a view whose negation is done by whoever reads it."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return torch._neg_view(-torch.softmax(x, dim))
