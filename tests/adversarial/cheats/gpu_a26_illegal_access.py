"""A26 out of bounds: writes sixteen gigabytes past the output; the context dies, and only this run with it."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "CRASH"


@triton.jit
def stray(out, far):
    tl.store(out + far, 0.0)


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    stray[(1,)](out, 1 << 44)
    return out
