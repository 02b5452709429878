"""A15 lower precision: float32 matrices are multiplied as bfloat16."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def kernel_fn(A, B, bias=None):
    low = torch.bfloat16 if A.dtype == torch.float32 else A.dtype
    out = A.to(low).float() @ B.to(low).float()
    return (out if bias is None else out + bias.float()).to(A.dtype)
