"""Host time of a launch: python3 scratch/launch_cost.py

Batches of 200 calls on small tensors, the device idle before each batch, median of 50 batches; in microseconds a call.
The rows "in C" repeat the call inside one launcher: what CUDA itself takes on this machine.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from autokernel.cuda import compile_cuda  # noqa: E402

SOURCE = r"""
#include <cuda_fp16.h>
__global__ void kernel(const __half* x, const __half* y, __half* out, long long n, float c) {
    const long long i = blockIdx.x * 128ll + threadIdx.x;
    if (i < n) out[i] = __float2half(__half2float(x[i]) + c * __half2float(y[i]));
}
__global__ void __launch_bounds__(128) large(float* x) { extern __shared__ float s[]; if (x == 0) s[0] = 1.f; }

extern "C" int empty(const __half* x, const __half* y, __half* out, long long n, float c, cudaStream_t stream) {
    return 0;
}
extern "C" int one_tensor(const __half* x, cudaStream_t stream) { return 0; }
extern "C" int launch(const __half* x, const __half* y, __half* out, long long n, float c, cudaStream_t stream) {
    kernel<<<(n + 127) / 128, 128, 0, stream>>>(x, y, out, n, c);
    return cudaGetLastError();
}
extern "C" void plain(const __half* x, const __half* y, __half* out, long long n, float c, cudaStream_t stream) {
    kernel<<<(n + 127) / 128, 128, 0, stream>>>(x, y, out, n, c);
}
extern "C" int launch_ex(const __half* x, const __half* y, __half* out, long long n, float c, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((n + 127) / 128), config.blockDim = dim3(128), config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, x, y, out, n, c);
}
extern "C" int launch_attribute(const __half* x, const __half* y, __half* out, long long n, float c,
                                cudaStream_t stream) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    kernel<<<(n + 127) / 128, 128, 0, stream>>>(x, y, out, n, c);
    return cudaGetLastError();
}
extern "C" int launch_device(const __half* x, const __half* y, __half* out, long long n, float c,
                             cudaStream_t stream) {
    int device, sms;
    cudaGetDevice(&device), cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    kernel<<<(n + 127) / 128, 128, 0, stream>>>(x, y, out, n, c);
    return cudaGetLastError();
}
extern "C" int c_launch(const __half* x, const __half* y, __half* out, long long n, float c, int times,
                        cudaStream_t stream) {
    for (int i = 0; i < times; i++) kernel<<<(n + 127) / 128, 128, 0, stream>>>(x, y, out, n, c);
    return cudaGetLastError();
}
extern "C" int c_launch_ex(const __half* x, const __half* y, __half* out, long long n, float c, int times,
                           cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((n + 127) / 128), config.blockDim = dim3(128), config.stream = stream;
    for (int i = 0; i < times; i++) cudaLaunchKernelEx(&config, kernel, x, y, out, n, c);
    return cudaGetLastError();
}
extern "C" int c_get_device(int times) {
    int device, code = 0;
    for (int i = 0; i < times; i++) code |= cudaGetDevice(&device);
    return code;
}
extern "C" int c_last_error(int times) {
    int code = 0;
    for (int i = 0; i < times; i++) code |= cudaGetLastError();
    return code;
}
extern "C" int c_set_attribute(int times) {
    for (int i = 0; i < times; i++) cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    return 0;
}
"""
CALLS, BATCHES = 200, 50


def median_us(call, calls=CALLS, batches=BATCHES):
    found = []
    for _ in range(batches + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found[5:])


def triton_call(x, y, out):
    import triton
    import triton.language as tl

    @triton.jit
    def add(x_ptr, y_ptr, out_ptr, n, c, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) + c * tl.load(y_ptr + at, mask=at < n), mask=at < n)

    grid = (triton.cdiv(x.numel(), 128),)
    return lambda: add[grid](x, y, out, x.numel(), 1.0, BLOCK=128)


def main():
    x = torch.randn(4096, device="cuda").half()
    y, out = torch.randn_like(x), torch.empty_like(x)
    module = compile_cuda(SOURCE)
    full = (x, y, out, x.numel(), 1.0)
    rows = {
        "loop and an empty Python function": lambda: None,
        "launcher, 1 tensor, empty": lambda: module.one_tensor(x),
        "launcher, 3 tensors, empty": lambda: module.empty(*full),
        "launcher, <<<>>>": lambda: module.launch(*full),
        "launcher, <<<>>>, returns void": lambda: module.plain(*full),
        "launcher, cudaLaunchKernelEx": lambda: module.launch_ex(*full),
        "launcher, <<<>>> and cudaGetDevice + attribute": lambda: module.launch_device(*full),
        "launcher, <<<>>> and cudaFuncSetAttribute": lambda: module.launch_attribute(*full),
        "torch.add(x, y, out=out)": lambda: torch.add(x, y, out=out),
        "torch.add(x, y)": lambda: torch.add(x, y),
        "torch.empty_like(x)": lambda: torch.empty_like(x),
        "Triton launch": triton_call(x, y, out),
    }
    for name, call in rows.items():
        print(f"{name:<50} {median_us(call):7.2f} us")
    many = 1000  # inside C; 500 launches stay below the queue's length
    for name, call, times in [
        ("in C: <<<>>>", module.c_launch, 500),
        ("in C: cudaLaunchKernelEx", module.c_launch_ex, 500),
    ]:
        print(f"{name:<50} {median_us(lambda c=call, t=times: c(*full, t), 1) / times:7.2f} us")
    for name, call in [
        ("in C: cudaGetDevice", module.c_get_device),
        ("in C: cudaGetLastError", module.c_last_error),
        ("in C: cudaFuncSetAttribute", module.c_set_attribute),
    ]:
        print(f"{name:<50} {median_us(lambda c=call: c(many), 1) / many:7.3f} us")


main()
