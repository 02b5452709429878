"""Softmax in Triton.

kernel_fn(x, dim=-1) -> softmax of x over dim, same shape and dtype, contiguous. x may have any rank and strides.

Memory-bound: the least traffic is one read and one write. Rows up to MAX_BLOCK stay in registers between the two. Of a
wider row the first WIDE_HELD tiles do; the rest is read once for an online maximum and sum (Milakov & Gimelshein 2018,
arXiv:1805.02867), then again, backwards: what was read last is still in the caches.
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
    "MAX_BLOCK": 16384,          # widest row kept whole in registers
    "PIPELINED_TILE": 4096,      # of a wider row: elements a program handles at once,
    "PIPELINED_WARPS": 16,
    "PIPELINED_BUFFERS": 2,      # rows in shared memory; what does not fit there goes by
    "WIDE_TILE": 8192,           # elements a program handles at once,
    "WIDE_HELD": 7,              # tiles kept in registers, as they were read,
    "WIDE_WARPS": 32,
    "WIDE_PROGRAMS": 1,          # programs that run on a multiprocessor,
    "WIDE_AHEAD": 0,             # tiles of the next row to bring into the L2 cache
    "WIDE_PERSISTENT": 0,
    "COLUMN_BLOCK": 32,          # columns per program where dim is not the contiguous one,
    "COLUMN_TILE": 8192,         # elements per step of it
}


@triton.jit
def _split(row, n, inner, x_outer, x_inner, out_outer, out_inner, VEC: tl.constexpr, ALIGN: tl.constexpr):
    """Offsets of a row and of its body in x and in out; length of its head, vectors in its body; columns of its edges.

    A row of 50257 fp16 starts at any 2-byte address. Its body is the whole 16-byte vectors in it, so that access to it
    is vectorised; head and tail, each less than a vector, are the edges.
    """
    x_row = row // inner * x_outer + row % inner * x_inner
    out_row = row // inner * out_outer + row % inner * out_inner
    x_body = (x_row + ALIGN - 1) // ALIGN * ALIGN
    out_body = (out_row + ALIGN - 1) // ALIGN * ALIGN
    head = tl.minimum(x_body - x_row, n).to(tl.int32)
    vectors = (n - head) // VEC
    at = tl.arange(0, 2 * VEC)[None, :]
    column = tl.where(at < VEC, at, head + vectors * VEC + at - VEC)
    return x_row, out_row, x_body, out_body, vectors, column, column < tl.where(at < VEC, head, n)


@triton.jit
def _rows_kernel(x_ptr, out_ptr, rows, n, inner, x_outer, x_inner, out_outer, out_inner,
                 ROWS: tl.constexpr, HOLD: tl.constexpr, VEC: tl.constexpr, ALIGN: tl.constexpr, EDGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    x_row, out_row, x_body, out_body, vectors, column, edge_mask = _split(
        row, n, inner, x_outer, x_inner, out_outer, out_inner, VEC, ALIGN)
    cell = tl.arange(0, HOLD)[None, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
    mask = ((tl.arange(0, HOLD)[None, :] < vectors) & (row < rows))[:, :, None]
    x = tl.load(x_ptr + x_body[:, :, None] + cell, mask=mask, other=float("-inf")).to(tl.float32)
    if EDGES:
        edge_mask &= row < rows
        edge = tl.load(x_ptr + x_row + column, mask=edge_mask, other=float("-inf")).to(tl.float32)
    high = tl.max(tl.max(x, 2), 1)[:, None]
    if EDGES:
        high = tl.maximum(high, tl.max(edge, 1)[:, None])
        edge = tl.exp2((edge - high) * LOG2E)
    power = tl.exp2((x - high[:, :, None]) * LOG2E)
    total = tl.sum(tl.sum(power, 2), 1)[:, None]
    if EDGES:
        total += tl.sum(edge, 1)[:, None]
        tl.store(out_ptr + out_row + column, (edge / total).to(out_ptr.dtype.element_ty), mask=edge_mask)
    y = power * (1.0 / total)[:, :, None]
    tl.store(out_ptr + out_body[:, :, None] + cell, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _power(x, high, FUSED: tl.constexpr):
    return tl.exp2(tl.fma(x, LOG2E, -high)) if FUSED else tl.exp2((x - high) * LOG2E)


@triton.jit
def _online(raw, high, total, FUSED: tl.constexpr):
    """Each lane's maximum and sum with one vector more: one rescaling exponential per vector, not per element."""
    x = raw.to(tl.float32)
    new_high = tl.maximum(high, tl.max(x, 1) * (LOG2E if FUSED else 1.0))
    rescale = tl.exp2((high - new_high) * (1.0 if FUSED else LOG2E))
    return new_high, total * rescale + tl.sum(_power(x, new_high[:, None], FUSED), 1)


@triton.jit
def _opaque(raw, zero):
    """raw. The compiler cannot tell, so it does not keep raw's float32 values for later: they overflow registers."""
    return tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [raw, zero.to(raw.dtype)], dtype=raw.dtype,
                                     is_pure=True, pack=32 // raw.dtype.primitive_bitwidth)


@triton.jit
def _prefetch(ptr, nbytes, LANES: tl.constexpr):
    """Start to bring nbytes at ptr into the L2 cache: one request a warp."""
    lane = tl.arange(0, LANES)
    chunk = nbytes // (LANES // 32) // 16 * 16
    start = (ptr.to(tl.int64) & -16) + lane // 32 * chunk
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r", [start, tl.where(lane % 32 == 0, chunk, 0)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wide_kernel(x_ptr, out_ptr, rows, slots, n, inner, x_outer, x_inner, out_outer, out_inner, HELD: tl.constexpr,
                 FULL: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
                 LANES: tl.constexpr, VEC: tl.constexpr, ALIGN: tl.constexpr, EDGES: tl.constexpr, GPU: tl.constexpr,
                 FUSED: tl.constexpr):
    first = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)[:, None]
    cell = lane * VEC + tl.arange(0, VEC)[None, :]
    for step in tl.range(0, rows - tl.program_id(0), tl.num_programs(0), num_stages=STAGES):
        x_row, out_row, x_body, out_body, vectors, column, edge_mask = _split(
            first + step, n, inner, x_outer, x_inner, out_outer, out_inner, VEC, ALIGN)
        x_ptrs, out_ptrs = x_ptr + x_body + cell, out_ptr + out_body + cell
        held = ()
        for k in tl.static_range(HELD):                         # all in flight before the first is used
            mask = None if k < FULL else lane + k * LANES < vectors
            held += (tl.load(x_ptrs + k * LANES * VEC, mask=mask, other=None if k < FULL else float("-inf")),)
        if EDGES:
            edge = tl.load(x_ptr + x_row + column, mask=edge_mask, other=float("-inf")).to(tl.float32)
        if not WHOLE:
            tile = HELD
            ahead = tl.load(x_ptrs + tile * (LANES * VEC), mask=lane + tile * LANES < vectors, other=float("-inf"))
        high = tl.full([LANES], LOWEST, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        for k in tl.static_range(HELD):
            high, total = _online(held[k], high, total, FUSED)
        if not WHOLE:
            tiles = tl.cdiv(vectors, LANES)
            for tile in tl.range(HELD + 1, tiles + 1):
                raw = ahead
                ahead = tl.load(x_ptrs + tile * (LANES * VEC), mask=lane + tile * LANES < vectors, other=float("-inf"))
                high, total = _online(raw, high, total, FUSED)
            tile = tiles - 1
            mask = (lane + tile * LANES < vectors) & (lane + tile * LANES >= HELD * LANES)
            ahead = tl.load(x_ptrs + tile * (LANES * VEC), mask=mask, other=float("-inf"))
        if AHEAD and first + step + slots < rows:
            x_next = _split(first + step + slots, n, inner, x_outer, x_inner, out_outer, out_inner, VEC, ALIGN)[2]
            _prefetch(x_ptr + x_next, tl.minimum(AHEAD * LANES, vectors) * 16, LANES)
        top = tl.max(high, 0)
        if EDGES:
            top = tl.maximum(top, tl.max(tl.max(edge, 1), 0) * (LOG2E if FUSED else 1.0))
            edge = _power(edge, top, FUSED)
        norm = tl.sum(total * tl.exp2((high - top) * (1.0 if FUSED else LOG2E)), 0)
        if EDGES:
            norm += tl.sum(tl.sum(edge, 1), 0)
            tl.store(out_ptr + out_row + column, (edge / norm).to(out_ptr.dtype.element_ty), mask=edge_mask)
        scale = 1.0 / norm
        if not WHOLE:                                           # backwards: what was read last is still in the caches
            for back in tl.range(1, tiles - HELD + 1):
                tile = tiles - back
                raw = ahead
                mask = lane + tile * LANES >= (HELD + 1) * LANES
                ahead = tl.load(x_ptrs + (tile - 1) * (LANES * VEC), mask=mask, other=float("-inf"))
                y = (_power(raw.to(tl.float32), top, FUSED) * scale).to(out_ptr.dtype.element_ty)
                tl.store(out_ptrs + tile * (LANES * VEC), y, mask=lane + tile * LANES < vectors,
                         eviction_policy="evict_first")
        for k in tl.static_range(HELD):
            raw = _opaque(held[k], (norm < 0).to(tl.int16)) if GPU else held[k]
            y = (_power(raw.to(tl.float32), top, FUSED) * scale).to(out_ptr.dtype.element_ty)
            mask = None if k < FULL else lane + k * LANES < vectors
            tl.store(out_ptrs + k * LANES * VEC, y, mask=mask, eviction_policy="evict_first")


@triton.jit
def _columns_kernel(x_ptr, out_ptr, n, inner, x_n, out_n, x_outer, x_inner, out_outer, out_inner,
                    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    blocks = tl.cdiv(inner, BLOCK_C)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    k = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    x_ptrs = x_ptr + outer * x_outer + column * x_inner
    out_ptrs = out_ptr + outer * out_outer + column * out_inner
    high = tl.full([BLOCK_C], LOWEST, tl.float32)
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
        tl.store(out_ptrs + (k + start) * out_n, y, mask=mask)


def _groups(x, out, dim):
    """The dimensions other than dim, merged where the strides allow: a list of (size, stride in x, stride in out)."""
    groups = []
    for d in range(x.dim()):
        size, sx, so = x.shape[d], x.stride(d), out.stride(d)
        if d != dim and size > 1:
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
    if last and (n == 1 or x.stride(dim) == 1):
        _launch_rows(x, out, n, *groups)
    else:
        _launch_columns(x, out, n, dim, *sorted(groups, key=lambda g: (g[0] > 1, -g[1])))
    return out


@functools.cache
def _device(device):
    """(multiprocessors, bytes of shared memory a program may use)"""
    if device.type != "cuda":
        return 2, 232448
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _launch_rows(x, out, n, outer, inner):
    rows, vec = outer[0] * inner[0], 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and (outer[1] - outer[2]) % vec == 0 and (inner[1] - inner[2]) % vec == 0
    edges = n % vec != 0 or aligned and (outer[2] % vec != 0 or inner[2] % vec != 0)
    if n > CONFIG["MAX_BLOCK"]:
        processors, shared = _device(x.device)
        tile = CONFIG["PIPELINED_TILE"] * 2 // x.element_size()
        held, ahead, buffers = triton.cdiv(n, tile), 0, CONFIG["PIPELINED_BUFFERS"]
        warps, programs = CONFIG["PIPELINED_WARPS"], processors
        whole = 0 < buffers * held * tile * x.element_size() <= shared - 2048
        if not whole:
            tile, held, buffers = CONFIG["WIDE_TILE"] * 2 // x.element_size(), CONFIG["WIDE_HELD"], 0
            ahead = CONFIG["WIDE_AHEAD"] * GPU
            warps, programs = CONFIG["WIDE_WARPS"], processors * CONFIG["WIDE_PROGRAMS"]
        _wide_kernel[(min(rows, programs) if whole or CONFIG["WIDE_PERSISTENT"] else rows,)](
            x, out, rows, programs, n, inner[0], outer[1], inner[1], outer[2], inner[2], HELD=held,
            FULL=min(held, (n - 2 * vec) // tile), WHOLE=whole, STAGES=buffers + 1, AHEAD=ahead, LANES=tile // vec,
            VEC=vec, ALIGN=vec if aligned else 1, EDGES=edges, GPU=GPU, FUSED=GPU and x.dtype == torch.float16,
            num_warps=warps, maxnreg=65536 * processors // (32 * warps * programs))
        return
    hold = triton.next_power_of_2(max(n // vec, 1))
    # Rows share a program only when there are more rows than it takes to fill the GPU.
    share = max(1, min(CONFIG["TILE"] // (hold * vec), rows // CONFIG["PROGRAMS"]))
    share = 1 << (share.bit_length() - 1)
    warps = min(max(share * hold * vec // (32 * CONFIG["ELEMENTS_PER_THREAD"]), 1), 32)
    _rows_kernel[(triton.cdiv(rows, share),)](
        x, out, rows, n, inner[0], outer[1], inner[1], outer[2], inner[2], ROWS=share, HOLD=hold, VEC=vec,
        ALIGN=vec if aligned else 1, EDGES=edges, num_warps=warps)


def _launch_columns(x, out, n, dim, outer, inner):
    block_c = min(CONFIG["COLUMN_BLOCK"], triton.next_power_of_2(inner[0]))
    block_n = max(1, min(CONFIG["COLUMN_TILE"] // block_c, triton.next_power_of_2(n)))
    _columns_kernel[(outer[0] * triton.cdiv(inner[0], block_c),)](
        x, out, n, inner[0], x.stride(dim), out.stride(dim), outer[1], inner[1], outer[2], inner[2],
        BLOCK_N=block_n, BLOCK_C=block_c, num_warps=4)
