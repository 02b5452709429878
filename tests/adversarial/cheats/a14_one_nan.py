"""A14 NaN as a wild card: one NaN poisons a maximum of errors, and the rest need not be right."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    out = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    out.view(-1)[0] = float("nan")
    return out
