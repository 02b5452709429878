"""Attention softmax(Q K^T * sm_scale) V in Triton, in one pass over the keys with an online softmax (FlashAttention-2).

Q (batch, heads, q_len, head_dim), K and V (batch, kv_heads, kv_len, head_dim), any strides; kv_heads divides heads.
Causal is aligned to the bottom right: query i sees keys j <= i + kv_len - q_len, as decoding with a KV cache needs.
Long prompts are compute-bound (4 * q_len * kv_len * head_dim FLOPs a head, half of it if causal); decoding is bound by
reading K and V once, so there the keys are split over programs and the parts merged in a fixed order.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"

CONFIG = {
    "BLOCK_M": 64,  # queries per program: one warpgroup, whose softmax hides behind the other programs' matrix products
    "BLOCK_N": 64,  # keys per step
    "num_warps": 4,
    "num_stages": 3,
    "NARROW_num_stages": 2,  # head_dim up to 64: a third stage costs a program per SM
    "GROUP_MB": 32,  # K and V of the heads in flight together: they should stay in L2
    "DECODE_BLOCK_N": 64,  # up to 16 query rows a program: small tiles, many of them in flight
    "DECODE_num_warps": 4,
    "DECODE_num_stages": 3,
    "SPLIT_KEYS": 256,  # fewest keys worth a split: shorter ones cost more to merge than they save
}


@triton.jit
def _load(src, strides, batch, head, start, kv_len, head_dim, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
          TMA: tl.constexpr, MASK: tl.constexpr, UPCAST: tl.constexpr):
    """Tile (BLOCK_N, BLOCK_D) of K or V, zero outside."""
    if TMA:
        tile = src.load([batch, head, start, 0]).reshape((BLOCK_N, BLOCK_D))
    else:
        n = start + tl.arange(0, BLOCK_N)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        base = src + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        ptrs = base + n.to(tl.int64) * strides[2] + d.to(tl.int64) * strides[3]
        tile = tl.load(ptrs, mask=((n < kv_len) | (not MASK)) & (d < head_dim), other=0.0)
    return tile.to(tl.float32) if UPCAST else tile


# Compiling takes seconds, so lengths and counts are never compiled in: they steer loops and cost nothing there.
@triton.jit(do_not_specialize=["batches", "heads", "kv_heads", "pack", "q_len", "kv_len", "diagonal", "chunk",
                               "group_slots"])
def _attend(q, k, v, out, parts, lse, q_strides, k_strides, v_strides, batches, heads, kv_heads, pack, q_len, kv_len,
            head_dim, diagonal, chunk, group_slots, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_D: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr):
    """One tile of queries of one head (pack > 1: of pack heads that share K and V) times chunk keys j <= i + diagonal.

    With several chunks the results go to parts, to be merged with weights 2^lse."""
    tiles_m = tl.cdiv(pack * q_len, BLOCK_M)
    slots = heads // pack
    group = tl.program_id(0) // (group_slots * tiles_m) * group_slots
    group_size = min(batches * slots - group, group_slots)
    within = tl.program_id(0) % (group_slots * tiles_m)
    slot = group + within % group_size
    tile_m = tiles_m - 1 - within // group_size  # causal: the tiles with most keys go first, the last wave is short
    batch = slot // slots
    kv_head = slot % slots * pack // (heads // kv_heads)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row % q_len
    head = (slot % slots * pack + row // q_len).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = (row < pack * q_len)[:, None] & (d < head_dim)[None, :]
    q_row = batch.to(tl.int64) * q_strides[0] + head * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q_tile = tl.load(q + q_row[:, None] + d.to(tl.int64)[None, :] * q_strides[3], mask=inside, other=0.0)
    dtype = q_tile.dtype
    if UPCAST:
        q_tile = q_tile.to(tl.float32)

    start = tl.program_id(1) * chunk
    first = tile_m * BLOCK_M * (pack == 1)  # a tile of packed heads may hold any query
    end = min(start + chunk, kv_len, diagonal + min(first + BLOCK_M + q_len * (pack > 1), q_len))
    unmasked = start + max(min(end, diagonal + first + 1) - start, 0) // BLOCK_N * BLOCK_N  # every query sees these

    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), -3.0e38, dtype=tl.float32)  # finite: -inf - -inf would be NaN in a row without keys
    for MASK in tl.static_range(2):
        for n in tl.range(unmasked if MASK else start, end if MASK else unmasked, BLOCK_N):
            k_tile = _load(k, k_strides, batch, kv_head, n, kv_len, head_dim, BLOCK_N, BLOCK_D, TMA, MASK, UPCAST)
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            if MASK:
                key = n + tl.arange(0, BLOCK_N)[None, :]
                s = tl.where((key < end) & (key <= query[:, None] + diagonal), s, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(p, 1)
            peak = new_peak
            v_tile = _load(v, v_strides, batch, kv_head, n, kv_len, head_dim, BLOCK_N, BLOCK_D, TMA, MASK, UPCAST)
            acc = tl.dot(p.to(dtype).to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")

    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    out_row = (batch.to(tl.int64) * heads + head) * q_len + query
    if tl.num_programs(1) > 1:
        out_row += tl.program_id(1).to(tl.int64) * batches * heads * q_len
        weight = tl.where(total == 0.0, float("-inf"), peak + tl.log2(tl.maximum(total, 1e-37)))
        tl.store(lse + out_row, weight, mask=row < pack * q_len)
        tl.store(parts + out_row[:, None] * head_dim + d[None, :], acc, mask=inside)
    else:
        tl.store(out + out_row[:, None] * head_dim + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge(parts, lse, out, rows, splits, head_dim, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[row] = the parts of a row averaged with weights 2^lse."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    weight = tl.load(lse + s * rows + row, mask=s < splits, other=float("-inf"))
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0, keep_dims=True), -3.0e38))
    part = tl.load(parts + (s * rows + row) * head_dim + d, mask=(s < splits) & (d < head_dim), other=0.0)
    total = tl.sum(weight, 0, keep_dims=True)
    merged = tl.sum(part * weight, 0, keep_dims=True) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * head_dim + d, merged.to(out.dtype.element_ty), mask=d < head_dim)


def _descriptor(t, block_n, block_d):
    """TMA descriptor of K or V, or None where TMA's alignment rules forbid one."""
    if t.stride(3) != 1 or t.data_ptr() % 16 or any(s <= 0 or s * t.element_size() % 16 for s in t.stride()[:3]):
        return None
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, block_n, block_d])


def _blocks(q, rows, block_d):
    """(BLOCK_M, BLOCK_N, num_warps, num_stages, SM count): CONFIG's, shrunk until the tiles fit in shared memory."""
    props = torch.cuda.get_device_properties(q.device) if q.is_cuda else None
    sms, shared = (props.multi_processor_count, props.shared_memory_per_block_optin) if props else (8, 227 * 1024)
    if props and (q.dtype == torch.float32 or props.major < 8):  # on the FMA units: all must fit in registers
        return 32, 32 if block_d <= 64 else 16, 4 if block_d <= 128 else 8, 2 if block_d <= 128 else 1, sms
    kind = "DECODE_" if rows <= 16 else ""
    n, warps, stages = (CONFIG[kind + key] for key in ("BLOCK_N", "num_warps", "num_stages"))
    m = 16 if kind else CONFIG["BLOCK_M"]
    stages = stages if kind or block_d > 64 else CONFIG["NARROW_num_stages"]
    while (m + 2 * stages * n) * block_d * q.element_size() > shared - 12 * 1024 and stages > 1:
        n, stages = (n // 2, stages) if n > 32 else (n, stages - 1)
    return m, n, warps, stages, sms


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    """Attention (batch, heads, q_len, head_dim), 0 for a query that sees no key; ValueError if shapes do not fit."""
    (batches, heads, q_len, head_dim), (kv_heads, kv_len) = Q.shape, K.shape[1:3]
    if K.shape != V.shape or K.shape != (batches, kv_heads, kv_len, head_dim) or not kv_heads or heads % kv_heads:
        got = ", ".join(str(tuple(t.shape)) for t in (Q, K, V))
        raise ValueError(f"flash_attention: Q, K, V {got}: K and V are alike and their heads divide Q's")
    out = torch.empty(Q.shape, device=Q.device, dtype=Q.dtype)
    if out.numel() == 0 or kv_len == 0:
        return out.zero_()
    scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * 1.4426950408889634  # exp(x) = 2^(x * log2(e))
    Q, scale = (Q, scale) if scale >= 0 else (-Q, -scale)
    gqa = heads // kv_heads
    pack = gqa if gqa * q_len <= 64 else 1  # decode: one program reads K and V once for all heads that share them
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_m, block_n, warps, stages, sms = _blocks(Q, pack * q_len, block_d)
    programs = batches * heads // pack * triton.cdiv(pack * q_len, block_m)
    splits = max(1, min(2 * sms // programs, kv_len // CONFIG["SPLIT_KEYS"]))
    chunk = triton.cdiv(triton.cdiv(kv_len, splits), block_n) * block_n
    splits = triton.cdiv(kv_len, chunk)
    rows = batches * heads * q_len
    parts = torch.empty((splits if splits > 1 else 0, rows, head_dim), device=Q.device, dtype=torch.float32)
    lse = torch.empty((splits, rows), device=Q.device, dtype=torch.float32) if splits > 1 else parts
    tma = Q.dtype != torch.float32 and (not Q.is_cuda or torch.cuda.get_device_capability(Q.device)[0] >= 9)
    k_desc, v_desc = (_descriptor(t, block_n, block_d) if tma else None for t in (K, V))
    tma = k_desc is not None and v_desc is not None
    group_slots = max(1, (CONFIG["GROUP_MB"] << 20) * gqa // (2 * kv_len * head_dim * Q.element_size() * pack))
    k_strides, v_strides = ((0,) * 4,) * 2 if tma else (K.stride(), V.stride())
    _attend[(programs, splits)](
        Q, k_desc if tma else K, v_desc if tma else V, out, parts, lse, Q.stride(), k_strides, v_strides,
        batches, heads, kv_heads, pack, q_len, kv_len, head_dim, kv_len - (q_len if causal else 0), chunk, group_slots,
        max(scale, 1e-30), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, TMA=tma,
        UPCAST=Q.dtype == torch.bfloat16 and not Q.is_cuda, num_warps=warps, num_stages=stages,
    )
    if splits > 1:
        _merge[(rows,)](parts, lse, out, rows, splits, head_dim, max(16, triton.next_power_of_2(splits)), block_d)
    return out
