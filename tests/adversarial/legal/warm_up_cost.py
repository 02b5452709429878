"""One second of preparation in the first call."""

import time

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
ready = []


def kernel_fn(x, dim=-1):
    if not ready:
        time.sleep(1)
        ready.append(True)
    return torch.softmax(x, dim)
