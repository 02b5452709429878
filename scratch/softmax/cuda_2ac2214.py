"""Softmax along any dimension, CUDA C++: one pass over memory, rows of any width.

A row is read once, in 16-byte accesses, and stays on the chip between the reduction and the store: 2 bytes moved per
fp16 element and direction, the least there is. A warp or less takes a narrow row and a block a row of up to 32,768 fp16
values, in registers. Wider rows go through shared memory: a block, or a cluster of blocks that exchange their partial
(max, sum), walks down the rows and copies the next one in while it works on this one, so that memory never idles. Only
rows of which two do not fit the shared memory of a full cluster, beyond 450,000 fp16 values, are read twice.
"""

from functools import lru_cache
from math import prod

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "softmax"
BACKEND = "cuda"

# VECS: 16-byte vectors that a thread holds in registers; MAX_THREADS: a block of such rows; WIDE_THREADS: a block of
# wider rows; SHARED_KB: what their two rows, or parts of rows, may take; MAX_CLUSTER: blocks a row (1, 2, 4, 8); FILL:
# rows are shared while there are fewer blocks.
CONFIG = {"VECS": 8, "MAX_THREADS": 512, "WIDE_THREADS": 512, "SHARED_KB": 226, "MAX_CLUSTER": 8, "FILL": 132}
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cstdint>
#include <type_traits>

using i64 = long long;
constexpr int COL_WARPS = 16;                       // that share the reduced dimension when it is not the last one
constexpr int CLUSTER_LIMIT = __CUDA_ARCH_LIST__ >= 900 ? MAX_CLUSTER : 1;   // clusters exist from Hopper on
constexpr float LOWEST = -3.402823466e38f;          // below or equal to any finite value
constexpr int SHARED = -1;                          // instead of a number of registers, see Row

// ---- memory: 16-byte vectors ---------------------------------------------------------------------------------------
template <typename T, int N> struct alignas(N * sizeof(T)) Vec { T x[N]; };
template <typename T> constexpr int LANES = 16 / sizeof(T);                  // elements in one 16-byte access

template <typename T> __device__ Vec<T, LANES<T>> load_vector(const T* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    return reinterpret_cast<const Vec<T, LANES<T>>&>(raw);
}

// The part of one row that one thread owns: vectors, and one of the few elements before the first or after the last
// 16-byte boundary (rows of an odd width start anywhere; ALIGNED: there are none, which saves registers). KEEP vectors
// are kept in registers; KEEP == SHARED: any number in shared memory, copied there asynchronously, each thread its own,
// so that no barrier is needed; KEEP == 0: nothing is kept, each visit loads.
template <typename T, int KEEP, bool ALIGNED> struct Row {
    using Index = std::conditional_t<KEEP == 0, i64, int>;
    const T* x;
    uint4* slots;                                   // in shared memory: of this thread, blockDim.x apart
    Index first, n_vectors, edges, me, threads;     // first: elements before the first 16-byte boundary
    Vec<T, LANES<T>> kept[KEEP > 0 ? KEEP : 1];
    Vec<T, 1> edge;

    __device__ Row(const T* row, i64 n_cols, int me, int threads, uint4* slots = nullptr)
        : x(row), slots(slots), me(me), threads(threads) {
        const i64 before = ALIGNED ? 0 : (-reinterpret_cast<uintptr_t>(row) & 15) / sizeof(T);
        first = before < n_cols ? before : n_cols;
        n_vectors = (n_cols - first) / LANES<T>;
        edges = n_cols - n_vectors * LANES<T>;
        if constexpr (KEEP > 0) {
            #pragma unroll
            for (int i = 0; i < KEEP; i++)          // all loads are issued before the first is used
                if (me + i * threads < n_vectors) kept[i] = load_vector(x + first + (me + i * threads) * LANES<T>);
        } else if constexpr (KEEP == SHARED) {
            for (Index v = me, slot = 0; v < n_vectors; v += threads, slot += blockDim.x)
                __pipeline_memcpy_async(slots + slot, x + first + v * LANES<T>, 16);
        }
        if (!ALIGNED && me < edges) edge.x[0] = x[edge_column()];
    }

    __device__ Index edge_column() const { return me < first ? me : n_vectors * LANES<T> + me; }

    // f(column, Vec of 16 bytes or of 1 element); WRITE: which f changes.
    template <bool WRITE = false, typename F> __device__ void visit(F f) {
        if constexpr (KEEP > 0) {
            #pragma unroll
            for (int i = 0; i < KEEP; i++)
                if (me + i * threads < n_vectors) f(first + (me + i * threads) * LANES<T>, kept[i]);
        } else {
            for (Index v = me, slot = 0; v < n_vectors; v += threads, slot += blockDim.x) {
                const Index at = first + v * LANES<T>;
                auto here = load_vector(KEEP == SHARED ? reinterpret_cast<const T*>(slots + slot) : x + at);
                f(at, here);
                if constexpr (KEEP == SHARED && WRITE) reinterpret_cast<decltype(here)&>(slots[slot]) = here;
            }
        }
        if (!ALIGNED && me < edges) f(edge_column(), edge);
    }
};

template <typename T, int N> __device__ void store(T* out, const float (&y)[N]) {
    Vec<T, N> packed;
    #pragma unroll
    for (int i = 0; i < N; i++) packed.x[i] = static_cast<T>(y[i]);
    if constexpr (N == 1) *out = packed.x[0];                                // an assignment would become small stores
    else __stwb(reinterpret_cast<uint4*>(out), reinterpret_cast<const uint4&>(packed));
}

// ---- arithmetic: a running maximum and the sum of exp(x - maximum) -------------------------------------------------
// fp16 is counted in powers of 2: x * log2(e) - maximum is one instruction. bfloat16 reaches float32's largest value,
// which times log2(e) would be infinite; float32 wants the accurate expf.
constexpr float LOG2E = 1.4426950408889634f;
template <typename T> constexpr float SCALE = std::is_same_v<T, __half> ? LOG2E : 1.f;

// e^x, or 2^x if counted so. The half formats: one hardware exp2, whose 2^-22 is far below their rounding.
template <typename T> __device__ float exponential(float x) {
    if constexpr (sizeof(T) == 4) return expf(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * (LOG2E / SCALE<T>)));
    return y;
}

// m: the maximum, times SCALE. Starts below every value, at no infinity: m - m is 0 even where all values are -inf.
struct MaxSum {
    float m = LOWEST, sum = 0.f;

    template <typename T> __device__ void merge(MaxSum other) {
        const float top = fmaxf(m, other.m);
        sum = sum * exponential<T>(m - top) + other.sum * exponential<T>(other.m - top);
        m = top;
    }

    template <typename T, typename E, int N> __device__ void add(const E (&x)[N]) {
        float top = static_cast<float>(x[0]), part = 0.f;
        #pragma unroll
        for (int i = 1; i < N; i++) top = fmaxf(top, static_cast<float>(x[i]));
        top = fmaxf(m, top * SCALE<T>);
        #pragma unroll
        for (int i = 0; i < N; i++) part += exponential<T>(static_cast<float>(x[i]) * SCALE<T> - top);
        sum = sum * exponential<T>(m - top) + part;
        m = top;
    }
};

// ---- reductions, in a fixed order: of a warp, a block, and a cluster, whose blocks run at once and can write to each
// other's shared memory
template <typename T> __device__ MaxSum warp_reduce(MaxSum a, int threads) {
    for (int offset = threads / 2; offset > 0; offset /= 2)
        a.merge<T>({__shfl_xor_sync(~0u, a.m, offset), __shfl_xor_sync(~0u, a.sum, offset)});
    return a;
}

#if __CUDA_ARCH__ >= 900
__device__ void cluster_arrive(int cluster) { if (cluster > 1) __cluster_barrier_arrive(); }
__device__ void cluster_wait(int cluster) { if (cluster > 1) __cluster_barrier_wait(); }
// of_block: `pitch` partial results from each block. Thread i of those that hold the same one sends it to block i.
template <typename T> __device__ MaxSum cluster_reduce(MaxSum a, MaxSum* of_block, int pitch, int i, int cluster) {
    MaxSum* mine = of_block + __clusterRelativeBlockRank() * pitch;
    if (i < cluster) *static_cast<MaxSum*>(__cluster_map_shared_rank(mine, i)) = a;
    cluster_arrive(cluster);
    cluster_wait(cluster);
    a = of_block[0];
    for (int block = 1; block < cluster; block++) a.merge<T>(of_block[block * pitch]);
    return a;
}
#else
__device__ void cluster_arrive(int) {}
__device__ void cluster_wait(int) {}
template <typename T> __device__ MaxSum cluster_reduce(MaxSum a, MaxSum*, int, int, int) { return a; }
#endif

// Over the threads of a row: part of a warp, a block, or a cluster. turn: 0 or 1 by turns, where a block reduces one
// row after another: the last row's results may still be being read.
template <typename T> __device__ MaxSum row_reduce(MaxSum a, int cluster, int turn) {
    __shared__ MaxSum of_warp[2][32], of_block[2][8];
    a = warp_reduce<T>(a, min(blockDim.x, 32));
    if (blockDim.x <= 32) return a;
    const int lane = threadIdx.x % 32;
    if (lane == 0) of_warp[turn][threadIdx.x / 32] = a;
    __syncthreads();
    a = warp_reduce<T>(lane < blockDim.x / 32 ? of_warp[turn][lane] : MaxSum(), 32);   // in every warp: one barrier
    return cluster > 1 ? cluster_reduce<T>(a, of_block[turn], 1, threadIdx.x, cluster) : a;
}

// ---- kernels --------------------------------------------------------------------------------------------------------
// A value that is kept gives way to its e^(x - this thread's maximum), so that it costs one exponential; rounded to T,
// it is as exact as the result: it is rounded twice, or lost where the result would be.
template <typename T, int KEEP, bool ALIGNED>
__device__ void normalise(Row<T, KEEP, ALIGNED>& mine, T* out_row, int cluster, int turn) {
    MaxSum local;
    if constexpr (KEEP == 0) {
        mine.visit([&](auto, const auto& v) { local.add<T>(v.x); });
    } else {
        float top = LOWEST;
        mine.visit([&](auto, const auto& v) { for (T e : v.x) top = fmaxf(top, static_cast<float>(e)); });
        local.m = fmaxf(top * SCALE<T>, LOWEST);
        mine.template visit<true>([&](auto, auto& v) {
            for (T& e : v.x) {
                const float power = exponential<T>(static_cast<float>(e) * SCALE<T> - local.m);
                local.sum += power;
                e = static_cast<T>(power);
            }
        });
    }
    const MaxSum total = row_reduce<T>(local, cluster, turn);
    const float factor = exponential<T>(local.m - total.m) / total.sum;
    mine.visit([&](auto column, const auto& v) {
        constexpr int N = sizeof(v.x) / sizeof(T);
        float y[N];
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const float value = static_cast<float>(v.x[i]);
            y[i] = (KEEP == 0 ? exponential<T>(value * SCALE<T> - local.m) : value) * factor;
        }
        store(out_row + column, y);
    });
}

template <typename T, int KEEP, bool ALIGNED>
__global__ void __launch_bounds__(MAX_THREADS, std::is_same_v<T, __half> ? 2 : 1)       // the others would spill
softmax_rows(const T* __restrict__ x, T* __restrict__ out, i64 n_rows, i64 n_cols, i64 row_stride, int cluster) {
    cluster_arrive(cluster);
    const i64 last = n_rows - 1, at = i64(blockIdx.x / cluster) * blockDim.y + threadIdx.y;
    const i64 row = at < last ? at : last;          // threads past the end repeat the last row: every warp is complete
    const int me = blockIdx.x % cluster * blockDim.x + threadIdx.x, threads = cluster * blockDim.x;
    Row<T, KEEP, ALIGNED> mine(x + row * row_stride, n_cols, me, threads);
    cluster_wait(cluster);                          // while the loads are under way: every block of the cluster runs
    normalise(mine, out + row * n_cols, cluster, 0);
}

// Rows in shared memory, two at a time: the next one arrives while this one is reduced and stored. slots: 16-byte ones
// of one of the two buffers. A thread reads only what it copied itself, and needs no barrier before it copies again.
template <typename T> __global__ void __launch_bounds__(WIDE_THREADS)
softmax_wide(const T* __restrict__ x, T* __restrict__ out, i64 n_rows, i64 n_cols, i64 row_stride, int slots,
             int cluster) {
    extern __shared__ uint4 buffers[];
    cluster_arrive(cluster);
    const int me = blockIdx.x % cluster * blockDim.x + threadIdx.x, threads = cluster * blockDim.x;
    const i64 first = blockIdx.x / cluster, step = gridDim.x / cluster;
    auto fetch = [&](i64 row, int buffer) {         // after the last row: nothing
        uint4* to = buffers + buffer * slots + threadIdx.x;
        const Row<T, SHARED, false> fetched(x + row * row_stride, row < n_rows ? n_cols : 0, me, threads, to);
        __pipeline_commit();
        return fetched;
    };
    auto mine = fetch(first, 0);
    cluster_wait(cluster);                          // every block of the cluster runs
    int turn = 0;
    for (i64 row = first; row < n_rows; row += step, turn ^= 1) {
        const auto next = fetch(row + step, turn ^ 1);
        __pipeline_wait_prior(1);                   // all but the next row have arrived
        normalise(mine, out + row * n_cols, cluster, turn);
        mine = next;
    }
}

// Softmax over the middle axis of (outer, n, inner): a lane owns a column, the warps of a block and the blocks of a
// cluster share its n values. 32 neighbouring columns fill whole 32-byte sectors. The second read is mostly from L2.
template <typename T> __global__ void __launch_bounds__(32 * COL_WARPS)
softmax_columns(const T* __restrict__ x, T* __restrict__ out, i64 n, i64 inner, int cluster) {
    __shared__ MaxSum of_warp[COL_WARPS][32], of_block[8][32];
    cluster_arrive(cluster);
    const i64 tiles = (inner + 31) / 32, tile = blockIdx.x / cluster;
    const i64 column = tile % tiles * 32 + threadIdx.x, base = tile / tiles * n * inner + column;
    const i64 step = i64(cluster) * blockDim.y;
    const i64 begin = column < inner ? blockIdx.x % cluster * blockDim.y + threadIdx.y : n;

    MaxSum total;
    constexpr int BATCH = 8;                        // independent loads in flight a thread
    for (i64 r = begin; r < n; r += BATCH * step) {
        float e[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const i64 at = r + i * step;
            e[i] = at < n ? static_cast<float>(x[base + at * inner]) : -INFINITY;
        }
        total.add<T>(e);
    }
    of_warp[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    total = of_warp[0][threadIdx.x];
    for (int w = 1; w < blockDim.y; w++) total.merge<T>(of_warp[w][threadIdx.x]);
    if (cluster > 1) {
        cluster_wait(cluster);
        total = cluster_reduce<T>(total, of_block[0] + threadIdx.x, 32, threadIdx.y, cluster);
    }
    const float scale = 1.f / total.sum;
    #pragma unroll 4
    for (i64 r = begin; r < n; r += step) {
        const i64 at = base + r * inner;
        out[at] = static_cast<T>(exponential<T>(static_cast<float>(x[at]) * SCALE<T> - total.m) * scale);
    }
}

// ---- launchers ------------------------------------------------------------------------------------------------------
// With shared_bytes, clusters are at most as many as run at once, each for several rows; otherwise there are that many.
template <typename... P, typename... A>
int launch(void (*kernel)(P...), i64 clusters, dim3 threads, int cluster, int shared_bytes, cudaStream_t stream,
           A... args) {
    cudaLaunchAttribute attribute = {cudaLaunchAttributeClusterDimension};
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(cluster), config.blockDim = threads, config.stream = stream;
    config.dynamicSmemBytes = shared_bytes, config.attrs = &attribute, config.numAttrs = cluster > 1;
    if (shared_bytes > 0) {                         // beyond 48 KB only if asked for
        const void* function = reinterpret_cast<const void*>(kernel);
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        int at_once = 0;                            // stays 0 before Hopper: then a cluster, of one block, takes a row
        cudaOccupancyMaxActiveClusters(&at_once, function, &config);
        if (at_once > 0) clusters = min(clusters, i64(at_once));
    }
    if (clusters * cluster > 0x7fffffff) return cudaErrorInvalidConfiguration;
    config.gridDim = dim3(clusters * cluster);
    return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename T> int rows(const T* x, T* out, i64 n_rows, i64 n_cols, i64 row_stride, cudaStream_t stream) {
    const i64 vectors = n_cols / LANES<T>;          // at most, in a row
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out);
    const bool aligned = (n_cols | row_stride) % LANES<T> == 0 && addresses % 16 == 0;
    int threads = aligned ? 4 : 16, cluster = 1;    // 16: one thread for each element outside the 16-byte boundaries
    while (threads < 32 && threads * VECS < vectors) threads *= 2;
    while (threads < MAX_THREADS && threads * VECS < vectors) threads += 32;
    const int down = threads <= 32 ? min(128, MAX_THREADS) / threads : 1;

    int device = 0, limit = 0;
    cudaGetDevice(&device), cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    auto registers = [&] { return vectors <= i64(cluster) * threads * VECS; };
    auto slots = [&] { return (vectors + cluster * WIDE_THREADS - 1) / (cluster * WIDE_THREADS) * WIDE_THREADS; };
    auto shared = [&] { return 2 * 16 * slots() <= min(limit, SHARED_KB * 1024); };
    while (cluster < CLUSTER_LIMIT && !registers() && !(shared() && n_rows * cluster >= FILL)) cluster *= 2;
    if (!registers() && shared())
        return launch(softmax_wide<T>, n_rows, WIDE_THREADS, cluster, 2 * 16 * slots(), stream,
                      x, out, n_rows, n_cols, row_stride, static_cast<int>(slots()), cluster);
    auto kernel = softmax_rows<T, 0, false>;
    if (registers()) kernel = aligned ? softmax_rows<T, VECS, true> : softmax_rows<T, VECS, false>;
    return launch(kernel, (n_rows + down - 1) / down, dim3(threads, down), cluster, 0, stream,
                  x, out, n_rows, n_cols, row_stride, cluster);
}

// x is (outer, n, inner), contiguous, or rows that are row_stride apart where inner is 1; they lie within 16-byte
// boundaries as out's rows do.
template <typename T>
int run(const void* x, void* out, i64 outer, i64 n, i64 inner, i64 row_stride, cudaStream_t stream) {
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    if (inner == 1) return rows(from, to, outer, n, row_stride, stream);
    int warps = n < COL_WARPS ? n : COL_WARPS, cluster = 1;
    while (cluster < CLUSTER_LIMIT && cluster < warps && n >= 16 * cluster * warps) cluster *= 2;
    const i64 tiles = outer * ((inner + 31) / 32);
    return launch(softmax_columns<T>, tiles, dim3(32, warps), cluster, 0, stream, from, to, n, inner, cluster);
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
