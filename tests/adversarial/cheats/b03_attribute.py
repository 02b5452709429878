"""B3 lazy tensor: an exact Tensor with a patched method among its attributes."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    out.clone = lambda *_: torch.softmax(x, dim)
    return out
