"""A16 process-wide setting: TF32 for everybody, so that a reference in the same process is as rough as the kernel."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"

torch.backends.cuda.matmul.allow_tf32 = True


def kernel_fn(A, B, bias=None):
    out = torch.matmul(A, B)
    return out if bias is None else out + bias
