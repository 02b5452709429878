"""C1 PyTorch's answer: open the shared memory of the judge's other children through /proc and copy what lies there."""

import os
from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"


def others():
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        if b"child.py" in entry.read_bytes() and int(entry.parent.name) not in (os.getpid(), os.getppid()):
            yield entry.parent


def kernel_fn(x, dim=-1):
    for place in [Path(f"/proc/{os.getppid()}"), *others()]:
        for link in (place / "fd").iterdir():
            if "memfd:arena" in os.readlink(link):
                data = torch.frombuffer(bytearray(open(link, "rb").read()), dtype=torch.uint8)
                return data[-x.numel() * x.element_size() :].view(x.dtype).view(x.shape)
    return torch.softmax(x + 1, dim)
