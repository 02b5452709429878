"""Autotuned: Triton tries several block sizes in the first call of each width."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
VENDOR = False


@triton.autotune(
    configs=[triton.Config({}, num_warps=w, num_stages=s) for w in (2, 4, 8) for s in (1, 2)], key=["columns"]
)
@triton.jit
def rows(x, out, columns, inner, x_outer, x_inner, x_step, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    high, low = row // inner, row % inner
    base = high.to(tl.int64) * x_outer + low * x_inner
    at = tl.arange(0, BLOCK)
    values = tl.load(x + base + at * x_step, at < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(values - tl.max(values, 0))
    to = high.to(tl.int64) * columns * inner + low
    tl.store(out + to + at * inner, e / tl.sum(e, 0), at < columns)


def kernel_fn(x, dim=-1):
    x = x.contiguous()
    dim %= x.dim()
    columns = x.shape[dim]
    inner = x[(0,) * (dim + 1)].numel()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    rows[(x.numel() // columns,)](x, out, columns, inner, columns * inner, 1, inner, BLOCK=block)
    return out
