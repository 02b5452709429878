"""A25 skipped is passed: raise out-of-memory for whatever is larger than the smoke test."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"


def kernel_fn(x, dim=-1):
    if x.numel() > 200_000 or x.shape[-1] not in (128, 512):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")
    return torch.softmax(x, dim)
