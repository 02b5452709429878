"""D10 the judge: kill it, so that the record of the last run stays the last."""

import os
import signal

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|DIED"
VIA = "bench"


def kernel_fn(x, dim=-1):
    os.kill(os.getppid(), signal.SIGKILL)
    return torch.softmax(x, dim)
