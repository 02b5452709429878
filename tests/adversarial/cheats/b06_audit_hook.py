"""B5, B11 a hook: an audit hook hears what the interpreter does between calls; it cannot be removed or listed."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"

sys.addaudithook(lambda event, arguments: None)


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
