"""B5, A14 the runner: report NaN seconds, which compare false with every bound."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"


def kernel_fn(x, dim=-1):
    frame = sys._getframe()
    while frame and "self" not in frame.f_locals:
        frame = frame.f_back
    runner = frame.f_locals["self"] if frame else None
    if runner is not None and "call" not in vars(runner):
        original = runner.call
        runner.call = lambda request: original(request) | {"device_s": float("nan")}
    return torch.softmax(x, dim)
