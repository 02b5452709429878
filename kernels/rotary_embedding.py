"""Rotary position embedding in Triton.

kernel_fn(x, cos, sin, interleaved=True) -> x with each pair of features (a, b) turned to (a cos - b sin, b cos + a sin)
(Su et al. 2021, arXiv:2104.09864), computed in float32, same shape and dtype as x, contiguous. x is (..., seq,
head_dim), cos and sin are (seq, head_dim / 2). Pairs are neighbours (2i, 2i + 1), or with interleaved=False the
rotate-half form (i, i + head_dim / 2).

Memory-bound: the least traffic is one read and one write of x. A program loads cos and sin for its positions once and
turns several heads. x may be a (batch, seq, heads, head_dim) tensor seen through transpose(1, 2): it is not copied.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rotary_embedding"
BACKEND = "triton"

CONFIG = {
    "TILE": 2048,        # elements of x a program turns at once
    "HEADS": 2,          # heads a program takes in turn
    "WARPS": 4,
    "STAGES": 2,         # tiles in flight ahead of the arithmetic
}


@triton.jit
def _rotary_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, heads, seq, x_batch, x_head, x_seq, cos_seq, sin_seq,
                   HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK_S: tl.constexpr,
                   BLOCK_H: tl.constexpr, STAGES: tl.constexpr):
    pid = tl.program_id(0)
    seq_blocks = tl.cdiv(seq, BLOCK_S)
    head_blocks = tl.cdiv(heads, HEADS)
    position = (pid % seq_blocks) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None].to(tl.int64)
    first = (pid // seq_blocks % head_blocks).to(tl.int64) * HEADS
    b = (pid // seq_blocks // head_blocks).to(tl.int64)
    i = tl.arange(0, BLOCK_H)[None, :]
    mask = (position < seq) & (i < HALF)
    cos = tl.load(cos_ptr + position * cos_seq + i, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * sin_seq + i, mask=mask, other=0.0).to(tl.float32)
    for head in tl.range(first, tl.minimum(first + HEADS, heads), num_stages=STAGES):
        x_row = b * x_batch + head * x_head + position * x_seq
        out_row = ((b * heads + head) * seq + position) * (2 * HALF)
        if INTERLEAVED:
            j = tl.arange(0, 2 * BLOCK_H)[None, :]          # both of a pair in one 16-byte vector of one thread
            pair_mask = (position < seq) & (j < 2 * HALF)
            x = tl.load(x_ptr + x_row + j, mask=pair_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x0, x1 = tl.split(tl.reshape(x, [BLOCK_S, BLOCK_H, 2]))
            y = tl.interleave(x0 * cos - x1 * sin, x1 * cos + x0 * sin)
            tl.store(out_ptr + out_row + j, y, mask=pair_mask)
        else:
            x0 = tl.load(x_ptr + x_row + i, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x1 = tl.load(x_ptr + x_row + HALF + i, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            tl.store(out_ptr + out_row + i, x0 * cos - x1 * sin, mask=mask)
            tl.store(out_ptr + out_row + HALF + i, x1 * cos + x0 * sin, mask=mask)


def kernel_fn(x, cos, sin, interleaved=True):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    if x.dim() != 4:
        x = x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
    if x.stride(3) != 1:
        x = x.contiguous()
    cos = cos if cos.stride(1) == 1 else cos.contiguous()
    sin = sin if sin.stride(1) == 1 else sin.contiguous()
    batch, heads, seq, dim = x.shape
    half = dim // 2
    block_h = triton.next_power_of_2(half)
    block_s = min(max(1, CONFIG["TILE"] // (2 * block_h)), triton.next_power_of_2(seq))
    grid = triton.cdiv(seq, block_s) * triton.cdiv(heads, CONFIG["HEADS"]) * batch
    _rotary_kernel[(grid,)](
        x, cos, sin, out, heads, seq, x.stride(0), x.stride(1), x.stride(2), cos.stride(0), sin.stride(0),
        HALF=half, INTERLEAVED=interleaved, HEADS=CONFIG["HEADS"], BLOCK_S=block_s, BLOCK_H=block_h,
        STAGES=CONFIG["STAGES"], num_warps=CONFIG["WARPS"])
    return out
