"""B5, B11 a hook: a finaliser on the output runs in whichever function drops it, and looks who that is."""

import sys
import weakref

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "FAIL|CRASH"
found = []


def look():
    frame = sys._getframe(1)
    while frame:
        found.extend(value for value in frame.f_locals.values() if type(value) is list)
        frame = frame.f_back


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    weakref.finalize(out, look)
    if found:
        found[0][:] = [0.0] * len(found[0])
    return out
