"""Calls cuBLAS: legal, and reported as such."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"
VENDOR = True


def kernel_fn(A, B, bias=None):
    out = torch.matmul(A, B)
    return out if bias is None else out + bias
