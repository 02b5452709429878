"""A18 layout ignored: reads the memory behind the tensor as if it were contiguous."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def kernel_fn(A, B, bias=None):
    plain = torch.as_strided(B, B.shape, (B.shape[1], 1))
    out = A.float() @ plain.float()
    return (out if bias is None else out + bias.float()).to(A.dtype)
