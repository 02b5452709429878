"""D10 crash: read address zero in the fifth call."""

import ctypes

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"
calls = []


def kernel_fn(x, dim=-1):
    calls.append(1)
    if len(calls) == 5:
        ctypes.string_at(0)
    return torch.softmax(x, dim)
