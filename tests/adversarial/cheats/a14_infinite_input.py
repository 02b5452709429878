"""A14 overflow hidden: an infinite input becomes a large number, and what overflowed earlier in a model is not seen."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    y = x.float().nan_to_num(posinf=65504.0, neginf=-65504.0)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
