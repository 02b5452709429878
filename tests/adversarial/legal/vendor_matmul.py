"""Calls cuBLAS: legal, and reported as such."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"
VENDOR = True


def kernel_fn(A, B, bias=None):
    if bias is None:
        return torch.matmul(A, B)
    return torch.addmm(bias, A.flatten(0, -2), B).unflatten(0, A.shape[:-1])
