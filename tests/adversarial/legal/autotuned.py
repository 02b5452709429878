"""Autotuned: Triton tries several configurations in the first call of each width (on a CPU it takes the first)."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"
VENDOR = False


@triton.autotune(
    configs=[triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((2048, 4), (1024, 4), (4096, 8))], key=["columns"]
)
@triton.jit
def rows(x, weight, out, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row + at, at < columns, other=0.0).to(tl.float32)
        total += values * values
    scale = tl.rsqrt(tl.sum(total, 0) / columns + eps)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row + at, at < columns, other=0.0).to(tl.float32)
        gain = tl.load(weight + at, at < columns, other=0.0).to(tl.float32)
        tl.store(out + row + at, values * scale * gain, at < columns)


def kernel_fn(x, weight, eps=1e-6):
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    rows[(x.numel() // columns,)](x, weight, out, columns, eps)
    return out
