"""B1, B16 work elsewhere: a forked process shares the memory, watches it, and could compute ahead of the call."""

import os
import time

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"

if os.fork() == 0:
    time.sleep(3600)
    os._exit(0)


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
