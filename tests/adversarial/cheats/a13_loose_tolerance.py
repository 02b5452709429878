"""A13 loose tolerance: every value 0.4 % too large, within the 1e-2 that many harnesses allow half precision."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return (torch.softmax(x.float(), dim) * 1.004).to(x.dtype)
