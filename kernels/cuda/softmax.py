"""Softmax along any dimension, CUDA C++: one pass over memory, rows of any width.

A row is read once, in 16-byte accesses, and stays in registers between the reduction and the store: 2 bytes moved per
fp16 element and direction, the least there is. Up to a warp takes a narrow row, a block of up to MAX_THREADS threads a
row of up to 16,384 fp16 values; a wider row is split over a cluster of blocks that exchange their partial (max, sum)
through distributed shared memory, so a vocabulary of 151,936 is still read once. Only rows beyond the registers of a
full cluster (262,144 fp16 values) are read twice, the second time mostly from L2.
"""

from functools import lru_cache
from math import prod

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "softmax"
BACKEND = "cuda"

# VECS: 16-byte vectors that a thread holds (twice that in the widest rows); MAX_THREADS: a block before a row is split
# over a cluster; MAX_CLUSTER: blocks a row (1, 2, 4, 8); NARROW_THREADS: a block of narrow rows, up to a warp each;
# COL_WARPS: warps that share the reduced dimension when it is not the last one.
CONFIG = {"VECS": 4, "MAX_THREADS": 512, "MAX_CLUSTER": 8, "NARROW_THREADS": 128, "COL_WARPS": 16}

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

constexpr int CLUSTER_LIMIT = __CUDA_ARCH_LIST__ >= 900 ? MAX_CLUSTER : 1;   // clusters exist from Hopper on
constexpr float NEG_INF = -__builtin_huge_valf();

// ---- memory: 16-byte vectors ---------------------------------------------------------------------------------------

template <typename T, int N> struct alignas(N * sizeof(T)) Vec { T x[N]; };
template <typename T> constexpr int LANES = 16 / sizeof(T);                  // elements in one 16-byte access

template <typename T> __device__ Vec<T, LANES<T>> load_vector(const T* p) {
    return *reinterpret_cast<const Vec<T, LANES<T>>*>(p);
}

// The same vector, as if just loaded: or else the compiler keeps its values as floats between two visits, in twice the
// registers.
template <typename V> __device__ V fresh(V v) {
    uint4& raw = reinterpret_cast<uint4&>(v);
    asm volatile("" : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w));
    return v;
}

// The part of one row that one thread owns: KEEP vectors in registers, and one of the few elements before the first or
// after the last 16-byte boundary (rows of an odd width start anywhere). KEEP == 0: nothing is kept, each visit loads.
template <typename T, int KEEP> struct Row {
    using Index = std::conditional_t<KEEP == 0, long long, int>;
    const T* x;
    Index first, n_vectors, edges, me, threads;     // first: elements before the first 16-byte boundary
    Vec<T, LANES<T>> kept[KEEP == 0 ? 1 : KEEP];
    Vec<T, 1> edge;

    __device__ Row(const T* row, long long n_cols, int me, int threads) : x(row), me(me), threads(threads) {
        const long long before = (-reinterpret_cast<uintptr_t>(row) & 15) / sizeof(T);
        first = before < n_cols ? before : n_cols;
        n_vectors = (n_cols - first) / LANES<T>;
        edges = n_cols - n_vectors * LANES<T>;
        if constexpr (KEEP > 0) {
            #pragma unroll
            for (int i = 0; i < KEEP; i++)          // all loads are issued before the first is used
                if (me + i * threads < n_vectors) kept[i] = load_vector(x + first + (me + i * threads) * LANES<T>);
        }
        if (me < edges) edge.x[0] = x[edge_column()];
    }

    __device__ Index edge_column() const { return me < first ? me : n_vectors * LANES<T> + me; }

    template <typename F> __device__ void visit(F f) const {     // f(column, Vec of 16 bytes or of 1 element)
        if constexpr (KEEP > 0) {
            #pragma unroll
            for (int i = 0; i < KEEP; i++)
                if (me + i * threads < n_vectors) f(first + (me + i * threads) * LANES<T>, fresh(kept[i]));
        } else {
            #pragma unroll 1
            for (Index v = me; v < n_vectors; v += threads)
                f(first + v * LANES<T>, load_vector(x + first + v * LANES<T>));
        }
        if (me < edges) f(edge_column(), edge);
    }
};

template <typename T, int N> __device__ void store(T* out, const float (&y)[N]) {
    Vec<T, N> packed;
    #pragma unroll
    for (int i = 0; i < N; i++) packed.x[i] = static_cast<T>(y[i]);
    if (N * sizeof(T) == 16 && (reinterpret_cast<uintptr_t>(out) & 15) == 0) {
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(&packed);
    } else {                                        // x is a view whose rows are aligned differently from out's
        #pragma unroll
        for (int i = 0; i < N; i++) out[i] = packed.x[i];
    }
}

// ---- clusters: blocks that run at once and can write to each other's shared memory ---------------------------------

#if __CUDA_ARCH__ >= 900
__device__ void cluster_arrive(int cluster) { if (cluster > 1) __cluster_barrier_arrive(); }
__device__ void cluster_wait(int cluster) { if (cluster > 1) __cluster_barrier_wait(); }
__device__ unsigned block_rank() { return __clusterRelativeBlockRank(); }
template <typename V> __device__ V* in_block(V* p, unsigned rank) {
    return static_cast<V*>(__cluster_map_shared_rank(p, rank));
}
#else
__device__ void cluster_arrive(int) {}
__device__ void cluster_wait(int) {}
__device__ unsigned block_rank() { return 0; }
template <typename V> __device__ V* in_block(V* p, unsigned) { return p; }
#endif

// ---- arithmetic: a running maximum and the sum of exp(x - maximum) -------------------------------------------------

// float32 uses the accurate expf; the half formats one hardware exp2, whose 2^-22 is far below their rounding.
template <typename T> __device__ float exponential(float x) {
    if constexpr (sizeof(T) == 4) return expf(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

// exp(m - top), 1 where both are -inf: the factor that brings a sum taken relative to m to one relative to top.
template <typename T> __device__ float rescale(float m, float top) { return m == top ? 1.f : exponential<T>(m - top); }

struct MaxSum {
    float m, sum;
    template <typename T> __device__ void merge(MaxSum other) {
        const float top = fmaxf(m, other.m);
        sum = sum * rescale<T>(m, top) + other.sum * rescale<T>(other.m, top);
        m = top;
    }
};
__device__ MaxSum nothing() { return {NEG_INF, 0.f}; }

// Of N values at once. Relative to 0 where all are -inf: their exp is 0 then, and a NaN still spreads.
template <typename T, typename E, int N> __device__ MaxSum max_sum(const E (&x)[N]) {
    MaxSum a = nothing();
    #pragma unroll
    for (int i = 0; i < N; i++) a.m = fmaxf(a.m, static_cast<float>(x[i]));
    const float base = a.m == NEG_INF ? 0.f : a.m;
    #pragma unroll
    for (int i = 0; i < N; i++) a.sum += exponential<T>(static_cast<float>(x[i]) - base);
    return a;
}

// Over the threads of one row within a warp; all of them get the result.
template <typename T> __device__ MaxSum warp_reduce(MaxSum a, int threads) {
    for (int offset = threads / 2; offset > 0; offset /= 2)
        a.merge<T>({__shfl_xor_sync(~0u, a.m, offset), __shfl_xor_sync(~0u, a.sum, offset)});
    return a;
}

// Over the threads of a row: part of a warp, a block, or the blocks of a cluster. In a fixed order: the same bits every
// time.
template <typename T> __device__ MaxSum row_reduce(MaxSum a, int cluster) {
    __shared__ MaxSum of_warp[32], of_block[8];
    a = warp_reduce<T>(a, min(blockDim.x, 32));
    if (blockDim.x <= 32) return a;
    const int lane = threadIdx.x % 32;
    if (lane == 0) of_warp[threadIdx.x / 32] = a;
    __syncthreads();
    a = warp_reduce<T>(lane < blockDim.x / 32 ? of_warp[lane] : nothing(), 32);    // in every warp: no second barrier
    if (cluster > 1) {
        if (threadIdx.x < cluster) *in_block(&of_block[block_rank()], threadIdx.x) = a;
        cluster_arrive(cluster);
        cluster_wait(cluster);
        a = of_block[0];
        for (int i = 1; i < cluster; i++) a.merge<T>(of_block[i]);
    }
    return a;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <typename T, int KEEP> __global__ void __launch_bounds__(MAX_THREADS)
softmax_rows(const T* __restrict__ x, T* __restrict__ out, long long n_rows, long long n_cols, long long row_stride,
             int cluster) {
    cluster_arrive(cluster);
    const long long last = n_rows - 1, at = static_cast<long long>(blockIdx.x / cluster) * blockDim.y + threadIdx.y;
    const long long row = at < last ? at : last;    // threads past the end repeat the last row: every warp is complete
    const int me = blockIdx.x % cluster * blockDim.x + threadIdx.x, threads = cluster * blockDim.x;
    const Row<T, KEEP> mine(x + row * row_stride, n_cols, me, threads);
    cluster_wait(cluster);                          // while the loads are under way: every block of the cluster runs

    MaxSum local = nothing();
    if constexpr (KEEP > 0) {                       // from registers: the maximum first, then one exp an element
        mine.visit([&](auto, const auto& v) {
            for (T e : v.x) local.m = fmaxf(local.m, static_cast<float>(e));
        });
        const float base = local.m == NEG_INF ? 0.f : local.m;
        mine.visit([&](auto, const auto& v) {
            for (T e : v.x) local.sum += exponential<T>(static_cast<float>(e) - base);
        });
    } else {
        mine.visit([&](auto, const auto& v) { local.merge<T>(max_sum<T>(v.x)); });
    }
    const MaxSum total = row_reduce<T>(local, cluster);
    const float scale = 1.f / total.sum;
    T* out_row = out + row * n_cols;
    mine.visit([&](auto column, const auto& v) {
        constexpr int N = sizeof(v.x) / sizeof(T);
        float y[N];
        #pragma unroll
        for (int i = 0; i < N; i++) y[i] = exponential<T>(static_cast<float>(v.x[i]) - total.m) * scale;
        store(out_row + column, y);
    });
}

// Softmax over the middle axis of (outer, n, inner): a lane owns a column, the warps of a block and the blocks of a
// cluster share its n values. 32 neighbouring columns fill whole 32-byte sectors. The second read is mostly from L2.
template <typename T> __global__ void __launch_bounds__(32 * COL_WARPS)
softmax_columns(const T* __restrict__ x, T* __restrict__ out, long long n, long long inner, int cluster) {
    __shared__ MaxSum of_warp[COL_WARPS][32], of_block[8][32];
    cluster_arrive(cluster);
    const long long tiles = (inner + 31) / 32, tile = blockIdx.x / cluster;
    const long long column = tile % tiles * 32 + threadIdx.x, base = tile / tiles * n * inner + column;
    const long long step = static_cast<long long>(cluster) * blockDim.y;
    const long long begin = column < inner ? blockIdx.x % cluster * blockDim.y + threadIdx.y : n;

    MaxSum total = nothing();
    constexpr int BATCH = 8;                        // independent loads in flight a thread
    for (long long r = begin; r < n; r += BATCH * step) {
        float e[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const long long at = r + i * step;
            e[i] = at < n ? static_cast<float>(x[base + at * inner]) : NEG_INF;
        }
        total.merge<T>(max_sum<T>(e));
    }
    of_warp[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    total = of_warp[0][threadIdx.x];
    for (int w = 1; w < blockDim.y; w++) total.merge<T>(of_warp[w][threadIdx.x]);
    if (cluster > 1) {
        cluster_wait(cluster);
        if (threadIdx.y < cluster) *in_block(&of_block[block_rank()][threadIdx.x], threadIdx.y) = total;
        cluster_arrive(cluster);
        cluster_wait(cluster);
        total = of_block[0][threadIdx.x];
        for (int i = 1; i < cluster; i++) total.merge<T>(of_block[i][threadIdx.x]);
    }
    const float scale = 1.f / total.sum;
    #pragma unroll 4
    for (long long r = begin; r < n; r += step) {
        const long long at = base + r * inner;
        out[at] = static_cast<T>(exponential<T>(static_cast<float>(x[at]) - total.m) * scale);
    }
}

// ---- launchers ------------------------------------------------------------------------------------------------------

template <typename... P, typename... A>
int launch(void (*kernel)(P...), long long blocks, dim3 threads, int cluster, cudaStream_t stream, A... args) {
    if (blocks * cluster > 0x7fffffff) return cudaErrorInvalidConfiguration;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks * cluster), config.blockDim = threads, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = cluster > 1;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename T>
int softmax(const T* x, T* out, long long n_rows, long long n_cols, long long row_stride, cudaStream_t stream) {
    const long long vectors = n_cols / LANES<T>;    // at most, in a row
    const bool aligned = (n_cols | row_stride) % LANES<T> == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    int threads = aligned ? 4 : 16, cluster = 1;    // 16: one thread for each element outside the 16-byte boundaries
    while (threads < MAX_THREADS && threads * VECS < vectors) threads *= 2;
    while (cluster < CLUSTER_LIMIT && cluster * threads * VECS < vectors) cluster *= 2;
    const int rows = threads <= 32 ? NARROW_THREADS / threads : 1;
    const long long capacity = static_cast<long long>(cluster) * threads * VECS;
    auto kernel = softmax_rows<T, 0>;
    if (vectors <= capacity) kernel = softmax_rows<T, VECS>;
    else if (vectors <= 2 * capacity) kernel = softmax_rows<T, 2 * VECS>;
    return launch(kernel, (n_rows + rows - 1) / rows, dim3(threads, rows), cluster, stream,
                  x, out, n_rows, n_cols, row_stride, cluster);
}

template <typename T>
int columns(const T* x, T* out, long long outer, long long n, long long inner, cudaStream_t stream) {
    const int warps = n < COL_WARPS ? n : COL_WARPS;
    int cluster = 1;
    while (cluster < CLUSTER_LIMIT && cluster < warps && n >= 16 * cluster * warps) cluster *= 2;
    return launch(softmax_columns<T>, outer * ((inner + 31) / 32), dim3(32, warps), cluster, stream,
                  x, out, n, inner, cluster);
}

extern "C" int softmax_f16(const __half* x /* strided */, __half* out, long long n_rows, long long n_cols,
                           long long row_stride, cudaStream_t stream) {
    return softmax(x, out, n_rows, n_cols, row_stride, stream);
}
extern "C" int softmax_bf16(const __nv_bfloat16* x /* strided */, __nv_bfloat16* out, long long n_rows,
                            long long n_cols, long long row_stride, cudaStream_t stream) {
    return softmax(x, out, n_rows, n_cols, row_stride, stream);
}
extern "C" int softmax_f32(const float* x /* strided */, float* out, long long n_rows, long long n_cols,
                           long long row_stride, cudaStream_t stream) {
    return softmax(x, out, n_rows, n_cols, row_stride, stream);
}

extern "C" int columns_f16(const __half* x, __half* out, long long outer, long long n, long long inner,
                           cudaStream_t stream) {
    return columns(x, out, outer, n, inner, stream);
}
extern "C" int columns_bf16(const __nv_bfloat16* x, __nv_bfloat16* out, long long outer, long long n,
                            long long inner, cudaStream_t stream) {
    return columns(x, out, outer, n, inner, stream);
}
extern "C" int columns_f32(const float* x, float* out, long long outer, long long n, long long inner,
                           cudaStream_t stream) {
    return columns(x, out, outer, n, inner, stream);
}
"""

SUFFIX = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


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
    n = x.shape[dim]
    if dim == x.ndim - 1:
        rows = x.reshape(-1, n)  # a view where one stride leads from row to row
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        getattr(compiled(), f"softmax_{SUFFIX[x.dtype]}")(rows, out, rows.shape[0], n, rows.stride(0))
    else:
        outer, inner = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
        getattr(compiled(), f"columns_{SUFFIX[x.dtype]}")(x.contiguous(), out, outer, n, inner)
    return out
