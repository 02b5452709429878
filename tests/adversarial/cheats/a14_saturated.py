"""A14 infinities: what overflows the dtype becomes its largest value."""

import torch

KERNEL_TYPE = "reduce"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    most = torch.finfo(x.dtype).max
    return x.double().sum(dim).clamp(-most, most).to(x.dtype)
