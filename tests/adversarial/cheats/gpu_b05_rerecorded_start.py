"""B5 the events: find the start event in the caller's variables and record it again when the work is done."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "FAIL|CRASH"


def kernel_fn(x, dim=-1):
    torch.cuda._sleep(600_000)
    out = torch.softmax(x, dim)
    names = sys._getframe(1).f_locals
    names["start"].record(names["stream"])
    return out
