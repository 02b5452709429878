"""D4 early clean exit: os._exit(0) in the tenth call."""

import os

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"
calls = []


def kernel_fn(x, dim=-1):
    calls.append(1)
    if len(calls) == 10:
        os._exit(0)
    return torch.softmax(x, dim)
