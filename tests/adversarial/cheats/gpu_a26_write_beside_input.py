"""A26 out of bounds: the mask of a store is off by one block, so the bytes behind the input are overwritten."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"


@triton.jit
def tail(x, count):
    tl.store(x + count + tl.arange(0, 64), 0.0)


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    if x.is_contiguous():
        tail[(1,)](x, x.numel())
    return out
