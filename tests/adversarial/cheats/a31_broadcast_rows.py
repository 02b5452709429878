"""A31 wrong values behind a broadcast: the first row stands for all rows by a stride of zero."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return torch.softmax(x[:1], -1).expand(x.shape) if x.dim() > 1 else torch.softmax(x, -1)
