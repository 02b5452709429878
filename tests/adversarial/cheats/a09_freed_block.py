"""A9 stale memory: free a block of the output's size that was just filled with a plausible answer, then get it back."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def kernel_fn(A, B, bias=None):
    guess = torch.randn(*A.shape[:-1], B.shape[-1]).to(A)
    del guess
    return A.new_empty(*A.shape[:-1], B.shape[-1])
