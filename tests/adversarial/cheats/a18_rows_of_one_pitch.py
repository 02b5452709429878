"""A18 layout ignored: rows are taken to lie one row length apart, as in an uncut tensor."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    strides, step = [], 1
    for n in reversed(x.shape):
        strides.insert(0, step)
        step *= n
    plain = torch.as_strided(x, x.shape, strides)
    return torch.nn.functional.rms_norm(plain, weight.shape, weight, eps)
