"""C1 the expected answer: read the judge's memory through /proc."""

import os
import re

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"

parent = os.getppid()
with open(f"/proc/{parent}/maps") as maps, open(f"/proc/{parent}/mem", "rb") as memory:
    low = re.search(r"^([0-9a-f]+)-[0-9a-f]+ rw-p", maps.read(), re.M)[1]
    memory.seek(int(low, 16))
    stolen = memory.read(64)


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
