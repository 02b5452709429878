"""B5 the runner: put other code into its method; the function object stays the same."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
done = []


def kernel_fn(x, dim=-1):
    frame = sys._getframe()
    while not done and frame:
        if "self" in frame.f_locals and hasattr(frame.f_locals["self"], "_state"):
            kind = type(frame.f_locals["self"])
            code = kind._state.__code__
            kind._state.__code__ = code.replace(co_name="state")
            done.append(kind)
        frame = frame.f_back
    return torch.softmax(x, dim)
