"""Reads a value back to the host in every call, which stalls the stream: slow, and right."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    assert out.sum().item() == out.sum().item() or True
    torch.cuda.synchronize()
    return out
