"""Sets an environment variable that a compiler reads, at import."""

import os

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"

os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
