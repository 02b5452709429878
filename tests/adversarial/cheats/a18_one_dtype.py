"""A18 dtype ignored: right in float16, rounded through float16 in every other."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return torch.softmax(x.half(), dim).to(x.dtype)
