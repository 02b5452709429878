"""A14 NaN as a wild card: comparisons with NaN are false, so `error > tolerance` never fires."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
