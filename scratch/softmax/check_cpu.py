"""The candidates' values on a CPU: CUDA through the emulator of the tests, Triton through its interpreter.

    AUTOKERNEL_CACHE=$(mktemp -d) TRITON_INTERPRET=1 python scratch/softmax/check_cpu.py scratch/softmax/cuda_ahead.py
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

sys.path[:0] = ["tests", "."]
from cuda_emulated import emulate  # noqa: E402
from test_cuda import SMALL, TOLERANCE, inputs  # noqa: E402


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(kernel_fn):
    inf, worst = float("inf"), 0.0
    for dtype in TOLERANCE:
        for x, dim in inputs("softmax", dtype):
            exact, out = x.double().softmax(dim), kernel_fn(x, dim)
            assert out.shape == x.shape and out.is_contiguous() and not out.isnan().any(), (x.shape, x.stride(), dim)
            scale = exact.square().mean().sqrt() + exact.abs()
            bound = TOLERANCE[dtype] * scale + (x.softmax(dim).double() - exact).abs().max()
            ratio = ((out.double() - exact).abs() / bound).max().item()
            worst = max(worst, ratio)
            assert ratio <= 1, (dtype, tuple(x.shape), x.stride(), dim, ratio)
        for shape in [(13, 7001), (7, 9000), (5, 10003)]:  # several rows a cluster
            x = torch.randn(shape).to(dtype)
            torch.testing.assert_close(kernel_fn(x), x.softmax(-1))
    for width in (2000, 9001):
        x = torch.randn(6, width)
        x[0], x[1, ::2], x[2, 7], x[3, 9], x[4, :1999] = -inf, -inf, inf, float("nan"), -inf
        for dtype in TOLERANCE:
            y = x.to(dtype)
            torch.testing.assert_close(kernel_fn(y), y.softmax(-1), equal_nan=True)
    return worst


path = sys.argv[1]
module = load(path)
if module.BACKEND == "cuda":
    small = {**SMALL, "WIDE_THREADS": 64, "WIDE_BLOCKS": 1, **dict(kv.split("=") for kv in sys.argv[2:])}
    emulate(module, Path(tempfile.mkdtemp()), **small)
else:
    module.CONFIG.update({k: int(v) for k, v in (kv.split("=") for kv in sys.argv[2:])})
print(path, "worst error, of the bound:", round(check(module.kernel_fn), 3))
