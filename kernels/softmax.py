"""Softmax in Triton.

kernel_fn(x, dim=-1) -> softmax of x over dim, same shape and dtype, contiguous. x may have any rank and strides.

Memory-bound: the least traffic is one read and one write. Rows up to MAX_BLOCK stay in registers between the two. Of a
wider row the first WIDE_HELD tiles do; the rest is read once for an online maximum and sum (Milakov & Gimelshein 2018,
arXiv:1805.02867), then again, backwards: what was read last is still in the caches.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"

LOG2E = tl.constexpr(1.4426950408889634)    # exp(x) as exp2(x * LOG2E): tl.exp takes three instructions more

CONFIG = {
    "TILE": 1024,                # elements one program holds when several narrow rows share it
    "ELEMENTS_PER_THREAD": 32,   # rows in registers: sets num_warps from the tile
    "PROGRAMS": 1024,            # rows share a program only beyond this many programs
    "MAX_BLOCK": 16384,          # widest row kept whole in registers
    "WIDE_TILE": 4096,           # of a wider row: elements a program handles at once,
    "WIDE_HELD": 6,              # tiles kept in registers, as they were read,
    "WIDE_DEPTH": 1,             # loads of other tiles in flight ahead of the arithmetic
    "WIDE_WARPS": 16,
    "WIDE_REGISTERS": 64,        # per thread: 64 lets two programs of 16 warps run on an SM
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
def _load(ptrs, tile, first, vectors, LANES: tl.constexpr, VEC: tl.constexpr):
    lane = tile * LANES + tl.arange(0, LANES)[:, None]
    mask = (lane >= first) & (lane < vectors)
    return tl.load(ptrs + tile * (LANES * VEC), mask=mask, other=float("-inf"))


@triton.jit
def _online(raw, high, total):
    """Each lane's maximum and sum with one vector more: one rescaling exponential per vector, not per element."""
    x = raw.to(tl.float32)
    new_high = tl.maximum(high, tl.max(x, 1))
    total = total * tl.exp2((high - new_high) * LOG2E) + tl.sum(tl.exp2((x - new_high[:, None]) * LOG2E), 1)
    return new_high, total


@triton.jit
def _store(ptrs, raw, tile, top, scale, vectors, LANES: tl.constexpr, VEC: tl.constexpr):
    # (scale < 0) is a zero that the compiler cannot see. Without it the float32 values of the first pass are kept for
    # this one, and do not fit in the registers; as they were read they do.
    bits = raw.to(tl.int32 if raw.dtype == tl.float32 else tl.int16, bitcast=True)
    x = (bits ^ (scale < 0).to(bits.dtype)).to(raw.dtype, bitcast=True).to(tl.float32)
    mask = tile * LANES + tl.arange(0, LANES)[:, None] < vectors
    y = (tl.exp2((x - top) * LOG2E) * scale).to(ptrs.dtype.element_ty)
    tl.store(ptrs + tile * (LANES * VEC), y, mask=mask, eviction_policy="evict_first")


@triton.jit
def _wide_kernel(x_ptr, out_ptr, n, inner, x_outer, x_inner, out_outer, out_inner, HELD: tl.constexpr,
                 DEPTH: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, ALIGN: tl.constexpr,
                 EDGES: tl.constexpr):
    x_row, out_row, x_body, out_body, vectors, column, edge_mask = _split(
        tl.program_id(0).to(tl.int64), n, inner, x_outer, x_inner, out_outer, out_inner, VEC, ALIGN)
    cell = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    x_ptrs, out_ptrs = x_ptr + x_body + cell, out_ptr + out_body + cell
    tiles = tl.maximum(tl.cdiv(vectors, LANES), HELD)
    held, ahead = (), ()
    for i in tl.static_range(HELD):                         # all in flight before the first is used
        held += (_load(x_ptrs, i, 0, vectors, LANES, VEC),)
    for i in tl.static_range(DEPTH):
        ahead += (_load(x_ptrs, HELD + i, 0, vectors, LANES, VEC),)
    if EDGES:
        edge = tl.load(x_ptr + x_row + column, mask=edge_mask, other=float("-inf")).to(tl.float32)
    high = tl.full([LANES], -3.4e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for i in tl.static_range(HELD):
        high, total = _online(held[i], high, total)
    for tile in range(HELD, tiles):
        ahead += (_load(x_ptrs, tile + DEPTH, 0, vectors, LANES, VEC),)
        high, total = _online(ahead[0], high, total)
        ahead = ahead[1:]
    ahead = ()
    for i in tl.static_range(DEPTH):
        ahead += (_load(x_ptrs, tiles - 1 - i, HELD * LANES, vectors, LANES, VEC),)
    top = tl.max(high, 0)
    if EDGES:
        top = tl.maximum(top, tl.max(tl.max(edge, 1), 0))
        edge = tl.exp2((edge - top) * LOG2E)
    norm = tl.sum(total * tl.exp2((high - top) * LOG2E), 0)
    if EDGES:
        norm += tl.sum(tl.sum(edge, 1), 0)
        tl.store(out_ptr + out_row + column, (edge / norm).to(out_ptr.dtype.element_ty), mask=edge_mask)
    for back in range(1, tiles - HELD + 1):                 # backwards: what was read last is still in the caches
        ahead += (_load(x_ptrs, tiles - back - DEPTH, HELD * LANES, vectors, LANES, VEC),)
        _store(out_ptrs, ahead[0], tiles - back, top, 1.0 / norm, vectors, LANES, VEC)
        ahead = ahead[1:]
    for i in tl.static_range(HELD):
        _store(out_ptrs, held[i], i, top, 1.0 / norm, vectors, LANES, VEC)


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


def _launch_rows(x, out, n, outer, inner):
    rows, vec = outer[0] * inner[0], 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and (outer[1] - outer[2]) % vec == 0 and (inner[1] - inner[2]) % vec == 0
    edges = n % vec != 0 or aligned and (outer[2] % vec != 0 or inner[2] % vec != 0)
    if n > CONFIG["MAX_BLOCK"]:
        tile = CONFIG["WIDE_TILE"] * 2 // x.element_size()
        _wide_kernel[(rows,)](
            x, out, n, inner[0], outer[1], inner[1], outer[2], inner[2], HELD=CONFIG["WIDE_HELD"], LANES=tile // vec,
            VEC=vec, ALIGN=vec if aligned else 1, EDGES=edges, DEPTH=CONFIG["WIDE_DEPTH"],
            num_warps=CONFIG["WIDE_WARPS"], maxnreg=CONFIG["WIDE_REGISTERS"])
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
