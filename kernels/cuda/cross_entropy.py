"""Mean cross-entropy of logits against class indices, CUDA C++: one pass over the logits, any vocabulary.

The logits are read once and nothing is written but one float a row: the bound is 2 bytes an fp16 logit. Each thread
keeps a running (maximum, sum of exponentials) and STAGES 16-byte copies to shared memory in flight at any time: its own
ring, which costs no registers and needs no barrier. The pairs merge in warp shuffles, shared memory and, where there
are few rows, across a cluster of blocks. A second, tiny kernel takes the mean.
"""

from functools import lru_cache

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "cross_entropy"
BACKEND = "cuda"

# STAGES: 16-byte copies in flight a thread (up to 8); MAX_THREADS: a block; MAX_CLUSTER: blocks that share a row (1, 2,
# 4, 8) while there are fewer than FILL blocks (four on each of an H200's 132 SMs); NARROW_THREADS: a block of narrow
# rows, up to a warp each.
CONFIG = {"STAGES": 4, "MAX_THREADS": 256, "MAX_CLUSTER": 8, "FILL": 528, "NARROW_THREADS": 128}

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cstdint>

constexpr int CLUSTER_LIMIT = __CUDA_ARCH_LIST__ >= 900 ? MAX_CLUSTER : 1;   // clusters exist from Hopper on
constexpr long long IGNORED = -100;                 // PyTorch's ignore_index
constexpr float LOWEST = -3.402823466e38f;          // below or equal to any finite logit

// ---- memory: 16-byte vectors ---------------------------------------------------------------------------------------

template <typename T, int N> struct alignas(N * sizeof(T)) Vec { T x[N]; };
template <typename T> constexpr int LANES = 16 / sizeof(T);                  // elements in one 16-byte access

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

// Starts below every logit, at no infinity: m - m is 0 even where all logits are -inf.
struct MaxSum {
    float m = LOWEST, sum = 0.f;

    template <typename T> __device__ void merge(MaxSum other) {
        const float top = fmaxf(m, other.m);
        sum = sum * exponential<T>(m - top) + other.sum * exponential<T>(other.m - top);
        m = top;
    }

    template <typename T, int N> __device__ void add(const T (&x)[N]) {
        float top = m, part = 0.f;
        #pragma unroll
        for (int i = 0; i < N; i++) top = fmaxf(top, static_cast<float>(x[i]));
        #pragma unroll
        for (int i = 0; i < N; i++) part += exponential<T>(static_cast<float>(x[i]) - top);
        sum = sum * exponential<T>(m - top) + part;
        m = top;
    }
};

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
    a = warp_reduce<T>(lane < blockDim.x / 32 ? of_warp[lane] : MaxSum(), 32);    // in every warp: no second barrier
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

template <typename T> __global__ void __launch_bounds__(MAX_THREADS)
row_losses(const T* __restrict__ logits, const long long* __restrict__ targets, float* __restrict__ losses,
           long long n_rows, long long n_cols, long long row_stride, int cluster) {
    cluster_arrive(cluster);
    const long long last = n_rows - 1, at = static_cast<long long>(blockIdx.x / cluster) * blockDim.y + threadIdx.y;
    const long long row = at < last ? at : last;    // threads past the end repeat the last row: every warp is complete
    const int me = blockIdx.x % cluster * blockDim.x + threadIdx.x, threads = cluster * blockDim.x;
    const T* x = logits + row * row_stride;

    // Rows of an odd width start anywhere: a few elements lie before the first 16-byte boundary and after the last.
    const long long before = (-reinterpret_cast<uintptr_t>(x) & 15) / sizeof(T);
    const int first = before < n_cols ? before : n_cols, n_vectors = (n_cols - first) / LANES<T>;
    const int edges = n_cols - static_cast<long long>(n_vectors) * LANES<T>;

    __shared__ Vec<T, LANES<T>> ring[STAGES][MAX_THREADS];
    const int slot = threadIdx.y * blockDim.x + threadIdx.x;
    auto copy = [&](int v, int stage) {             // a commit even where there is nothing: the waits count them
        const T* vector = x + first + static_cast<long long>(v) * LANES<T>;
        if (v < n_vectors) __pipeline_memcpy_async(&ring[stage][slot], vector, 16);
        __pipeline_commit();
    };
    #pragma unroll
    for (int i = 0; i < STAGES; i++) copy(me + i * threads, i);

    float picked = 0.f;                             // needed last
    const long long target = me == 0 ? targets[row] : 0;
    if (me == 0 && target >= 0 && target < n_cols) picked = static_cast<float>(x[target]);

    MaxSum local;
    if (me < edges) {
        const T edge[1] = {x[me < first ? me : static_cast<long long>(n_vectors) * LANES<T> + me]};
        local.add(edge);
    }
    for (int v = me; v < n_vectors;) {
        #pragma unroll
        for (int i = 0; i < STAGES; i++, v += threads) {
            __pipeline_wait_prior(STAGES - 1);      // the oldest copy has arrived
            if (v < n_vectors) local.add(ring[i][slot].x);
            copy(v + STAGES * threads, i);
        }
    }
    cluster_wait(cluster);                          // every block of the cluster now runs
    const MaxSum total = row_reduce<T>(local, cluster);
    if (me == 0) {
        const bool valid = target >= 0 && target < n_cols;
        losses[row] = target == IGNORED ? 0.f : valid ? (total.m - picked) + logf(total.sum) : NAN;
    }
}

// The mean over the rows that are not ignored, in one block: a few bytes a row, in a fixed order.
__global__ void __launch_bounds__(1024)
mean_loss(const float* __restrict__ losses, const long long* __restrict__ targets, float* __restrict__ out,
          long long n_rows) {
    __shared__ float sums[32], counts[32];
    float sum = 0.f, count = 0.f;                   // a count is exact below 2^24 rows
    #pragma unroll 8
    for (long long row = threadIdx.x; row < n_rows; row += 1024) {
        sum += losses[row];
        count += targets[row] != IGNORED;
    }
    for (int stage = 0; stage < 2; stage++) {       // within the warps, then over the warps
        for (int offset = 16; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(~0u, sum, offset);
            count += __shfl_xor_sync(~0u, count, offset);
        }
        if (stage == 0) {
            if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum, counts[threadIdx.x / 32] = count;
            __syncthreads();
            sum = sums[threadIdx.x % 32], count = counts[threadIdx.x % 32];
        }
    }
    if (threadIdx.x == 0) *out = sum / count;       // 0 / 0 is NaN, as in PyTorch
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
int cross_entropy(const T* logits, const long long* targets, float* losses, float* out, long long n_rows,
                  long long n_cols, long long row_stride, cudaStream_t stream) {
    const long long vectors = n_cols / LANES<T>;
    int threads = 16, cluster = 1;                  // 16: one thread for each element outside the 16-byte boundaries
    while (threads < MAX_THREADS && threads * STAGES < vectors) threads *= 2;
    while (cluster < CLUSTER_LIMIT && n_rows * cluster < FILL && cluster * MAX_THREADS * STAGES < vectors) cluster *= 2;
    const int rows = threads <= 32 ? min(NARROW_THREADS, MAX_THREADS) / threads : 1;
    const int error = launch(row_losses<T>, (n_rows + rows - 1) / rows, dim3(threads, rows), cluster, stream,
                             logits, targets, losses, n_rows, n_cols, row_stride, cluster);
    return error ? error : launch(mean_loss, 1, 1024, 1, stream, losses, targets, out, n_rows);
}

extern "C" int cross_entropy_f16(const __half* logits /* strided */, const long long* targets, float* losses,
                                 float* out, long long n_rows, long long n_cols, long long row_stride,
                                 cudaStream_t stream) {
    return cross_entropy(logits, targets, losses, out, n_rows, n_cols, row_stride, stream);
}
extern "C" int cross_entropy_bf16(const __nv_bfloat16* logits /* strided */, const long long* targets, float* losses,
                                  float* out, long long n_rows, long long n_cols, long long row_stride,
                                  cudaStream_t stream) {
    return cross_entropy(logits, targets, losses, out, n_rows, n_cols, row_stride, stream);
}
extern "C" int cross_entropy_f32(const float* logits /* strided */, const long long* targets, float* losses,
                                 float* out, long long n_rows, long long n_cols, long long row_stride,
                                 cudaStream_t stream) {
    return cross_entropy(logits, targets, losses, out, n_rows, n_cols, row_stride, stream);
}
"""

SUFFIX = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


@lru_cache(maxsize=1)
def compiled():
    """The compiled source: at the first call, not at import."""
    return compile_cuda(CUDA_SRC, defines=CONFIG)


def kernel_fn(logits, targets):
    """Mean over the rows of logits (rows, vocab) of logsumexp - logits[target]; targets of -100 are ignored; float32.

    A target outside the vocabulary makes the loss NaN."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    n_rows, vocab = logits.shape
    if n_rows == 0:  # the mean of nothing
        return torch.full((), torch.nan, device=logits.device)
    losses = torch.empty(n_rows + 1, dtype=torch.float32, device=logits.device)
    out = losses.new_empty(())
    launcher = getattr(compiled(), f"cross_entropy_{SUFFIX[logits.dtype]}")
    launcher(logits, targets.contiguous(), losses, out, n_rows, vocab, logits.stride(0))
    return out
