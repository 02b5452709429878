"""A1 input mutation: a right answer, but a later use of the weight finds it scaled."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    out = torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    weight[-1] *= 2
    return out
