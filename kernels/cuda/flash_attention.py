"""flash_attention, CUDA C++ starter: softmax(Q K^T * scale) V without writing the scores, fp32 online softmax.

Q is (batch, heads, q_len, head_dim), K and V (batch, kv_heads, kv_len, head_dim) with heads a multiple of kv_heads; any
strides, so transposed views are read in place. Causal is aligned to the bottom right: row i sees columns up to
i + kv_len - q_len; a row that sees none gives 0. head_dim up to 256, padded to 64, 128 or 256 with TMA's zeros.

- fp16/bf16 on Hopper: a block owns 128 query rows, 64 per consumer warpgroup; a producer thread streams K and V tiles
  with TMA. wgmma computes S = Q K^T from shared memory; P stays in registers as the next wgmma's operand. S of a tile
  is issued together with O += P V of the tile before: the tensor cores work while the softmax is computed.
- fp32, and 16-bit types on other GPUs: IEEE FMA, a warp owns query rows, the same online softmax.
A row is always summed by one thread group in one fixed order: bitwise deterministic.
"""

import math
from functools import lru_cache

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "flash_attention"
BACKEND = "cuda"
# BLOCK_N: K/V rows per tile, 64 or 128, for head_dim up to 128 (above, 64: the registers hold no more); STAGES: K/V
# tiles in flight, 2 fill the shared memory at head_dim 256.
CONFIG = {"BLOCK_N": 128, "STAGES": 2}
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
HEAD_DIM_MAX = 256

CUDA_SRC = r"""
#include <cuda.h>  // CUtensorMap; the encoder itself is looked up at run time, so nothing links to libcuda
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

using i64 = long long;
struct Strides { i64 batch, head, row; };  // in elements; head_dim is contiguous
struct Problem {
    int batch, heads, kv_heads, q_len, kv_len, head_dim, causal;
    float scale;  // of the scores, times log2(e): the softmax is in base 2
    Strides q, k, v;
};

// Block -> (head of the whole batch, query tile). Within a set of heads whose K and V fit in L2, long causal rows come
// first, so that the short ones fill the gaps at the end.
__device__ void locate(const Problem& p, int tiles, int& head, int& tile) {
    const i64 kv_bytes = i64(p.kv_len) * p.head_dim * 4, all = i64(p.batch) * p.heads;
    const int set = max(1ll, min(all, (24ll << 20) / kv_bytes)), first = blockIdx.x / (set * tiles) * set;
    const int heads = min(i64(set), all - first), rest = blockIdx.x - first * tiles;
    head = first + rest % heads, tile = tiles - 1 - rest / heads;
}
// Columns that row `row` may see.
__device__ int visible(const Problem& p, int row) {
    return p.causal ? max(0, min(p.kv_len, row + 1 + p.kv_len - p.q_len)) : p.kv_len;
}
__device__ float exp2_fast(float x) {  // 2^x to 2 ulp; exp2f would add steps for denormals
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ------------------------------------------------------------------------------------------------ Hopper: wgmma + TMA
constexpr int BM = 128, THREADS = 3 * 128;  // producer warpgroup + two consumers of 64 rows each
constexpr int ROW = 128;                    // bytes of 64 16-bit values: one row of the swizzle

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ uint32_t smem_addr(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void mbar_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count));
}
__device__ void mbar_expect_bytes(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ void mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
__device__ void mbar_wait(uint32_t bar, int parity) {  // until the phase of that parity has completed
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
                 :: "r"(bar), "r"(parity) : "memory");
}
// `rows` rows of one head, in chunks of 64 columns: chunk c lies at dst + c * rows * ROW.
__device__ void tma_load(uint32_t dst, const CUtensorMap* map, int chunks, int rows, int row, int head, int batch,
                         uint32_t bar) {
    mbar_expect_bytes(bar, chunks * rows * ROW);  // what lies outside the tensor arrives as zeros and counts too
    for (int c = 0; c < chunks; ++c)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3, %4, %5}], [%6];" :: "r"(dst + c * rows * ROW), "l"(map), "r"(c * 64),
                     "r"(row), "r"(head), "r"(batch), "r"(bar) : "memory");
}

// wgmma reads shared memory through a descriptor: address and strides in 16-byte units, 128-byte swizzle (1 << 62). One
// form serves all operands: 8 rows of 128 bytes are a swizzle atom, the next 8 rows lie 1024 bytes on. For Q and K the
// contiguous dimension is wgmma's k, for V it is n (the instruction's transpose flag).
__device__ uint64_t descriptor(uint32_t addr) {
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((addr & 0x3ffff) >> 4);
}

#define REGS32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
    "%27,%28,%29,%30,%31"
#define REGS64 REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"   \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(i) ACC4(i), ACC4(i + 4), ACC4(i + 8), ACC4(i + 12)
#define MMA(N, TYPE) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE
#define SET_P(i) "{ .reg .pred p; setp.ne.b32 p, %" #i ", 0; "
#define SCORES128(TYPE) asm volatile(SET_P(66) MMA(128, TYPE) " {" REGS64 "}, %64, %65, p, 1, 1, 0, 0; }" \
                                     : ACC16(0), ACC16(16), ACC16(32), ACC16(48) : "l"(a), "l"(b), "r"(accumulate))
#define SCORES64(TYPE) asm volatile(SET_P(34) MMA(64, TYPE) " {" REGS32 "}, %32, %33, p, 1, 1, 0, 0; }" \
                                    : ACC16(0), ACC16(16) : "l"(a), "l"(b), "r"(accumulate))
#define VALUES64(TYPE) asm volatile(MMA(64, TYPE) " {" REGS32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;" \
                                    : ACC16(0), ACC16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d (64 x 128 or 64 x 64 over the warpgroup) = Q (64 x 16) K^T (16 x 128 or 64) + (accumulate ? d : 0)
template <typename T> __device__ void mma_scores(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same<T, __half>::value) SCORES128("f16"); else SCORES128("bf16");
}
template <typename T> __device__ void mma_scores(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same<T, __half>::value) SCORES64("f16"); else SCORES64("bf16");
}
// d (64 x 64) += P (64 x 16, registers) V (16 x 64)
template <typename T> __device__ void mma_values(float (&d)[32], const uint32_t* a, uint64_t b) {
    if constexpr (std::is_same<T, __half>::value) VALUES64("f16"); else VALUES64("bf16");
}
__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// Keeps the compiler from moving work on wgmma's registers across its fence or wait; costs no instruction.
template <int N>
__device__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i]) :: "memory");
}
template <int N>
__device__ void pin(uint32_t (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i]) :: "memory");
}
template <typename T>
__device__ uint32_t pack(float lo, float hi) {  // two 16-bit values, lo in the low half
    const T pair[2] = {T(lo), T(hi)};
    uint32_t v;
    memcpy(&v, pair, 4);
    return v;
}
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// head_dim padded to 64 * CHUNKS; BN rows of K and V per tile
template <typename T, int CHUNKS, int BN>
__global__ void __launch_bounds__(THREADS, 1)
attention_wgmma(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                const __grid_constant__ CUtensorMap map_v, T* out, const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t dynamic_smem[];
    __shared__ alignas(8) uint64_t bars[1 + 4 * STAGES];
    constexpr int Q_BYTES = CHUNKS * BM * ROW, KV_BYTES = CHUNKS * BN * ROW;
    const uint32_t sq = (smem_addr(dynamic_smem) + 1023) & ~1023u, sk = sq + Q_BYTES, sv = sk + STAGES * KV_BYTES;
    const uint32_t q_full = smem_addr(bars), k_full = q_full + 8, v_full = k_full + 8 * STAGES;
    const uint32_t k_empty = v_full + 8 * STAGES, v_empty = k_empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i <= 4 * STAGES; ++i) mbar_init(q_full + 8 * i, i <= 2 * STAGES ? 1 : 8);  // 8 consumer warps
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int head, q_tile;
    locate(p, (p.q_len + BM - 1) / BM, head, q_tile);
    const int batch = head / p.heads, kv_head = head % p.heads / (p.heads / p.kv_heads), q0 = q_tile * BM;
    const int tiles = (visible(p, min(q0 + BM, p.q_len) - 1) + BN - 1) / BN;  // the last, the masked one, comes first
    int stage = 0, phase = 0;
    auto advance = [&] { if (++stage == STAGES) stage = 0, phase ^= 1; };

    if (threadIdx.x < 128) {  // producer: one thread issues all copies
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 0 || tiles == 0) return;
        tma_load(sq, &map_q, CHUNKS, BM, q0, head % p.heads, batch, q_full);
        for (int t = tiles - 1; t >= 0; --t, advance()) {
            mbar_wait(k_empty + 8 * stage, phase ^ 1);
            tma_load(sk + stage * KV_BYTES, &map_k, CHUNKS, BN, t * BN, kv_head, batch, k_full + 8 * stage);
            mbar_wait(v_empty + 8 * stage, phase ^ 1);
            tma_load(sv + stage * KV_BYTES, &map_v, CHUNKS, BN, t * BN, kv_head, batch, v_full + 8 * stage);
        }
    } else {  // consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int lane = threadIdx.x % 32, wg = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // uniform
        const int row = q0 + wg * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // and row + 8
        const int seen[2] = {visible(p, row), visible(p, row + 8)}, seen_by_all = visible(p, q0 + wg * 64);
        float s[BN / 2], o[CHUNKS][32] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, factor[2];
        uint32_t prob[BN / 4];  // P: an accumulator's layout is an A operand's, so nothing is exchanged

        auto scores = [&] {  // S = Q K^T, issued
            mbar_wait(k_full + 8 * stage, phase);
            const uint64_t dq = descriptor(sq + wg * 64 * ROW), dk = descriptor(sk + stage * KV_BYTES);
            pin(s);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < CHUNKS * 4; ++k) {  // 16 columns of head_dim; descriptors count 16 bytes
                const int chunk = k / 4, step = k % 4 * 32;
                mma_scores<T>(s, dq + (chunk * BM * ROW + step) / 16, dk + (chunk * BN * ROW + step) / 16, k);
            }
            wgmma_commit();
        };
        auto values = [&](int at, int parity) {  // O += P V, issued
            mbar_wait(v_full + 8 * at, parity);
            const uint64_t dv = descriptor(sv + at * KV_BYTES);
            for (auto& chunk : o) pin(chunk);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BN / 16 * CHUNKS; ++i) {
                const int k = i / CHUNKS, c = i % CHUNKS;
                mma_values<T>(o[c], prob + 4 * k, dv + (c * BN * ROW + k * 16 * ROW) / 16);
            }
            wgmma_commit();
        };
        auto softmax = [&](int tile) {  // S -> exp2(scale * S - max), and the factor that O and the sums need
            pin(s);
            const int col0 = tile * BN + lane % 4 * 2;
            if (tile * BN + BN > seen_by_all)
#pragma unroll
                for (int i = 0; i < BN / 2; ++i)
                    if (col0 + i / 4 * 8 + i % 2 >= seen[i / 2 % 2]) s[i] = -INFINITY;
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // this thread's two rows; a quad shares each
                float m = -INFINITY;
#pragma unroll
                for (int i = 2 * h; i < BN / 2; i += 4) m = fmaxf(m, fmaxf(s[i], s[i + 1]));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                m = fmaxf(row_max[h], m * p.scale);
                const float base = m == -INFINITY ? 0.f : m;  // nothing seen yet: keep inf - inf away
                factor[h] = exp2_fast(row_max[h] - base);
                row_max[h] = m, row_sum[h] *= factor[h];
#pragma unroll
                for (int i = 2 * h; i < BN / 2; i += 4)
#pragma unroll
                    for (int e = i; e < i + 2; ++e) row_sum[h] += s[e] = exp2_fast(fmaf(s[e], p.scale, -base));
            }
        };
        auto to_operand = [&] {
#pragma unroll
            for (int i = 0; i < BN / 4; ++i) prob[i] = pack<T>(s[2 * i], s[2 * i + 1]);
            pin(prob);
        };

        if (tiles > 0) {
            mbar_wait(q_full, 0);
            scores();
            wgmma_wait<0>();
            if (lane == 0) mbar_arrive(k_empty + 8 * stage);
            softmax(tiles - 1);
            to_operand();
            for (int t = tiles - 2; t >= 0; --t) {
                const int before = stage, parity = phase;
                advance();
                scores();
                values(before, parity);
                wgmma_wait<1>();  // S is there; O still on its way
                if (lane == 0) mbar_arrive(k_empty + 8 * stage);
                softmax(t);
                wgmma_wait<0>();
                if (lane == 0) mbar_arrive(v_empty + 8 * before);
                pin(s);  // P's registers are free from here on
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    pin(o[c]);
#pragma unroll
                    for (int i = 0; i < 32; ++i) o[c][i] *= factor[i / 2 % 2];
                }
                to_operand();
            }
            values(stage, phase);
            wgmma_wait<0>();
            for (auto& chunk : o) pin(chunk);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = row_sum[h] + __shfl_xor_sync(~0u, row_sum[h], 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float factor = sum == 0.f ? 0.f : 1.f / sum;
            T* dst = out + (i64(head) * p.q_len + row + 8 * h) * p.head_dim;
            if (row + 8 * h < p.q_len)
#pragma unroll
                for (int i = 0; i < CHUNKS * 8; ++i) {  // 8 columns at a time, two of them this thread's
                    const int d = i * 8 + lane % 4 * 2;
                    const float* value = &o[i / 8][i % 8 * 4 + 2 * h];
                    if (p.head_dim % 2 == 0 && d < p.head_dim)
                        *reinterpret_cast<uint32_t*>(dst + d) = pack<T>(value[0] * factor, value[1] * factor);
                    else
                        for (int e = 0; e < 2; ++e)
                            if (d + e < p.head_dim) dst[d + e] = T(value[e] * factor);
                }
        }
    }
#endif
}

// A (batch, heads, rows, head_dim) tensor in boxes of box_rows x 64; TMA swizzles as wgmma expects, zeros outside.
template <typename T>
cudaError_t tensor_map(CUtensorMap* map, const T* base, Problem p, int heads, int rows, Strides s, int box_rows) {
    static const auto encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult status;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }();
    if (!encode) return cudaErrorNotSupported;
    const bool half = std::is_same<T, __half>::value;
    const auto type = half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cuuint64_t dims[4] = {cuuint64_t(p.head_dim), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(p.batch)};
    cuuint64_t strides[3] = {cuuint64_t(s.row) * 2, cuuint64_t(s.head) * 2, cuuint64_t(s.batch) * 2};
    cuuint32_t box[4] = {64, cuuint32_t(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
    const CUresult r = encode(map, type, 4, const_cast<T*>(base), dims, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, int CHUNKS, int BN>
cudaError_t launch_wgmma(const T* q, const T* k, const T* v, T* out, const Problem& p, cudaStream_t stream) {
    CUtensorMap map_q, map_k, map_v;
    if (cudaError_t err = tensor_map(&map_q, q, p, p.heads, p.q_len, p.q, BM)) return err;
    if (cudaError_t err = tensor_map(&map_k, k, p, p.kv_heads, p.kv_len, p.k, BN)) return err;
    if (cudaError_t err = tensor_map(&map_v, v, p, p.kv_heads, p.kv_len, p.v, BN)) return err;
    const int smem = CHUNKS * ROW * (BM + 2 * STAGES * BN) + 1024;  // 1024: room to align the first tile
    auto kernel = attention_wgmma<T, CHUNKS, BN>;
    if (cudaError_t err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem)) return err;
    kernel<<<i64(p.q_len + BM - 1) / BM * p.heads * p.batch, THREADS, smem, stream>>>(map_q, map_k, map_v, out, p);
    return cudaGetLastError();
}

// --------------------------------------------------------------------------------------------------- fp32: IEEE FMA
// Eight warps, each with R query rows. The lanes are first the 32 keys of a tile, lane j scoring key j, then columns of
// the output, lane c summing columns c, c + 32, ... over the tile's values.
template <int D>  // head_dim padded to 64, 128 or 256
__global__ void __launch_bounds__(256)
attention_fma(const float* q, const float* k, const float* v, float* out, const __grid_constant__ Problem p) {
    constexpr int R = D <= 128 ? 8 : 4, TILE = 8 * R, LD = D + 4;  // 4: rows start 4 banks apart
    extern __shared__ __align__(16) float smem[];
    float *sq = smem, *sk = sq + TILE * LD, *sv = sk + 32 * LD;
    int head, q_tile;
    locate(p, (p.q_len + TILE - 1) / TILE, head, q_tile);
    const int batch = head / p.heads, h = head % p.heads, kv_head = h / (p.heads / p.kv_heads), q0 = q_tile * TILE;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * R, end = visible(p, min(q0 + TILE, p.q_len) - 1);
    auto fetch = [&](float* tile, int n, const float* src, Strides s, int src_head, int first, int rows) {
        src += batch * s.batch + src_head * s.head;
        for (int e = threadIdx.x; e < n * D; e += 256) {
            const int r = first + e / D, d = e % D;
            tile[e / D * LD + d] = r < rows && d < p.head_dim ? src[r * s.row + d] : 0.f;
        }
    };
    float o[R][D / 32] = {}, row_max[R], row_sum[R] = {};
    for (float& m : row_max) m = -INFINITY;
    fetch(sq, TILE, q, p.q, h, q0, p.q_len);
    for (int col0 = 0; col0 < end; col0 += 32) {
        __syncthreads();  // the last tile has been used
        fetch(sk, 32, k, p.k, kv_head, col0, p.kv_len);
        fetch(sv, 32, v, p.v, kv_head, col0, p.kv_len);
        __syncthreads();
        float s[R] = {};
        for (int d = 0; d < D; d += 4) {
            const float4 y = *reinterpret_cast<float4*>(sk + lane * LD + d);
            for (int i = 0; i < R; ++i) {
                const float4 x = *reinterpret_cast<float4*>(sq + (row0 + i) * LD + d);
                s[i] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
            }
        }
        for (int i = 0; i < R; ++i) {
            s[i] = col0 + lane < visible(p, q0 + row0 + i) ? s[i] * p.scale : -INFINITY;
            float m = s[i];
            for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
            m = fmaxf(row_max[i], m);
            const float base = m == -INFINITY ? 0.f : m, factor = exp2f(row_max[i] - base);
            s[i] = exp2f(s[i] - base), row_max[i] = m, row_sum[i] = row_sum[i] * factor + s[i];
            for (int c = 0; c < D / 32; ++c) o[i][c] *= factor;
        }
        for (int j = 0; j < 32; ++j)
            for (int i = 0; i < R; ++i) {
                const float x = __shfl_sync(~0u, s[i], j);
                for (int c = 0; c < D / 32; ++c) o[i][c] += x * sv[j * LD + lane + 32 * c];
            }
    }
    for (int i = 0; i < R; ++i) {
        for (int d = 16; d; d /= 2) row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], d);
        float* dst = out + (i64(head) * p.q_len + q0 + row0 + i) * p.head_dim;
        for (int c = 0, d = lane; c < D / 32; ++c, d += 32)
            if (q0 + row0 + i < p.q_len && d < p.head_dim) dst[d] = row_sum[i] == 0.f ? 0.f : o[i][c] / row_sum[i];
    }
}

template <int D>
cudaError_t launch_fma(const float* q, const float* k, const float* v, float* out, const Problem& p, cudaStream_t s) {
    constexpr int TILE = D <= 128 ? 64 : 32, smem = (TILE + 2 * 32) * (D + 4) * 4;
    auto kernel = attention_fma<D>;
    if (cudaError_t err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem)) return err;
    kernel<<<i64(p.q_len + TILE - 1) / TILE * p.heads * p.batch, 256, smem, s>>>(q, k, v, out, p);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch(const void* q, const void* k, const void* v, void* out, const Problem& p, cudaStream_t stream) {
    cudaError_t (*run)(const T*, const T*, const T*, T*, const Problem&, cudaStream_t);
    if constexpr (std::is_same<T, float>::value)
        run = p.head_dim <= 64 ? launch_fma<64> : p.head_dim <= 128 ? launch_fma<128> : launch_fma<256>;
    else
        run = p.head_dim <= 64 ? launch_wgmma<T, 1, BLOCK_N> : p.head_dim <= 128 ? launch_wgmma<T, 2, BLOCK_N>
                                                                                : launch_wgmma<T, 4, 64>;
    return run((const T*)q, (const T*)k, (const T*)v, (T*)out, p, stream);
}

extern "C" int attention(const void* q /* strided */, const void* k /* strided */, const void* v /* strided */,
                         void* out, int dtype, int batch, int heads, int kv_heads, int q_len, int kv_len, int head_dim,
                         int causal, float scale, i64 q_batch, i64 q_head, i64 q_row, i64 k_batch, i64 k_head,
                         i64 k_row, i64 v_batch, i64 v_head, i64 v_row, cudaStream_t stream) {
    const Problem p = {batch, heads, kv_heads, q_len, kv_len, head_dim, causal, scale, {q_batch, q_head, q_row},
                       {k_batch, k_head, k_row}, {v_batch, v_head, v_row}};
    const auto run = dtype == 0 ? launch<__half> : dtype == 1 ? launch<__nv_bfloat16> : launch<float>;
    return run(q, k, v, out, p, stream);
}
"""


@lru_cache(maxsize=1)
def compiled():
    """The compiled source: at the first call, not at import."""
    return compile_cuda(CUDA_SRC, defines=CONFIG)


def tma_heads(x):
    """x as TMA reads it: head_dim adjacent, base and strides at multiples of 16 bytes; else a padded copy."""
    padded = (x.shape[3] + 7) // 8 * 8
    strides = [x.stride(i) if x.shape[i] > 1 else padded for i in range(3)]  # of a single index: anything
    if x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(s > 0 and s % 8 == 0 for s in strides):
        return x.as_strided(x.shape, (*strides, 1))
    return x.new_empty((*x.shape[:3], padded))[..., : x.shape[3]].copy_(x)


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    """Q (batch, heads, q_len, head_dim), K and V (batch, kv_heads, kv_len, head_dim) -> contiguous, like Q."""
    batch, heads, q_len, head_dim = Q.shape
    kv_heads, kv_len = K.shape[1], K.shape[2]
    if head_dim > HEAD_DIM_MAX or heads % kv_heads:
        limits = f"head_dim at most {HEAD_DIM_MAX}, heads a multiple of kv_heads"
        raise ValueError(f"flash_attention: head_dim {head_dim}, heads {heads}, kv_heads {kv_heads}; allowed: {limits}")
    if Q.dtype != torch.float32 and torch.cuda.get_device_capability(Q.device)[0] != 9:
        return kernel_fn(Q.float(), K.float(), V.float(), causal, sm_scale).to(Q.dtype)
    out = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device)
    if out.numel() == 0 or kv_len == 0:
        return out.zero_()
    scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    if scale <= 0:  # the kernels take the maximum before they scale
        Q, scale = (-Q, -scale) if scale < 0 else (torch.zeros_like(Q), 1.0)
    if Q.dtype != torch.float32:
        Q, K, V = tma_heads(Q), tma_heads(K), tma_heads(V)
    elif not Q.stride(3) == K.stride(3) == V.stride(3) == 1:
        Q, K, V = Q.contiguous(), K.contiguous(), V.contiguous()
    compiled().attention(
        Q, K, V, out, DTYPES[Q.dtype], batch, heads, kv_heads, q_len, kv_len, head_dim, int(causal),
        scale / math.log(2), *Q.stride()[:3], *K.stride()[:3], *V.stride()[:3],
    )  # fmt: skip
    return out
