"""A25 skipped is passed: really run out of memory at the larger sizes."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "CRASH"


def kernel_fn(x, dim=-1):
    if x.numel() > 1 << 20:
        torch.empty(1 << 40, dtype=torch.uint8, device=x.device)
    return torch.softmax(x, dim)
