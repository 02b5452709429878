"""flash_attention, CUDA C++ starter: softmax(Q K^T * scale) V without writing the scores, fp32 online softmax.

Q (batch, heads, q_len, head_dim), K and V (batch, kv_heads, kv_len, head_dim) of any strides; kv_heads divides heads.
Causal is aligned to the bottom right: row i sees columns up to i + kv_len - q_len; a row that sees none gives 0.

- fp16/bf16 on Hopper: a block owns 128 query rows, 64 per consumer warpgroup; a producer thread streams K and V tiles
  with TMA. wgmma computes S = Q K^T from shared memory; P stays in registers as the next wgmma's operand. S of a tile
  is issued together with O += P V of the tile before: the tensor cores work while the softmax is computed.
- fp32, other GPUs, and 16-bit rows that TMA cannot read: IEEE FMA, a warp a query row, the same online softmax.
"""

import math
from functools import lru_cache

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "flash_attention"
BACKEND = "cuda"
# BLOCK_N: K/V rows per tile, 64 or 128, for head_dim up to 128 (above: 64, for want of registers); STAGES: of tiles.
CONFIG = {"BLOCK_N": 128, "STAGES": 2}
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

CUDA_SRC = r"""
#include <cuda.h>  // CUtensorMap; the encoder itself is looked up at run time, so nothing links to libcuda
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

#define UNROLL _Pragma("unroll")
#define PTX asm volatile
using i64 = long long;
struct Strides { i64 batch, head, row; };  // in elements; head_dim is contiguous
struct Problem {
    int batch, heads, kv_heads, q_len, kv_len, head_dim, causal;
    float scale;  // of the scores, times log2(e): the softmax is in base 2
    Strides q, kv;  // K and V lie alike
};

// Block -> (head of the whole batch, query tile). Within a set of heads whose K and V fit in L2, long causal rows come
// first, so that the short ones fill the gaps at the end.
__device__ void locate(const Problem& p, int tiles, int& head, int& tile) {
    const i64 kv_bytes = i64(p.kv_len) * p.head_dim * 4, all = i64(p.batch) * p.heads;
    const int set = max(1ll, min(all, (24ll << 20) / kv_bytes)), first = blockIdx.x / (set * tiles) * set;
    const int heads = min(i64(set), all - first), rest = blockIdx.x - first * tiles;
    head = first + rest % heads, tile = tiles - 1 - rest / heads;
}
__device__ int visible(const Problem& p, int row) {  // columns that the row may see
    return p.causal ? max(0, min(p.kv_len, row + 1 + p.kv_len - p.q_len)) : p.kv_len;
}
__device__ float exp2_fast(float x) {  // 2^x to 2 ulp; exp2f would add steps for denormals
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// ------------------------------------------------------------------------------------------------ Hopper: wgmma + TMA
constexpr int BM = 128, THREADS = 3 * 128, ROW = 128;  // ROW: bytes of 64 16-bit values, one row of the swizzle
__device__ uint32_t smem_addr(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void mbar_arrive(uint32_t bar) { PTX("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
__device__ void mbar_wait(uint32_t bar, int parity) {  // until the phase of that parity has completed
    PTX("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
                 :: "r"(bar), "r"(parity) : "memory");
}
// `rows` rows of one head, in chunks of 64 columns: chunk c lies at dst + c * rows * ROW.
__device__ void tma_load(uint32_t dst, const CUtensorMap* map, int chunks, int rows, int row, int head, int batch,
                         uint32_t bar) {
    PTX("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"  // what lies outside the tensor arrives as
                 :: "r"(bar), "r"(chunks * rows * ROW) : "memory");         // zeros and counts too
    for (int c = 0; c < chunks; ++c)
        PTX("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
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
#define OPCODE(N, TYPE) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE
#define SET_P "{ .reg .pred p; setp.ne.b32 p, "
#define SCORES128(TYPE) PTX(SET_P "%66, 0; " OPCODE(128, TYPE) " {" REGS64 "}, %64, %65, p, 1, 1, 0, 0; }" \
                            : ACC16(0), ACC16(16), ACC16(32), ACC16(48) : "l"(a), "l"(b), "r"(add))
#define SCORES64(TYPE) PTX(SET_P "%34, 0; " OPCODE(64, TYPE) " {" REGS32 "}, %32, %33, p, 1, 1, 0, 0; }" \
                           : ACC16(0), ACC16(16) : "l"(a), "l"(b), "r"(add))
#define VALUES64(TYPE) PTX(OPCODE(64, TYPE) " {" REGS32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;" \
                           : ACC16(0), ACC16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define MMA(ASM) if constexpr (std::is_same_v<T, __half>) ASM("f16"); else ASM("bf16")
// d (64 x 128 or 64 x 64 over the warpgroup) = Q (64 x 16) K^T (16 x 128 or 64) + (add ? d : 0)
template <typename T> __device__ void mma_scores(float (&d)[64], uint64_t a, uint64_t b, int add) { MMA(SCORES128); }
template <typename T> __device__ void mma_scores(float (&d)[32], uint64_t a, uint64_t b, int add) { MMA(SCORES64); }
// d (64 x 64) += P (64 x 16, registers) V (16 x 64)
template <typename T> __device__ void mma_values(float (&d)[32], const uint32_t* a, uint64_t b) { MMA(VALUES64); }
template <int N> __device__ void wgmma_wait() { PTX("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// Keeps the compiler from moving work on wgmma's registers across its fence or wait; costs no instruction.
template <typename V, int N> __device__ void pin(V (&r)[N]) {
    UNROLL for (int i = 0; i < N; ++i)
        if constexpr (std::is_same_v<V, float>) PTX("" : "+f"(r[i]) :: "memory");
        else PTX("" : "+r"(r[i]) :: "memory");
}
template <typename T> __device__ uint32_t pack(float lo, float hi) {  // two 16-bit values, lo in the low half
    alignas(4) const T pair[2] = {T(lo), T(hi)};
    return reinterpret_cast<const uint32_t&>(pair);
}

// head_dim padded to 64 * CHUNKS; BN rows of K and V per tile
template <typename T, int CHUNKS, int BN> __global__ void __launch_bounds__(THREADS, 1)
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
        for (int i = 0; i <= 4 * STAGES; ++i)  // one arrival fills a tile, 8 warps empty it
            PTX("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(q_full + 8 * i), "r"(i > 2 * STAGES ? 8 : 1));
        PTX("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int head, q_tile, stage = 0, phase = 0;
    locate(p, (p.q_len + BM - 1) / BM, head, q_tile);
    const int batch = head / p.heads, kv_head = head % p.heads / (p.heads / p.kv_heads), q0 = q_tile * BM;
    const int tiles = (visible(p, min(q0 + BM, p.q_len) - 1) + BN - 1) / BN;  // the last, the masked one, comes first
    auto advance = [&] { if (++stage == STAGES) stage = 0, phase ^= 1; };
    if (threadIdx.x < 128) {  // producer: one thread issues all copies
        PTX("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 0 || tiles == 0) return;
        tma_load(sq, &map_q, CHUNKS, BM, q0, head % p.heads, batch, q_full);
        for (int t = tiles - 1; t >= 0; --t, advance()) {
            mbar_wait(k_empty + 8 * stage, phase ^ 1);
            tma_load(sk + stage * KV_BYTES, &map_k, CHUNKS, BN, t * BN, kv_head, batch, k_full + 8 * stage);
            mbar_wait(v_empty + 8 * stage, phase ^ 1);
            tma_load(sv + stage * KV_BYTES, &map_v, CHUNKS, BN, t * BN, kv_head, batch, v_full + 8 * stage);
        }
    } else {  // consumers
        PTX("setmaxnreg.inc.sync.aligned.u32 240;");
        const int lane = threadIdx.x % 32, wg = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // uniform
        const int row = q0 + wg * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // and row + 8
        const int seen[2] = {visible(p, row), visible(p, row + 8)}, seen_by_all = visible(p, q0 + wg * 64);
        float s[BN / 2], o[CHUNKS][32] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, factor[2];
        uint32_t prob[BN / 4];  // P: an accumulator's layout is an A operand's, so nothing is exchanged
        auto scores = [&] {  // S = Q K^T, issued
            mbar_wait(k_full + 8 * stage, phase);
            const uint64_t dq = descriptor(sq + wg * 64 * ROW), dk = descriptor(sk + stage * KV_BYTES);
            pin(s);
            PTX("wgmma.fence.sync.aligned;" ::: "memory");
            UNROLL for (int k = 0; k < CHUNKS * 4; ++k) {  // 16 columns of head_dim; descriptors count 16 bytes
                const int chunk = k / 4, step = k % 4 * 32;
                mma_scores<T>(s, dq + (chunk * BM * ROW + step) / 16, dk + (chunk * BN * ROW + step) / 16, k);
            }
            PTX("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto values = [&](int at, int parity) {  // O += P V, issued
            mbar_wait(v_full + 8 * at, parity);
            const uint64_t dv = descriptor(sv + at * KV_BYTES);
            for (auto& chunk : o) pin(chunk);
            PTX("wgmma.fence.sync.aligned;" ::: "memory");
            UNROLL for (int i = 0; i < BN / 16 * CHUNKS; ++i) {
                const int k = i / CHUNKS, c = i % CHUNKS;
                mma_values<T>(o[c], prob + 4 * k, dv + (c * BN * ROW + k * 16 * ROW) / 16);
            }
            PTX("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto softmax = [&](int tile) {  // S -> exp2(scale * S - max), and the factor that O and the sums need
            pin(s);
            const int col0 = tile * BN + lane % 4 * 2;
            if (tile * BN + BN > seen_by_all)
                UNROLL for (int i = 0; i < BN / 2; ++i)
                    if (col0 + i / 4 * 8 + i % 2 >= seen[i / 2 % 2]) s[i] = -INFINITY;
            UNROLL for (int h = 0; h < 2; ++h) {  // this thread's two rows; a quad shares each
                float m = -INFINITY;
                UNROLL for (int i = 2 * h; i < BN / 2; i += 4) m = fmaxf(m, fmaxf(s[i], s[i + 1]));
                for (int lanes = 1; lanes <= 2; ++lanes) m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
                m = fmaxf(row_max[h], m * p.scale);
                const float base = m == -INFINITY ? 0.f : m;  // nothing seen yet: keep inf - inf away
                factor[h] = exp2_fast(row_max[h] - base);
                row_max[h] = m, row_sum[h] *= factor[h];
                UNROLL for (int i = 2 * h; i < BN / 2; i += i % 2 ? 3 : 1)
                    row_sum[h] += s[i] = exp2_fast(fmaf(s[i], p.scale, -base));
            }
        };
        auto to_operand = [&] {
            UNROLL for (int i = 0; i < BN / 4; ++i) prob[i] = pack<T>(s[2 * i], s[2 * i + 1]);
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
                UNROLL for (int c = 0; c < CHUNKS; ++c) {
                    pin(o[c]);
                    UNROLL for (int i = 0; i < 32; ++i) o[c][i] *= factor[i / 2 % 2];
                }
                to_operand();
            }
            values(stage, phase);
            wgmma_wait<0>();
            for (auto& chunk : o) pin(chunk);
        }
        UNROLL for (int h = 0; h < 2; ++h) {
            float sum = row_sum[h] + __shfl_xor_sync(~0u, row_sum[h], 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float factor = sum == 0.f ? 0.f : 1.f / sum;
            T* dst = out + (i64(head) * p.q_len + row + 8 * h) * p.head_dim;
            UNROLL for (int i = 0; i < CHUNKS * 8; ++i) {  // 8 columns at a time, two of them this thread's
                const int d = i * 8 + lane % 4 * 2;
                const float* value = &o[i / 8][i % 8 * 4 + 2 * h];
                if (row + 8 * h < p.q_len && d < p.head_dim)
                    *reinterpret_cast<uint32_t*>(dst + d) = pack<T>(value[0] * factor, value[1] * factor);
            }
        }
    }
#endif
}

// --------------------------------------------------------------------------------------------------- fp32: IEEE FMA
// The plain algorithm on contiguous tensors: a warp owns a query row, a lane every 32nd column of it.
template <int COLS> __global__ void __launch_bounds__(256)  // head_dim padded to 32 * COLS
attention_fma(const float* q, const float* k, const float* v, float* out, const __grid_constant__ Problem p) {
    const i64 at = blockIdx.x * 8ll + threadIdx.x / 32, head = at / p.q_len;  // of the whole batch
    if (head >= i64(p.batch) * p.heads) return;
    const i64 first = head / (p.heads / p.kv_heads) * p.kv_len * p.head_dim;
    const int lane = threadIdx.x % 32, end = visible(p, at % p.q_len);
    auto columns = [&](auto f) { for (int c = 0, d = lane; c < COLS; ++c, d += 32) if (d < p.head_dim) f(c, d); };
    float x[COLS], o[COLS] = {}, row_max = -INFINITY, row_sum = 0.f;
    columns([&](int c, int d) { x[c] = q[at * p.head_dim + d]; });
    for (int j = 0; j < end; ++j) {
        const float *key = k + first + i64(j) * p.head_dim, *value = v + (key - k);
        float s = 0.f;
        columns([&](int c, int d) { s = fmaf(x[c], key[d], s); });
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
        const float m = fmaxf(row_max, s * p.scale), factor = exp2f(row_max - m), weight = exp2f(s * p.scale - m);
        row_max = m, row_sum = row_sum * factor + (j % 32 == lane ? weight : 0.f);  // 32 partial sums: more exact
        columns([&](int c, int d) { o[c] = fmaf(weight, value[d], o[c] * factor); });
    }
    for (int d = 16; d; d /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, d);
    columns([&](int c, int d) { out[at * p.head_dim + d] = row_sum == 0.f ? 0.f : o[c] / row_sum; });
}

// A (batch, heads, rows, head_dim) tensor in boxes of box_rows x 64; TMA swizzles as wgmma expects, zeros outside.
template <typename T>
cudaError_t tensor_map(CUtensorMap* map, const void* base, Problem p, int heads, int rows, Strides s, int box_rows) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    cudaDriverEntryPointQueryResult status;
    if (!encode) cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, 0, &status);
    const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint64_t dims[] = {cuuint64_t(p.head_dim), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(p.batch)};
    const cuuint64_t strides[] = {cuuint64_t(s.row) * 2, cuuint64_t(s.head) * 2, cuuint64_t(s.batch) * 2};
    const cuuint32_t box[] = {64, cuuint32_t(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
    return !encode || encode(map, type, 4, const_cast<void*>(base), dims, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
               ? cudaErrorInvalidValue : cudaSuccess;
}

template <typename T, int D>  // head_dim padded to D
cudaError_t launch(const void* q, const void* k, const void* v, void* out, const Problem& p, cudaStream_t stream) {
    const i64 heads = i64(p.batch) * p.heads, fma_blocks = (heads * p.q_len + 7) / 8;
    if constexpr (std::is_same_v<T, float>) {
        attention_fma<D / 32><<<fma_blocks, 256, 0, stream>>>((const T*)q, (const T*)k, (const T*)v, (T*)out, p);
    } else {
        constexpr int CHUNKS = D / 64, BN = D > 128 ? 64 : BLOCK_N;
        constexpr int smem = CHUNKS * ROW * (BM + 2 * STAGES * BN) + 1024;  // 1024: room to align the first tile
        CUtensorMap map_q, map_k, map_v;
        if (auto error = tensor_map<T>(&map_q, q, p, p.heads, p.q_len, p.q, BM)) return error;
        if (auto error = tensor_map<T>(&map_k, k, p, p.kv_heads, p.kv_len, p.kv, BN)) return error;
        if (auto error = tensor_map<T>(&map_v, v, p, p.kv_heads, p.kv_len, p.kv, BN)) return error;
        auto kernel = attention_wgmma<T, CHUNKS, BN>;
        if (auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem)) return error;
        kernel<<<(p.q_len + BM - 1) / BM * heads, THREADS, smem, stream>>>(map_q, map_k, map_v, (T*)out, p);
    }
    return cudaGetLastError();
}

extern "C" int attention(const void* q /* strided */, const void* k /* strided */, const void* v /* strided */,
                         void* out, int dtype, int batch, int heads, int kv_heads, int q_len, int kv_len, int head_dim,
                         int causal, float scale, i64 q_batch, i64 q_head, i64 q_row, i64 kv_batch, i64 kv_head,
                         i64 kv_row, cudaStream_t stream) {
    const Problem p = {batch, heads, kv_heads, q_len, kv_len, head_dim, causal, scale, {q_batch, q_head, q_row},
                       {kv_batch, kv_head, kv_row}};
    auto run = [&](auto of) {
        using T = decltype(of);
        const auto padded = head_dim <= 64 ? launch<T, 64> : head_dim <= 128 ? launch<T, 128> : launch<T, 256>;
        return padded(q, k, v, out, p, stream);
    };
    return dtype == 0 ? run(__half()) : dtype == 1 ? run(__nv_bfloat16()) : run(float());
}
"""


@lru_cache(maxsize=1)
def compiled():
    """The compiled source: at the first call, not at import."""
    return compile_cuda(CUDA_SRC, defines=CONFIG)


def tma_heads(x):
    """x as TMA reads it: head_dim adjacent, base and strides at multiples of 16 bytes; else a copy."""
    fits = x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(s > 0 and s % 8 == 0 for s in x.stride()[:3])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    """Q (batch, heads, q_len, head_dim), K and V (batch, kv_heads, kv_len, head_dim) -> contiguous, like Q."""
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = Q.shape, K.shape
    if head_dim > 256 or heads % kv_heads:
        raise ValueError(f"flash_attention: head_dim {head_dim}, at most 256; {heads} heads, multiple of {kv_heads}")
    half = Q.dtype != torch.float32
    if half and (head_dim % 8 or torch.cuda.get_device_capability(Q.device)[0] != 9):
        return kernel_fn(Q.float(), K.float(), V.float(), causal, sm_scale).to(Q.dtype)
    out = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device)
    if out.numel() == 0 or kv_len == 0:
        return out.zero_()
    scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    if scale <= 0:  # the kernels take the maximum before they scale
        Q, scale = (-Q, -scale) if scale < 0 else (torch.zeros_like(Q), 1.0)
    Q, K, V = (tma_heads(x) if half else x.contiguous() for x in (Q, K, V))
    if K.stride() != V.stride():
        K, V = K.contiguous(), V.contiguous()
    compiled().attention(
        Q, K, V, out, DTYPES[Q.dtype], batch, heads, kv_heads, q_len, kv_len, head_dim, int(causal),
        scale / math.log(2), *Q.stride()[:3], *K.stride()[:3],
    )  # fmt: skip
    return out
