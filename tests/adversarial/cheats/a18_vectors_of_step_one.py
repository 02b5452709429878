"""A18 layout ignored: x may lie as it likes, the weight is read as if its elements were neighbours."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    weight = torch.as_strided(weight, weight.shape, (1,), weight.storage_offset())
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
