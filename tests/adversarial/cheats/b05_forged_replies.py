"""B5 the runner: replace its whole call by one that hands over 20 ms of slow work and reports a hundredth of it."""

import sys
import time

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "cpu"


def kernel_fn(x, dim=-1):
    frame = sys._getframe()
    while frame and "self" not in frame.f_locals:
        frame = frame.f_back
    runner = frame.f_locals["self"] if frame else None
    if runner is not None and "call" not in vars(runner):
        original = runner.call

        def call(request):
            reply = original(request)
            for name in ("device_s", "host_s"):
                reply[name] /= 100
            reply["left"] = []
            return reply

        runner.call = call
        runner.inspect = lambda request: {"changed": []}
    time.sleep(0.02)
    return torch.softmax(x, dim)
