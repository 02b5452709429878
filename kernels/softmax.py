"""Softmax in Triton.

kernel_fn(x, dim=-1) -> softmax of x over dim, same shape and dtype, contiguous. x may have any rank and strides.

Memory-bound: the least traffic is one read and one write. Rows up to MAX_BLOCK stay in registers between the two. So do
wider ones of which two fit in shared memory: one program a multiprocessor works on a row while the next are on their
way. Of still wider rows only WIDE_HELD tiles stay; the rest is read twice, the second time from the L2 cache.
"""

import functools

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"

GPU = not triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)    # exp(x) as exp2(x * LOG2E): tl.exp takes three instructions more
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)

CONFIG = {
    "TILE": 1024,                # elements one program holds when several narrow rows share it
    "ELEMENTS_PER_THREAD": 32,   # rows in registers: sets num_warps from the tile
    "PROGRAMS": 1024,            # rows share a program only beyond this many programs
    "MAX_BLOCK": 16384,          # widest row that is one block
    "PIPELINED_TILE": 4096,      # 16-bit elements of a wider row that a program handles at once
    "PIPELINED_WARPS": 16,
    "PIPELINED_BUFFERS": 2,      # rows in shared memory
    "WIDE_TILE": 8192,           # the same of a row that does not fit there,
    "WIDE_HELD": 7,              # tiles kept in registers, as they were read,
    "WIDE_WARPS": 32,
    "WIDE_PROGRAMS": 1,          # programs that run on a multiprocessor at a time,
    "WIDE_PERSISTENT": 0,        # 1: programs stay, and take row after row,
    "WIDE_AHEAD": 0,             # tiles of a next row brought into the L2 cache
    "COLUMN_BLOCK": 32,          # columns per program where dim is not the contiguous one,
    "COLUMN_TILE": 8192,         # elements per step of it
}


@triton.jit
def _split(row, n, stride, VEC: tl.constexpr, ALIGN: tl.constexpr):
    """Offsets of a row and of its body in x and in out; vectors in its body; columns and mask of its edges.

    A row of 50257 fp16 starts at any 2-byte address. Its body is the whole 16-byte vectors in it, so that access to it
    is vectorised; head and tail, each less than a vector, are the edges.
    """
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
def _online(raw, high, total, FUSED: tl.constexpr):
    """Each lane's maximum and sum with one vector more (Milakov & Gimelshein 2018, arXiv:1805.02867)."""
    x = raw.to(tl.float32)
    new_high = tl.maximum(high, tl.max(x, 1) * (LOG2E if FUSED else 1.0))
    total *= tl.exp2((high - new_high) * (1.0 if FUSED else LOG2E))     # one more exponential a vector
    return new_high, total + tl.sum(_power(x, new_high[:, None], FUSED), 1)


@triton.jit
def _load(ptrs, lane, tile, first, end, MASKED: tl.constexpr):
    lane += tile * lane.shape[0]
    ptrs += tile * (ptrs.shape[0] * ptrs.shape[1])
    return tl.load(ptrs, mask=(lane >= first) & (lane < end), other=float("-inf")) if MASKED else tl.load(ptrs)


@triton.jit
def _store(ptrs, raw, lane, tile, end, high, scale, FUSED: tl.constexpr, MASKED: tl.constexpr):
    y = (_power(raw.to(tl.float32), high, FUSED) * scale).to(ptrs.dtype.element_ty)
    ptrs += tile * (ptrs.shape[0] * ptrs.shape[1])
    mask = lane + tile * lane.shape[0] < end if MASKED else None
    tl.store(ptrs, y, mask=mask, eviction_policy="evict_first")


@triton.jit
def _opaque(raw, zero, GPU: tl.constexpr):
    """raw. The compiler cannot tell, so it does not keep raw's float32 values for later: they overflow registers."""
    return raw if not GPU else tl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;", "=r,r,r", [raw, zero.to(raw.dtype)], dtype=raw.dtype, is_pure=True,
        pack=32 // raw.dtype.primitive_bitwidth)


@triton.jit
def _prefetch(ptr, nbytes, LANES: tl.constexpr):
    """Start to bring nbytes at ptr into the L2 cache: one request a warp."""
    lane = tl.arange(0, LANES)
    chunk = nbytes // (LANES // 32) // 16 * 16
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}", "=r,l,r",
        [(ptr.to(tl.int64) & -16) + lane // 32 * chunk, tl.where(lane % 32 == 0, chunk, 0)], tl.int32, False, 1)


@triton.jit
def _wide_kernel(x_ptr, out_ptr, rows, programs, n, stride, HELD: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr,
                 STAGES: tl.constexpr, AHEAD: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, ALIGN: tl.constexpr,
                 EDGES: tl.constexpr, GPU: tl.constexpr, FUSED: tl.constexpr):
    lane = tl.arange(0, LANES)[:, None]
    cell = lane * VEC + tl.arange(0, VEC)[None, :]
    for step in tl.range(0, rows - tl.program_id(0), tl.num_programs(0), num_stages=STAGES):
        row = tl.program_id(0).to(tl.int64) + step
        x_row, out_row, x_body, out_body, vectors, column, edge_mask = _split(row, n, stride, VEC, ALIGN)
        x_ptrs, out_ptrs, tiles = x_ptr + x_body + cell, out_ptr + out_body + cell, tl.cdiv(vectors, LANES)
        held = ()
        for i in tl.static_range(HELD):                 # all in flight before the first is used
            held += (_load(x_ptrs, lane, i, 0, vectors, i >= FULL),)
        if EDGES:
            edge = tl.load(x_ptr + x_row + column, mask=edge_mask, other=float("-inf")).to(tl.float32)
        if not WHOLE:
            ahead = _load(x_ptrs, lane, HELD, 0, vectors, True)
        high, total = tl.full([LANES], LOWEST, tl.float32), tl.zeros([LANES], tl.float32)
        for i in tl.static_range(HELD):
            high, total = _online(held[i], high, total, FUSED)
        if not WHOLE:
            for tile in tl.range(HELD + 1, tiles + 1):
                raw, ahead = ahead, _load(x_ptrs, lane, tile, 0, vectors, True)
                high, total = _online(raw, high, total, FUSED)
            ahead = _load(x_ptrs, lane, tiles - 1, HELD * LANES, vectors, True)
        if AHEAD and row + programs < rows:
            body = _split(row + programs, n, stride, VEC, ALIGN)[2]
            _prefetch(x_ptr + body, tl.minimum(AHEAD * LANES, vectors) * 16, LANES)
        top = tl.max(high, 0)
        if EDGES:
            top = tl.maximum(top, tl.max(tl.max(edge, 1), 0) * (LOG2E if FUSED else 1.0))
            edge = _power(edge, top, FUSED)
        norm = tl.sum(total * tl.exp2((high - top) * (1.0 if FUSED else LOG2E)), 0)
        if EDGES:
            norm += tl.sum(tl.sum(edge, 1), 0)
            tl.store(out_ptr + out_row + column, edge / norm, mask=edge_mask)
        scale = 1.0 / norm
        if not WHOLE:                                   # backwards: what was read last is still in the caches
            for back in tl.range(1, tiles - HELD + 1):
                raw, ahead = ahead, _load(x_ptrs, lane, tiles - 1 - back, HELD * LANES, vectors, True)
                _store(out_ptrs, raw, lane, tiles - back, vectors, top, scale, FUSED, True)
        for i in tl.static_range(HELD):
            raw = _opaque(held[i], (norm < 0).to(tl.int16), GPU)
            _store(out_ptrs, raw, lane, i, vectors, top, scale, FUSED, i >= FULL)


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
    if x.numel() and inner > 1:
        block_c = min(CONFIG["COLUMN_BLOCK"], triton.next_power_of_2(inner))
        block_n = max(1, min(CONFIG["COLUMN_TILE"] // block_c, triton.next_power_of_2(n)))
        grid = (x.numel() // (n * inner) * triton.cdiv(inner, block_c),)
        _columns_kernel[grid](x.contiguous(), out, n, inner, BLOCK_N=block_n, BLOCK_C=block_c, num_warps=4)
    elif x.numel():
        x = x.reshape(-1, n)
        _launch_rows(x if x.stride(1) == 1 else x.contiguous(), out, n)
    return out


@functools.cache
def _device(device):
    """(multiprocessors, bytes of shared memory a program may use)"""
    if device.type != "cuda":
        return 2, 232448
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _launch_rows(x, out, n):
    rows, stride, vec = x.shape[0], x.stride(0), 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and (stride - n) % vec == 0
    common = dict(VEC=vec, ALIGN=vec if aligned else 1, EDGES=n % vec != 0)
    if n <= CONFIG["MAX_BLOCK"]:
        hold = triton.next_power_of_2(max(n // vec, 1))
        # Rows share a program only when there are more rows than it takes to fill the GPU.
        share = max(1, min(CONFIG["TILE"] // (hold * vec), rows // CONFIG["PROGRAMS"]))
        share = 1 << (share.bit_length() - 1)
        warps = min(max(share * hold * vec // (32 * CONFIG["ELEMENTS_PER_THREAD"]), 1), 32)
        grid = (triton.cdiv(rows, share),)
        _rows_kernel[grid](x, out, rows, n, stride, ROWS=share, HOLD=hold, num_warps=warps, **common)
        return
    processors, shared = _device(x.device)
    lanes, buffers, warps = CONFIG["PIPELINED_TILE"] // 8, CONFIG["PIPELINED_BUFFERS"], CONFIG["PIPELINED_WARPS"]
    held, programs, persistent, ahead = triton.cdiv(n, lanes * vec), processors, True, 0
    whole = 0 < buffers * held * lanes * 16 <= shared - 2048
    if not whole:
        lanes, held, buffers, warps = CONFIG["WIDE_TILE"] // 8, CONFIG["WIDE_HELD"], 0, CONFIG["WIDE_WARPS"]
        programs, persistent = processors * CONFIG["WIDE_PROGRAMS"], CONFIG["WIDE_PERSISTENT"]
        ahead = CONFIG["WIDE_AHEAD"] * GPU
    _wide_kernel[(min(rows, programs) if persistent else rows,)](
        x, out, rows, programs, n, stride, HELD=held, FULL=min(held, (n // vec - 2) // lanes), WHOLE=whole,
        STAGES=buffers + 1, AHEAD=ahead, LANES=lanes, GPU=GPU, FUSED=GPU and x.dtype == torch.float16, num_warps=warps,
        maxnreg=65536 * processors // (32 * warps * programs), **common)
