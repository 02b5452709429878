"""A26 out of bounds: writes 64 elements past the end of the input, where another tensor could lie."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    if x.is_contiguous():
        torch.as_strided(x, (64,), (1,), x.storage_offset() + x.numel()).zero_()
    return out
