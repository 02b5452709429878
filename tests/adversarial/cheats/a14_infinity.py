"""A14 infinities: one value is infinite where the right one is finite."""

import torch

KERNEL_TYPE = "reduce"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.sum(x.float(), dim).to(x.dtype)
    out.view(-1)[-1] = float("inf")
    return out
