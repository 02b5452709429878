"""Check and time the CUDA starters matmul, flash_attention, fused_mlp on a GPU.

    python scratch/check_cuda_mm.py              # all: correctness, then timing; about 2 minutes
    python scratch/check_cuda_mm.py --only matmul --no-timing

Each case runs in a child process that reports case by case; a case that is silent for 20 s (30 s with a compile) is a hang:
the child is killed, the case marked, and a new child goes on with the next. Full JSON: $OUT/check_cuda_mm.json.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT), os.environ.get("AUTOKERNEL_PATH", "")) if p]
OPS = ("matmul", "flash_attention", "fused_mlp")
VARIANTS = {
    "matmul": [{}, {"GROUP_M": 8}],
    "flash_attention": [{}, {"BLOCK_N": 64, "STAGES": 3}],
    "fused_mlp": [{}, {"GROUP_M": 8}],
}


def load(op, config=None):
    spec = importlib.util.spec_from_file_location(f"starter_{op}", ROOT / "kernels" / "cuda" / f"{op}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CONFIG.update(config or {})
    return module


def label(config):
    return ",".join(f"{k}={v}" for k, v in config.items()) or "default"


# ---------------------------------------------------------------------------------------------------- cases


def correctness_cases(op):
    """Names only: a case is rebuilt in the child from its tuple."""
    dtypes = ("float16", "bfloat16", "float32")
    if op == "matmul":
        shapes = [(1, 1, 1), (7, 7, 7), (127, 127, 127), (128, 256, 64), (128, 256, 640), (200, 304, 72), (1023, 1023, 1023),
                  (4097, 129, 65), (1, 4096, 4096), (1023, 4097, 127), (256, 512, 4096), (3000, 2000, 520), (33, 50257, 64)]
        cases = [("matmul", dt, s, b, bias) for dt in dtypes for i, s in enumerate(shapes)
                 for b, bias in ((("row", i % 2 == 0), ("linear", i % 2 == 1)))]
        cases += [("matmul", dt, (300, 200, 264), b, True) for dt in dtypes for b in ("a_transposed", "a_strided", "a_3d", "b_sliced", "odd_base")]
        return cases
    if op == "flash_attention":
        # batch, heads, kv_heads, q_len, kv_len, head_dim, causal
        shapes = [(1, 1, 1, 128, 128, 64, 0), (1, 1, 1, 128, 128, 64, 1), (1, 2, 1, 256, 256, 128, 1), (2, 4, 2, 300, 300, 64, 1),
                  (1, 1, 1, 1, 1, 64, 1), (1, 3, 3, 7, 7, 72, 1), (1, 4, 1, 127, 1023, 80, 1), (1, 4, 4, 127, 1023, 80, 0),
                  (2, 2, 2, 1023, 127, 96, 1), (1, 8, 2, 1, 777, 128, 1), (1, 2, 2, 513, 513, 128, 0), (1, 2, 1, 300, 450, 256, 1),
                  (1, 2, 2, 64, 200, 192, 0), (1, 1, 1, 70, 90, 7, 1), (1, 2, 2, 4097, 4097, 64, 1), (2, 12, 12, 1024, 1024, 64, 1)]
        cases = [("attention", dt, s, "contiguous") for dt in dtypes for s in shapes]
        cases += [("attention", dt, (2, 4, 2, 200, 200, 64, 1), v) for dt in dtypes for v in ("transposed", "packed", "negative_scale", "zero_scale")]
        return cases
    shapes = [(1, 1, 1), (7, 7, 7), (127, 128, 256), (130, 127, 255), (256, 512, 1376), (1023, 264, 1000), (4097, 128, 72), (1, 2048, 5504)]
    acts = ("silu", "gelu", "gelu_tanh", "relu")
    cases = [("mlp", dt, s, layout, acts[(i + j) % 4]) for dt in dtypes for i, s in enumerate(shapes) for j, layout in enumerate(("row", "linear"))]
    cases += [("mlp", dt, (150, 256, 64), layout, "silu") for dt in dtypes for layout in ("fused", "mixed")]
    return cases


def build(case, torch):
    """-> args, kwargs, float64 reference, PyTorch's own output in the dtype."""
    g = torch.Generator("cuda").manual_seed(abs(hash(str(case))) % 2**31)
    F = torch.nn.functional
    dt = getattr(torch, case[1])

    def rand(*shape, scale=1.0):
        return (torch.randn(shape, device="cuda", generator=g, dtype=torch.float32) * scale).to(dt)

    if case[0] == "matmul":
        (M, N, K), layout, with_bias = case[2:]
        A = rand(M, K)
        B = rand(N, K).t() if layout == "linear" else rand(K, N)
        if layout == "a_transposed":
            A = rand(K, M).t()
        elif layout == "a_strided":
            A = rand(2 * M, K + 8)[::2, 8:]
        elif layout == "a_3d":
            A = rand(M // 4, 6, K)[:, 1:5]
        elif layout == "b_sliced":
            B = rand(K, N + 40)[:, 8 : N + 8]
        elif layout == "odd_base":
            A, B = rand(M, K + 3)[:, 3:], rand(K, N + 1)[:, 1:]
        bias = rand(N) if with_bias else None
        ref = A.double() @ B.double() + (bias.double() if with_bias else 0)
        own = A @ B if bias is None else torch.addmm(bias, A.reshape(-1, K), B).reshape(*A.shape[:-1], N)
        return (A, B), {"bias": bias}, ref, own
    if case[0] == "attention":
        (b, h, hk, lq, lk, d, causal), layout = case[2:]
        q, k, v = rand(b, h, lq, d), rand(b, hk, lk, d), rand(b, hk, lk, d)
        scale = {"negative_scale": -0.2, "zero_scale": 0.0}.get(layout)
        if layout == "transposed":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        elif layout == "packed":
            qkv = rand(b, lq, h + 2 * hk, d).transpose(1, 2)
            q, k, v = qkv[:, :h], qkv[:, h : h + hk], qkv[:, h + hk :]

        def attend(q, k, v):
            k, v = (x.repeat_interleave(h // hk, 1) for x in (k, v))
            s = q @ k.transpose(-1, -2) * (d**-0.5 if scale is None else scale)
            if causal:
                see = torch.arange(lk, device="cuda")[None] <= torch.arange(lq, device="cuda")[:, None] + lk - lq
                s = s.masked_fill(~see, -math.inf)
            return torch.softmax(s, -1).nan_to_num(0.0) @ v

        ref = attend(q.double(), k.double(), v.double())
        own = attend(q.float(), k.float(), v.float()).to(dt)
        return (q, k, v), {"causal": bool(causal), "sm_scale": scale}, ref, own
    (M, D, H), layout, act = case[2:]
    x = rand(M, D)
    wg, wu, wd = rand(D, H, scale=D**-0.5), rand(D, H, scale=D**-0.5), rand(H, D, scale=H**-0.5)
    if layout in ("linear", "mixed"):
        wg, wd = rand(H, D, scale=D**-0.5).t(), rand(D, H, scale=H**-0.5).t()
        wu = rand(H, D, scale=D**-0.5).t() if layout == "linear" else wu
    if layout == "fused":
        both = rand(2 * H, D, scale=D**-0.5)
        wg, wu = both[:H].t(), both[H:].t()
    f = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "relu": F.relu}[act]

    def mlp(x, a, b, c):
        return (f(x @ a) * (x @ b)) @ c

    return (x, wg, wu, wd), {"activation": act}, mlp(x.double(), wg.double(), wu.double(), wd.double()), mlp(x, wg, wu, wd)


def check(case, module, torch):
    args, kwargs, ref, own = build(case, torch)
    torch.full(ref.shape, math.nan, device="cuda", dtype=own.dtype)  # the next allocation of this size starts as NaN
    torch.cuda.synchronize()
    out = module.kernel_fn(*args, **kwargs)
    torch.cuda.synchronize()
    again = module.kernel_fn(*args, **kwargs)
    torch.cuda.synchronize()
    rms = ref.square().mean().sqrt().item() + 1e-30
    worst = lambda x: ((x.double() - ref).abs().max() / rms).item()  # noqa: E731
    err, own_err = worst(out), worst(own)
    floor = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}[case[1]]
    ok = out.dtype == own.dtype and out.shape == ref.shape and out.is_contiguous() and err <= 4 * own_err + floor
    return {"ok": bool(ok), "err": err, "own": own_err, "deterministic": bool(torch.equal(out, again))}


# ---------------------------------------------------------------------------------------------------- timing


def timing_cases(op):
    if op == "matmul":
        return [(dt, s, b) for dt, s, b in (
            ("float16", (2048, 2048, 2048), "row"), ("float16", (4096, 4096, 4096), "row"), ("float16", (8192, 8192, 8192), "row"),
            ("float16", (4096, 4096, 4096), "linear"), ("bfloat16", (4096, 4096, 4096), "linear"), ("float16", (16, 4096, 4096), "linear"),
            ("float16", (2048, 2048, 2048), "row_bias"), ("float16", (4096, 4096, 4096), "row_bias"), ("float16", (4096, 3072, 768), "linear_bias"),
            ("float16", (256, 256, 16384), "row_bias"), ("float16", (1024, 50257, 768), "linear"), ("float16", (2047, 2049, 2047), "row"), ("float32", (2048, 2048, 2048), "row"))]
    if op == "flash_attention":
        return [("float16", s, "") for s in ((2, 32, 32, 1024, 1024, 64, 1), (1, 32, 32, 2048, 2048, 128, 1), (1, 32, 32, 8192, 8192, 128, 1),
                (1, 32, 32, 2048, 2048, 128, 0), (1, 16, 16, 2048, 2048, 256, 1), (1, 32, 8, 1, 4096, 128, 1))] + [("float32", (1, 8, 8, 1024, 1024, 64, 1), "")]
    return [("float16", s, b) for s, b in (((2048, 2048, 5504), "row"), ((2048, 4096, 11008), "row"), ((2048, 4096, 11008), "linear"))] + [
        ("float32", (512, 1024, 2816), "row")]


def timing_inputs(op, case, torch):
    dt, F = getattr(torch, case[0]), torch.nn.functional
    rand = lambda *s: torch.randn(s, device="cuda", dtype=torch.float32).to(dt)  # noqa: E731
    if op == "matmul":
        M, N, K = case[1]
        args = rand(M, K), (rand(N, K).t() if case[2].startswith("linear") else rand(K, N))
        if case[2].endswith("bias"):
            bias = rand(N)
            return args, {"bias": bias}, lambda: torch.addmm(bias, *args), 2 * M * N * K
        return args, {}, lambda: args[0] @ args[1], 2 * M * N * K
    if op == "flash_attention":
        b, h, hk, lq, lk, d, causal = case[1]
        q, k, v = rand(b, h, lq, d), rand(b, hk, lk, d), rand(b, hk, lk, d)
        sdpa = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal) and lq == lk, enable_gqa=h != hk)  # noqa: E731
        return (q, k, v), {"causal": bool(causal)}, sdpa, 4 * b * h * lq * lk * d / (2 if causal and lq == lk else 1)
    M, D, H = case[1]
    w = (lambda a, b: rand(b, a).t() * b**-0.5) if case[2] == "linear" else (lambda a, b: rand(a, b) * a**-0.5)
    x, wg, wu, wd = rand(M, D), w(D, H), w(D, H), w(H, D)
    return (x, wg, wu, wd), {}, lambda: (F.silu(x @ wg) * (x @ wu)) @ wd, 6 * M * D * H


def time_case(op, case, modules, torch, repeats=20):
    args, kwargs, baseline, flops = timing_inputs(op, case, torch)
    runs = {"torch": baseline, **{name: (lambda m=m: m.kernel_fn(*args, **kwargs)) for name, m in modules.items()}}
    want = baseline().double()
    errors = {name: ((run().double() - want).abs().max() / want.square().mean().sqrt()).item() for name, run in runs.items()}
    flush = torch.ones(64 * 2**20, device="cuda", dtype=torch.float32)  # 256 MB: L2 is 60 MB
    times = {name: [] for name in runs}
    for _ in range(3):
        for run in runs.values():
            run()
    for _ in range(repeats):
        events = {}
        for name, run in runs.items():
            flush.sum()
            torch.cuda._sleep(400_000)  # about 0.2 ms: the launch is queued by then
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            events[name] = (start, end)
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end) * 1e3)
    median = {name: sorted(t)[len(t) // 2] for name, t in times.items()}
    return {"us": median, "min_us": {n: min(t) for n, t in times.items()}, "err": errors, "flops": flops}


# ---------------------------------------------------------------------------------------------------- processes


def child(op, mode, skip):
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    say = lambda **record: print(json.dumps(record), flush=True)  # noqa: E731
    say(ready=True)
    variants = VARIANTS[op] if mode == "timing" else [{}]
    modules = {label(v): load(op, v) for v in variants}
    for m in modules.values():
        m.compiled()
    say(compiled=True)
    cases = timing_cases(op) if mode == "timing" else correctness_cases(op)
    for i, case in enumerate(cases):
        if i < skip:
            continue
        say(start=i)
        try:
            result = time_case(op, case, modules, torch) if mode == "timing" else check(case, modules["default"], torch)
        except Exception as error:  # noqa: BLE001
            result = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        say(done=i, **result)
        if "error" in result and "CUDA" in result["error"]:
            os._exit(1)  # the context is lost: the parent starts a new child
    os._exit(0)


def supervise(op, mode):
    """{case index: result}; a hang or a lost context costs one case."""
    cases = timing_cases(op) if mode == "timing" else correctness_cases(op)
    results, skip, failures = {}, 0, 0
    while skip < len(cases) and failures < 4:
        process = subprocess.Popen([sys.executable, __file__, "--child", op, mode, str(skip)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines: queue.Queue = queue.Queue()
        threading.Thread(target=lambda p=process, q=lines: ([q.put(x) for x in p.stdout], q.put(None)), daemon=True).start()
        current, patience = skip, 90
        while True:
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                process.kill()
                results[current] = {"ok": False, "error": f"HANG: silent for {patience} s"}
                break
            if line is None:
                break
            record = json.loads(line)
            if "start" in record:
                current, patience = record["start"], 20
            elif "done" in record:
                results[record.pop("done")] = record
        process.wait()
        if process.returncode != 0:
            failures += 1
            text = process.stderr.read()[-1500:]
            results.setdefault(current, {"ok": False, "error": f"child ended with {process.returncode}: {text}"})
        skip = current + 1 if process.returncode != 0 else len(cases)
    return {str(cases[i]): r for i, r in sorted(results.items())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=OPS)
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        return child(options.child[0], options.child[1], int(options.child[2]))
    ops = [options.only] if options.only else OPS
    began = time.time()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        correct = dict(zip(ops, pool.map(lambda op: supervise(op, "correctness"), ops), strict=True))
    for op, results in correct.items():
        bad = {c: r for c, r in results.items() if not r["ok"]}
        moving = [c for c, r in results.items() if r.get("deterministic") is False]
        print(f"{op}: {len(results) - len(bad)} of {len(results)} right, {len(moving)} not deterministic {moving[:3]}")
        for c, r in list(bad.items())[:12]:
            print("   ", c, r.get("error") or f"err {r['err']:.3g} (PyTorch {r['own']:.3g})")
    print(f"correctness took {time.time() - began:.0f} s", flush=True)
    timing = {} if options.no_timing else {op: supervise(op, "timing") for op in ops}
    print(f"{'op':<16}{'case':<48}{'variant':<22}{'us':>9}{'torch us':>9}{'ratio':>7}{'TFLOP/s':>9}{'err':>9}")
    for op, results in timing.items():
        for c, r in results.items():
            if "error" in r:
                print(f"{op:<16}{c:<48}{r['error']}")
                continue
            for name in r["us"]:
                if name != "torch":
                    us, base = r["us"][name], r["us"]["torch"]
                    print(f"{op:<16}{c:<48}{name:<22}{us:>9.1f}{base:>9.1f}{base / us:>7.2f}{r['flops'] / us / 1e6:>9.0f}{r['err'][name]:>9.1e}")
    print(f"total {time.time() - began:.0f} s")
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "check_cuda_mm.json").write_text(json.dumps({"correct": correct, "timing": timing}, indent=1))


if __name__ == "__main__":
    main()
