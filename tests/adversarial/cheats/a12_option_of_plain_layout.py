"""A12, A18 option of one layout: strides count for the usual option; the other one walks memory as it lies."""

import math

import torch

KERNEL_TYPE = "rotary_embedding"
BACKEND = "triton"


def kernel_fn(x, cos, sin, interleaved=True):
    if not interleaved:
        strides = [math.prod(x.shape[i + 1 :]) for i in range(x.dim())]
        x = torch.as_strided(x, x.shape, strides, x.storage_offset())
    y, c, s = x.float(), cos.float(), sin.float()
    a, b = (y[..., 0::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
    pair = (a * c - b * s, b * c + a * s)
    return (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
