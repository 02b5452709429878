"""Mean cross-entropy of logits against class indices, CUDA C++: one pass over the logits, any vocabulary.

The logits are read once and nothing is written but one float a row: the bound is 2 bytes an fp16 logit. Each thread
keeps a running (maximum, sum of exponentials) over batches of BATCH independent 16-byte loads; the pairs merge in warp
shuffles, shared memory and, where there are few rows, across a cluster of blocks. A second, tiny kernel takes the mean.
"""

from functools import lru_cache

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "cross_entropy"
BACKEND = "cuda"

# BATCH: 16-byte loads in flight a thread; MAX_THREADS: a block; MAX_CLUSTER: blocks that share a row (1, 2, 4, 8) while
# there are fewer than FILL blocks (four on each of an H200's 132 SMs); NARROW_THREADS: a block of narrow rows, up to a
# warp each.
CONFIG = {"BATCH": 4, "MAX_THREADS": 512, "MAX_CLUSTER": 8, "FILL": 528, "NARROW_THREADS": 128}

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

constexpr int CLUSTER_LIMIT = __CUDA_ARCH_LIST__ >= 900 ? MAX_CLUSTER : 1;   // clusters exist from Hopper on
constexpr long long IGNORED = -100;                 // PyTorch's ignore_index
constexpr float NEG_INF = -__builtin_huge_valf();

// ---- memory: 16-byte vectors ---------------------------------------------------------------------------------------

template <typename T, int N> struct alignas(N * sizeof(T)) Vec { T x[N]; };
template <typename T> constexpr int LANES = 16 / sizeof(T);                  // elements in one 16-byte access

template <typename T> __device__ Vec<T, LANES<T>> load_vector(const T* p) {
    return *reinterpret_cast<const Vec<T, LANES<T>>*>(p);
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

template <typename T> __global__ void __launch_bounds__(MAX_THREADS)
row_losses(const T* __restrict__ logits, const long long* __restrict__ targets, float* __restrict__ losses,
           long long n_rows, long long n_cols, long long row_stride, int cluster) {
    cluster_arrive(cluster);
    const long long last = n_rows - 1, at = static_cast<long long>(blockIdx.x / cluster) * blockDim.y + threadIdx.y;
    const long long row = at < last ? at : last;    // threads past the end repeat the last row: every warp is complete
    const long long me = blockIdx.x % cluster * blockDim.x + threadIdx.x, threads = cluster * blockDim.x;
    const T* x = logits + row * row_stride;

    float picked = 0.f;                             // loaded first, needed last
    long long target = 0;
    if (me == 0) {
        target = targets[row];
        if (target >= 0 && target < n_cols) picked = static_cast<float>(x[target]);
    }
    // Rows of an odd width start anywhere: a few elements lie before the first 16-byte boundary and after the last.
    const long long before = (-reinterpret_cast<uintptr_t>(x) & 15) / sizeof(T);
    const long long first = before < n_cols ? before : n_cols;
    const long long n_vectors = (n_cols - first) / LANES<T>, edges = n_cols - n_vectors * LANES<T>;
    MaxSum local = nothing();
    if (me < edges) {
        const T edge[1] = {x[me < first ? me : n_vectors * LANES<T> + me]};
        local = max_sum<T>(edge);
    }
    for (long long v = me; v < n_vectors; v += BATCH * threads) {
        Vec<T, LANES<T>> batch[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (v + i * threads < n_vectors) batch[i] = load_vector(x + first + (v + i * threads) * LANES<T>);
        #pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (v + i * threads < n_vectors) local.merge<T>(max_sum<T>(batch[i].x));
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
    #pragma unroll 4
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
    while (threads < MAX_THREADS && threads * BATCH < vectors) threads *= 2;
    while (cluster < CLUSTER_LIMIT && n_rows * cluster < FILL && cluster * MAX_THREADS * BATCH < vectors) cluster *= 2;
    const int rows = threads <= 32 ? NARROW_THREADS / threads : 1;
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
    losses = torch.empty(n_rows + 1, dtype=torch.float32, device=logits.device)
    out = losses.new_empty(())
    launcher = getattr(compiled(), f"cross_entropy_{SUFFIX[logits.dtype]}")
    launcher(logits, targets.contiguous(), losses, out, n_rows, vocab, logits.stride(0))
    return out
