"""Time CONFIG variants of the matmul, flash_attention and fused_mlp starters on a Hopper GPU.

    python scratch/tune_mm.py [--ops matmul flash_attention fused_mlp]

Prints one table; writes everything to $OUT/tune_mm.json (default workspace/). Variants are compiled in parallel
without a GPU first; each operator is then measured in a child process with a deadline, variants that may hang apart.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", ROOT / "workspace"))


def v(**changes):
    return changes


MATMUL = [
    v(), v(STORE_HALVES=False, num_stages=3), v(num_stages=3), v(GROUP_M=4), v(GROUP_M=16), v(PERSISTENT=False),
    v(BLOCK_M=256, BLOCK_N=128), v(BLOCK_M=256, BLOCK_N=128, GROUP_M=4), v(BLOCK_K=128, num_stages=2),
    v(BLOCK_N=128, num_stages=5, STORE_HALVES=False), v(BLOCK_N=128, num_warps=4, num_stages=3, PERSISTENT=False),
    v(BLOCK_N=128, num_warps=4, num_stages=3, PERSISTENT=False, GROUP_M=16),
    v(BLOCK_M=256, BLOCK_N=128, PERSISTENT=False),
]
SKINNY = [
    v(), v(SKINNY_BLOCK_N=16), v(SKINNY_BLOCK_N=64), v(SKINNY_BLOCK_K=128), v(SKINNY_BLOCK_K=128, SKINNY_BLOCK_N=64),
    v(SKINNY_BLOCK_K=512, SKINNY_BLOCK_N=16), v(SKINNY_WARPS=2), v(SKINNY_WARPS=8),
    v(SKINNY_WARPS=2, SKINNY_BLOCK_N=16),
]
FLASH = [
    v(), v(num_stages=3), v(BLOCK_N=64), v(BLOCK_N=64, num_stages=3), v(BLOCK_N=64, num_stages=4), v(GROUP_MB=8),
    v(GROUP_MB=256), v(BLOCK_M=64, num_warps=4), v(BLOCK_M=64, num_warps=4, BLOCK_N=64),
    v(BLOCK_M=64, num_warps=4, BLOCK_N=64, num_stages=3), v(num_warps=4, BLOCK_N=64),
    v(num_warps=4, BLOCK_N=64, num_stages=3), v(num_warps=4, BLOCK_N=32, num_stages=3),
]
DECODE = [
    v(), v(DECODE_BLOCK_N=128), v(DECODE_BLOCK_N=128, DECODE_num_stages=2), v(DECODE_BLOCK_N=32, DECODE_num_stages=4),
    v(DECODE_num_stages=2), v(DECODE_num_stages=4), v(DECODE_num_warps=2), v(DECODE_num_warps=8),
    v(SPLIT_KEYS=128), v(SPLIT_KEYS=512),
]
MLP = [
    v(), v(num_stages=3), v(GROUP_M=4), v(GROUP_M=16), v(PERSISTENT=False), v(GATE_BLOCK_N=64),
    v(BLOCK_M=256, GATE_BLOCK_N=64, DOWN_BLOCK_N=128), v(BLOCK_M=64, num_warps=4, num_stages=2, PERSISTENT=False),
    v(GATE_BLOCK_N=64, num_stages=3, PERSISTENT=False), v(BLOCK_K=128, num_stages=2), v(DOWN_BLOCK_N=128),
]
# (operator, shape, variants). matmul: M, K, N, is B a Linear's weight; attention: batch, heads, kv_heads, q, kv,
# head_dim; mlp: rows, dim, hidden, which launch (both, gate, down).
CASES = [
    ("matmul", (2048, 2048, 2048, False), MATMUL), ("matmul", (4096, 4096, 4096, False), MATMUL),
    ("matmul", (8192, 8192, 8192, False), MATMUL), ("matmul", (4096, 4096, 4096, True), MATMUL),
    ("matmul", (1, 4096, 4096, True), SKINNY), ("matmul", (16, 4096, 11008, True), SKINNY),
    ("flash_attention", (2, 32, 32, 1024, 1024, 64), FLASH), ("flash_attention", (1, 32, 32, 2048, 2048, 128), FLASH),
    ("flash_attention", (1, 32, 32, 8192, 8192, 128), FLASH), ("flash_attention", (1, 32, 32, 1, 4096, 128), DECODE),
    ("flash_attention", (1, 32, 8, 1, 4096, 128), DECODE),
    ("fused_mlp", (2048, 2048, 5504, "both"), MLP), ("fused_mlp", (2048, 4096, 11008, "both"), MLP),
    ("fused_mlp", (2048, 2048, 5504, "gate"), MLP), ("fused_mlp", (2048, 2048, 5504, "down"), MLP),
    ("fused_mlp", (2048, 4096, 11008, "gate"), MLP), ("fused_mlp", (2048, 4096, 11008, "down"), MLP),
]


def load(op, changes):
    """A fresh module of the starter with its CONFIG changed; FILE names another file under scratch/."""
    path = ROOT / "scratch" / changes["FILE"] if "FILE" in changes else ROOT / "kernels" / f"{op}.py"
    spec = importlib.util.spec_from_file_location(f"{op}_variant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CONFIG.update({k: x for k, x in changes.items() if k != "FILE"})
    return module


def inputs(op, shape, make):
    if op == "matmul":
        M, K, N, weight = shape
        return [make(M, K), make(N, K).t() if weight else make(K, N)]
    if op == "flash_attention":
        b, h, kvh, m, n, d = shape
        return [make(b, h, m, d), make(b, kvh, n, d), make(b, kvh, n, d)]
    rows, dim, hidden, part = shape
    scale = dim**-0.5
    if part == "down":
        return [make(rows, hidden), make(hidden, dim) * hidden**-0.5]
    return [make(rows, dim), make(dim, hidden) * scale, make(dim, hidden) * scale, make(hidden, dim) * hidden**-0.5]


def call(op, shape, module, args):
    """The variant's result as a function without arguments."""
    if op != "fused_mlp" or shape[3] == "both":
        return lambda: module.kernel_fn(*args)
    if shape[3] == "gate":
        return lambda: module._launch(args[0], args[1], args[2], "silu", module.CONFIG["GATE_BLOCK_N"])
    return lambda: module._launch(args[0], args[1], args[1], None, module.CONFIG["DOWN_BLOCK_N"])


def reference(op, shape, args):
    """PyTorch's operator, a float64 reference of (part of) the result, the part, FLOPs."""
    import torch
    import torch.nn.functional as F

    wide = [a.double() for a in args]
    if op == "matmul":
        M, K, N, _ = shape
        return (lambda: args[0] @ args[1]), wide[0] @ wide[1], (lambda out: out), 2 * M * K * N
    if op == "flash_attention":
        b, h, kvh, m, n, d = shape
        take = [0, h - 1]
        q = wide[0][:, take]
        k, val = (t[:, [i // (h // kvh) for i in take]] for t in wide[1:])
        s = q @ k.transpose(-1, -2) * d**-0.5
        keep = torch.ones(m, n, device=q.device, dtype=torch.bool).tril(n - m)
        ref = torch.softmax(s.masked_fill_(~keep, float("-inf")), -1) @ val
        fn = lambda: F.scaled_dot_product_attention(*args, is_causal=m == n, enable_gqa=h != kvh)  # noqa: E731
        return fn, ref, (lambda out: out[:, take]), 4 * b * h * m * n * d // (2 if m == n else 1)
    rows, dim, hidden, part = shape
    if part == "down":
        return (lambda: args[0] @ args[1]), wide[0] @ wide[1], (lambda out: out), 2 * rows * dim * hidden
    x, g, u, w = args
    hid = F.silu(wide[0] @ wide[1]) * (wide[0] @ wide[2])
    if part == "gate":
        return (lambda: F.silu(x @ g) * (x @ u)), hid, (lambda out: out), 4 * rows * dim * hidden
    return (lambda: (F.silu(x @ g) * (x @ u)) @ w), hid @ wide[3], (lambda out: out), 6 * rows * dim * hidden


def compile_one(task):
    """Compile one variant for sm_90 without touching a GPU; the Triton cache then serves the measuring process."""
    op, shape, changes, sms, shared = task
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    class Stub:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=0: 0)

    if not getattr(jit, "stubbed", False):
        jit.stubbed = True
        driver.set_active(Stub())
        run = jit.JITFunction.run
        jit.JITFunction.run = lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)
        props = type("Props", (), {"multi_processor_count": sms, "shared_memory_per_block_optin": shared, "major": 9})
        torch.cuda.get_device_properties = lambda device=None: props
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        torch.Tensor.is_cuda = property(lambda self: True)
    start = time.time()
    try:
        args = inputs(op, shape, lambda *size: _Lazy(torch.empty(size, dtype=torch.float16)))
        args = [a.tensor if isinstance(a, _Lazy) else a for a in args]
        call(op, shape, load(op, changes), args)()
        return op, shape, changes, time.time() - start, ""
    except Exception as e:  # noqa: BLE001
        return op, shape, changes, time.time() - start, f"{type(e).__name__}: {str(e)[:150]}"


class _Lazy:
    """An uninitialised tensor whose scaling is skipped, so that no memory is touched while compiling."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __mul__(self, factor):
        return self

    def t(self):
        return _Lazy(self.tensor.t())


def measure(op, risky, repeats=20):
    """Every case of one operator: the variants and PyTorch timed in turn, cold L2, launch hidden by a sleep."""
    import torch

    torch.manual_seed(0)
    flush = torch.randn(64 << 20, device="cuda")
    results, path = [], OUT / f"tune_{op}{'_risky' if risky else ''}.json"
    for case_op, shape, variants in CASES:
        if case_op != op:
            continue
        if risky and variants not in (MATMUL, FLASH, MLP):
            continue
        variants = RISKY[op] if risky else variants
        args = inputs(op, shape, lambda *size: torch.randn(size, device="cuda", dtype=torch.float16))
        torch_fn, ref, part, flops = reference(op, shape, args)
        rms = ref.pow(2).mean().sqrt()
        error = lambda out: ((part(out).double() - ref).abs().max() / rms).item()  # noqa: B023, E731
        fns, rows = [("torch", torch_fn)], {"torch": {"error": error(torch_fn()), "us": []}}
        for changes in variants:
            name = ",".join(f"{k}={x}" for k, x in changes.items()) or "default"
            try:
                fn = call(op, shape, load(op, changes), args)
                rows[name] = {"error": error(fn()), "us": []}
                rows[name]["same"] = bool(torch.equal(fn(), fn()))
                torch.cuda.synchronize()
                fns.append((name, fn))
            except Exception as e:  # noqa: BLE001
                rows[name] = {"failed": f"{type(e).__name__}: {str(e)[:150]}"}
        ref = None
        for _ in range(repeats):
            for name, fn in fns:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.sum()
                torch.cuda._sleep(500_000)
                start.record()
                fn()
                end.record()
                torch.cuda.synchronize()
                rows[name]["us"].append(start.elapsed_time(end) * 1e3)
        for row in rows.values():
            if row.get("us"):
                row["us"] = round(statistics.median(row["us"]), 2)
                row["tflops"] = round(flops / row["us"] / 1e6, 1)
        results.append({"op": op, "shape": shape, "rows": rows})
        path.write_text(json.dumps(results))  # after every case: a later one may hang
    return results


def print_table(results):
    print(f"{'op':16}{'shape':30}{'torch us':>9}{'best us':>9}{'ratio':>7}{'TFLOP/s':>8}  top 3 variants; default")
    for r in results:
        torch_us, limit = r["rows"]["torch"]["us"], max(4 * r["rows"]["torch"]["error"], 5e-3)
        rows = {n: x for n, x in r["rows"].items() if n != "torch"}
        good = {n: x for n, x in rows.items() if "us" in x and x["error"] < limit}
        top = sorted(good, key=lambda n: good[n]["us"])[:3]
        shape = "x".join(str(s) for s in r["shape"])
        if top:
            us, rate = good[top[0]]["us"], good[top[0]]["tflops"]
            text = " | ".join(f"{n} {good[n]['us']}" for n in top)
            text += f"; default {good['default']['us']}" if "default" in good else ""
            print(f"{r['op']:16}{shape:30}{torch_us:9.1f}{us:9.1f}{torch_us / us:7.2f}{rate:8.0f}  {text}")
        for n, x in rows.items():
            if n not in good:
                print(f"    BAD {shape} {n}: {x.get('failed', 'error ' + str(x.get('error')))[:110]}")
            elif not x["same"]:
                print(f"    NOT DETERMINISTIC {shape} {n}")


RISKY = {  # warp specialisation as the Triton 3.6 compiler does it for Hopper: untested on a GPU, may hang
    "matmul": [
        v(FILE="ws_matmul.py"), v(FILE="ws_matmul.py", GROUP_M=16), v(FILE="ws_matmul.py", num_stages=3),
        v(FILE="ws_matmul.py", PERSISTENT=False), v(FILE="ws_matmul.py", BLOCK_N=128, num_stages=5),
    ],
    "flash_attention": [
        v(FILE="ws_flash.py"), v(FILE="ws_flash.py", PERSISTENT=False), v(FILE="ws_flash.py", BLOCK_N=64, num_stages=3),
        v(FILE="ws_flash.py", BLOCK_N=64, num_stages=2), v(FILE="ws_flash.py", GROUP_MB=8),
    ],
    "fused_mlp": [v(FILE="ws_mlp.py"), v(FILE="ws_mlp.py", num_stages=3), v(FILE="ws_mlp.py", PERSISTENT=False)],
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", help="measure one operator in this process")
    parser.add_argument("--risky", action="store_true")
    parser.add_argument("--ops", nargs="*", default=["matmul", "flash_attention", "fused_mlp"])
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if args.measure:
        measure(args.measure, args.risky)
        return
    start = time.time()
    sms, shared = 132, 232448
    tasks = [(op, s, c, sms, shared) for op, s, cs in CASES if op in args.ops
             for c in cs + (RISKY[op] if cs in (MATMUL, FLASH, MLP) else [])]
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        compiled = list(pool.map(compile_one, tasks))
    print(f"{len(tasks)} variants compiled in {time.time() - start:.0f} s on {workers} processes")
    for op, shape, changes, _, why in compiled:
        if why:
            print(f"    COMPILE {op} {shape} {changes}: {why}")
    if args.compile_only:
        return
    everything = []
    for op, risky in [(op, False) for op in args.ops] + [(op, True) for op in args.ops if RISKY.get(op)]:
        name = OUT / f"tune_{op}{'_risky' if risky else ''}.json"
        name.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--measure", op] + (["--risky"] if risky else [])
        child = subprocess.Popen(command, start_new_session=True)
        try:
            code = child.wait(timeout=40 if risky else 90)
        except subprocess.TimeoutExpired:
            child.kill()
            code = "deadline"
        if code != 0:
            print(f"{op}{' risky' if risky else ''}: ended with {code}")
        everything += json.loads(name.read_text()) if name.exists() else []
    print_table(everything)
    (OUT / "tune_mm.json").write_text(json.dumps(everything, indent=1))
    print(f"total {time.time() - start:.0f} s; {OUT / 'tune_mm.json'}")


if __name__ == "__main__":
    main()
