"""D2 the result channel: a reply announced as four gigabytes, and one nested a hundred thousand deep."""

import os
import struct

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"


def kernel_fn(x, dim=-1):
    for fd in range(3, 64):
        if os.path.islink(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}"):
            data = b"[" * 100_000
            os.write(fd, struct.pack("<I", len(data)) + data + struct.pack("<I", 0xFFFFFFFF))
    return torch.softmax(x, dim)
