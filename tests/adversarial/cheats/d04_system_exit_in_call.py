"""D4 early clean exit: sys.exit() in a call that is hard."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"


def kernel_fn(x, dim=-1):
    if x.dtype == torch.bfloat16:
        sys.exit(0)
    return torch.softmax(x, dim)
