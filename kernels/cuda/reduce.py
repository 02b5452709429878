"""Sum along any dimension, CUDA C++: one pass over memory, float32 accumulation, any width.

x is seen as (outer, n, inner) and read once, in 16-byte accesses where the alignment allows. inner == 1: a part of a
warp, or a block, adds up a row. Otherwise a thread owns neighbouring columns and the threads of a block share the n
values of each. Where that makes too few blocks, n is split too, and a second launch adds the partial sums: always in
the same order, so the result has the same bits every time.
"""

from functools import lru_cache
from math import prod

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "reduce"
BACKEND = "cuda"

# BATCH: independent loads in flight a thread; THREADS: a block at most, a power of two; FILL: blocks below which n is
# split (four on each of an H200's 132 SMs); NARROW_THREADS: a block of narrow rows, up to a warp each.
CONFIG = {"BATCH": 4, "THREADS": 256, "FILL": 528, "NARROW_THREADS": 128}

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

template <typename T, int N> struct alignas(N * sizeof(T)) Vec { T x[N]; };
template <typename T> constexpr int LANES = 16 / sizeof(T);                  // elements in one 16-byte access

template <typename T, int N> __device__ Vec<T, N> load(const T* p) { return *reinterpret_cast<const Vec<T, N>*>(p); }

// ---- kernels: part blockIdx.y of gridDim.y parts of n; with one part the result, otherwise a partial sum -----------

// Rows of n neighbouring elements; blockDim.x threads a row, blockDim.y rows a block.
template <typename T, typename R> __global__ void __launch_bounds__(THREADS)
sum_rows(const T* __restrict__ x, R* __restrict__ out, long long n_rows, long long n, long long row_stride,
         long long part_size) {
    const long long last = n_rows - 1, at = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    const long long row = at < last ? at : last;    // threads past the end repeat the last row: every warp is complete
    const long long begin = blockIdx.y * part_size, size = min(part_size, n - begin);
    const T* p = x + row * row_stride + begin;

    // Rows of an odd width start anywhere: a few elements lie before the first 16-byte boundary and after the last.
    const long long before = (-reinterpret_cast<uintptr_t>(p) & 15) / sizeof(T), first = min(before, size);
    const long long n_vectors = (size - first) / LANES<T>, edges = size - n_vectors * LANES<T>;
    const int me = threadIdx.x, threads = blockDim.x;
    float sum = me < edges ? static_cast<float>(p[me < first ? me : n_vectors * LANES<T> + me]) : 0.f;
    for (long long v = me; v < n_vectors; v += BATCH * threads) {
        Vec<T, LANES<T>> batch[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (v + i * threads < n_vectors) batch[i] = load<T, LANES<T>>(p + first + (v + i * threads) * LANES<T>);
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (v + i * threads >= n_vectors) break;
            float part = 0.f;                       // short sums first: less rounding, and chains that run in parallel
            for (T e : batch[i].x) part += static_cast<float>(e);
            sum += part;
        }
    }
    __shared__ float of_warp[32];
    for (int offset = min(threads, 32) / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threads > 32) {
        if (me % 32 == 0) of_warp[me / 32] = sum;
        __syncthreads();
        sum = me < threads / 32 ? of_warp[me] : 0.f;
        if (me < 32)
            for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    }
    if (me == 0) out[blockIdx.y * n_rows + row] = static_cast<R>(sum);
}

// The middle axis of (outer, n, inner): a thread owns N neighbouring columns, blockDim.y threads share their n values.
template <typename T, typename R, int N> __global__ void __launch_bounds__(THREADS)
sum_columns(const T* __restrict__ x, R* __restrict__ out, long long outer, long long n, long long inner,
            long long part_size) {
    __shared__ float shared[THREADS * N];
    const long long width = static_cast<long long>(blockDim.x) * N, tiles = (inner + width - 1) / width;
    const long long o = blockIdx.x / tiles, column = blockIdx.x % tiles * width + threadIdx.x * N;
    const long long begin = blockIdx.y * part_size, end = column < inner ? min(begin + part_size, n) : 0;
    const T* p = x + o * n * inner + column;
    const long long step = blockDim.y;

    float sum[N] = {};
    for (long long r = begin + threadIdx.y; r < end; r += BATCH * step) {
        Vec<T, N> batch[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (r + i * step < end) batch[i] = load<T, N>(p + (r + i * step) * inner);
        #pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (r + i * step < end)
                for (int j = 0; j < N; j++) sum[j] += static_cast<float>(batch[i].x[j]);
    }
    float* mine = shared + threadIdx.y * blockDim.x + threadIdx.x;
    #pragma unroll
    for (int j = 0; j < N; j++) mine[j * THREADS] = sum[j];
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half)
            for (int j = 0; j < N; j++) mine[j * THREADS] += mine[j * THREADS + half * blockDim.x];
    }
    R* target = out + (blockIdx.y * outer + o) * inner + column;
    if (threadIdx.y == 0 && column < inner)
        for (int j = 0; j < N; j++) target[j] = static_cast<R>(mine[j * THREADS]);
}

// ---- launchers ------------------------------------------------------------------------------------------------------

template <typename... P, typename... A>
int launch(void (*kernel)(P...), long long blocks, long long parts, dim3 threads, cudaStream_t stream, A... args) {
    if (blocks > 0x7fffffff || parts > 0xffff) return cudaErrorInvalidConfiguration;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks, parts), config.blockDim = threads, config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

int power_of_two(long long at_least, int limit) {
    int p = 1;
    while (p < at_least && p < limit) p *= 2;
    return p;
}

// The part of n that a block takes: few enough parts to fill the GPU once, and at least `least` values worth its time.
long long part_size(long long n, long long blocks, long long least) {
    const long long parts = min((FILL + blocks - 1) / blocks, n / least + 1);
    return ((n + parts - 1) / parts + 63) / 64 * 64;                         // a multiple of 64 keeps rows aligned
}

template <typename T, typename R>
int columns(const T* x, R* out, float* partial, long long outer, long long n, long long inner, cudaStream_t stream) {
    const bool vectors = inner % LANES<T> == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    const int N = vectors ? LANES<T> : 1;
    const int across = power_of_two(inner / N, 32), down = power_of_two(n, THREADS / across);
    const long long blocks = outer * ((inner + across * N - 1) / (across * N));
    const long long size = partial ? part_size(n, blocks, 16LL * down) : n, parts = (n + size - 1) / size;
    const dim3 threads(across, down);
    if (parts == 1) {
        auto kernel = vectors ? sum_columns<T, R, LANES<T>> : sum_columns<T, R, 1>;
        return launch(kernel, blocks, 1, threads, stream, x, out, outer, n, inner, n);
    }
    auto kernel = vectors ? sum_columns<T, float, LANES<T>> : sum_columns<T, float, 1>;
    const int error = launch(kernel, blocks, parts, threads, stream, x, partial, outer, n, inner, size);
    return error ? error : columns<float, R>(partial, out, nullptr, 1, parts, outer * inner, stream);
}

template <typename T>
int rows(const T* x, T* out, float* partial, long long n_rows, long long n, long long row_stride, cudaStream_t stream) {
    const bool aligned = n % LANES<T> == 0 && row_stride % LANES<T> == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    int threads = aligned ? 4 : 16;                 // 16: one thread for each element outside the 16-byte boundaries
    while (threads < THREADS && threads * BATCH < n / LANES<T>) threads *= 2;
    const int down = threads <= 32 ? min(NARROW_THREADS, THREADS) / threads : 1;
    const long long blocks = (n_rows + down - 1) / down;
    const long long size = partial ? part_size(n, blocks, 16LL * THREADS * LANES<T>) : n, parts = (n + size - 1) / size;
    const dim3 block(threads, down);
    if (parts == 1) return launch(sum_rows<T, T>, blocks, 1, block, stream, x, out, n_rows, n, row_stride, n);
    const int error = launch(sum_rows<T, float>, blocks, parts, block, stream, x, partial, n_rows, n, row_stride, size);
    return error ? error : columns<float, T>(partial, out, nullptr, 1, parts, n_rows, stream);
}

// partial: room for a float of every partial sum, see PARTIALS; none: n is not split.
extern "C" int sum_rows_f16(const __half* x /* strided */, __half* out, float* partial /* optional */,
                            long long n_rows, long long n, long long row_stride, cudaStream_t stream) {
    return rows(x, out, partial, n_rows, n, row_stride, stream);
}
extern "C" int sum_rows_bf16(const __nv_bfloat16* x /* strided */, __nv_bfloat16* out, float* partial /* optional */,
                             long long n_rows, long long n, long long row_stride, cudaStream_t stream) {
    return rows(x, out, partial, n_rows, n, row_stride, stream);
}
extern "C" int sum_rows_f32(const float* x /* strided */, float* out, float* partial /* optional */,
                            long long n_rows, long long n, long long row_stride, cudaStream_t stream) {
    return rows(x, out, partial, n_rows, n, row_stride, stream);
}

extern "C" int sum_columns_f16(const __half* x, __half* out, float* partial /* optional */,
                               long long outer, long long n, long long inner, cudaStream_t stream) {
    return columns(x, out, partial, outer, n, inner, stream);
}
extern "C" int sum_columns_bf16(const __nv_bfloat16* x, __nv_bfloat16* out, float* partial /* optional */,
                                long long outer, long long n, long long inner, cudaStream_t stream) {
    return columns(x, out, partial, outer, n, inner, stream);
}
extern "C" int sum_columns_f32(const float* x, float* out, float* partial /* optional */,
                               long long outer, long long n, long long inner, cudaStream_t stream) {
    return columns(x, out, partial, outer, n, inner, stream);
}
"""

SUFFIX = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


@lru_cache(maxsize=1)
def compiled():
    """The compiled source: at the first call, not at import."""
    return compile_cuda(CUDA_SRC, defines=CONFIG)


# Floats that hold the partial sums of any case: only fewer than FILL blocks split n, into fewer than 2 * FILL, and a
# block covers at most 32 threads of 8 columns.
PARTIALS = 2 * CONFIG["FILL"] * 256


def kernel_fn(x, dim=-1):
    """Sum of x along dim, in x's dtype, accumulated in float32."""
    dim %= x.ndim
    if x.ndim == 2 and x.stride(0) == 1 and x.stride(1) > 1:  # stored transposed: sum its transpose
        x, dim = x.t(), 1 - dim
    n, outer, inner = x.shape[dim], prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    out = x.new_empty(x.shape[:dim] + x.shape[dim + 1 :])
    if x.numel() == 0:
        return out.zero_()
    few, long = outer * inner < 256 * CONFIG["FILL"], x.numel() > 1 << 16
    partial = x.new_empty(PARTIALS, dtype=torch.float32) if few and long else None  # None: n is not split
    if inner == 1:
        rows = x.reshape(outer, n)  # a view where one stride leads from row to row
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        getattr(compiled(), f"sum_rows_{SUFFIX[x.dtype]}")(rows, out, partial, outer, n, rows.stride(0))
    else:
        getattr(compiled(), f"sum_columns_{SUFFIX[x.dtype]}")(x.contiguous(), out, partial, outer, n, inner)
    return out
