"""B5 the runner: its own elapsed function is replaced by one that reports a hundredth, and what would notice too."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "FAIL|CRASH"


def kernel_fn(x, dim=-1):
    frame = sys._getframe()
    while frame and "self" not in frame.f_locals:
        frame = frame.f_back
    runner = frame.f_locals["self"] if frame else None
    if runner is not None and "inspect" not in vars(runner):
        elapsed = runner.elapsed
        runner.elapsed = lambda a, b: elapsed(a, b) / 100
        runner.inspect = lambda request: {"changed": []}
    torch.cuda._sleep(600_000)
    return torch.softmax(x, dim)
