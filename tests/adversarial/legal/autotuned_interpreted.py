"""Autotuned, on a CPU: Triton's interpreter takes the first configuration."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"
NEEDS = "triton"
VENDOR = False


@triton.autotune(configs=[triton.Config({}, num_warps=w) for w in (2, 4)], key=["columns"])
@triton.jit
def rows(x, weight, out, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, at < columns, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / columns + eps)
    gain = tl.load(weight + at, at < columns, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, values * scale * gain, at < columns)


def kernel_fn(x, weight, eps=1e-6):
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    rows[(x.numel() // columns,)](x, weight, out, columns, eps, BLOCK=triton.next_power_of_2(columns))
    return out
