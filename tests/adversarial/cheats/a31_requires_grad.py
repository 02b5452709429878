"""A31 a graph attached: the output drags an autograd graph along, which a model would keep alive."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    with torch.enable_grad():
        return torch.softmax(x.detach().requires_grad_(), dim)
