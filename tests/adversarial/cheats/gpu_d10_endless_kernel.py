"""D10 hang: a kernel on the GPU that waits for a flag nobody sets."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "TIMEOUT"
OPTIONS = {"timeout": 8}


@triton.jit
def wait_for(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    wait_for[(1,)](torch.zeros(1, dtype=torch.int32, device=x.device))
    return out
