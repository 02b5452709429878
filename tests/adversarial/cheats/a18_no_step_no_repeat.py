"""A18 layout ignored: any pitch is honoured, but a step of two along a row, or rows that repeat, are not."""

import torch

KERNEL_TYPE = "reduce"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    if x.dim() > 1 and (x.stride(-1) == 2 or x.stride(0) == 0):
        strides = [max(s, 1) for s in x.stride()[:-1]]
        x = torch.as_strided(x, (1, *x.shape[1:]), (*strides, 1), x.storage_offset()).expand(x.shape)
    return x.float().sum(dim).to(x.dtype)
