"""Softmax in Triton.

kernel_fn(x, dim=-1) -> softmax of x over dim, same shape and dtype, contiguous. x may have any rank and strides.

Memory-bound: the least traffic is one read and one write. Rows stay in registers between the two: of one program up to
MAX_BLOCK, beyond of several that exchange their maxima and sums, up to MAX_SPLIT. Still wider rows are read twice.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"

GPU = tl.constexpr(not triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)    # exp(x) as exp2(x * LOG2E): tl.exp takes three instructions more
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)

CONFIG = {
    "TILE": 1024,                # elements one program holds when several narrow rows share it
    "ELEMENTS_PER_THREAD": 32,   # rows in registers: sets num_warps from the tile
    "PROGRAMS": 1024,            # rows share a program only beyond this many programs
    "MAX_BLOCK": 16384,          # widest row that is one block
    "WIDE_WARPS": 8,             # of a program that shares a wider row with others,
    "WIDE_HELD": 5,              # the 16-byte vectors that each of its threads holds,
    "WIDE_PROGRAMS": 4,          # programs on a multiprocessor at a time: sets the registers they may take
    "MAX_SPLIT": 32,             # programs a row: fewer than any GPU runs at once, for they wait for each other
    "COLUMN_BLOCK": 32,          # columns per program where dim is not the contiguous one
}


@triton.jit
def _split(row, n, stride, VEC: tl.constexpr, ALIGN: tl.constexpr):
    """Offsets of a row and of its body in x and in out; vectors in its body; columns and mask of its edges.

    A row of 50257 fp16 starts at any 2-byte address. Its body is the whole 16-byte vectors in it, so that access to it
    is vectorised; head and tail, each less than a vector, are the edges."""
    x_row, out_row = row * stride, row * n
    x_body, out_body = (x_row + ALIGN - 1) // ALIGN * ALIGN, (out_row + ALIGN - 1) // ALIGN * ALIGN
    head = tl.minimum(x_body - x_row, n).to(tl.int32)
    vectors = (n - head) // VEC
    at = tl.arange(0, 2 * VEC)[None, :]
    column = tl.where(at < VEC, at, head + vectors * VEC + at - VEC)
    return x_row, out_row, x_body, out_body, vectors, column, column < tl.where(at < VEC, head, n)


@triton.jit
def _rows_kernel(x_ptr, out_ptr, rows, n, stride, ROWS: tl.constexpr, HOLD: tl.constexpr, VEC: tl.constexpr,
                 ALIGN: tl.constexpr, EDGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    x_row, out_row, x_body, out_body, vectors, column, edge_mask = _split(row, n, stride, VEC, ALIGN)
    cell = tl.arange(0, HOLD)[None, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
    mask = ((tl.arange(0, HOLD)[None, :] < vectors) & (row < rows))[:, :, None]
    x = tl.load(x_ptr + x_body[:, :, None] + cell, mask=mask, other=float("-inf")).to(tl.float32)
    high = tl.max(tl.max(x, 2), 1)[:, None]
    if EDGES:
        edge_mask &= row < rows
        edge = tl.load(x_ptr + x_row + column, mask=edge_mask, other=float("-inf")).to(tl.float32)
        high = tl.maximum(high, tl.max(edge, 1)[:, None])
        edge = tl.exp2((edge - high) * LOG2E)
    power = tl.exp2((x - high[:, :, None]) * LOG2E)
    total = tl.sum(tl.sum(power, 2), 1)[:, None]
    if EDGES:
        total += tl.sum(edge, 1)[:, None]
        tl.store(out_ptr + out_row + column, edge / total, mask=edge_mask)
    tl.store(out_ptr + out_body[:, :, None] + cell, power * (1.0 / total)[:, :, None], mask=mask)


@triton.jit
def _power(x, high, FUSED: tl.constexpr):
    """exp(x - maximum). FUSED: high is the maximum times LOG2E, and one FMA makes the exponent. Only float16 has so
    small a range that this neither overflows nor, the same high being used throughout, loses accuracy."""
    return tl.exp2(tl.fma(x, LOG2E, -high)) if FUSED else tl.exp2((x - high) * LOG2E)


@triton.jit
def _wide_kernel(x_ptr, out_ptr, parts_ptr, n, stride, SPLIT: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr,
                 LANES: tl.constexpr, VEC: tl.constexpr, ALIGN: tl.constexpr):
    """One of SPLIT programs that share a row and exchange (maximum, sum) through parts_ptr, where zeros were before.
    A GPU starts programs in order: the others run already, or are the next to.
    A value gives way to its exp(x - maximum of this lane), so that it costs one exponential. Rounded to x's type that
    is as exact as the result: it is rounded twice, or lost where the result would be."""
    row, part = (tl.program_id(0) // SPLIT).to(tl.int64), tl.program_id(0) % SPLIT
    x_row, out_row, x_body, out_body, vectors, column, edge_mask = _split(row, n, stride, VEC, ALIGN)
    lane = part * (HELD * LANES) + tl.arange(0, LANES)[:, None]
    cell = lane * VEC + tl.arange(0, VEC)[None, :]
    held, powers, total = (), (), tl.zeros([LANES], tl.float32)
    for i in tl.static_range(HELD):                     # all in flight before the first is used
        mask = lane + i * LANES < vectors
        tile = tl.load(x_ptr + x_body + cell + i * (LANES * VEC), mask=mask, other=float("-inf"))
        held += (tile if GPU else tile.to(tl.float32),)         # the interpreter cannot compare bfloat16
    edge_mask &= column >= part * n                     # the first program's
    edge = tl.load(x_ptr + x_row + column, mask=edge_mask, other=float("-inf")).to(tl.float32)
    largest = held[0]
    for i in tl.static_range(1, HELD):
        largest = tl.maximum(largest, held[i])
    FUSED: tl.constexpr = GPU and x_ptr.dtype.element_ty == tl.float16
    UNIT: tl.constexpr = LOG2E if FUSED else 1.0        # of the maxima, see _power; exp(x) of them is exp2(x * BASE)
    BASE: tl.constexpr = 1.0 if FUSED else LOG2E
    high = tl.maximum(tl.max(largest, 1).to(tl.float32) * UNIT, LOWEST)
    for i in tl.static_range(HELD):
        power = _power(held[i].to(tl.float32), high[:, None], FUSED)
        total += tl.sum(power, 1)
        powers += (power.to(x_ptr.dtype.element_ty),)
    top = tl.maximum(tl.max(high, 0), tl.max(tl.max(edge, 1), 0) * UNIT)
    norm = tl.sum(total * tl.exp2((high - top) * BASE), 0) + tl.sum(tl.sum(_power(edge, top, FUSED), 1), 0)
    if SPLIT > 1:                                       # both in one word: it is there as a whole or not at all
        bits = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(parts_ptr + tl.program_id(0), bits | (norm.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF))
        at, ptrs = tl.arange(0, PARTS), parts_ptr + row * SPLIT + tl.arange(0, PARTS)
        words = tl.load(ptrs, mask=at < SPLIT, other=1, volatile=True)
        while GPU and tl.min((words != 0).to(tl.int32), 0) == 0:
            words = tl.load(ptrs, mask=at < SPLIT, other=1, volatile=True)
        tops = tl.where(at < SPLIT, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), LOWEST)
        norms = tl.where(at < SPLIT, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
        top = tl.max(tops, 0)
        norm = tl.sum(norms * tl.exp2((tops - top) * BASE), 0)
    tl.store(out_ptr + out_row + column, _power(edge, top, FUSED) / norm, mask=edge_mask)
    scale = tl.exp2((high - top) * BASE) / norm
    for i in tl.static_range(HELD):
        mask = lane + i * LANES < vectors
        tl.store(out_ptr + out_body + cell + i * (LANES * VEC), powers[i].to(tl.float32) * scale[:, None], mask=mask)


@triton.jit
def _columns_kernel(x_ptr, out_ptr, n, inner, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    blocks = tl.cdiv(inner, BLOCK_C)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    k = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    at = (tl.program_id(0) // blocks).to(tl.int64) * n * inner + column
    high, total = tl.full([BLOCK_C], LOWEST, tl.float32), tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, n, BLOCK_N):
        mask = (k + start < n) & (column < inner)
        x = tl.load(x_ptr + at + (k + start) * inner, mask=mask, other=float("-inf")).to(tl.float32)
        new_high = tl.maximum(high, tl.max(x, 0))
        total = total * tl.exp2((high - new_high) * LOG2E) + tl.sum(tl.exp2((x - new_high[None, :]) * LOG2E), 0)
        high = new_high
    for start in range(0, n, BLOCK_N):
        mask = (k + start < n) & (column < inner)
        x = tl.load(x_ptr + at + (k + start) * inner, mask=mask, other=0.0).to(tl.float32)
        y = tl.exp2((x - high[None, :]) * LOG2E) * (1.0 / total)[None, :]
        tl.store(out_ptr + at + (k + start) * inner, y, mask=mask)


def kernel_fn(x, dim=-1):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    n, inner = (x.shape[dim], out.stride(dim)) if x.dim() else (1, 1)
    vec, lanes = 16 // x.element_size(), 32 * CONFIG["WIDE_WARPS"]
    if x.numel() and (inner > 1 or n > CONFIG["MAX_SPLIT"] * CONFIG["WIDE_HELD"] * lanes * vec):
        block_c = min(CONFIG["COLUMN_BLOCK"], triton.next_power_of_2(inner))
        block_n = max(1, min(8192 // block_c, triton.next_power_of_2(n)))
        grid = (x.numel() // (n * inner) * triton.cdiv(inner, block_c),)
        _columns_kernel[grid](x.contiguous(), out, n, inner, BLOCK_N=block_n, BLOCK_C=block_c, num_warps=4)
    elif x.numel():
        x = x.reshape(-1, n)
        _launch_rows(x if x.stride(1) == 1 else x.contiguous(), out, n, vec, lanes)
    return out


def _launch_rows(x, out, n, vec, lanes):
    rows, stride = x.shape[0], x.stride(0)
    common = dict(VEC=vec, ALIGN=vec if x.data_ptr() % 16 == 0 and (stride - n) % vec == 0 else 1)
    if n <= CONFIG["MAX_BLOCK"]:
        hold = triton.next_power_of_2(max(n // vec, 1))
        # Rows share a program only when there are more rows than it takes to fill the GPU.
        share = max(1, min(CONFIG["TILE"] // (hold * vec), rows // CONFIG["PROGRAMS"]))
        share = 1 << (share.bit_length() - 1)
        warps = min(max(share * hold * vec // (32 * CONFIG["ELEMENTS_PER_THREAD"]), 1), 32)
        _rows_kernel[(triton.cdiv(rows, share),)](
            x, out, rows, n, stride, ROWS=share, HOLD=hold, EDGES=n % vec != 0, num_warps=warps, **common)
        return
    tiles = triton.cdiv(n // vec, lanes)        # programs share a row evenly, in more parts where rows are few
    held = max(triton.cdiv(tiles, CONFIG["MAX_SPLIT"]), min(tiles * rows // CONFIG["PROGRAMS"], CONFIG["WIDE_HELD"]))
    split = triton.cdiv(tiles, held) if GPU else min(tiles, 3)
    parts = torch.zeros(rows * split, dtype=torch.int64, device=x.device)
    for _ in range(1 if GPU else 2):            # the interpreter runs one program after the other, so they cannot wait
        _wide_kernel[(rows * split,)](
            x, out, parts, n, stride, SPLIT=split, PARTS=triton.next_power_of_2(split), HELD=triton.cdiv(tiles, split),
            LANES=lanes, num_warps=CONFIG["WIDE_WARPS"], maxnreg=65536 // (lanes * CONFIG["WIDE_PROGRAMS"]), **common)
