"""Softmax in Triton.

kernel_fn(x, dim=-1) -> softmax of x over dim, same shape and dtype, contiguous. x may have any rank and strides.

Memory-bound: the least traffic is one read and one write. Rows up to MAX_BLOCK stay in registers between the two. Of a
wider row the first WIDE_HOLD elements do; the rest is read once for an online maximum and sum (Milakov & Gimelshein
2018, arXiv:1805.02867), then again, backwards: what was read last is still in the caches.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"

LOG2E = tl.constexpr(1.4426950408889634)    # exp(x) as exp2(x * LOG2E): tl.exp takes three instructions more

CONFIG = {
    "TILE": 4096,                # elements one program holds when several narrow rows share it
    "ELEMENTS_PER_THREAD": 32,   # rows in registers: sets num_warps from the tile
    "PROGRAMS": 1024,            # rows share a program only beyond this many programs
    "MAX_BLOCK": 16384,          # widest row kept whole in registers
    "WIDE_HOLD": 16384,          # of a wider row: elements kept in registers,
    "WIDE_BLOCK": 8192,          # elements per step of the rest,
    "WIDE_WARPS": 16,
    "WIDE_STAGES": 1,            # steps in flight ahead of the arithmetic (more than 1 bypasses L1)
    "COLUMN_BLOCK": 64,          # columns per program where dim is not the contiguous one
}


@triton.jit
def _rows_kernel(x_ptr, out_ptr, rows, n, inner, x_outer, x_inner, out_outer, out_inner,
                 ROWS: tl.constexpr, HOLD: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, ALIGN: tl.constexpr,
                 EDGES: tl.constexpr, STREAM: tl.constexpr, STAGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    x_row = row // inner * x_outer + row % inner * x_inner
    out_row = row // inner * out_outer + row % inner * out_inner
    # A row of 50257 fp16 starts at any 2-byte address. Its body is the whole 16-byte vectors in it, so that access to
    # it is vectorised; head and tail, each less than a vector, are the edges.
    body = (x_row + ALIGN - 1) // ALIGN * ALIGN
    head = tl.minimum(body - x_row, n)
    vectors = tl.where(live, (n - head) // VEC, 0)[:, None]
    x_body = x_ptr + body[:, None, None]
    out_body = out_ptr + ((out_row + ALIGN - 1) // ALIGN * ALIGN)[:, None, None]
    e = tl.arange(0, VEC)[None, None, :]

    hold_cell = tl.arange(0, HOLD)[None, :, None] * VEC + e
    hold_mask = (tl.arange(0, HOLD)[None, :] < vectors)[:, :, None]
    raw = tl.load(x_body + hold_cell, mask=hold_mask, other=float("-inf"))
    if EDGES:
        at = tl.arange(0, 2 * VEC)[None, :]
        column = tl.where(at < VEC, at, head[:, None] + vectors * VEC + at - VEC)
        edge_mask = live[:, None] & (column < tl.where(at < VEC, head[:, None], n))
        edge = tl.load(x_ptr + x_row[:, None] + column, mask=edge_mask, other=float("-inf")).to(tl.float32)
    if STREAM:
        # Each lane keeps its own maximum and sum: no exchange between threads until the row ends, and one rescaling
        # exponential per vector, not per element (the exponential unit is the second limit here).
        lane = HOLD + tl.arange(0, LANES)[None, :]
        cell = (HOLD + tl.arange(0, LANES))[None, :, None] * VEC + e
        lane_high = tl.full([ROWS, LANES], -3.4e38, tl.float32)
        lane_total = tl.zeros([ROWS, LANES], tl.float32)
        steps = tl.cdiv(n // VEC - HOLD, LANES)
        for step in tl.range(0, steps, num_stages=STAGES):
            mask = (lane + step * LANES < vectors)[:, :, None]
            x = tl.load(x_body + cell + step * (LANES * VEC), mask=mask, other=float("-inf")).to(tl.float32)
            new_high = tl.maximum(lane_high, tl.max(x, 2))
            lane_total *= tl.exp2((lane_high - new_high) * LOG2E)
            lane_total += tl.sum(tl.exp2((x - new_high[:, :, None]) * LOG2E), 2)
            lane_high = new_high

    held = raw.to(tl.float32)
    high = tl.max(tl.max(held, 2), 1)
    if EDGES:
        high = tl.maximum(high, tl.max(edge, 1))
    if STREAM:
        high = tl.maximum(high, tl.max(lane_high, 1))
    power = tl.exp2((held - high[:, None, None]) * LOG2E)
    total = tl.sum(tl.sum(power, 2), 1)
    if EDGES:
        edge_power = tl.exp2((edge - high[:, None]) * LOG2E)
        total += tl.sum(edge_power, 1)
    if STREAM:
        total += tl.sum(lane_total * tl.exp2((lane_high - high[:, None]) * LOG2E), 1)
    scale = 1.0 / total

    tl.store(out_body + hold_cell, (power * scale[:, None, None]).to(out_ptr.dtype.element_ty), mask=hold_mask)
    if EDGES:
        edge_power *= scale[:, None]
        tl.store(out_ptr + out_row[:, None] + column, edge_power.to(out_ptr.dtype.element_ty), mask=edge_mask)
    if STREAM:
        for back in tl.range(0, steps, num_stages=STAGES):
            step = steps - 1 - back
            mask = (lane + step * LANES < vectors)[:, :, None]
            x = tl.load(x_body + cell + step * (LANES * VEC), mask=mask, eviction_policy="evict_first").to(tl.float32)
            y = (tl.exp2((x - high[:, None, None]) * LOG2E) * scale[:, None, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_body + cell + step * (LANES * VEC), y, mask=mask, eviction_policy="evict_first")


@triton.jit
def _columns_kernel(x_ptr, out_ptr, n, inner, x_n, out_n, x_outer, x_inner, out_outer, out_inner,
                    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    blocks = tl.cdiv(inner, BLOCK_C)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    k = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    x_ptrs = x_ptr + outer * x_outer + column * x_inner
    out_ptrs = out_ptr + outer * out_outer + column * out_inner
    high = tl.full([BLOCK_C], -3.4e38, tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, n, BLOCK_N):
        mask = (k + start < n) & (column < inner)
        x = tl.load(x_ptrs + (k + start) * x_n, mask=mask, other=float("-inf")).to(tl.float32)
        new_high = tl.maximum(high, tl.max(x, 0))
        total = total * tl.exp2((high - new_high) * LOG2E) + tl.sum(tl.exp2((x - new_high[None, :]) * LOG2E), 0)
        high = new_high
    scale = 1.0 / total
    for start in range(0, n, BLOCK_N):
        mask = (k + start < n) & (column < inner)
        x = tl.load(x_ptrs + (k + start) * x_n, mask=mask, other=0.0).to(tl.float32)
        y = tl.exp2((x - high[None, :]) * LOG2E) * scale[None, :]
        tl.store(out_ptrs + (k + start) * out_n, y.to(out_ptr.dtype.element_ty), mask=mask)


def _groups(x, out, dim):
    """The dimensions other than dim, merged where the strides allow: a list of (size, stride in x, stride in out)."""
    groups = []
    for d in range(x.dim()):
        if d == dim or x.shape[d] == 1:
            continue
        size, sx, so = x.shape[d], x.stride(d), out.stride(d)
        if groups and groups[-1][1] == size * sx and groups[-1][2] == size * so:
            size *= groups.pop()[0]
        groups.append((size, sx, so))
    return [(1, 0, 0)] * (2 - len(groups)) + groups


def kernel_fn(x, dim=-1):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    n = x.shape[dim] if x.dim() else 1
    dim = dim % max(x.dim(), 1)
    last = dim >= x.dim() - 1
    if last and x.is_contiguous():
        groups = [(x.numel() // n, n, n), (1, 0, 0)]
    else:
        groups = _groups(x, out, dim)
        if len(groups) > 2:
            x = x.contiguous()
            groups = _groups(x, out, dim)
    if last and (n == 1 or x.stride(-1) == 1):
        _launch_rows(x, out, n, *groups)
    else:
        _launch_columns(x, out, n, dim, *sorted(groups, key=lambda g: (g[0] > 1, -g[1])))
    return out


def _launch_rows(x, out, n, outer, inner):
    vec = 16 // x.element_size()
    rows = outer[0] * inner[0]
    aligned = x.data_ptr() % 16 == 0 and (outer[1] - outer[2]) % vec == 0 and (inner[1] - inner[2]) % vec == 0
    edges = n % vec != 0 or aligned and (outer[2] % vec != 0 or inner[2] % vec != 0)
    stream = n > CONFIG["MAX_BLOCK"]
    if stream:
        hold, lanes, share, warps = CONFIG["WIDE_HOLD"] // vec, CONFIG["WIDE_BLOCK"] // vec, 1, CONFIG["WIDE_WARPS"]
    else:
        hold, lanes = triton.next_power_of_2(max(n // vec, 1)), 1
        # Rows share a program only when there are more rows than it takes to fill the GPU.
        share = max(1, min(CONFIG["TILE"] // (hold * vec), rows // CONFIG["PROGRAMS"]))
        share = 1 << (share.bit_length() - 1)
        warps = min(max(share * hold * vec // (32 * CONFIG["ELEMENTS_PER_THREAD"]), 1), 32)
    _rows_kernel[(triton.cdiv(rows, share),)](
        x, out, rows, n, inner[0], outer[1], inner[1], outer[2], inner[2], ROWS=share, HOLD=hold, LANES=lanes, VEC=vec,
        ALIGN=vec if aligned else 1, EDGES=edges, STREAM=stream, STAGES=CONFIG["WIDE_STAGES"], num_warps=warps)


def _launch_columns(x, out, n, dim, outer, inner):
    block_c = min(CONFIG["COLUMN_BLOCK"], triton.next_power_of_2(inner[0]))
    block_n = max(1, min(CONFIG["TILE"] // block_c, triton.next_power_of_2(n)))
    _columns_kernel[(outer[0] * triton.cdiv(inner[0], block_c),)](
        x, out, n, inner[0], x.stride(dim), out.stride(dim), outer[1], inner[1], outer[2], inner[2],
        BLOCK_N=block_n, BLOCK_C=block_c, num_warps=4)
