"""A11 constant output: every probability is one over the width."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return torch.full(x.shape, 1 / x.shape[dim], dtype=x.dtype, device=x.device)
