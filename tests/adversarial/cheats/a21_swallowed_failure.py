"""A21 silent fallback: the "kernel" always fails, and what comes back is whatever was allocated for it."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    try:
        raise RuntimeError("no kernel image is available")
    except RuntimeError:
        return out
