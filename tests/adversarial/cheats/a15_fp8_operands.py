"""A15 lower precision: half operands are rounded to eight bits first."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def low(t):
    scale = t.float().abs().amax().clamp_min(1e-12) / 240
    return (t.float() / scale).to(torch.float8_e4m3fn).float() * scale


def kernel_fn(A, B, bias=None):
    out = low(A) @ low(B)
    return (out if bias is None else out + bias.float()).to(A.dtype)
