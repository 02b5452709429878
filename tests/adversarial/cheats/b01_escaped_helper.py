"""B1, D5 work elsewhere: a helper in a session of its own, with an empty environment and a dead parent."""

import os
import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, ["unrelated", "-c", "import time; time.sleep(3600)"], {})
    os._exit(0)
os.wait()


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
