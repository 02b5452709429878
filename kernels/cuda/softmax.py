"""Softmax along any dimension, CUDA C++: one pass over memory, rows of any width.

A row is read once, in 16-byte accesses, and stays in registers between the reduction and the store: the least traffic
there is. A warp or less takes a narrow row and a block a row of up to 16,384 fp16 values. A cluster of blocks shares a
wider row: it walks down the rows, and while it works on one, the next arrives in shared memory, so that memory never
idles. Only rows beyond a full cluster's registers (327,680 fp16 values, 163,840 bf16, 81,920 fp32) are read twice.
"""

from functools import lru_cache
from math import prod

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "softmax"
BACKEND = "cuda"

# VECS, MAX_THREADS: 16-byte lines that a thread holds of a row that one block takes, and its threads; WIDE_VECS,
# WIDE_THREADS: the same for a cluster's blocks; FILL: a wide row is shared by more blocks while there are fewer.
CONFIG = {"VECS": 4, "MAX_THREADS": 512, "WIDE_VECS": 5, "WIDE_THREADS": 1024, "FILL": 132}
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cstdint>
#include <type_traits>

#define UNROLL _Pragma("unroll")
using i64 = long long;
constexpr int MAX_CLUSTER = 8, COL_WARPS = 16;      // warps that share the reduced dimension when it is not the last
constexpr float LOWEST = -3.402823466e38f;          // below or equal to any finite value
constexpr float LOG2E = 1.4426950408889634f;
// threads of a cluster's block: bfloat16 and float32 take more registers each
template <typename T> constexpr int WIDE = std::is_same_v<T, __half> ? WIDE_THREADS : WIDE_THREADS / 2;

// ---- memory: 16-byte vectors ---------------------------------------------------------------------------------------
template <typename T> constexpr int LANES = 16 / sizeof(T);  // elements in a line, the 16 bytes of one access
template <typename T> struct alignas(16) Elements { T x[LANES<T>]; };

// Lines are moved as plain bits: a struct of __half would be moved element by element.
template <typename T> __device__ void unpack(const uint4& line, float (&y)[LANES<T>]) {
    UNROLL for (int i = 0; i < LANES<T>; i++) y[i] = reinterpret_cast<const Elements<T>&>(line).x[i];
}
template <typename T> __device__ uint4 packed(const float (&y)[LANES<T>]) {
    Elements<T> line;
    UNROLL for (int i = 0; i < LANES<T>; i++) line.x[i] = static_cast<T>(y[i]);
    return reinterpret_cast<const uint4&>(line);
}

// A row: whole lines, and the few elements before the first and after the last 16-byte boundary, its edges: rows of an
// odd width start anywhere. x and out lie alike within the boundaries.
template <typename T> struct Row {
    T* x;
    int first, n_lines, edges;                      // first: elements before the first boundary

    __device__ Row(T* x, i64 n_cols) : x(x) {
        const i64 before = (-reinterpret_cast<uintptr_t>(x) & 15) / sizeof(T);
        first = before < n_cols ? before : n_cols;
        n_lines = (n_cols - first) / LANES<T>;
        edges = n_cols - i64(n_lines) * LANES<T>;
    }
    __device__ uint4* line(int i) const { return (uint4*)(x + first) + i; }
    __device__ i64 edge(int i) const { return i < first ? i : i64(n_lines) * LANES<T> + i; }   // its column
};

// ---- arithmetic: a maximum and the sum of e^(x - maximum) ----------------------------------------------------------
// fp16 is counted in powers of 2: x * log2(e) - maximum is one instruction. bfloat16 reaches float32's largest value,
// which times log2(e) would be infinite; float32 wants the accurate expf.
template <typename T> constexpr float SCALE = std::is_same_v<T, __half> ? LOG2E : 1.f;

// e^x, or 2^x if counted so. The half formats: one hardware exp2, whose 2^-22 is far below their rounding.
template <typename T> __device__ float exponential(float x) {
    if constexpr (sizeof(T) == 4) return expf(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * (LOG2E / SCALE<T>)));
    return y;
}

// m: the maximum, times SCALE. Starts below every value, at no infinity: m - m is 0 even where all values are -inf.
struct MaxSum { float m = LOWEST, sum = 0.f; };
template <typename T> __device__ MaxSum merged(MaxSum a, MaxSum b) {
    const float m = fmaxf(a.m, b.m);
    return {m, a.sum * exponential<T>(a.m - m) + b.sum * exponential<T>(b.m - m)};
}
template <typename T, int N> __device__ MaxSum added(MaxSum a, const float (&x)[N]) {
    float top = x[0], sum = 0.f;
    UNROLL for (int i = 1; i < N; i++) top = fmaxf(top, x[i]);
    top = fmaxf(a.m, top * SCALE<T>);
    UNROLL for (int i = 0; i < N; i++) sum += exponential<T>(x[i] * SCALE<T> - top);
    return {top, a.sum * exponential<T>(a.m - top) + sum};
}

// The largest value of these lines; 16-bit ones are compared two at a time.
template <typename T, int N> __device__ float largest(const uint4 (&lines)[N]) {
    using Half = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    using Word = std::conditional_t<sizeof(T) == 4, float, Half>;
    const Word* words = reinterpret_cast<const Word*>(lines);
    Word top = words[0];
    UNROLL for (int i = 1; i < 4 * N; i++)
        if constexpr (sizeof(T) == 4) top = fmaxf(top, words[i]);
        else top = __hmax2(top, words[i]);
    if constexpr (sizeof(T) == 4) return top;
    else return fmaxf(static_cast<float>(top.x), static_cast<float>(top.y));
}

// ---- reductions, in a fixed order ----------------------------------------------------------------------------------
// Over `threads` threads of a warp, all of which get the result.
template <typename T> __device__ MaxSum warp_reduce(MaxSum a, int threads = 32) {
    float m = a.m;
    for (int offset = threads / 2; offset > 0; offset /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, offset));
    float sum = a.sum * exponential<T>(a.m - m);
    for (int offset = threads / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return {m, sum};
}
// Over the threads of a row: part of a warp, or the whole block.
template <typename T> __device__ MaxSum row_reduce(MaxSum a) {
    __shared__ MaxSum of_warp[32];
    a = warp_reduce<T>(a, min(blockDim.x, 32));
    if (blockDim.x <= 32) return a;
    const int lane = threadIdx.x % 32;
    if (lane == 0) of_warp[threadIdx.x / 32] = a;
    __syncthreads();
    return warp_reduce<T>(lane < blockDim.x / 32 ? of_warp[lane] : MaxSum());     // in every warp: no second barrier
}

// Clusters: blocks that run at once and can write to each other's shared memory. mbarriers count the bytes that arrive:
// nobody waits for more than those. (A barrier of the cluster would wait for all that its blocks store in out.)
#if __CUDA_ARCH__ >= 900
__device__ uint32_t address(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }
__device__ void expect(uint64_t* bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(bar)), "r"(bytes) : "memory");
}
__device__ void wait(uint64_t* bar, int parity) {   // until the phase of that parity has completed
    uint32_t done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(address(bar)), "r"(parity) : "memory");
}
__device__ void send(MaxSum a, MaxSum* place, uint64_t* bar, int block) {    // to this place in another block
    asm volatile("{ .reg .b32 to, at; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 at, %1, %2;"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [at]; }"
                 :: "r"(address(place)), "r"(address(bar)), "r"(block), "f"(a.m), "f"(a.sum) : "memory");
}
#endif

// ---- kernels --------------------------------------------------------------------------------------------------------
// blockDim.y rows a block. KEEP lines a thread are held in registers; KEEP == 0: none, each visit loads. ALIGNED: there
// are no edges, which saves registers.
template <typename T, int KEEP, bool ALIGNED> __global__ void __launch_bounds__(MAX_THREADS)
softmax_rows(const T* __restrict__ x, T* __restrict__ out, i64 n_rows, i64 n_cols, i64 row_stride) {
    const i64 last = n_rows - 1, at = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    const i64 index = at < last ? at : last;        // threads past the end repeat the last row: every warp is complete
    const Row<const T> row(x + index * row_stride, n_cols);
    const Row<T> result(out + index * n_cols, n_cols);
    const int me = threadIdx.x, threads = blockDim.x;
    uint4 kept[KEEP > 0 ? KEEP : 1];
    UNROLL for (int i = 0; i < KEEP; i++)                  // all loads are issued before the first is used
        if (me + i * threads < row.n_lines) kept[i] = *row.line(me + i * threads);
    const bool has_edge = !ALIGNED && me < row.edges;
    const float edge[1] = {has_edge ? static_cast<float>(row.x[row.edge(me)]) : 0.f};
    auto visit = [&](auto f) {                      // f(line, its values)
        float y[LANES<T>];
        UNROLL for (int i = 0; i < KEEP; i++)
            if (me + i * threads < row.n_lines) unpack<T>(kept[i], y), f(me + i * threads, y);
        for (int i = me; KEEP == 0 && i < row.n_lines; i += threads) unpack<T>(*row.line(i), y), f(i, y);
    };
    MaxSum total;
    visit([&](int, const auto& values) { total = added<T>(total, values); });
    if (has_edge) total = added<T>(total, edge);
    total = row_reduce<T>(total);
    const float factor = 1.f / total.sum;
    auto share = [&](float value) { return exponential<T>(value * SCALE<T> - total.m) * factor; };
    visit([&](int i, auto& values) {
        UNROLL for (float& value : values) value = share(value);
        *result.line(i) = packed<T>(values);
    });
    if (has_edge) result.x[row.edge(me)] = static_cast<T>(share(edge[0]));
}

// A cluster a row, row after row. The values give way to their e^(x - this thread's maximum), so that each costs one
// exponential; rounded to T, that is as exact as the result: it is rounded twice, or lost where the result would be.
template <typename T>
__global__ void __launch_bounds__(WIDE<T>)
softmax_wide(const T* __restrict__ x, T* __restrict__ out, i64 n_rows, i64 n_cols, i64 row_stride, int cluster) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 arriving[];             // each thread its own: nothing to wait for but its own copies
    __shared__ MaxSum parts[2][MAX_CLUSTER * WIDE_THREADS / 32];     // of every warp; by turns: those of a row may
    __shared__ uint64_t bars[2];                                     // still be read when the next row's arrive
    const int me = blockIdx.x % cluster * blockDim.x + threadIdx.x, threads = cluster * blockDim.x;
    const int lane = threadIdx.x % 32, n_parts = threads / 32;
    const i64 step = gridDim.x / cluster;
    T next_edge;
    auto fetch = [&](i64 index) {                   // after the last row: nothing
        const Row<const T> row(x + index * row_stride, index < n_rows ? n_cols : 0);
        UNROLL for (int i = 0; i < WIDE_VECS; i++)
            if (me + i * threads < row.n_lines)
                __pipeline_memcpy_async(arriving + i * blockDim.x + threadIdx.x, row.line(me + i * threads), 16);
        if (me < row.edges) next_edge = row.x[row.edge(me)];
    };
    fetch(blockIdx.x / cluster);
    if (threadIdx.x == 0)
        for (uint64_t& bar : bars) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(&bar)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            expect(&bar, n_parts * sizeof(MaxSum));
        }
    __cluster_barrier_arrive();                     // every block of the cluster runs, and is prepared
    __cluster_barrier_wait();
    int turn = 0, parity = 0;
    for (i64 index = blockIdx.x / cluster; index < n_rows; index += step, turn ^= 1, parity ^= !turn) {
        const Row<T> row(out + index * n_cols, n_cols);
        uint4 kept[WIDE_VECS];
        float y[LANES<T>], edge = me < row.edges ? static_cast<float>(next_edge) : -INFINITY;
        __pipeline_commit(), __pipeline_wait_prior(0);
        UNROLL for (float& value : y) value = -INFINITY;     // in the lines beyond the row's end
        UNROLL for (int i = 0; i < WIDE_VECS; i++) {
            kept[i] = packed<T>(y);
            if (me + i * threads < row.n_lines) kept[i] = arriving[i * blockDim.x + threadIdx.x];
        }
        fetch(index + step);
        MaxSum mine = {fmaxf(fmaxf(largest<T>(kept), edge) * SCALE<T>, LOWEST)};
        mine.sum = edge = exponential<T>(edge * SCALE<T> - mine.m);
        UNROLL for (uint4& line : kept) {
            unpack<T>(line, y);
            UNROLL for (float& value : y) mine.sum += value = exponential<T>(value * SCALE<T> - mine.m);
            line = packed<T>(y);
        }
        const MaxSum of_warp = warp_reduce<T>(mine);
        if (lane < cluster) send(of_warp, &parts[turn][me / 32], &bars[turn], lane);
        wait(&bars[turn], parity);
        if (threadIdx.x == 0) expect(&bars[turn], n_parts * sizeof(MaxSum));    // the row after the next one's
        MaxSum total;
        for (int i = lane; i < n_parts; i += 32) total = merged<T>(total, parts[turn][i]);
        total = warp_reduce<T>(total);
        const float factor = exponential<T>(mine.m - total.m) / total.sum;
        UNROLL for (int i = 0; i < WIDE_VECS; i++) {
            unpack<T>(kept[i], y);
            UNROLL for (float& value : y) value *= factor;
            if (me + i * threads < row.n_lines) *row.line(me + i * threads) = packed<T>(y);
        }
        if (me < row.edges) row.x[row.edge(me)] = static_cast<T>(edge * factor);
    }
#endif
}

// Softmax over the middle axis of (outer, n, inner): a lane owns a column, the warps of a block share its n values. 32
// neighbouring columns fill whole 32-byte sectors. The second read is mostly from L2.
template <typename T> __global__ void __launch_bounds__(32 * COL_WARPS)
softmax_columns(const T* __restrict__ x, T* __restrict__ out, i64 n, i64 inner) {
    __shared__ MaxSum of_warp[COL_WARPS][32];
    const i64 tiles = (inner + 31) / 32, column = blockIdx.x % tiles * 32 + threadIdx.x;
    const i64 base = blockIdx.x / tiles * n * inner + column, begin = column < inner ? threadIdx.y : n;
    MaxSum total;
    constexpr int BATCH = 8;                        // independent loads in flight a thread
    for (i64 r = begin; r < n; r += BATCH * blockDim.y) {
        float e[BATCH];
        UNROLL for (int i = 0; i < BATCH; i++) {
            const i64 at = r + i * blockDim.y;
            e[i] = at < n ? static_cast<float>(x[base + at * inner]) : -INFINITY;
        }
        total = added<T>(total, e);
    }
    of_warp[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    total = of_warp[0][threadIdx.x];
    for (int w = 1; w < blockDim.y; w++) total = merged<T>(total, of_warp[w][threadIdx.x]);
    const float factor = 1.f / total.sum;
    for (i64 r = begin; r < n; r += blockDim.y) {
        const i64 at = base + r * inner;
        out[at] = static_cast<T>(exponential<T>(static_cast<float>(x[at]) * SCALE<T> - total.m) * factor);
    }
}

// ---- launchers ------------------------------------------------------------------------------------------------------
template <typename T>
int wide(const T* x, T* out, i64 n_rows, i64 n_cols, i64 row_stride, int cluster, cudaStream_t stream) {
    const int warp = cluster * WIDE_VECS * 32, threads = (n_cols / LANES<T> + warp - 1) / warp * 32;
    cudaLaunchAttribute attribute = {cudaLaunchAttributeClusterDimension};
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(cluster), config.blockDim = dim3(threads), config.dynamicSmemBytes = WIDE_VECS * 16 * threads;
    config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
    const void* kernel = reinterpret_cast<const void*>(softmax_wide<T>);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.dynamicSmemBytes);
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    int at_once = 0;                                // clusters: no more than run at once, each walks down the rows
    if (const int error = cudaOccupancyMaxActiveClusters(&at_once, kernel, &config)) return error;
    config.gridDim = dim3(min(n_rows, i64(at_once)) * cluster);
    return cudaLaunchKernelEx(&config, softmax_wide<T>, x, out, n_rows, n_cols, row_stride, cluster);
}

// x is (outer, n, inner), contiguous, or rows that are row_stride apart where inner is 1.
template <typename T>
int run(const void* from, void* to, i64 outer, i64 n, i64 inner, i64 row_stride, cudaStream_t stream) {
    const T* x = (const T*)from;
    T* out = (T*)to;
    cudaLaunchConfig_t config = {};
    config.stream = stream;
    if (inner > 1) {
        config.gridDim = dim3(outer * ((inner + 31) / 32)), config.blockDim = dim3(32, n < COL_WARPS ? n : COL_WARPS);
        return cudaLaunchKernelEx(&config, softmax_columns<T>, x, out, n, inner);
    }
    const i64 lines = n / LANES<T>;                 // at most, in a row
    const bool aligned = (n | row_stride) % LANES<T> == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    int threads = aligned ? 4 : 16, cluster = 1;    // 16: one thread for each element outside the 16-byte boundaries
    while (threads < 32 && threads * VECS < lines) threads *= 2;
    while (threads < MAX_THREADS && threads * VECS < lines) threads += 32;
    auto kernel = aligned ? softmax_rows<T, VECS, true> : softmax_rows<T, VECS, false>;
    if (threads * VECS < lines) {
        auto fits = [&] { return cluster * WIDE_VECS * WIDE<T> >= lines; };
        while (cluster < MAX_CLUSTER && (!fits() || outer * cluster < FILL)) cluster++;
        if (__CUDA_ARCH_LIST__ >= 900 && fits()) return wide(x, out, outer, n, row_stride, cluster, stream);
        kernel = softmax_rows<T, 0, false>;
    }
    const int down = threads <= 32 ? min(128, MAX_THREADS) / threads : 1;
    config.gridDim = dim3((outer + down - 1) / down), config.blockDim = dim3(threads, down);
    return cudaLaunchKernelEx(&config, kernel, x, out, outer, n, row_stride);
}

extern "C" int softmax(const void* x /* strided */, void* out, int dtype, i64 outer, i64 n, i64 inner, i64 row_stride,
                       cudaStream_t stream) {
    const auto of_type = dtype == 0 ? run<__half> : dtype == 1 ? run<__nv_bfloat16> : run<float>;
    return of_type(x, out, outer, n, inner, row_stride, stream);
}
"""


@lru_cache(maxsize=1)
def compiled():
    """The compiled source: at the first call, not at import."""
    return compile_cuda(CUDA_SRC, defines=CONFIG)


def kernel_fn(x, dim=-1):
    """Softmax of x along dim; same shape and dtype, contiguous."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    dim %= x.ndim
    outer, n, inner = prod(x.shape[:dim]), x.shape[dim], prod(x.shape[dim + 1 :])
    if inner == 1:
        x = x.reshape(outer, n)  # a view where one stride leads from row to row
    if inner > 1 or x.stride(1) != 1:
        x = x.contiguous()
    elif (x.stride(0) - n) * x.element_size() % 16 or (x.data_ptr() - out.data_ptr()) % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # or its rows would straddle other 16-byte lines than out's
    compiled().softmax(x, out, DTYPES[x.dtype], outer, n, inner, x.stride(0))
    return out
