"""A31 another type: a tuple whose first element is the answer."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return (torch.softmax(x, dim),)
