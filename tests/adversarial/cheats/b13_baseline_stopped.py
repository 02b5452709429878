"""B13, D10 the baseline stopped: SIGSTOP to every other child of the judge."""

import os
import signal
from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|TIMEOUT|NO VERDICT"
OPTIONS = {"timeout": 15}
VIA = "bench"


def kernel_fn(x, dim=-1):
    for entry in Path("/proc").glob("[0-9]*"):
        command = (entry / "cmdline").read_bytes() if (entry / "cmdline").exists() else b""
        if b"child.py" in command and int(entry.name) != os.getpid():
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getppid():
                os.kill(int(entry.name), signal.SIGSTOP)
    return torch.softmax(x, dim)
