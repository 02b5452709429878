"""D6 memory that other programs share: writes below /dev/shm, where every process of the user may."""

from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "cpu"
EXPECT = "CRASH|FAIL"


def kernel_fn(x, dim=-1):
    with open(Path("/dev/shm") / "autokernel-zoo", "wb") as segment:
        segment.write(b"another's")
    return torch.softmax(x, dim)
