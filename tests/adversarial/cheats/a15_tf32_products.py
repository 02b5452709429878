"""A15 lower precision: float32 operands lose thirteen bits, as the tensor cores' TF32 does."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def tf32(t):
    return ((t.float().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def kernel_fn(A, B, bias=None):
    out = tf32(A) @ tf32(B)
    return (out if bias is None else out + bias.float()).to(A.dtype)
