"""On a GPU: the six memory-bound CUDA starters against float64 at odd shapes, and their times against PyTorch's.

    python scratch/check_cuda_mem.py [--no-sweep] [--memcheck] [--only softmax,reduce]

Writes $OUT/check_cuda_mem.json. --memcheck: one odd size each and nothing else (for compute-sanitizer)."""

import argparse
import importlib.util
import itertools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from autokernel.cuda import CudaArgumentError, CudaLaunchError, compile_cuda  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-5}
OPS = ("softmax", "layernorm", "rmsnorm", "cross_entropy", "rotary_embedding", "reduce")


def load(name, **config):
    """The starter with other CONFIG values."""
    spec = importlib.util.spec_from_file_location(f"{name}_{time.monotonic_ns()}", ROOT / f"kernels/cuda/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    unknown = config.keys() - module.CONFIG.keys()
    if unknown:
        raise KeyError(f"kernels/cuda/{name}.py has no {unknown}; it has {list(module.CONFIG)}")
    module.CONFIG.update(config)
    return module


def rotary_ref(x, cos, sin, interleaved=True):
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


REFERENCE = {
    "softmax": lambda x, dim=-1: torch.softmax(x, dim),
    "layernorm": lambda x, w, b, eps=1e-5: F.layer_norm(x, w.shape, w, b, eps),
    "rmsnorm": lambda x, w, eps=1e-6: F.rms_norm(x, w.shape, w, eps),
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "rotary_embedding": rotary_ref,
    "reduce": lambda x, dim=-1: x.sum(dim),
}


def contents(shape, dtype, kind):
    r = torch.randn(shape, device="cuda")
    if kind == "near_max":
        r = torch.rand(shape, device="cuda") * 1.2e5 - 6e4
    elif kind == "offset":
        r = r + 100
    elif kind == "constant":
        r = torch.randn(*shape[:-1], 1, device="cuda").expand(shape)
    elif kind == "masked":
        r[torch.rand(shape, device="cuda") < 0.3] = -float("inf")
        r[..., -1] = 0
    elif kind == "tiny":
        r = r * 1e-3
    return r.to(dtype)


def laid_out(x, layout):
    """x with other strides: rows cut out of a wider tensor (16-byte aligned, or at an odd element), NaN around them."""
    if layout == "padded" or layout == "odd":
        pad, first = (16, 8) if layout == "padded" else (3, 1)
        wide = torch.full((*x.shape[:-1], x.shape[-1] + pad), float("nan"), dtype=x.dtype, device=x.device)
        view = wide[..., first : first + x.shape[-1]]
        return view.copy_(x)
    if layout == "transposed" and x.ndim >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "heads" and x.ndim == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x


ROWS = [
    (1, 1),
    (1023, 3),
    (7, 1023),
    (5, 4097),
    (129,),
    (2, 3, 5, 77),
    (300, 128),
    (513, 768),
    (64, 2048),
    (3, 16392),
    (3, 50257),
    (600, 20000),
    (300, 50257),
    (2, 151936),
    (140, 151936),
    (2, 300001),
    (40, 8192),
    (7000, 64),
]


def cases(op, quick):
    rows = [(7, 1023), (3, 50257)] if quick else ROWS
    for dtype in DTYPES:
        if op == "rotary_embedding":
            shapes = (
                [(2, 3, 33, 80)]
                if quick
                else [
                    (1, 1, 1, 2),
                    (1, 3, 127, 64),
                    (1, 2, 33, 80),
                    (2, 3, 17, 6),
                    (50, 64),
                    (3, 50, 64),
                    (2, 8, 300, 128),
                    (8, 32, 1, 128),
                    (2, 5, 31, 200),
                ]
            )
            for shape, layout, inter in itertools.product(shapes, ("", "padded", "odd", "heads"), (True, False)):
                angles = torch.rand(shape[-2], shape[-1] // 2, device="cuda") * 6
                yield (
                    laid_out(contents(shape, dtype, "normal"), layout),
                    angles.cos().to(dtype),
                    angles.sin().to(dtype),
                    inter,
                )
            continue
        for shape in rows:
            plans = (
                [("", "normal"), ("odd", "normal")]
                if quick
                else [
                    ("", "normal"),
                    ("padded", "normal"),
                    ("odd", "normal"),
                    ("transposed", "normal"),
                    ("", "near_max"),
                    ("", "offset"),
                    ("", "constant"),
                    ("", "tiny"),
                ]
                + [("", "masked")] * (op in ("softmax", "cross_entropy"))
            )
            for layout, kind in plans:
                if op == "reduce" and dtype == torch.float16 and kind in ("near_max", "offset"):
                    continue  # the sum itself overflows
                x = laid_out(contents(shape, dtype, kind), layout)
                if op in ("softmax", "reduce"):
                    for dim in range(-1, x.ndim - 1):
                        yield (x, dim)
                elif op == "cross_entropy":
                    if x.ndim == 2 and layout != "transposed":
                        targets = torch.randint(0, shape[1], (shape[0],), device="cuda")
                        if kind == "masked":
                            targets[:] = shape[1] - 1
                        yield (x, targets)
                        ignored = torch.where(torch.rand(shape[0], device="cuda") < 0.3, -100, targets)
                        ignored[0] = targets[0]
                        yield (x, ignored)
                else:
                    w, b = contents(shape[-1:], dtype, "normal"), contents(shape[-1:], dtype, "normal")
                    yield (x, w) if op == "rmsnorm" else (x, w, b)


def errors(out, ref):
    finite = torch.isfinite(ref)
    rms = ref[finite].square().mean().sqrt() if finite.any() else ref.new_zeros(())
    e = ((out.double() - ref).abs() / (rms + ref.abs() + 1e-300))[finite]
    return e.max().item() if e.numel() else 0.0


def check(op, module, quick=False):
    bad, count, worst = [], 0, 0.0
    for args in cases(op, quick):
        double = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
        ref, theirs = REFERENCE[op](*double), REFERENCE[op](*args)
        junk = torch.full((max(ref.numel(), 1),), float("nan"), dtype=args[0].dtype, device="cuda")
        del junk  # what torch.empty hands out next
        out = module.kernel_fn(*args)
        again = module.kernel_fn(*args)
        e, t, dtype = errors(out, ref), errors(theirs, ref), args[0].dtype
        out_dtype = torch.float32 if op == "cross_entropy" else dtype
        ok = (
            out.shape == ref.shape
            and out.dtype == out_dtype
            and out.is_contiguous()
            and torch.equal(out.isnan(), ref.isnan())
            and torch.equal(
                out.view(torch.uint8) if out.ndim else out.isnan(),
                again.view(torch.uint8) if out.ndim else again.isnan(),
            )
            and e <= max(TOLERANCE[out_dtype], 4 * t)
            and (dtype != torch.float32 or e <= 4 * t + 1e-6)
        )
        count, worst = count + 1, max(worst, e / TOLERANCE[out_dtype])
        if not ok:
            bad.append(
                f"{tuple(args[0].shape)} {args[0].stride()} {dtype} {args[1:] if not torch.is_tensor(args[1]) else ''} error {e:.2e} torch {t:.2e}"
            )
    return {"checks": count, "bad": bad[:8], "n_bad": len(bad), "worst_of_tolerance": worst}


# ---- time -------------------------------------------------------------------------------------------------------------


def timer():
    buffer = torch.ones(
        256 << 18, dtype=torch.float32, device="cuda"
    )  # 256 MB, read before each call: cold and clean L2
    sink = torch.empty((), device="cuda")

    def measure(fn, repeat=30):
        for _ in range(3):
            fn()
        pairs = []
        for _ in range(repeat):
            torch.sum(buffer, dim=0, out=sink)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            fn()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return sorted(s.elapsed_time(e) * 1e3 for s, e in pairs)[repeat // 2]

    return measure


def bench_args(op, shape):
    x = torch.randn(shape, device="cuda").half()
    if op == "rotary_embedding":
        angles = torch.rand(shape[2], shape[3] // 2, device="cuda") * 6
        return x, angles.cos().half(), angles.sin().half()
    w = torch.randn(shape[-1], device="cuda").half()
    return {
        "softmax": (x,),
        "reduce": (x,),
        "rmsnorm": (x, w),
        "layernorm": (x, w, w.clone()),
        "cross_entropy": (x, torch.randint(0, shape[-1], (shape[0],), device="cuda")),
    }[op]


BENCH = {  # shape: floor of the ratio to PyTorch
    "softmax": {
        (4096, 4096): 2.6,
        (4096, 50257): 1.5,
        (2048, 151936): 1.6,
        (4096, 1024): 0,
        (4096, 32000): 0,
        (4, 131072): 0,
        (12288, 1024): 0,
    },
    "layernorm": {
        (4096, 2048): 1.3,
        (16384, 8192): 1.65,
        (8192, 4096): 0,
        (4096, 768): 0,
        (64, 65536): 0,
        (1, 4096): 0,
    },
    "rmsnorm": {(4096, 4096): 1.2, (16384, 8192): 1.5, (65536, 128): 0, (2048, 5120): 0, (64, 65536): 0, (1, 4096): 0},
    "cross_entropy": {(4096, 32000): 2.1, (4096, 50257): 2.3, (2048, 151936): 3.0, (8, 151936): 0, (65536, 10): 0},
    "rotary_embedding": {(2, 32, 1024, 128): 6, (1, 32, 16384, 128): 0, (8, 32, 1, 128): 0},
    "reduce": {(8192, 8192): 1.3, (4096, 4096): 0, (262144, 64): 0, (4, 4194304): 0, (1024, 50257): 0},
}
VARIANTS = {
    "softmax": [
        {"WIDE_THREADS": 1024},
        {"WIDE_THREADS": 768},
        {"WIDE_THREADS": 512, "SHARED_KB": 112},
        {"WIDE_THREADS": 256, "SHARED_KB": 75},
        {"VECS": 4},
    ],
    "layernorm": [{"VECS": 4}, {"MAX_THREADS": 256}],
    "rmsnorm": [{"VECS": 8}, {"MAX_THREADS": 512}],
    "cross_entropy": [{"STAGES": 8}, {"STAGES": 6}, {"MAX_THREADS": 128}, {"MAX_THREADS": 512}],
    "rotary_embedding": [{"HEADS": 4}, {"HEADS": 1}, {"THREADS": 128}, {"HEADS": 4, "THREADS": 128}],
    "reduce": [{"BATCH": 8}, {"THREADS": 512}],
}


def bytes_moved(op, shape):
    n = 1
    for s in shape:
        n *= s
    return 2 * n * (1 if op in ("cross_entropy", "reduce") else 2)


def host_us(fn, calls=200, rounds=8):
    best = 1e9
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best


BROKEN = r"""
__global__ void fill(float* x, float value) { extern __shared__ float s[]; s[threadIdx.x] = value; x[threadIdx.x] = s[threadIdx.x]; }
extern "C" void unchecked(float* x, float value, int smem, cudaStream_t stream) { fill<<<1, 32, smem, stream>>>(x, value); }
extern "C" int ping(float* x, float* y, long long n, float value, cudaStream_t stream) { return 0; }
"""


def launcher_behaviour():
    """Errors, streams and graphs of the launcher itself."""
    m, x = compile_cuda(BROKEN), torch.zeros(32, device="cuda")
    seen = {}
    try:
        m.unchecked(x, 1.0, 1 << 20)
    except CudaLaunchError as error:
        seen["too much shared memory"] = str(error)
    try:
        m.unchecked(x.cpu(), 1.0, 128)
    except CudaArgumentError as error:
        seen["cpu tensor"] = str(error)
    m.unchecked(x, 2.0, 128)
    seen["works after the error"] = bool((x == 2).all())
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        m.unchecked(x, 3.0, 128)
    stream.synchronize()
    seen["side stream"] = bool((x == 3).all())
    with torch.cuda.graph(graph):
        m.unchecked(x, 4.0, 128)
    before = bool((x == 3).all())
    graph.replay()
    torch.cuda.synchronize()
    seen["graph"] = before and bool((x == 4).all())
    y = torch.zeros(32, device="cuda")
    seen["bare call us"] = host_us(lambda: m.ping(x, y, 32, 1.0))
    seen["call with a launch us"] = host_us(lambda: m.unchecked(x, 1.0, 128))
    return seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--memcheck", action="store_true")
    parser.add_argument("--only", default=",".join(OPS))
    args = parser.parse_args()
    ops, begin = args.only.split(","), time.perf_counter()
    result = {"launcher": launcher_behaviour() if not args.memcheck else {}, "ops": {}}
    for key, value in result["launcher"].items():
        print(f"  {key}: {value}")
    variants = {op: [{}, *([] if args.no_sweep or args.memcheck else VARIANTS[op])] for op in ops}
    plans = {op: [load(op, **variant) for variant in variants[op]] for op in ops}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        modules = [m for plan in plans.values() for m in plan]
        compiled = list(pool.map(lambda m: m.compiled(), modules))
    print(
        f"compiled {len(modules)} sources in {time.perf_counter() - begin:.1f} s; defaults: "
        + ", ".join(f"{op} {plans[op][0].compiled().compile_seconds:.1f} s" for op in ops),
        flush=True,
    )
    spills = [
        k
        for c, m in zip(compiled, modules, strict=True)
        for k, r in c.resources.items()
        if r["spill_bytes"] and m in [p[0] for p in plans.values()]
    ]
    print("kernels that spill in the default configuration:", spills or "none")
    for op in ops:
        start = time.perf_counter()
        found = result["ops"][op] = {"check": check(op, plans[op][0], args.memcheck)}
        c = found["check"]
        print(
            f"{op:17s} {c['checks']} checks, {c['n_bad']} bad, worst {c['worst_of_tolerance']:.2f} of tolerance, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        for variant, module in zip(variants[op][1:], plans[op][1:], strict=True):
            try:
                c["bad"] += [f"{variant}: {line}" for line in check(op, module, quick=True)["bad"]]
            except CudaLaunchError as error:
                c["bad"].append(f"{variant}: {error}")
        for line in c["bad"]:
            print("   BAD", line)
    if args.memcheck:
        torch.cuda.synchronize()
        return
    measure = timer()

    def attempt(fn):
        try:
            return measure(fn)
        except CudaLaunchError:
            return float("nan")

    pair = torch.empty(2, 1 << 29, dtype=torch.float16, device="cuda").normal_()
    copy_us = measure(lambda: pair[1].copy_(pair[0]), 10)
    copy = result["copy_tb_s"] = 4 * (1 << 29) / copy_us / 1e6
    pair = None
    print(
        f"copy of 1 GiB: {copy:.2f} TB/s\n{'op':17s} {'shape':22s} {'torch us':>9s} {'ours us':>9s} {'ratio':>6s} {'floor':>6s} {'% copy':>7s}  variants, us"
    )
    for op in ops:
        print(f"{op}: variants " + ", ".join(" ".join(f"{k}={v}" for k, v in variant.items()) for variant in variants[op][1:]))
        rows = result["ops"][op]["bench"] = []
        for shape, floor in BENCH[op].items():
            inputs = bench_args(op, shape)
            theirs, ours = (
                measure(lambda i=inputs: REFERENCE[op](*i)),
                [attempt(lambda m=m, i=inputs: m.kernel_fn(*i)) for m in plans[op]],
            )
            share = bytes_moved(op, shape) / ours[0] / 1e6 / copy * 100
            rows.append(
                {
                    "shape": shape,
                    "torch_us": theirs,
                    "us": ours[0],
                    "ratio": theirs / ours[0],
                    "floor": floor,
                    "copy_pct": share,
                    "variants": list(zip(variants[op], ours, strict=True)),
                }
            )
            mark = "" if theirs / ours[0] >= floor else "  BELOW FLOOR"
            print(
                f"{op:17s} {str(shape):22s} {theirs:9.1f} {ours[0]:9.1f} {theirs / ours[0]:6.2f} {floor:6.2f} {share:7.1f}  "
                + " ".join(f"{us:7.1f}" for us in ours[1:])
                + mark,
                flush=True,
            )
            del inputs
        small = bench_args(op, (1, 4, 16, 64) if op == "rotary_embedding" else (16, 512))
        found = result["ops"][op]
        found["host_us"] = host_us(lambda: plans[op][0].kernel_fn(*small))
        found["torch_host_us"] = host_us(lambda: REFERENCE[op](*small))
        print(
            f"{op:17s} host time of kernel_fn {found['host_us']:.1f} us, of PyTorch {found['torch_host_us']:.1f} us",
            flush=True,
        )
    Path(os.environ.get("OUT", "/tmp"), "check_cuda_mem.json").write_text(json.dumps(result, indent=1))
    print(f"total {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
