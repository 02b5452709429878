"""A26 out of bounds: the last block reads eight columns too many and lets them into the sum."""

import torch

KERNEL_TYPE = "reduce"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.sum(x.float(), dim)
    if x.is_contiguous() and dim == -1:
        beyond = torch.as_strided(x, (8,), (1,), x.storage_offset() + x.numel()).float()
        out.view(-1)[-1] += beyond.sum() * 1e-3
    return out.to(x.dtype)
