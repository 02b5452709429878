"""Sum over one dimension in Triton.

kernel_fn(x, dim=-1) -> sum of x over dim, that dimension removed, dtype of x, accumulated in float32. x may have any
rank and strides.

Memory-bound: the least traffic is one read of x. Sums over the last dimension stream along rows; sums over another one
stream tiles of neighbouring columns, so that access stays contiguous. With too few sums to fill the GPU each is split
over several programs; a second launch adds the partial sums in a fixed order, so equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "reduce"
BACKEND = "triton"

CONFIG = {
    "BLOCK": 8192,         # elements per step of a row program
    "WARPS": 8,
    "STAGES": 1,           # loads in flight ahead of the arithmetic
    "PROGRAMS": 1024,      # fewer programs than this: rows or columns are split; more: narrow rows share a program
    "COLUMN_BLOCK": 64,    # neighbouring columns per program
    "COLUMN_TILE": 8192,   # elements per step of a column program
    "COLUMN_WARPS": 4,
    "COLUMN_STAGES": 1,
}


@triton.jit
def _rows_kernel(x_ptr, out_ptr, rows, n, inner, outer_stride, inner_stride, split_steps, splits,
                 ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, ALIGN: tl.constexpr,
                 EDGES: tl.constexpr, STAGES: tl.constexpr):
    split = tl.program_id(0) % splits
    row = (tl.program_id(0) // splits).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    start = row // inner * outer_stride + row % inner * inner_stride
    # A row of 50257 fp16 starts at any 2-byte address. Its body is the whole 16-byte vectors in it, so that access to
    # it is vectorised; head and tail, each less than a vector, are the edges.
    body = (start + ALIGN - 1) // ALIGN * ALIGN
    head = tl.minimum(body - start, n)
    vectors = tl.where(live, (n - head) // VEC, 0)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    cell = tl.arange(0, LANES)[None, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
    ptrs = x_ptr + body[:, None, None] + cell
    lane_sum = tl.zeros([ROWS, LANES], tl.float32)
    first = split * split_steps
    last = tl.minimum(first + split_steps, tl.cdiv(n // VEC, LANES))
    for step in tl.range(first, last, num_stages=STAGES):
        mask = (lane + step * LANES < vectors)[:, :, None]
        x = tl.load(ptrs + step * (LANES * VEC), mask=mask, other=0.0, eviction_policy="evict_first")
        lane_sum += tl.sum(x.to(tl.float32), 2)
    total = tl.sum(lane_sum, 1)
    if EDGES:
        e = tl.arange(0, 2 * VEC)[None, :]
        column = tl.where(e < VEC, e, head[:, None] + vectors * VEC + e - VEC)
        end = tl.where(split == 0, tl.where(e < VEC, head[:, None], n), 0)
        mask = live[:, None] & (column < end)
        total += tl.sum(tl.load(x_ptr + start[:, None] + column, mask=mask, other=0.0).to(tl.float32), 1)
    tl.store(out_ptr + row * splits + split, total, mask=live)


@triton.jit
def _columns_kernel(x_ptr, out_ptr, n, inner, n_stride, outer_stride, inner_stride, out_outer, out_inner, out_split,
                    split_steps, splits, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr):
    blocks = tl.cdiv(inner, BLOCK_C)
    split = tl.program_id(0) // blocks % splits
    outer = (tl.program_id(0) // blocks // splits).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    ptrs = x_ptr + outer * outer_stride + (column * inner_stride)[None, :]
    partial = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    first = split * split_steps
    last = tl.minimum(first + split_steps, tl.cdiv(n, BLOCK_N))
    for step in tl.range(first, last, num_stages=STAGES):
        at = k + step * BLOCK_N
        mask = (at < n) & (column < inner)[None, :]
        x = tl.load(ptrs + at * n_stride, mask=mask, other=0.0, eviction_policy="evict_first")
        partial += x.to(tl.float32)
    out_ptrs = out_ptr + split.to(tl.int64) * out_split + outer * out_outer + column * out_inner
    tl.store(out_ptrs, tl.sum(partial, 0), mask=column < inner)


def _groups(x, dim):
    """The dimensions other than dim, merged where the strides allow: a list of (size, stride in x, stride in out)."""
    groups, step = [], 1
    for d in reversed(range(x.dim())):
        if d == dim or x.shape[d] == 1:
            continue
        size, sx, so, step = x.shape[d], x.stride(d), step, step * x.shape[d]
        if groups and sx == groups[0][0] * groups[0][1]:
            groups[0] = (size * groups[0][0], *groups[0][1:])
        else:
            groups.insert(0, (size, sx, so))
    return [(1, 0, 0)] * (2 - len(groups)) + groups


def kernel_fn(x, dim=-1):
    n = x.shape[dim] if x.dim() else 1
    dim = dim % max(x.dim(), 1)
    shape = x.shape[:dim] + x.shape[dim + 1:]
    if x.numel() == 0:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    last = dim >= x.dim() - 1
    if last and x.is_contiguous():
        groups = [(x.numel() // n, n, 1), (1, 0, 0)]
    else:
        groups = _groups(x, dim)
        if len(groups) > 2:
            x = x.contiguous()
            groups = _groups(x, dim)
    if n == 1 or x.stride(dim) == 1 and groups[1][1] != 1:
        _launch_rows(x, out, n, *groups)
    else:
        _launch_columns(x, out, n, x.stride(dim), *sorted(groups, key=lambda g: (g[0] > 1, -g[1])))
    return out


def _launch_rows(x, out, n, outer, inner):
    vec = 16 // x.element_size()
    rows = outer[0] * inner[0]
    align = vec if x.data_ptr() % 16 == 0 else 1
    lanes = min(triton.next_power_of_2(max(n // vec, 1)), CONFIG["BLOCK"] // vec)
    steps = triton.cdiv(n // vec, lanes)
    share = max(1, min(CONFIG["BLOCK"] // (lanes * vec), rows // CONFIG["PROGRAMS"]))
    share = 1 << (share.bit_length() - 1)
    blocks = triton.cdiv(rows, share)
    splits = max(1, min(CONFIG["PROGRAMS"] // blocks, steps))
    target = out if splits == 1 else torch.empty(rows * splits, dtype=torch.float32, device=x.device)
    _rows_kernel[(blocks * splits,)](
        x, target, rows, n, inner[0], outer[1], inner[1], triton.cdiv(steps, splits), splits,
        ROWS=share, LANES=lanes, VEC=vec, ALIGN=align,
        EDGES=n % vec != 0 or align > 1 and (outer[1] % vec or inner[1] % vec) != 0,
        STAGES=CONFIG["STAGES"], num_warps=CONFIG["WARPS"])
    if splits > 1:
        _launch_rows(target, out, splits, (rows, splits, 1), (1, 0, 0))


def _launch_columns(x, out, n, n_stride, outer, inner):
    block_c = min(CONFIG["COLUMN_BLOCK"], triton.next_power_of_2(inner[0]))
    block_n = max(1, min(CONFIG["COLUMN_TILE"] // block_c, triton.next_power_of_2(n)))
    blocks, steps = outer[0] * triton.cdiv(inner[0], block_c), triton.cdiv(n, block_n)
    splits = max(1, min(CONFIG["PROGRAMS"] // blocks, steps))
    sums = outer[0] * inner[0]
    target = out if splits == 1 else torch.empty(sums * splits, dtype=torch.float32, device=x.device)
    _columns_kernel[(blocks * splits,)](
        x, target, n, inner[0], n_stride, outer[1], inner[1], outer[2], inner[2], sums, triton.cdiv(steps, splits),
        splits, BLOCK_N=block_n, BLOCK_C=block_c, STAGES=CONFIG["COLUMN_STAGES"], num_warps=CONFIG["COLUMN_WARPS"])
    if splits > 1:
        _launch_columns(target, out, splits, sums, (1, 0, 0), (sums, 1, 1))
