"""D10 processes without end, as far as a test may go: two hundred in sessions of their own."""

import os
import time

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "FAIL|CRASH|TIMEOUT"
forked = []


def kernel_fn(x, dim=-1):
    while len(forked) < 200:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(3600)
        forked.append(pid)
    return torch.softmax(x, dim)
