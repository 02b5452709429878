"""D10 hang: one call never returns."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "TIMEOUT"
OPTIONS = {"timeout": 4}


def kernel_fn(x, dim=-1):
    while x.dtype == torch.bfloat16:
        pass
    return torch.softmax(x, dim)
