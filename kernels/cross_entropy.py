"""Cross-entropy loss in Triton.

kernel_fn(logits, targets) -> float32 scalar: mean over the rows of logsumexp(logits[row]) - logits[row, target].
logits is (rows, classes), or (rows, classes, d1, ...) as in torch.nn.functional.cross_entropy; targets holds class
indices; rows with target -100 count neither in the sum nor in the mean (no row left: nan). A target outside the classes
gives nan.

Memory-bound: the least traffic is one read of the logits. A program streams one row (or several narrow ones) with an
online maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867); with too few rows to fill the GPU a row is split
over several programs. A second launch combines the partial results in a fixed order, so equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "cross_entropy"
BACKEND = "triton"

LOG2E = tl.constexpr(1.4426950408889634)    # exp(x) as exp2(x * LOG2E): tl.exp takes three instructions more

CONFIG = {
    "BLOCK": 2048,        # elements per step of a program
    "WARPS": 4,
    "STAGES": 1,          # loads in flight ahead of the arithmetic
    "PROGRAMS": 1024,     # fewer row blocks than this: rows are split; more: narrow rows share a program
    "MEAN_BLOCK": 4096,   # partial results per step of the second launch
}


@triton.jit
def _rows_kernel(logits_ptr, targets_ptr, partial_ptr, rows, classes, row_stride, target_stride, split_steps, splits,
                 SPLIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
                 ALIGN: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr):
    split = tl.program_id(0) % splits
    row = (tl.program_id(0) // splits).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets_ptr + row * target_stride, mask=row < rows, other=-100)
    live = target != -100
    start = row * row_stride
    # A row of 50257 fp16 starts at any 2-byte address. Its body is the whole 16-byte vectors in it, so that access to
    # it is vectorised; head and tail, each less than a vector, are the edges.
    body = (start + ALIGN - 1) // ALIGN * ALIGN
    head = tl.minimum(body - start, classes)
    vectors = tl.where(live, (classes - head) // VEC, 0)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    cell = tl.arange(0, LANES)[None, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
    ptrs = logits_ptr + body[:, None, None] + cell
    # Each lane keeps its own maximum and sum: no exchange between threads until the row ends, and one rescaling
    # exponential per vector, not per element (the exponential unit is the second limit here).
    lane_high = tl.full([ROWS, LANES], -3.4e38, tl.float32)
    lane_total = tl.zeros([ROWS, LANES], tl.float32)
    first = split * split_steps
    last = tl.minimum(first + split_steps, tl.cdiv(tl.max(tl.max(vectors, 1), 0), LANES).to(tl.int32))
    for step in tl.range(first, last, num_stages=STAGES):
        mask = (lane + step * LANES < vectors)[:, :, None]
        x = tl.load(ptrs + step * (LANES * VEC), mask=mask, other=float("-inf"),
                    eviction_policy="evict_first").to(tl.float32)
        new_high = tl.maximum(lane_high, tl.max(x, 2))
        lane_total *= tl.exp2((lane_high - new_high) * LOG2E)
        lane_total += tl.sum(tl.exp2((x - new_high[:, :, None]) * LOG2E), 2)
        lane_high = new_high
    high = tl.max(lane_high, 1)
    total = tl.sum(lane_total * tl.exp2((lane_high - high[:, None]) * LOG2E), 1)
    if EDGES:
        e = tl.arange(0, 2 * VEC)[None, :]
        column = tl.where(e < VEC, e, head[:, None] + vectors * VEC + e - VEC)
        end = tl.where(split == 0, tl.where(e < VEC, head[:, None], classes), 0)
        mask = live[:, None] & (column < end)
        edge = tl.load(logits_ptr + start[:, None] + column, mask=mask, other=float("-inf")).to(tl.float32)
        new_high = tl.maximum(high, tl.max(edge, 1))
        total = total * tl.exp2((high - new_high) * LOG2E) + tl.sum(tl.exp2((edge - new_high[:, None]) * LOG2E), 1)
        high = new_high
    if SPLIT:
        index = row * splits + split
        tl.store(partial_ptr + index, high, mask=row < rows)
        tl.store(partial_ptr + rows * splits + index, total, mask=row < rows)
    else:
        known = (target >= 0) & (target < classes)
        hit = tl.load(logits_ptr + start + target, mask=known, other=float("nan")).to(tl.float32)
        loss = tl.where(live, high - hit + tl.log(total), 0.0)
        tl.store(partial_ptr + tl.program_id(0), tl.sum(loss, 0))
        tl.store(partial_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(live.to(tl.float32), 0))


@triton.jit
def _mean_kernel(partial_ptr, count, out_ptr, BLOCK: tl.constexpr):
    losses = tl.zeros([BLOCK], tl.float32)
    lives = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        losses += tl.load(partial_ptr + i, mask=i < count, other=0.0)
        lives += tl.load(partial_ptr + count + i, mask=i < count, other=0.0)
    tl.store(out_ptr, tl.sum(losses, 0) / tl.sum(lives, 0))


@triton.jit
def _merge_kernel(partial_ptr, logits_ptr, targets_ptr, out_ptr, rows, classes, row_stride, target_stride, splits,
                  ROWS: tl.constexpr, SPLITS: tl.constexpr):
    losses = tl.zeros([ROWS], tl.float32)
    lives = tl.zeros([ROWS], tl.float32)
    split = tl.arange(0, SPLITS)[None, :]
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        target = tl.load(targets_ptr + row * target_stride, mask=row < rows, other=-100)
        live = target != -100
        known = (target >= 0) & (target < classes)
        hit = tl.load(logits_ptr + row * row_stride + target, mask=known, other=float("nan")).to(tl.float32)
        index = row[:, None] * splits + split
        mask = live[:, None] & (split < splits)
        high = tl.load(partial_ptr + index, mask=mask, other=-3.4e38)
        total = tl.load(partial_ptr + rows * splits + index, mask=mask, other=0.0)
        top = tl.max(high, 1)
        loss = top - hit + tl.log(tl.sum(total * tl.exp2((high - top[:, None]) * LOG2E), 1))
        losses += tl.where(live, loss, 0.0)
        lives += live.to(tl.float32)
    tl.store(out_ptr, tl.sum(losses, 0) / tl.sum(lives, 0))


def kernel_fn(logits, targets):
    if logits.dim() != 2:                                   # classes are dimension 1 of (rows, classes, d1, ...)
        logits = logits.movedim(min(1, logits.dim() - 1), -1).reshape(-1, logits.shape[min(1, logits.dim() - 1)])
        targets = targets.reshape(-1)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, classes = logits.shape
    row_stride, vec = logits.stride(0), 16 // logits.element_size()
    align = vec if logits.data_ptr() % 16 == 0 else 1
    lanes = min(triton.next_power_of_2(max(classes // vec, 1)), CONFIG["BLOCK"] // vec)
    steps = triton.cdiv(classes // vec, lanes)
    share = max(1, min(CONFIG["BLOCK"] // (lanes * vec), rows // CONFIG["PROGRAMS"]))
    share = 1 << (share.bit_length() - 1)
    blocks = max(triton.cdiv(rows, share), 1)
    splits = max(1, min(CONFIG["PROGRAMS"] // blocks, steps))
    partial = torch.empty(2 * blocks * splits, dtype=torch.float32, device=logits.device)
    out = torch.empty((), dtype=torch.float32, device=logits.device)
    _rows_kernel[(blocks * splits,)](
        logits, targets, partial, rows, classes, row_stride, targets.stride(0), triton.cdiv(steps, splits), splits,
        SPLIT=splits > 1, ROWS=share, LANES=lanes, VEC=vec, ALIGN=align,
        EDGES=align == 1 and classes % vec != 0 or (classes % vec or row_stride % vec) != 0,
        STAGES=CONFIG["STAGES"], num_warps=CONFIG["WARPS"])
    if splits == 1:
        _mean_kernel[(1,)](partial, blocks, out, BLOCK=CONFIG["MEAN_BLOCK"], num_warps=16)
    else:
        width = triton.next_power_of_2(splits)
        _merge_kernel[(1,)](partial, logits, targets, out, rows, classes, row_stride, targets.stride(0), splits,
                            ROWS=max(1, CONFIG["MEAN_BLOCK"] // width), SPLITS=width, num_warps=16)
    return out
