"""Rotary position embedding, CUDA C++: interleaved pairs or rotate-half, any strides between heads and positions.

x is read once and written once, 2 bytes an fp16 element and direction. A thread owns N pairs of one position (two
16-byte accesses) and applies the same cosines and sines, loaded once, to HEADS heads: all their loads are independent
and in flight together, and the tables cost 1 / HEADS of what they would cost per head.
"""

from functools import lru_cache
from math import prod

import torch

from autokernel.cuda import compile_cuda

KERNEL_TYPE = "rotary_embedding"
BACKEND = "cuda"

# THREADS: of a block; HEADS: heads that a thread rotates by the same angles.
CONFIG = {"THREADS": 256, "HEADS": 2}

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

template <typename T, int N> struct alignas(N * sizeof(T)) Vec { T x[N]; };

// Memory is moved as plain bits: assigning a struct of __half moves its elements one by one (44 us instead of 12).
template <int BYTES> struct Bits { using type = uint4; };
template <> struct Bits<8> { using type = uint2; };
template <> struct Bits<4> { using type = unsigned; };
template <> struct Bits<2> { using type = unsigned short; };

template <typename T, int N> __device__ Vec<T, N> load(const T* p) {
    using Raw = typename Bits<N * sizeof(T)>::type;
    const Raw raw = *reinterpret_cast<const Raw*>(p);
    return reinterpret_cast<const Vec<T, N>&>(raw);
}

template <typename T, int N> __device__ void store(T* p, const Vec<T, N>& v) {
    using Raw = typename Bits<N * sizeof(T)>::type;
    __stwb(reinterpret_cast<Raw*>(p), reinterpret_cast<const Raw&>(v));     // an assignment would become four stores
}

// The same values, as if just loaded: or else the compiler turns all heads into floats at once, in twice the registers.
template <typename T, int N> __device__ void fresh(Vec<T, N>& v) {
    if constexpr (sizeof(v) == 16) {
        uint4& raw = reinterpret_cast<uint4&>(v);
        asm volatile("" : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w));
    }
}

// Pair i of the N pairs in two vectors: neighbours within one (interleaved), or one of each (rotate-half).
template <int N, bool INTERLEAVED, typename T>
__device__ T& member(Vec<T, N>& low, Vec<T, N>& high, int i, int which) {
    const int at = INTERLEAVED ? 2 * i + which : i + which * N;
    return at < N ? low.x[at] : high.x[at - N];
}

// The angles of these pairs: N in a row, or N / 2 for either vector.
template <int N, bool INTERLEAVED, typename T> __device__ Vec<T, N> angles(const T* table, int at, int half) {
    if constexpr (N == 1 || !INTERLEAVED) return load<T, N>(table + at);
    else {
        const Vec<T, N / 2> both[2] = {load<T, N / 2>(table + at / 2), load<T, N / 2>(table + (half + at) / 2)};
        return reinterpret_cast<const Vec<T, N>&>(both);
    }
}

// (a, b) -> (a cos - b sin, b cos + a sin). x is (batch, heads, seq, 2 * half) with strides; out is contiguous.
// A thread takes one vector of either half of a position, whatever the pairing, so that a warp's vectors adjoin.
template <typename T, int N, bool INTERLEAVED> __global__ void __launch_bounds__(THREADS)
rotate(const T* __restrict__ x, const T* __restrict__ cos, const T* __restrict__ sin, T* __restrict__ out, int heads,
       int groups, long long seq, int half, long long batch_stride, long long head_stride, long long seq_stride) {
    const int batch = blockIdx.x / groups, first = blockIdx.x % groups * HEADS;
    const T* x_head = x + batch * batch_stride + first * head_stride;
    T* out_head = out + (static_cast<long long>(batch) * heads + first) * seq * 2 * half;
    for (long long s = blockIdx.y * blockDim.y + threadIdx.y; s < seq; s += gridDim.y * blockDim.y) {
        for (int at = threadIdx.x * N; at < half; at += blockDim.x * N) {
            constexpr bool NEIGHBOURS = N == 1 && INTERLEAVED;
            const int low_at = NEIGHBOURS ? 2 * at : at, high_at = NEIGHBOURS ? 2 * at + 1 : at + half;
            Vec<T, N> low[HEADS], high[HEADS];
            #pragma unroll
            for (int j = 0; j < HEADS; j++) {       // every load before the first use
                if (first + j >= heads) break;
                const T* source = x_head + j * head_stride + s * seq_stride;
                low[j] = load<T, N>(source + low_at);
                high[j] = load<T, N>(source + high_at);
            }
            const Vec<T, N> c = angles<N, INTERLEAVED>(cos + s * half, at, half);
            const Vec<T, N> d = angles<N, INTERLEAVED>(sin + s * half, at, half);
            #pragma unroll
            for (int j = 0; j < HEADS; j++) {
                if (first + j >= heads) break;
                fresh(low[j]), fresh(high[j]);
                Vec<T, N> new_low, new_high;
                #pragma unroll
                for (int i = 0; i < N; i++) {
                    const float a = member<N, INTERLEAVED>(low[j], high[j], i, 0), cosine = c.x[i];
                    const float b = member<N, INTERLEAVED>(low[j], high[j], i, 1), sine = d.x[i];
                    member<N, INTERLEAVED>(new_low, new_high, i, 0) = static_cast<T>(a * cosine - b * sine);
                    member<N, INTERLEAVED>(new_low, new_high, i, 1) = static_cast<T>(b * cosine + a * sine);
                }
                T* target = out_head + (j * seq + s) * 2 * half;
                store<T, N>(target + low_at, new_low);
                store<T, N>(target + high_at, new_high);
            }
        }
    }
}

template <typename T, int N>
int start(const T* x, const T* cos, const T* sin, T* out, long long batch, long long heads, long long seq, int half,
          long long batch_stride, long long head_stride, long long seq_stride, bool interleaved, cudaStream_t stream) {
    const int across = min(max(half / N, 1), THREADS);
    const int down = min(max(THREADS / across, 1), static_cast<int>(min(seq, 1024LL)));
    const long long groups = (heads + HEADS - 1) / HEADS, tiles = min((seq + down - 1) / down, 65535LL);
    if (batch * groups > 0x7fffffff) return cudaErrorInvalidConfiguration;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(batch * groups, tiles), config.blockDim = dim3(across, down), config.stream = stream;
    return cudaLaunchKernelEx(&config, interleaved ? rotate<T, N, true> : rotate<T, N, false>, x, cos, sin, out,
                              static_cast<int>(heads), static_cast<int>(groups), seq, half,
                              batch_stride, head_stride, seq_stride);
}

template <typename T>
int rotary(const T* x, const T* cos, const T* sin, T* out, long long batch, long long heads, long long seq, int half,
           long long batch_stride, long long head_stride, long long seq_stride, bool interleaved, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out) |
                                reinterpret_cast<uintptr_t>(cos) | reinterpret_cast<uintptr_t>(sin);
    const bool vectors = (half | batch_stride | head_stride | seq_stride) % N == 0 && addresses % 16 == 0;
    auto run = vectors ? start<T, N> : start<T, 1>;
    return run(x, cos, sin, out, batch, heads, seq, half, batch_stride, head_stride, seq_stride, interleaved, stream);
}

extern "C" int rotary_f16(const __half* x /* strided */, const __half* cos, const __half* sin, __half* out,
                          long long batch, long long heads, long long seq, int half, long long batch_stride,
                          long long head_stride, long long seq_stride, bool interleaved, cudaStream_t stream) {
    return rotary(x, cos, sin, out, batch, heads, seq, half, batch_stride, head_stride, seq_stride, interleaved,
                  stream);
}
extern "C" int rotary_bf16(const __nv_bfloat16* x /* strided */, const __nv_bfloat16* cos, const __nv_bfloat16* sin,
                           __nv_bfloat16* out, long long batch, long long heads, long long seq, int half,
                           long long batch_stride, long long head_stride, long long seq_stride, bool interleaved,
                           cudaStream_t stream) {
    return rotary(x, cos, sin, out, batch, heads, seq, half, batch_stride, head_stride, seq_stride, interleaved,
                  stream);
}
extern "C" int rotary_f32(const float* x /* strided */, const float* cos, const float* sin, float* out,
                          long long batch, long long heads, long long seq, int half, long long batch_stride,
                          long long head_stride, long long seq_stride, bool interleaved, cudaStream_t stream) {
    return rotary(x, cos, sin, out, batch, heads, seq, half, batch_stride, head_stride, seq_stride, interleaved,
                  stream);
}
"""

SUFFIX = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


@lru_cache(maxsize=1)
def compiled():
    """The compiled source: at the first call, not at import."""
    return compile_cuda(CUDA_SRC, defines=CONFIG)


def kernel_fn(x, cos, sin, interleaved=True):
    """Rotate pairs of x (*batch, seq, head_dim) by the angles of cos, sin (seq, head_dim / 2); same shape, contiguous.

    interleaved: pairs are (x[2i], x[2i + 1]); otherwise (x[i], x[i + head_dim / 2]). Any strides but the last one's."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    *batch, seq, dim = x.shape
    four = x if x.ndim == 4 else x.reshape(prod(batch[:-1]), batch[-1] if batch else 1, seq, dim)
    if four.stride(3) != 1:
        four = four.contiguous()
    b, h, s, _ = four.stride()
    launcher = getattr(compiled(), f"rotary_{SUFFIX[x.dtype]}")
    cos, sin = cos.to(x.dtype).contiguous(), sin.to(x.dtype).contiguous()
    launcher(four, cos, sin, out, four.shape[0], four.shape[1], seq, dim // 2, b, h, s, interleaved)
    return out
