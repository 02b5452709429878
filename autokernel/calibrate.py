"""Measure the roofs of the GPU present: memory bandwidth and dense matrix rate, as a kernel can reach them.

Single cold-cache runs on random data, like the judge's own timings. The best of them counts as the peak, so that a
percentage of it stays below 100. Takes a few seconds; nothing else may run on the GPU meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autokernel.gpu import Calibration, Device, save_calibration
from autokernel.records import now

try:
    import triton
    import triton.language as tl
except ImportError:                         # no Triton for this platform: torch's own copy and sum alone
    triton = None

BLOCK, STEPS, WARPS = 4096, 8, 8            # 256 threads, 4 loads of 16 bytes each a step; 128 KB a program

if triton is not None:
    @triton.jit
    def _copy(src, dst, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
        start = tl.program_id(0) * BLOCK * STEPS
        for step in tl.static_range(STEPS):
            at = start + step * BLOCK + tl.arange(0, BLOCK)
            tl.store(dst + at, tl.load(src + at, mask=at < n), mask=at < n)

    @triton.jit
    def _read(src, dst, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
        start = tl.program_id(0) * BLOCK * STEPS
        total = tl.zeros([BLOCK], tl.float32)
        for step in tl.static_range(STEPS):
            at = start + step * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(src + at, mask=at < n, other=0.0)
        tl.store(dst + tl.program_id(0), tl.sum(total))         # 4 bytes for 128 KB read


def _move(kernel: Any, src: torch.Tensor, dst: torch.Tensor) -> None:
    """`_copy` or `_read` over contiguous float32 tensors below 2**31 elements; `_read` leaves partial sums in dst."""
    kernel[(triton.cdiv(src.numel(), BLOCK * STEPS),)](src, dst, src.numel(), BLOCK=BLOCK, STEPS=STEPS, num_warps=WARPS)


def _cold_times(run: Callable[[], Any], flush: torch.Tensor, repeats: int) -> list[float]:
    """Seconds of single runs, each with a cold L2. Clearing it keeps the GPU busy while the host launches `run`."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def _bandwidths(free: int, flush: torch.Tensor, repeats: int) -> dict[str, float]:
    n = min(2**30, free // 8) // (4 * BLOCK * STEPS) * BLOCK * STEPS    # two of 1 GiB, at most a quarter of it
    src, dst = torch.rand(n, device=flush.device), torch.empty(n, device=flush.device)
    copies: list[Callable[[], Any]] = [lambda: dst.copy_(src)]
    reads: list[Callable[[], Any]] = [lambda: src.sum()]
    if triton is not None:
        copies.append(lambda: _move(_copy, src, dst))
        reads.append(lambda: _move(_read, src, dst))
    copy, read = (min(min(_cold_times(run, flush, repeats)) for run in ways) for ways in (copies, reads))
    return {"copy_gb_s": 8e-9 * n / copy, "read_gb_s": 4e-9 * n / read}


def _matmul_rates(arch: str, free: int, flush: torch.Tensor, repeats: int) -> dict[str, float]:
    """TFLOPS of torch.matmul per precision. Random data: zeros draw less power and run faster."""
    amd = arch.startswith("gfx")
    modern = amd or float(arch) >= 8                # bf16 and tf32 need Ampere
    rates: dict[str, float] = {}
    keep = torch.backends.cuda.matmul.fp32_precision
    try:
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("tf32", torch.float32),
                            ("fp32", torch.float32)):
            if name in ("bf16", "tf32") and not modern or name == "tf32" and amd:
                continue
            torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
            # Two sizes: the larger fills the GPU evenly, the smaller is over before the power limit lowers the clock.
            for n in (4096,) if name == "fp32" or free < 4 * 2**30 else (4096, 8192):
                a, b = (torch.randn(n, n, device=flush.device, dtype=dtype) for _ in range(2))
                out = torch.empty_like(a)
                times = _cold_times(partial(torch.matmul, a, b, out=out), flush, repeats)
                rates[name] = max(rates.get(name, 0.0), 2e-12 * n**3 / min(times))
    finally:
        torch.backends.cuda.matmul.fp32_precision = keep
    return rates


def calibrate(device: Device, repeats: int = 12) -> Calibration:
    """Measure `device` and keep the result in the user's cache folder. Raises OSError if that cannot be written."""
    with torch.cuda.device(device.index):
        flush = torch.empty(int(max(256, 4 * (device.l2_mb or 0))) * 2**20, dtype=torch.int8, device="cuda")
        free, _ = torch.cuda.mem_get_info()
        matmul = _matmul_rates(device.arch, free, flush, repeats)
        torch.cuda.empty_cache()
        moved = _bandwidths(free, flush, repeats)
        torch.cuda.empty_cache()
    result = Calibration(device.key, now(), **moved, tflops=matmul)
    save_calibration(result)
    return result
