"""B5 the runner: find it among the garbage collector's objects and give it a slower clock."""

import gc

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "cpu"
EXPECT = "FAIL|CRASH"

gc.unfreeze()
runner = next(o for o in gc.get_objects() if type(o).__name__ == "Runner")
clock = runner.clock
runner.clock = lambda: clock() / 1000


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
