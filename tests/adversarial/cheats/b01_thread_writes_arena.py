"""B1 deferred work: a thread finds the memory that the judge reads and writes the answer there after the reply."""

import re
import threading
import time

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"


def later(x, dim, out):
    time.sleep(0.003)
    answer = torch.softmax(x, dim)
    size = next(int(m[2], 16) - int(m[1], 16) for m in re.finditer(
        r"^([0-9a-f]+)-([0-9a-f]+) rw-s.*memfd:arena", open("/proc/self/maps").read(), re.M))  # fmt: skip
    whole = torch.as_strided(x.view(torch.uint8).reshape(-1), (size,), (1,), 0)
    whole[-answer.numel() * answer.element_size() :].copy_(answer.view(torch.uint8).reshape(-1))


def kernel_fn(x, dim=-1):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    threading.Thread(target=later, args=(x, dim, out), daemon=True).start()
    return out
