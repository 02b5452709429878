"""A1 input mutation: leave the bytes alone and make the caller's tensor object point to other memory (set_)."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    x.set_(out.clone())
    return out
