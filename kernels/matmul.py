"""Matrix product C = A @ B (+ bias) in Triton: a persistent kernel fed by Hopper's tensor memory accelerator (TMA).

A (..., M, K) and B (K, N) may be strided or transposed views: a Linear's weight comes as `weight.t()`, uncopied.
Compute-bound from a few hundred rows of A on; below that the time is that of reading B once. Where TMA is not possible
(an older GPU, a row pitch that is not a multiple of 16 bytes, fp32) the same kernel loads through pointers.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

KERNEL_TYPE = "matmul"
BACKEND = "triton"

CONFIG = {
    "BLOCK_M": 128,  # 128x256 over two warpgroups: the most wgmma work per operand byte read from shared memory
    "BLOCK_N": 256,
    "BLOCK_K": 64,  # 128 bytes of fp16: one swizzled row of a TMA tile
    "GROUP_M": 8,  # row tiles walked together, so that a wave of programs shares its A and B tiles in L2
    "num_warps": 8,
    "num_stages": 4,
    "PERSISTENT": True,  # one program per SM: the next tile's loads overlap this tile's store
    "STORE_HALVES": True,  # TMA store in two halves: its shared buffer shrinks to 32 KB, which leaves room for a stage
    "SKINNY_BLOCK_N": 32,  # M <= 64 is bound by reading B: narrow tiles give every SM a share of the columns
    "SKINNY_BLOCK_K": 256,
    "SKINNY_WARPS": 4,
}
SWEEP = {  # what `bench.py --sweep auto` tries
    "BLOCK_M": [64, 128, 256],
    "BLOCK_N": [128, 256],
    "BLOCK_K": [32, 64, 128],
    "GROUP_M": [4, 8, 16],
    "num_warps": [4, 8],
    "num_stages": [3, 4, 5],
    "PERSISTENT": [True, False],
    "STORE_HALVES": [True, False],
}


@triton.jit
def _load(src, row, col, rows, cols, stride_row, stride_col, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
          TMA: tl.constexpr, TRANS: tl.constexpr, EVEN: tl.constexpr):
    """Tile (BLOCK_ROW, BLOCK_COL) of a matrix at (row, col), zero outside; TRANS: src describes the transpose."""
    if TMA:
        if TRANS:
            tile = src.load([col, row]).T
        else:
            tile = src.load([row, col])
    else:
        r = row + tl.arange(0, BLOCK_ROW)[:, None]
        c = col + tl.arange(0, BLOCK_COL)[None, :]
        ptrs = src + r.to(tl.int64) * stride_row + c.to(tl.int64) * stride_col
        if EVEN:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=(r < rows) & (c < cols), other=0.0)
    return tile


@triton.jit
def _store(c, row, col, M, N, tile, TMA: tl.constexpr):
    """Write a tile of the contiguous C (M, N) at (row, col)."""
    if TMA:
        c.store([row, col], tile.to(c.dtype))
    else:
        m = row + tl.arange(0, tile.shape[0])[:, None]
        n = col + tl.arange(0, tile.shape[1])[None, :]
        tl.store(c + m.to(tl.int64) * N + n, tile.to(c.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def _matmul(a, b, c, bias, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, num_programs,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
            TMA: tl.constexpr, TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, TMA_STORE: tl.constexpr,
            STORE_HALVES: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, num_programs, flatten=True):
        group = tile // (GROUP_M * tiles_n)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        row = (group * GROUP_M + within % group_rows) * BLOCK_M
        col = (within // group_rows) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a_tile = _load(a, row, k, M, K, stride_am, stride_ak, BLOCK_M, BLOCK_K, TMA, TRANS_A, EVEN)
            b_tile = _load(b, k, col, K, N, stride_bk, stride_bn, BLOCK_K, BLOCK_N, TMA, TRANS_B, EVEN)
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
        n = col + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if STORE_HALVES:
            left, right = acc.reshape((BLOCK_M, 2, BLOCK_N // 2)).permute((0, 2, 1)).split()
            _store(c, row, col, M, N, left, TMA_STORE)
            _store(c, row, col + BLOCK_N // 2, M, N, right, TMA_STORE)
        else:
            _store(c, row, col, M, N, acc, TMA_STORE)


def _descriptor(t, block_row, block_col):
    """(TMA descriptor, does it describe the transpose?) of a matrix; (None, False) where TMA's rules forbid one."""
    for matrix, block, trans in ((t, [block_row, block_col], False), (t.T, [block_col, block_row], True)):
        pitch = matrix.stride(0)
        if matrix.stride(1) == 1 and pitch > 0 and pitch * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0:
            return TensorDescriptor(matrix, list(matrix.shape), [pitch, 1], block), trans
    return None, False


def _tiling(a, N):
    """(BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages, SM count): CONFIG's, shrunk where the grid or the GPU asks."""
    M, sms, shared, fma = a.shape[0], 1, 227 * 1024, False  # the interpreter (no GPU) wants few large tiles
    if a.is_cuda:
        props = torch.cuda.get_device_properties(a.device)
        sms, shared = props.multi_processor_count, props.shared_memory_per_block_optin
        fma = a.dtype == torch.float32 or props.major < 8
    if fma:  # IEEE fp32 runs on the FMA units: operands and accumulator must fit in registers
        return (128 if M > 64 else 32), 64, 16, 4, 2, sms
    if M <= 64:
        m, k, warps, stages = max(16, triton.next_power_of_2(M)), CONFIG["SKINNY_BLOCK_K"], CONFIG["SKINNY_WARPS"], 4
        n = CONFIG["SKINNY_BLOCK_N" if a.is_cuda else "BLOCK_N"]
    else:
        m, n, k, stages = CONFIG["BLOCK_M"], CONFIG["BLOCK_N"], CONFIG["BLOCK_K"], CONFIG["num_stages"]
        # A last wave that leaves SMs idle costs a full one: smaller tiles win when they save more than they lose.
        sizes = [(m, n, 1.0), (m, n // 2, 1.1), (m, n // 4, 1.3), (m // 2, n // 4, 1.6)]
        waves = [triton.cdiv(triton.cdiv(M, m) * triton.cdiv(N, n), sms) for m, n, _ in sizes]
        _, (m, n, _) = min((w * s[0] * s[1] * s[2], s) for w, s in zip(waves, sizes, strict=True))
        warps = CONFIG["num_warps"] if m * n > 64 * 128 else 4
    if shared < 200 * 1024:
        m, n, k = min(m, 128), min(n, 128), min(k, 64)
    stages = max(1, min(stages, shared // ((m + n) * k * a.element_size())))
    return m, n, k, warps, stages, sms


def kernel_fn(A, B, bias=None):
    """C (..., M, N) = A (..., M, K) @ B (K, N) + bias (N,), summed in fp32; ValueError if the sizes do not chain."""
    if B.ndim != 2 or A.shape[-1] != B.shape[0] or A.dtype != B.dtype:
        got = f"A {tuple(A.shape)} {A.dtype}, B {tuple(B.shape)} {B.dtype}"
        raise ValueError(f"matmul: {got}: pass A (..., M, K) and B (K, N) of one dtype")
    if A.dtype == torch.bfloat16 and not A.is_cuda:  # Triton's interpreter multiplies bf16 as integers and truncates it
        return kernel_fn(A.float(), B.float(), bias if bias is None else bias.float()).to(A.dtype)
    a = A if A.ndim == 2 else A.reshape(-1, A.shape[-1])
    (M, K), N = a.shape, B.shape[1]
    C = torch.empty((*A.shape[:-1], N), device=A.device, dtype=A.dtype)
    if C.numel() == 0:
        return C
    block_m, block_n, block_k, warps, stages, sms = _tiling(a, N)
    tma = K > 0 and a.dtype != torch.float32
    tma = tma and (not a.is_cuda or torch.cuda.get_device_capability(a.device)[0] >= 9)
    a_desc, trans_a = _descriptor(a, block_m, block_k) if tma else (None, False)
    b_desc, trans_b = _descriptor(B, block_k, block_n) if a_desc else (None, False)
    halves = CONFIG["STORE_HALVES"]
    c_desc, trans_c = _descriptor(C.view(M, N), block_m, block_n >> halves) if b_desc else (None, False)
    tma, tma_store = b_desc is not None, c_desc is not None and not trans_c
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    persistent = CONFIG["PERSISTENT"] and tma and M > 64  # the other cases need several small programs per SM
    programs = min(tiles, sms) if persistent else tiles
    _matmul[(programs,)](
        a_desc if tma else a, b_desc if tma else B, c_desc if tma_store else C,
        bias if bias is None else bias.contiguous(), M, N, K,
        a.stride(0), a.stride(1), B.stride(0), B.stride(1), programs,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=CONFIG["GROUP_M"],
        TMA=tma, TRANS_A=trans_a, TRANS_B=trans_b, TMA_STORE=tma_store, STORE_HALVES=halves,
        HAS_BIAS=bias is not None,
        EVEN=not tma and M % block_m == 0 and N % block_n == 0 and K % block_k == 0,
        num_warps=warps, num_stages=stages,
    )
    return C
