"""C1, C3 the judge's side: zero everything that is reachable from the inputs, so that all copies agree."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "FAIL|CRASH"


def kernel_fn(x, dim=-1):
    whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    whole.zero_()
    return torch.full(x.shape, 1 / x.shape[dim], dtype=x.dtype, device=x.device)
