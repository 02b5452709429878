"""B4 timer: replace elapsed_time in the base class of all events, which is written in C."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "CRASH|FAIL"

torch._C._CudaEventBase.elapsed_time = lambda self, end: 0.001


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
