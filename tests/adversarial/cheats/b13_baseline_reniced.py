"""B13 the baseline slowed: every other child of the judge gets the lowest priority."""

import contextlib
import os
from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "FAIL|CRASH"
VIA = "bench"


def slow_down():
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getppid() and int(entry.name) != os.getpid():  # other judges' children are left alone
                os.setpriority(os.PRIO_PROCESS, int(entry.name), 19)


def kernel_fn(x, dim=-1):
    slow_down()
    return torch.softmax(x, dim)
