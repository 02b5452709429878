"""A30 output aliases the previous output: one buffer for all calls saves the allocation and breaks the caller."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
buffers = {}


def kernel_fn(x, dim=-1):
    key = x.shape, x.dtype
    if key not in buffers:
        buffers[key] = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.softmax(x, dim, out=buffers[key])
    return buffers[key]
