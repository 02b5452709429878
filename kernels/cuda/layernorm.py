"""LayerNorm over the last dimension, CUDA C++: one pass over memory, rows of any width.

A row is read once, in 16-byte accesses, and stays in registers until the store: 2 bytes moved per fp16 element and
direction; weight and bias come from L1. Each thread computes count, mean and squared deviations of its part; the parts
merge as in Chan's form of Welford's algorithm, so that one reduction gives both moments. Up to a warp takes a narrow
row, a block of up to MAX_THREADS threads a row of up to 16,384 fp16 values, a cluster of blocks a wider one; only
beyond 131,072 is a row read again.
"""

from functools import lru_cache

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "layernorm"
BACKEND = "cuda"

# VECS: 16-byte vectors that a thread holds; MAX_THREADS: a block before a row is split over a cluster; MAX_CLUSTER:
# blocks a row (1, 2, 4, 8); NARROW_THREADS: a block of narrow rows, up to a warp each.
CONFIG = {"VECS": 8, "MAX_THREADS": 128, "MAX_CLUSTER": 8, "NARROW_THREADS": 128}

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

constexpr int CLUSTER_LIMIT = __CUDA_ARCH_LIST__ >= 900 ? MAX_CLUSTER : 1;   // clusters exist from Hopper on

// ---- memory: 16-byte vectors ---------------------------------------------------------------------------------------

template <typename T, int N> struct alignas(N * sizeof(T)) Vec { T x[N]; };
template <typename T> constexpr int LANES = 16 / sizeof(T);                  // elements in one 16-byte access

// Plain loads: evict-first ones cost 5 % on an H200, though x is read only once.
template <typename T> __device__ Vec<T, LANES<T>> load_vector(const T* p) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p));
    return reinterpret_cast<const Vec<T, LANES<T>>&>(raw);
}

// The part of one row that one thread owns: KEEP vectors in registers, and one of the few elements before the first or
// after the last 16-byte boundary (rows of an odd width start anywhere). ALIGNED: there are none, which saves a quarter
// of the registers. KEEP == 0: nothing is kept, each visit loads.
template <typename T, int KEEP, bool ALIGNED> struct Row {
    using Index = std::conditional_t<KEEP == 0, long long, int>;
    const T* x;
    Index first, n_vectors, edges, me, threads;     // first: elements before the first 16-byte boundary
    Vec<T, LANES<T>> kept[KEEP == 0 ? 1 : KEEP];
    Vec<T, 1> edge;

    __device__ Row(const T* row, long long n_cols, int me, int threads) : x(row), me(me), threads(threads) {
        const long long before = ALIGNED ? 0 : (-reinterpret_cast<uintptr_t>(row) & 15) / sizeof(T);
        first = before < n_cols ? before : n_cols;
        n_vectors = (n_cols - first) / LANES<T>;
        edges = n_cols - n_vectors * LANES<T>;
        if constexpr (KEEP > 0) {
            #pragma unroll
            for (int i = 0; i < KEEP; i++)          // all loads are issued before the first is used
                if (me + i * threads < n_vectors) kept[i] = load_vector(x + first + (me + i * threads) * LANES<T>);
        }
        if (!ALIGNED && me < edges) edge.x[0] = x[edge_column()];
    }

    __device__ Index edge_column() const { return me < first ? me : n_vectors * LANES<T> + me; }

    template <typename F> __device__ void visit(F f) const {     // f(column, Vec of 16 bytes or of 1 element)
        if constexpr (KEEP > 0) {
            #pragma unroll
            for (int i = 0; i < KEEP; i++)
                if (me + i * threads < n_vectors) f(first + (me + i * threads) * LANES<T>, kept[i]);
        } else {
            #pragma unroll 1
            for (Index v = me; v < n_vectors; v += threads)
                f(first + v * LANES<T>, load_vector(x + first + v * LANES<T>));
        }
        if (!ALIGNED && me < edges) f(edge_column(), edge);
    }
};

template <bool ALIGNED, typename T, int N> __device__ void store(T* out, const float (&y)[N]) {
    Vec<T, N> packed;
    #pragma unroll
    for (int i = 0; i < N; i++) packed.x[i] = static_cast<T>(y[i]);
    if (N * sizeof(T) == 16 && (ALIGNED || reinterpret_cast<uintptr_t>(out) % 16 == 0)) {
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(&packed);
    } else {                                        // x is a view whose rows are aligned differently from out's
        #pragma unroll
        for (int i = 0; i < N; i++) out[i] = packed.x[i];
    }
}

// N consecutive elements of a parameter vector; every row reads them, so they stay in L1.
template <bool ALIGNED, typename T, int N> __device__ Vec<T, N> parameters(const T* p) {
    Vec<T, N> v;
    if (ALIGNED || reinterpret_cast<uintptr_t>(p) % sizeof(v) == 0) {
        v = *reinterpret_cast<const Vec<T, N>*>(p);
    } else {                                        // a row that does not start on a 16-byte boundary
        #pragma unroll
        for (int i = 0; i < N; i++) v.x[i] = p[i];
    }
    return v;
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

// ---- arithmetic: count, mean and squared deviations from the mean, and their merge (Chan, Golub, LeVeque 1983) -----

struct Moments {
    float n, mean, m2;
    __device__ void merge(Moments other) {
        const float total = n + other.n, share = total > 0.f ? __fdividef(other.n, total) : 0.f;
        const float delta = other.mean - mean;
        mean += delta * share;
        m2 += other.m2 + delta * delta * n * share;
        n = total;
    }
};

__device__ Moments warp_reduce(Moments a, int threads) {
    for (int offset = threads / 2; offset > 0; offset /= 2)
        a.merge({__shfl_xor_sync(~0u, a.n, offset), __shfl_xor_sync(~0u, a.mean, offset),
                 __shfl_xor_sync(~0u, a.m2, offset)});
    return a;
}

// Over the threads of a row: part of a warp, a block, or the blocks of a cluster; in a fixed order.
__device__ Moments row_reduce(Moments a, int cluster) {
    __shared__ Moments of_warp[32], of_block[8];
    a = warp_reduce(a, min(blockDim.x, 32));
    if (blockDim.x <= 32) return a;
    const int lane = threadIdx.x % 32;
    if (lane == 0) of_warp[threadIdx.x / 32] = a;
    __syncthreads();
    a = warp_reduce(lane < blockDim.x / 32 ? of_warp[lane] : Moments{}, 32);       // in every warp: no second barrier
    if (cluster > 1) {
        if (threadIdx.x < cluster) *in_block(&of_block[block_rank()], threadIdx.x) = a;
        cluster_arrive(cluster);
        cluster_wait(cluster);
        a = of_block[0];
        for (int i = 1; i < cluster; i++) a.merge(of_block[i]);
    }
    return a;
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

// The median of three values: no lone outlier.
template <typename T> __device__ float typical(const T* row, long long n_cols) {
    const float a = row[0], b = row[n_cols / 2], c = row[n_cols - 1];
    return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// out = (x - mean) * rsqrt(variance + eps) * weight + bias, in float32 until the store.
template <typename T, int KEEP, bool ALIGNED> __global__ void __launch_bounds__(MAX_THREADS)
layernorm_rows(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out,
               long long n_rows, long long n_cols, long long row_stride, float eps, int cluster) {
    cluster_arrive(cluster);
    const long long last = n_rows - 1, at = static_cast<long long>(blockIdx.x / cluster) * blockDim.y + threadIdx.y;
    const long long row = at < last ? at : last;    // threads past the end repeat the last row: every warp is complete
    const int me = blockIdx.x % cluster * blockDim.x + threadIdx.x, threads = cluster * blockDim.x;
    const Row<T, KEEP, ALIGNED> mine(x + row * row_stride, n_cols, me, threads);
    const float origin = typical(x + row * row_stride, n_cols);
    cluster_wait(cluster);                          // while the loads are under way: every block of the cluster runs

    // Both moments in one visit, around the thread's own first value: however far out, its deviation is the row's too,
    // and does not swamp it. The means count from a typical value of the row: a large common offset costs no digits.
    float n = 0.f, shift = 0.f, sum = 0.f, squares = 0.f;
    mine.visit([&](auto, const auto& v) {
        if (n == 0.f) shift = static_cast<float>(v.x[0]);
        for (T e : v.x) {
            const float d = static_cast<float>(e) - shift;
            sum += d;
            squares += d * d;
        }
        n += sizeof(v.x) / sizeof(T);
    });
    const float mean = sum / fmaxf(n, 1.f);
    const Moments total = row_reduce({n, n > 0.f ? shift - origin + mean : 0.f, squares - sum * mean}, cluster);
    const float m2 = total.m2 < 0.f ? 0.f : total.m2;    // fmaxf would make 0 of a NaN, which an infinite x must give
    const float scale = rsqrtf(m2 / n_cols + eps), offset = -total.mean * scale;

    T* out_row = out + row * n_cols;
    mine.visit([&](auto column, const auto& v) {
        constexpr int N = sizeof(v.x) / sizeof(T);
        const Vec<T, N> w = parameters<ALIGNED, T, N>(weight + column), b = parameters<ALIGNED, T, N>(bias + column);
        float y[N];
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const float normal = (static_cast<float>(v.x[i]) - origin) * scale + offset;
            y[i] = normal * static_cast<float>(w.x[i]) + static_cast<float>(b.x[i]);
        }
        store<ALIGNED>(out_row + column, y);
    });
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
int layernorm(const T* x, const T* weight, const T* bias, T* out, long long n_rows, long long n_cols,
              long long row_stride, float eps, cudaStream_t stream) {
    const long long vectors = n_cols / LANES<T>;    // at most, in a row
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out) |
                                reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(bias);
    const bool aligned = (n_cols | row_stride) % LANES<T> == 0 && addresses % 16 == 0;
    int threads = aligned ? 4 : 16, cluster = 1;    // 16: one thread for each element outside the 16-byte boundaries
    while (threads < 32 && threads * VECS < vectors) threads *= 2;
    while (threads < MAX_THREADS && threads * VECS < vectors) threads += 32;
    while (cluster < CLUSTER_LIMIT && cluster * threads * VECS < vectors) cluster *= 2;
    const int rows = threads <= 32 ? min(NARROW_THREADS, MAX_THREADS) / threads : 1;
    const long long capacity = static_cast<long long>(cluster) * threads * VECS;
    auto kernel = layernorm_rows<T, 0, false>;
    if (vectors <= capacity) kernel = aligned ? layernorm_rows<T, VECS, true> : layernorm_rows<T, VECS, false>;
    return launch(kernel, (n_rows + rows - 1) / rows, dim3(threads, rows), cluster, stream,
                  x, weight, bias, out, n_rows, n_cols, row_stride, eps, cluster);
}

extern "C" int layernorm_f16(const __half* x /* strided */, const __half* weight, const __half* bias, __half* out,
                             long long n_rows, long long n_cols, long long row_stride, float eps,
                             cudaStream_t stream) {
    return layernorm(x, weight, bias, out, n_rows, n_cols, row_stride, eps, stream);
}
extern "C" int layernorm_bf16(const __nv_bfloat16* x /* strided */, const __nv_bfloat16* weight,
                              const __nv_bfloat16* bias, __nv_bfloat16* out, long long n_rows, long long n_cols,
                              long long row_stride, float eps, cudaStream_t stream) {
    return layernorm(x, weight, bias, out, n_rows, n_cols, row_stride, eps, stream);
}
extern "C" int layernorm_f32(const float* x /* strided */, const float* weight, const float* bias, float* out,
                             long long n_rows, long long n_cols, long long row_stride, float eps,
                             cudaStream_t stream) {
    return layernorm(x, weight, bias, out, n_rows, n_cols, row_stride, eps, stream);
}
"""

SUFFIX = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


@lru_cache(maxsize=1)
def compiled():
    """The compiled source: at the first call, not at import."""
    return compile_cuda(CUDA_SRC, defines=CONFIG)


def kernel_fn(x, weight, bias, eps=1e-5):
    """x (*rows, dim) normalised over dim, times weight (dim,) plus bias (dim,); same shape and dtype, contiguous."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, x.shape[-1])  # a view where one stride leads from row to row
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    launcher = getattr(compiled(), f"layernorm_{SUFFIX[x.dtype]}")
    launcher(rows, weight.contiguous(), bias.contiguous(), out, rows.shape[0], rows.shape[1], rows.stride(0), eps)
    return out
