"""A18 layout of matrices: all rows are taken to lie x.stride(-2) apart; x.transpose(0, 1) of three axes does not."""

import math

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    rows = torch.as_strided(x, (math.prod(x.shape[:-1]), x.shape[-1]), (x.stride(-2), x.stride(-1)))
    y = rows.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype).view(x.shape)
