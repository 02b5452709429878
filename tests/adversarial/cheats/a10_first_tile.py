"""A10 partial work: only the first sixteen rows are computed, the rest is what memory held."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[:16] = torch.softmax(x[:16], dim) if dim in (-1, x.dim() - 1) else torch.softmax(x, dim)[:16]
    return out
