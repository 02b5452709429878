"""fused_mlp, CUDA C++ starter: (act(x @ w_gate) * (x @ w_up)) @ w_down, fp32 accumulation.

x is (..., dim); w_gate and w_up (dim, hidden), w_down (hidden, dim), row-major or transposed views of Linear weights.
Two launches of one kernel. Gated: a tile holds 128 columns of x @ w_gate beside the same 128 of x @ w_up, so x is read
once for both and the activation runs on the accumulators; only the product goes to memory, in the input's dtype.
Down: a plain product.

- fp16/bf16 on Hopper: warp-specialised wgmma. One thread streams 64-deep slabs into a ring of shared-memory stages with
  TMA; two warpgroups multiply them, each 64 rows of a 128 x 256 tile. Persistent blocks, so that the ring refills while
  a finished tile is written. TMA needs 16-byte rows: an operand without them is copied into padded rows.
- fp32, and 16-bit types on other GPUs: IEEE FMA, any strides.
Each output element is summed by one thread group in one fixed order: bitwise deterministic.
"""

from functools import lru_cache

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "fused_mlp"
BACKEND = "cuda"
# STAGES: slabs in flight, 48 KB each, 4 fill Hopper's 227 KB; GROUP_M: row tiles walked per column sweep, 16 x 8 tiles
# in flight share the most A and B in L2.
CONFIG = {"STAGES": 4, "GROUP_M": 16}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

CUDA_SRC = r"""
#include <cuda.h>  // CUtensorMap; the encoder itself is looked up at run time, so nothing links to libcuda
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

#define UNROLL _Pragma("unroll")
using i64 = long long;
struct Problem { i64 M, N, K, a_row, a_col, b_row, b_col, out_row; int activation; };  // strides in elements

template <typename T> __device__ float activate(float x, int activation) {
    if (activation == 1) return 0.5f * x * (1.f + erff(x * 0.70710678f));
    if (activation == 3) return x < 0.f ? 0.f : x;  // so written, NaN stays NaN
    // silu = x sigmoid(x); gelu_tanh = x sigmoid(2u), as (1 + tanh u) / 2 = sigmoid(2u)
    const float z = activation == 2 ? 1.5957691f * (x + 0.044715f * x * x * x) : x;
    return x / (1.f + (sizeof(T) == 4 ? expf(-z) : __expf(-z)));  // the fast exp's error is far below 16-bit rounding
}

// ------------------------------------------------------------------------------------------------ Hopper: wgmma + TMA
constexpr int BM = 128, BK = 64;    // 64 16-bit values: one 128-byte row of the swizzle
constexpr int SLAB = 128 * BK * 2;  // bytes of a 128 x 64 slab: A's, and each 128-column half of B's
constexpr int THREADS = 3 * 128;    // producer warpgroup + two consumer warpgroups

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ uint32_t smem_addr(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
__device__ void mbar_wait(uint32_t bar, int parity) {  // until the phase of that parity has completed
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
                 :: "r"(bar), "r"(parity) : "memory");
}
__device__ void tma_load(uint32_t dst, const CUtensorMap* map, int inner, int outer, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];" :: "r"(dst), "l"(map), "r"(inner), "r"(outer), "r"(bar) : "memory");
}

// wgmma reads shared memory through a descriptor: address and strides in 16-byte units, 128-byte swizzle (1 << 62).
// K-major operand: 8 rows of 128 bytes form a 1024-byte swizzle atom, and the next 8 rows lie 1024 bytes on. N-major:
// an atom is 8 k-rows of 64 columns, the next 8 k-rows lie 1024 bytes on, the next 64 columns SLAB / 2 (else unused).
__device__ uint64_t descriptor(uint32_t addr) {
    return (1ull << 62) | (64ull << 32) | (uint64_t(SLAB / 32) << 16) | ((addr & 0x3ffff) >> 4);
}

#define REGS64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"   \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(i) ACC4(i), ACC4(i + 4), ACC4(i + 8), ACC4(i + 12)
#define MMA_ASM(TYPE)                                                                                                  \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE \
                 " " REGS64 ", %64, %65, p, 1, 1, 0, %67; }"                                                         \
                 : ACC16(0), ACC16(16), ACC16(32), ACC16(48) : "l"(a), "l"(b), "r"(accumulate), "n"(B_N_MAJOR))

// d (64 x 128, this thread's 64 values) = a (64 x 16) b (16 x 128) + (accumulate ? d : 0)
template <typename T, int B_N_MAJOR> __device__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<T, __half>) MMA_ASM("f16"); else MMA_ASM("bf16");
}
template <int N>
__device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// Keeps the compiler from moving uses of accumulators across an asynchronous wgmma's wait; costs no instruction.
__device__ void pin(float (&r)[64]) { UNROLL for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(r[i]) :: "memory"); }

// Two rows of a 64 x 128 accumulator, 8 apart. Lane q of a quad holds columns 2q, 2q+1 of each 8-column group; two
// butterfly exchanges transpose four groups, so that it holds all 8 columns of group q and stores 16 bytes at once.
template <typename T> __device__ void store_rows(T* out, const float (&d)[64], i64 row, i64 col0, const Problem& p) {
    const int q = threadIdx.x % 4;
    UNROLL for (int g = 0; g < 8; ++g) {  // 32 columns of one row at a time
        uint32_t v[4];
        UNROLL for (int i = 0; i < 4; ++i) {
            const int r = 16 * (g % 4) + 4 * i + 2 * (g / 4);
            const T pair[2] = {T(d[r]), T(d[r + 1])};
            memcpy(&v[i], pair, 4);
        }
        UNROLL for (int s = 1; s <= 2; s *= 2)
            UNROLL for (int i = 0; i < 4; ++i)
                if (!(i & s)) {
                    const uint32_t sent = q & s ? v[i] : v[i + s], got = __shfl_xor_sync(~0u, sent, s);
                    (q & s ? v[i] : v[i + s]) = got;
                }
        const i64 r = row + g / 4 * 8, col = col0 + 32 * (g % 4) + 8 * q;
        if (r >= p.M || col >= p.N) continue;
        T* dst = out + r * p.out_row + col;
        if (p.out_row % 8 == 0) *reinterpret_cast<uint4*>(dst) = make_uint4(v[0], v[1], v[2], v[3]);  // padding too
        else UNROLL for (int i = 0; i < 8; ++i)
                if (col + i < p.N) memcpy(dst + i, reinterpret_cast<char*>(v) + 2 * i, 2);
    }
}
#endif

// A stage holds a slab of A and two of B. Gated: they come from w_gate and w_up, the same 128 columns. Otherwise: 128
// columns each, side by side, of w_down.
template <typename T, bool B_N_MAJOR, bool GATED>
__global__ void __launch_bounds__(THREADS, 1)
mlp_wgmma(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b0,
          const __grid_constant__ CUtensorMap map_b1, T* out, Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t dynamic_smem[];
    __shared__ alignas(8) uint64_t bars[2 * STAGES];
    constexpr int STAGE_BYTES = 3 * SLAB, BN = GATED ? 128 : 256;
    const uint32_t smem = (smem_addr(dynamic_smem) + 1023) & ~1023u;   // swizzle atoms start at multiples of 1024
    const uint32_t full = smem_addr(bars), empty = full + 8 * STAGES;  // full: bytes landed; empty: consumers done
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; ++i)  // full and empty by turns: one arrival fills a stage, 8 warps empty it
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                         :: "r"((i % 2 ? empty : full) + i / 2 * 8), "r"(i % 2 ? 8 : 1));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    const int tiles_m = (p.M + BM - 1) / BM, tiles_n = (p.N + BN - 1) / BN, slabs = (p.K + BK - 1) / BK;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so that the compiler knows it is uniform
    int stage = 0, phase = 0, m0, n0;
    auto advance = [&] { if (++stage == STAGES) stage = 0, phase ^= 1; };
    auto locate = [&](int tile) {  // GROUP_M row tiles share their column tiles while those are in L2
        const int group = tile / (GROUP_M * tiles_n), rest = tile % (GROUP_M * tiles_n);
        const int rows = min(GROUP_M, tiles_m - group * GROUP_M);
        m0 = (group * GROUP_M + rest % rows) * BM, n0 = rest / rows * BN;
    };

    if (warpgroup == 0) {  // producer: one thread issues all copies
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
            locate(tile);
            for (int k = 0; k < slabs * BK; k += BK, advance()) {
                const uint32_t a = smem + stage * STAGE_BYTES, bar = full + 8 * stage;
                mbar_wait(empty + 8 * stage, phase ^ 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"  // zeros from outside the matrix
                             :: "r"(bar), "r"(STAGE_BYTES) : "memory");                // arrive, and count, too
                tma_load(a, &map_a, k, m0, bar);
                for (int h = 0; h < 2; ++h) {
                    const CUtensorMap* map_b = h ? &map_b1 : &map_b0;
                    const uint32_t b = a + (1 + h) * SLAB;
                    const int n = GATED ? n0 : n0 + 128 * h;
                    tma_load(b, map_b, B_N_MAJOR ? n : k, B_N_MAJOR ? k : n, bar);
                    if (B_N_MAJOR) tma_load(b + SLAB / 2, map_b, n + 64, k, bar);  // 64 of its columns are a box
                }
            }
        }
    } else {  // consumers: 64 rows each
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row0 = (warpgroup - 1) * 64;
        for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
            float acc[2][64];
            uint32_t in_use = 0;  // the empty barrier of the stage being multiplied
            for (int k = 0; k < slabs; ++k, advance()) {
                const uint32_t slab_a = smem + stage * STAGE_BYTES, slab_b = slab_a + SLAB;
                const uint64_t a = descriptor(slab_a + row0 * BK * 2), b = descriptor(slab_b);
                constexpr int B_STEP = B_N_MAJOR ? 2048 : 32;  // bytes to the next 16 of k: 16 rows or 16 columns
                mbar_wait(full + 8 * stage, phase);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                UNROLL for (int i = 0; i < BK / 16 * 2; ++i) {
                    const int kk = i / 2, h = i % 2;  // descriptors count 16 bytes
                    wgmma<T, B_N_MAJOR>(acc[h], a + kk * 32 / 16, b + (h * SLAB + kk * B_STEP) / 16, k | kk);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                wgmma_wait<1>();  // the previous slab is done: hand its stage back
                if (in_use && lane == 0) mbar_arrive(in_use);
                in_use = empty + 8 * stage;
            }
            wgmma_wait<0>();
            if (lane == 0) mbar_arrive(in_use);
            locate(tile);
            const i64 row = m0 + row0 + warp * 16 + lane / 4;
            for (auto& half : acc) pin(half);
            if constexpr (GATED)
                UNROLL for (int i = 0; i < 64; ++i) acc[0][i] = activate<T>(acc[0][i], p.activation) * acc[1][i];
            UNROLL for (int h = 0; h < (GATED ? 1 : 2); ++h) store_rows(out, acc[h], row, n0 + 128 * h, p);
        }
    }
#endif
}

// A row-major (rows, cols) matrix in boxes of box_rows x 64; TMA swizzles as wgmma expects and fills zeros outside.
template <typename T>
cudaError_t tensor_map(CUtensorMap* map, const T* base, i64 rows, i64 cols, i64 row_stride, int box_rows) {
    static const auto encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult status;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }();
    if (!encode) return cudaErrorNotSupported;
    const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint64_t dims[] = {cuuint64_t(cols), cuuint64_t(rows)}, strides[] = {cuuint64_t(row_stride) * sizeof(T)};
    const cuuint32_t box[] = {64, cuuint32_t(box_rows)}, steps[] = {1, 1};
    const CUresult r = encode(map, type, 2, const_cast<T*>(base), dims, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, bool B_N_MAJOR, bool GATED>
cudaError_t launch_wgmma(const void* a, const void* b0, const void* b1, void* out, Problem p, cudaStream_t stream) {
    int device, sms;
    CUtensorMap map_a, map_b[2];
    if (cudaError_t err = cudaGetDevice(&device)) return err;
    if (cudaError_t err = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return err;
    if (cudaError_t err = tensor_map(&map_a, (const T*)a, p.M, p.K, p.a_row, BM)) return err;
    for (int h = 0; h < 2; ++h) {
        const T* b = (const T*)(h ? b1 : b0);
        if (cudaError_t err = B_N_MAJOR ? tensor_map(&map_b[h], b, p.K, p.N, p.b_row, BK)
                                        : tensor_map(&map_b[h], b, p.N, p.K, p.b_col, 128)) return err;
    }
    const int smem = STAGES * 3 * SLAB + 1024, BN = GATED ? 128 : 256;  // 1024: room to align the first stage
    auto kernel = mlp_wgmma<T, B_N_MAJOR, GATED>;
    if (cudaError_t err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem)) return err;
    const i64 tiles = (p.M + BM - 1) / BM * ((p.N + BN - 1) / BN);
    kernel<<<int(tiles < sms ? tiles : sms), THREADS, smem, stream>>>(map_a, map_b[0], map_b[1], (T*)out, p);
    return cudaGetLastError();
}

// --------------------------------------------------------------------------------------------------- fp32: IEEE FMA
// 64 x 64 tiles, 4 x 4 elements a thread; gated: of both products, so that a thread has both factors of its elements.
template <bool GATED>
__global__ void __launch_bounds__(256)
mlp_fma(const float* a, const float* b0, const float* b1, float* out, Problem p) {
    constexpr int DEPTH = 16;
    __shared__ __align__(16) float sa[DEPTH][68], sb[1 + GATED][DEPTH][68];  // padded: fewer bank conflicts
    const i64 m0 = blockIdx.x * 64ll, n0 = blockIdx.y * 64ll;
    const int ty = threadIdx.x / 16 * 4, tx = threadIdx.x % 16 * 4;
    // 64 rows (of M or N) x DEPTH. Neighbours walk the contiguous dimension, so that every layout coalesces.
    auto fetch = [&](float (&tile)[DEPTH][68], const float* x, i64 row0, i64 rows, i64 k0, i64 row_step, i64 k_step) {
        UNROLL for (int e = threadIdx.x; e < 64 * DEPTH; e += 256) {
            const int r = k_step == 1 ? e / DEPTH : e % 64, k = k_step == 1 ? e % DEPTH : e / 64;
            const bool inside = row0 + r < rows && k0 + k < p.K;
            tile[k][r] = inside ? x[(row0 + r) * row_step + (k0 + k) * k_step] : 0.f;
        }
    };
    float acc[1 + GATED][16] = {};
    for (i64 k0 = 0; k0 < p.K; k0 += DEPTH) {
        fetch(sa, a, m0, p.M, k0, p.a_row, p.a_col);
        fetch(sb[0], b0, n0, p.N, k0, p.b_col, p.b_row);
        if (GATED) fetch(sb[GATED], b1, n0, p.N, k0, p.b_col, p.b_row);
        __syncthreads();
        UNROLL for (int k = 0; k < DEPTH; ++k) {
            const float4 x = *reinterpret_cast<float4*>(&sa[k][ty]);
            for (int h = 0; h < 1 + GATED; ++h) {
                const float4 y = *reinterpret_cast<float4*>(&sb[h][k][tx]);
                for (int i = 0; i < 16; ++i) acc[h][i] = fmaf((&x.x)[i / 4], (&y.x)[i % 4], acc[h][i]);
            }
        }
        __syncthreads();  // before the next slab overwrites this one
    }
    UNROLL for (int i = 0; i < 16; ++i) {
        const i64 m = m0 + ty + i / 4, n = n0 + tx + i % 4;
        const float value = GATED ? activate<float>(acc[0][i], p.activation) * acc[GATED][i] : acc[0][i];
        if (m < p.M && n < p.N) out[m * p.out_row + n] = value;
    }
}

template <typename T, bool GATED>
cudaError_t launch(const void* a, const void* b0, const void* b1, void* out, Problem p, cudaStream_t stream) {
    if constexpr (std::is_same_v<T, float>) {
        const dim3 grid((p.M + 63) / 64, (p.N + 63) / 64);
        mlp_fma<GATED><<<grid, 256, 0, stream>>>((const float*)a, (const float*)b0, (const float*)b1, (float*)out, p);
        return cudaGetLastError();
    } else {
        const auto run = p.b_row == 1 ? launch_wgmma<T, false, GATED> : launch_wgmma<T, true, GATED>;
        return run(a, b0, b1, out, p, stream);
    }
}

extern "C" int fused_mlp(const void* x /* strided */, const void* gate /* strided */, const void* up /* strided */,
                         const void* down /* strided */, void* product, void* out, int dtype, int activation, i64 M,
                         i64 dim, i64 hidden, i64 dim_out, i64 x_row, i64 x_col, i64 up_row, i64 up_col, i64 down_row,
                         i64 down_col, i64 product_row, cudaStream_t stream) {
    const Problem first = {M, hidden, dim, x_row, x_col, up_row, up_col, product_row, activation};
    const Problem second = {M, dim_out, hidden, product_row, 1, down_row, down_col, dim_out, 0};
    auto run = [&](auto of) {
        const cudaError_t err = launch<decltype(of), true>(x, gate, up, product, first, stream);
        return err ? err : launch<decltype(of), false>(product, down, down, out, second, stream);
    };
    return dtype == 0 ? run(__half()) : dtype == 1 ? run(__nv_bfloat16()) : run(float());
}
"""


@lru_cache(maxsize=1)
def compiled():
    """The compiled source: at the first call, not at import."""
    return compile_cuda(CUDA_SRC, defines=CONFIG)


def tma_rows(x):
    """x (rows, cols) as TMA reads it: columns adjacent, base and rows at multiples of 16 bytes; else a padded copy."""
    rows, cols = x.shape
    padded = (cols + 7) // 8 * 8
    stride = x.stride(0) if rows > 1 else padded  # the stride of a single row may be anything
    if (cols == 1 or x.stride(1) == 1) and stride >= cols and stride % 8 == 0 and x.data_ptr() % 16 == 0:
        return x.as_strided((rows, cols), (stride, 1))
    return x.new_empty((rows, padded))[:, :cols].copy_(x)


def weight(w):
    """w as TMA reads it, in the layout it has."""
    return tma_rows(w.t()).t() if w.stride(0) == 1 and w.shape[0] > 1 else tma_rows(w)


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    """x (..., dim), w_gate and w_up (dim, hidden), w_down (hidden, dim) -> (..., dim) in x's dtype."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"fused_mlp: activation {activation!r}, known: {', '.join(ACTIVATIONS)}")
    dim, hidden = w_gate.shape
    out = torch.empty((*x.shape[:-1], w_down.shape[1]), dtype=x.dtype, device=x.device)
    if out.numel() == 0 or dim == 0 or hidden == 0:
        return out.zero_()
    if x.dtype != torch.float32 and torch.cuda.get_device_capability(x.device)[0] != 9:
        return kernel_fn(x.float(), w_gate.float(), w_up.float(), w_down.float(), activation).to(x.dtype)
    a = x.reshape(-1, dim)  # a view wherever the leading dimensions allow one
    if x.dtype != torch.float32:
        a, w_gate, w_up, w_down = tma_rows(a), weight(w_gate), weight(w_up), weight(w_down)
    if w_up.stride() != w_gate.stride():
        w_gate = w_gate.contiguous() if 0 in w_gate.stride() else w_gate  # expanded: a copy of it cannot be written
        w_up = torch.empty_strided(w_gate.shape, w_gate.stride(), dtype=x.dtype, device=x.device).copy_(w_up)
    product = x.new_empty((a.shape[0], (hidden + 7) // 8 * 8))  # rows of 16 bytes for TMA
    compiled().fused_mlp(
        a, w_gate, w_up, w_down, product, out, DTYPES[x.dtype], ACTIVATIONS[activation], a.shape[0], dim, hidden,
        w_down.shape[1], *a.stride(), *w_gate.stride(), *w_down.stride(), product.stride(0),
    )  # fmt: skip
    return out
