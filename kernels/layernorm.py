"""LayerNorm in Triton.

kernel_fn(x, weight, bias, eps=1e-5) -> (x - mean) / sqrt(var + eps) * weight + bias over the last dimension, biased
variance (Ba et al. 2016, arXiv:1607.06450), same shape and dtype as x, contiguous, computed in float32. bias may be
None.

Memory-bound: the least traffic is one read and one write of x. Rows up to MAX_BLOCK stay in registers, so the variance
is the mean of the squared distances from the known mean: exact also where the mean is much larger than the spread.
Wider rows are read again for it, from L2.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "layernorm"
BACKEND = "triton"

CONFIG = {
    "TILE": 4096,                # elements a program holds when several narrow rows share it
    "ELEMENTS_PER_THREAD": 32,   # rows in registers: sets num_warps from the tile
    "PROGRAMS": 2048,            # rows share a program only beyond this many programs
    "HOIST": False,              # loading weight and bias beside x hides their latency, but takes registers
    "LOAD_POLICY": "",
    "STORE_POLICY": "",
    "MAX_BLOCK": 16384,          # widest row kept in registers
}


@triton.jit
def _load_affine(weight_ptr, bias_ptr, column, n, BIAS: tl.constexpr):
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0)
    bias = tl.load(bias_ptr + column, mask=column < n, other=0.0) if BIAS else 0.0
    return weight, bias


@triton.jit
def _rows_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, rows, n, inner, outer_stride, inner_stride, eps,
                 ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, HOIST: tl.constexpr,
                 LOAD_POLICY: tl.constexpr, STORE_POLICY: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    mask = (row < rows) & (column < n)
    start = row // inner * outer_stride + row % inner * inner_stride
    x = tl.load(x_ptr + start + column, mask=mask, other=0.0, eviction_policy=LOAD_POLICY)
    if HOIST:
        weight, bias = _load_affine(weight_ptr, bias_ptr, column, n, BIAS)
    x = x.to(tl.float32)
    x = tl.where(column < n, x - (tl.sum(x, 1) / n)[:, None], 0.0)
    if x_ptr.dtype.element_ty == tl.float32:                # a mean of 1e5 is rounded by 0.004: take that out too
        x = tl.where(column < n, x - (tl.sum(x, 1) / n)[:, None], 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 1) / n + eps)[:, None]
    if not HOIST:
        weight, bias = _load_affine(weight_ptr, bias_ptr, column, n, BIAS)
    y = (x * weight.to(tl.float32) + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * n + column, y, mask=mask, eviction_policy=STORE_POLICY)


@triton.jit
def _wide_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, n, inner, outer_stride, inner_stride, eps,
                 BLOCK: tl.constexpr, BIAS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // inner * outer_stride + row % inner * inner_stride
    out_ptr += row * n
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        sums += tl.load(x_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / n
    sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < n, other=0.0).to(tl.float32)
        x = tl.where(column < n, x - mean, 0.0)
        sums += x
        squares += x * x
    rest = tl.sum(sums, 0) / n                              # what rounding left in the mean
    scale = tl.rsqrt(tl.sum(squares, 0) / n - rest * rest + eps)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < n, other=0.0, eviction_policy="evict_first").to(tl.float32)
        weight, bias = _load_affine(weight_ptr, bias_ptr, column, n, BIAS)
        y = (x - mean - rest) * scale * weight.to(tl.float32) + bias
        tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty), mask=column < n)


def _row_strides(x):
    """(x, size of the inner row group, stride of the outer, stride of the inner); x is copied where two do not do."""
    n, groups = x.shape[-1], []
    if not x.is_contiguous():
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if size == 1:
                continue
            if groups and groups[-1][1] == size * stride:
                size *= groups.pop()[0]
            groups.append((size, stride))
        if len(groups) > 2 or x.stride(-1) != 1:
            x, groups = x.contiguous(), []
    if len(groups) == 2:
        return x, groups[1][0], groups[0][1], groups[1][1]
    return x, 1, groups[0][1] if groups else n, 0


def kernel_fn(x, weight, bias, eps=1e-5):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    n = x.shape[-1]
    rows = x.numel() // n
    x, inner, outer_stride, inner_stride = _row_strides(x)
    weight = weight.contiguous()
    biased = bias is not None
    bias = bias.contiguous() if biased else weight
    if n > CONFIG["MAX_BLOCK"]:
        _wide_kernel[(rows,)](x, weight, bias, out, n, inner, outer_stride, inner_stride, eps,
                              BLOCK=CONFIG["MAX_BLOCK"] // 2, BIAS=biased, num_warps=16)
        return out
    block = triton.next_power_of_2(n)
    # Rows share a tile only when there are more rows than it takes to fill the GPU.
    share = max(1, min(CONFIG["TILE"] // block, rows // CONFIG["PROGRAMS"]))
    share = 1 << (share.bit_length() - 1)
    warps = min(max(share * block // (32 * CONFIG["ELEMENTS_PER_THREAD"]), 1), 16)
    _rows_kernel[(triton.cdiv(rows, share),)](
        x, weight, bias, out, rows, n, inner, outer_stride, inner_stride, eps,
        ROWS=share, BLOCK=block, BIAS=biased, HOIST=CONFIG["HOIST"], LOAD_POLICY=CONFIG["LOAD_POLICY"],
        STORE_POLICY=CONFIG["STORE_POLICY"], num_warps=warps)
    return out
