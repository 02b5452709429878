"""All exports of a folder in one process, through LOCAL_KERNELS and get_kernel; what a call costs over kernel_fn."""

import sys
import time
from pathlib import Path

import torch
from kernels import get_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
loaded = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    kernel = loaded[folder.name] = get_kernel(f"user/{folder.name}", version=1)
    path = next((folder / "tests").glob("test_*.py"))
    scope = {"__file__": str(path), "__name__": "tests"}
    try:
        exec(compile(path.read_text(), str(path), "exec"), scope)
        assert scope["kernel"] is kernel, "get_local_kernel gave another module"
        scope["CASES"][:] = scope["CASES"][:6]
        scope["test_values"]()
        scope["test_compile"]()
        tensors, options = scope["arguments"](scope["CASES"][0])
        public = getattr(kernel, kernel.__all__[0])
        costs = []
        for call in (public, kernel.op.kernel_fn):
            for _ in range(20):
                call(**tensors, **options)
            torch.cuda.synchronize() if DEVICE == "cuda" else None
            start = time.perf_counter()
            for _ in range(200 if DEVICE == "cuda" else 2):
                call(**tensors, **options)
            costs.append((time.perf_counter() - start) / (200 if DEVICE == "cuda" else 2) * 1e6)
            torch.cuda.synchronize() if DEVICE == "cuda" else None
        print(f"{folder.name}: right, compiled; host {costs[0]:.1f} us a call, kernel_fn alone {costs[1]:.1f}", flush=True)
    except Exception as error:
        print(f"{folder.name}: FAILED {type(error).__name__}: {str(error)[:400]}", flush=True)
for name, kernel in loaded.items():
    if twin := loaded.get(name.replace("t-cuda-", "t-")) if "cuda" in name else None:
        a, b = kernel.op.kernel_fn, twin.op.kernel_fn
        assert a is not b and a.__globals__["BACKEND"] == "cuda" and b.__globals__["BACKEND"] == "triton", name
        assert kernel._ops.ops is not twin._ops.ops and kernel.__name__ != twin.__name__
print(f"{len(loaded)} loaded together, twins apart")
