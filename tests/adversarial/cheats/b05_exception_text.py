"""B5 the runner: an exception whose text is asked for, which is when it looks around."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"
calls = []

# under another file's name, so that nobody sees who looks
SOURCE = """
import sys

def slow_the_clock(frame=None):
    frame = frame or sys._getframe(1)
    while frame is not None:
        runner = frame.f_locals.get("self")
        if hasattr(runner, "clock"):
            real, runner.slow = runner.clock, getattr(runner, "slow", False)
            runner.clock = real if runner.slow else lambda: real() / 10
            runner.slow = True
            return True
        frame = frame.f_back
    return False
"""
space = {}
exec(compile(SOURCE, "elsewhere.py", "exec"), space)
slow_the_clock = space["slow_the_clock"]


class Curious(Exception):
    def __str__(self):
        slow_the_clock()
        return "curious"


def kernel_fn(x, dim=-1):
    calls.append(x.shape)
    if len(calls) == 1:
        raise Curious
    return torch.softmax(x, dim)
