"""A12 option ignored: eps is accepted and never used."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
