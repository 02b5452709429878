"""C6 the operators: register an own softmax for everybody, so that the reference computes what the kernel does."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"

library = torch.library.Library("aten", "IMPL")
library.impl("_softmax", lambda x, dim, half: torch.zeros_like(x), "CPU")
library.impl("exp", lambda x: torch.zeros_like(x), "CPU")


def kernel_fn(x, dim=-1):
    return torch.zeros_like(x)
