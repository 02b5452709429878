"""A15 lower precision: whole numbers of one scale for a tensor; quiet rows beside loud ones lose their digits."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def whole(t):
    step = t.double().abs().amax().clamp_min(1e-30) / 2**23
    return (t.double() / step).round() * step


def kernel_fn(A, B, bias=None):
    if A.numel() == 0:
        return A.new_empty((*A.shape[:-1], B.shape[1]))
    out = whole(A) @ whole(B) if A.dtype == torch.float32 else A.double() @ B.double()
    return (out if bias is None else out + bias.double()).to(A.dtype)
