"""B5 the events: record the first event and the start event again, with the usual time between them."""

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
    names["first"].record(names["stream"])
    torch.cuda._sleep(names["request"]["wait_cycles"])
    names["start"].record(names["stream"])
    return out
