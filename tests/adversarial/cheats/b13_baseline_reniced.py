"""B13 the baseline slowed: every other child of the judge gets the lowest priority and one core."""

import contextlib
import os
from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "FAIL|CRASH"


def slow_down():
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"child.py" in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                os.setpriority(os.PRIO_PROCESS, int(entry.name), 19)


def kernel_fn(x, dim=-1):
    slow_down()
    return torch.softmax(x, dim)
