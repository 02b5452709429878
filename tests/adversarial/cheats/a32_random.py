"""A32 not deterministic and not declared: rounding by the throw of a coin."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.softmax(x.float(), dim)
    return (out * (1 + (torch.rand_like(out) - 0.5) * torch.finfo(x.dtype).eps)).to(x.dtype)
