"""Gated MLP (act(x @ w_gate) * (x @ w_up)) @ w_down in Triton: two launches, one kernel.

The first launch reads each tile of x once for both products and applies the activation to the fp32 accumulators, so
gate and up never reach device memory; the second is a plain product. Weights (in, out) may be transposed views of a
Linear's. Compute-bound from a few hundred rows of x on (6 * rows * dim * hidden FLOPs); below, the weights' bytes rule.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

KERNEL_TYPE = "fused_mlp"
BACKEND = "triton"

CONFIG = {
    "BLOCK_M": 128,
    "GATE_BLOCK_N": 128,  # columns of gate and as many of up: together one 128x256 tile of accumulators
    "DOWN_BLOCK_N": 256,
    "BLOCK_K": 64,  # 128 bytes of fp16: one swizzled row of a TMA tile
    "GROUP_M": 8,  # row tiles walked together, so that a wave of programs shares its tiles in L2
    "num_warps": 8,
    "num_stages": 4,
    "PERSISTENT": True,  # one program per SM: the next tile's loads overlap this tile's store
    "SKINNY_BLOCK_N": 32,  # up to 64 rows of x: narrow tiles give every SM a share of the weights
    "SKINNY_BLOCK_K": 128,
    "SKINNY_WARPS": 4,
}


@triton.jit
def _load(src, strides, row, col, rows, cols, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, TMA: tl.constexpr,
          TRANS: tl.constexpr):
    """Tile (BLOCK_ROW, BLOCK_COL) of a matrix at (row, col), zero outside; TRANS: src describes the transpose."""
    if TMA:
        if TRANS:
            tile = src.load([col, row]).T
        else:
            tile = src.load([row, col])
    else:
        r = row + tl.arange(0, BLOCK_ROW)[:, None]
        c = col + tl.arange(0, BLOCK_COL)[None, :]
        ptrs = src + r.to(tl.int64) * strides[0] + c.to(tl.int64) * strides[1]
        tile = tl.load(ptrs, mask=(r < rows) & (c < cols), other=0.0)
    return tile


@triton.jit
def _store(out, row, col, rows, cols, tile, TMA: tl.constexpr):
    """Write a tile of the contiguous out (rows, cols) at (row, col)."""
    if TMA:
        out.store([row, col], tile.to(out.dtype))
    else:
        r = row + tl.arange(0, tile.shape[0])[:, None]
        c = col + tl.arange(0, tile.shape[1])[None, :]
        tl.store(out + r.to(tl.int64) * cols + c, tile.to(out.dtype.element_ty), mask=(r < rows) & (c < cols))


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) = 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def _product(x, w, w_up, out, x_strides, w_strides, up_strides, M, N, K, num_programs, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, ACTIVATION: tl.constexpr,
             TMA: tl.constexpr, TRANS_X: tl.constexpr, TRANS_W: tl.constexpr, TRANS_UP: tl.constexpr,
             TMA_STORE: tl.constexpr):
    """out = act(x @ w) * (x @ w_up), or x @ w where ACTIVATION is None."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # Flattening the loops of the gated product makes ptxas wait for every single wgmma (seen in its SASS).
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, num_programs, flatten=ACTIVATION is None):
        group = tile // (GROUP_M * tiles_n)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        row = (group * GROUP_M + within % group_rows) * BLOCK_M
        col = (within // group_rows) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x_tile = _load(x, x_strides, row, k, M, K, BLOCK_M, BLOCK_K, TMA, TRANS_X)
            w_tile = _load(w, w_strides, k, col, K, N, BLOCK_K, BLOCK_N, TMA, TRANS_W)
            acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
            if ACTIVATION is not None:
                up_tile = _load(w_up, up_strides, k, col, K, N, BLOCK_K, BLOCK_N, TMA, TRANS_UP)
                up = tl.dot(x_tile, up_tile, up, input_precision="ieee")
        if ACTIVATION is not None:
            _store(out, row, col, M, N, _activate(acc, ACTIVATION) * up, TMA_STORE)
        else:  # in two halves: the shared buffer of a whole 128x256 tile would cost a pipeline stage
            left, right = acc.reshape((BLOCK_M, 2, BLOCK_N // 2)).permute((0, 2, 1)).split()
            _store(out, row, col, M, N, left, TMA_STORE)
            _store(out, row, col + BLOCK_N // 2, M, N, right, TMA_STORE)


def _descriptor(t, block_row, block_col):
    """(TMA descriptor, does it describe the transpose?) of a matrix; (None, False) where TMA's rules forbid one."""
    for matrix, block, trans in ((t, [block_row, block_col], False), (t.T, [block_col, block_row], True)):
        pitch = matrix.stride(0)
        if matrix.stride(1) == 1 and pitch > 0 and pitch * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0:
            return TensorDescriptor(matrix, list(matrix.shape), [pitch, 1], block), trans
    return None, False


def _tiling(x, N, block_n, gated):
    """(BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages, SM count): CONFIG's, shrunk where the grid or the GPU asks."""
    M, sms, shared, fma = x.shape[0], 1, 227 * 1024, False  # the interpreter (no GPU) wants few large tiles
    if x.is_cuda:
        props = torch.cuda.get_device_properties(x.device)
        sms, shared = props.multi_processor_count, props.shared_memory_per_block_optin
        fma = x.dtype == torch.float32 or props.major < 8
    if fma:  # IEEE fp32 runs on the FMA units: operands and accumulators must fit in registers
        return (64 if M > 64 else 32), 64, 16, 4, 2, sms
    if M <= 64:
        m, k, warps, stages = max(16, triton.next_power_of_2(M)), CONFIG["SKINNY_BLOCK_K"], CONFIG["SKINNY_WARPS"], 4
        n = CONFIG["SKINNY_BLOCK_N"] if x.is_cuda else block_n
    else:
        m, n, k, stages = CONFIG["BLOCK_M"], block_n, CONFIG["BLOCK_K"], CONFIG["num_stages"]
        # A last wave that leaves SMs idle costs a full one: smaller tiles win when they save more than they lose.
        sizes = [(m, n, 1.0), (m, n // 2, 1.1), (m, n // 4, 1.3), (m // 2, n // 4, 1.6)]
        waves = [triton.cdiv(triton.cdiv(M, m) * triton.cdiv(N, n), sms) for m, n, _ in sizes]
        _, (m, n, _) = min((w * s[0] * s[1] * s[2], s) for w, s in zip(waves, sizes, strict=True))
        warps = CONFIG["num_warps"] if m * n > 64 * 64 else 4
    if shared < 200 * 1024:
        m, n, k = min(m, 128), min(n, block_n // 2), min(k, 64)
    stages = max(1, min(stages, shared // ((m + n * (2 if gated else 1)) * k * x.element_size())))
    return m, n, k, warps, stages, sms


def _launch(x, w, w_up, activation, block_n):
    """x (rows, K) times w (K, N); gated by a second product with w_up where there is an activation."""
    (M, K), N = x.shape, w.shape[1]
    out = torch.empty((M, N), device=x.device, dtype=x.dtype)
    block_m, block_n, block_k, warps, stages, sms = _tiling(x, N, block_n, activation is not None)
    tma = K > 0 and x.dtype != torch.float32
    tma = tma and (not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] >= 9)
    x_desc, trans_x = _descriptor(x, block_m, block_k) if tma else (None, False)
    w_desc, trans_w = _descriptor(w, block_k, block_n) if x_desc else (None, False)
    up_desc, trans_up = _descriptor(w_up, block_k, block_n) if w_desc else (None, False)
    tma = up_desc is not None
    out_desc, trans_out = _descriptor(out, block_m, block_n if activation else block_n // 2) if tma else (None, False)
    tma_store = out_desc is not None and not trans_out
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    persistent = CONFIG["PERSISTENT"] and tma and M > 64  # the other cases need several small programs per SM
    programs = min(tiles, sms) if persistent else tiles
    _product[(programs,)](
        x_desc if tma else x, w_desc if tma else w, up_desc if tma else w_up, out_desc if tma_store else out,
        x.stride(), w.stride(), w_up.stride(), M, N, K, programs,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=CONFIG["GROUP_M"], ACTIVATION=activation,
        TMA=tma, TRANS_X=trans_x, TRANS_W=trans_w, TRANS_UP=trans_up, TMA_STORE=tma_store,
        num_warps=warps, num_stages=stages,
    )
    return out


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    """out (..., dim_out) of x (..., dim), w_gate and w_up (dim, hidden), w_down (hidden, dim_out); fp32 accumulation,
    hidden values rounded to x's dtype. Activations: silu, gelu (erf), gelu_tanh, relu; ValueError for another one or
    for shapes that do not chain."""
    if activation not in ("silu", "gelu", "gelu_tanh", "relu"):
        raise ValueError(f"fused_mlp: activation {activation!r}: one of silu, gelu, gelu_tanh, relu")
    if w_gate.shape != w_up.shape or (x.shape[-1], w_down.shape[0]) != tuple(w_gate.shape):
        got = ", ".join(str(tuple(t.shape)) for t in (x, w_gate, w_up, w_down))
        raise ValueError(f"fused_mlp: shapes {got}: pass (..., dim), (dim, hidden) twice, (hidden, dim_out)")
    if x.dtype == torch.bfloat16 and not x.is_cuda:  # Triton's interpreter multiplies bf16 as integers and truncates it
        return kernel_fn(x.float(), w_gate.float(), w_up.float(), w_down.float(), activation).to(x.dtype)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], w_down.shape[1]))
    hidden = _launch(rows, w_gate, w_up, activation, CONFIG["GATE_BLOCK_N"])
    return _launch(hidden, w_down, w_down, None, CONFIG["DOWN_BLOCK_N"]).view(*x.shape[:-1], w_down.shape[1])
