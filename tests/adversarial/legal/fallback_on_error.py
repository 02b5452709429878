"""A custom path that fails everywhere and falls back to PyTorch: right, timed as what it is, and marked for review."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
VENDOR = True


def kernel_fn(x, dim=-1):
    try:
        raise NotImplementedError("no kernel for this GPU yet")
    except NotImplementedError:
        return torch.softmax(x, dim)
