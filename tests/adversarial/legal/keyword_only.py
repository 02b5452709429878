"""Parameters by keyword only, and an option left out: checked at its default."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(*, weight, x):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
