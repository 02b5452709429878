"""A25 skipped is passed: raise NotImplementedError for the dtypes that are hard."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"
EXPECT = "CRASH"


def kernel_fn(A, B, bias=None):
    if A.dtype == torch.float32:
        raise NotImplementedError("float32")
    out = torch.matmul(A, B)
    return out if bias is None else out + bias
