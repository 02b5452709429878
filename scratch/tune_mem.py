"""Temporary: tune the memory-bound Triton starters on a GPU. OUT=<folder> python scratch/tune_mem.py [op ...]"""
import importlib.util
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", "."))
REPS = int(os.environ.get("REPS", "30"))


def grid(**axes):
    """Every combination of the named CONFIG values."""
    out = [{}]
    for key, values in axes.items():
        out = [{**o, key: v} for o in out for v in values]
    return out


def pipelined(*rows):
    return [dict(zip(("PIPELINED_TILE", "PIPELINED_WARPS", "PIPELINED_BUFFERS"), r, strict=True)) for r in rows]


def wide(*rows):
    keys = ("WIDE_TILE", "WIDE_HELD", "WIDE_WARPS", "WIDE_PROGRAMS", "WIDE_AHEAD", "WIDE_PERSISTENT")
    return [dict(zip(keys, r, strict=True), PIPELINED_BUFFERS=0) for r in rows]


PIPE = pipelined((8192, 32, 2), (8192, 16, 2), (4096, 16, 1), (2048, 8, 2))
WIDE = wide((4096, 6, 16, 2, 0, 0), (8192, 2, 16, 2, 0, 0), (4096, 6, 16, 2, 0, 1), (4096, 6, 16, 2, 6, 0),
            (4096, 6, 16, 2, 6, 1), (4096, 6, 16, 2, 13, 1), (8192, 2, 16, 2, 3, 1))
WIDEST = wide((8192, 7, 32, 1, 0, 1), (8192, 7, 32, 1, 4, 1), (8192, 7, 32, 1, 8, 1), (8192, 7, 32, 1, 8, 0),
              (8192, 6, 32, 1, 0, 0), (16384, 3, 32, 1, 0, 0), (16384, 2, 32, 1, 4, 1), (8192, 2, 16, 2, 0, 0),
              (8192, 2, 16, 2, 2, 1), (8192, 7, 16, 1, 0, 0), (16384, 3, 16, 1, 3, 1))
POLICIES = [("evict_first", ""), ("", ""), ("", "evict_first"), ("evict_first", "evict_first")]
NORM = [dict(ELEMENTS_PER_THREAD=e, HOIST=True, LOAD_POLICY=a, STORE_POLICY=b) for e in (16, 32) for a, b in POLICIES]
NORM += [dict(ELEMENTS_PER_THREAD=64, LOAD_POLICY="", STORE_POLICY=""), dict(ELEMENTS_PER_THREAD=8, LOAD_POLICY=""),
         dict(ELEMENTS_PER_THREAD=16, HOIST=False, LOAD_POLICY=""), dict(ELEMENTS_PER_THREAD=32, HOIST=False),
         dict(PROGRAMS=512, TILE=8192, LOAD_POLICY=""), dict(PROGRAMS=512, TILE=16384, LOAD_POLICY="")]
COL = grid(COLUMN_BLOCK=[64, 128, 256], COLUMN_TILE=[4096, 8192], COLUMN_WARPS=[4, 8], PROGRAMS=[528, 1056])


def rotary_eager(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def rotate_half_eager(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rn(*shape, dtype=torch.float16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def angles(seq, half, dtype=torch.float16):
    a = torch.rand(seq, half, device="cuda") * 6.28
    return a.cos().to(dtype), a.sin().to(dtype)


# op, name, arguments, fused PyTorch, least bytes of (inputs, output), variants, target ratio
def case(op, name, make, torch_fn, variants, target=0.0, extra=()):
    return dict(op=op, name=name, make=make, torch_fn=torch_fn, variants=variants, target=target, extra=extra)


def softmax(x):
    return F.softmax(x, -1)


CASES = [
    case("softmax", "4096x4096", lambda: (rn(4096, 4096),), softmax, [], 2.6),
    case("softmax", "4096x50257", lambda: (rn(4096, 50257),), softmax, PIPE + WIDE, 1.5),
    case("softmax", "2048x151936", lambda: (rn(2048, 151936),), softmax, WIDEST, 1.6),
    case("softmax", "4096x32000", lambda: (rn(4096, 32000),), softmax, PIPE[:1] + WIDE[:3]),
    case("softmax", "4x131072", lambda: (rn(4, 131072),), softmax, WIDEST[4:8]),
    case("softmax", "4096x50257 bf16", lambda: (rn(4096, 50257, dtype=torch.bfloat16),), softmax, PIPE[:1] + WIDE[:2]),
    case("softmax", "4096x20000 fp32", lambda: (rn(4096, 20000, dtype=torch.float32),), softmax, PIPE[:1] + WIDE[:2]),
    case("softmax", "16384x8192", lambda: (rn(16384, 8192),), softmax, []),
    case("softmax", "12288x197", lambda: (rn(12288 * 4, 197),), softmax, []),
    case("softmax", "64x512x512 dim1", lambda: (rn(64, 512, 512),), lambda x: F.softmax(x, 1), [], extra=(1,)),
    case("layernorm", "4096x2048", lambda: (rn(4096, 2048), rn(2048), rn(2048)),
         lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), NORM, 1.3),
    case("layernorm", "16384x8192", lambda: (rn(16384, 8192), rn(8192), rn(8192)),
         lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), NORM, 1.65),
    case("rmsnorm", "4096x4096", lambda: (rn(4096, 4096), rn(4096)),
         lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6), NORM, 1.2),
    case("rmsnorm", "16384x8192", lambda: (rn(16384, 8192), rn(8192)),
         lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6), NORM, 1.5),
    case("cross_entropy", "2048x151936", lambda: (rn(2048, 151936), torch.randint(151936, (2048,), device="cuda")),
         F.cross_entropy, [], 3.0),
    case("rotary_embedding", "2x32x1024x128", lambda: (rn(2, 32, 1024, 128), *angles(1024, 64)), rotary_eager, [], 6.0),
    case("rotary_embedding", "1x32x16384x128", lambda: (rn(1, 32, 16384, 128), *angles(16384, 64)), rotary_eager,
         grid(TILE=[1024, 2048], HEADS=[2, 4], STAGES=[1, 2])),
    case("reduce", "8192x8192", lambda: (rn(8192, 8192),), lambda x: x.sum(-1), [], 1.3),
    case("reduce", "8192x8192 dim0", lambda: (rn(8192, 8192),), lambda x: x.sum(0), COL, extra=(0,)),
    case("reduce", "4096x50257 dim0", lambda: (rn(4096, 50257),), lambda x: x.sum(0), COL[::3], extra=(0,)),
]


def load(op):
    spec = importlib.util.spec_from_file_location(f"starter_{op}", ROOT / "kernels" / f"{op}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(module, variant, base):
    module.CONFIG.clear()
    module.CONFIG.update(base, **variant)


def warm(jobs):
    """Compile in a worker process; the kernels land in Triton's disk cache."""
    for index, variants in jobs:
        c = CASES[index]
        module = load(c["op"])
        base = dict(module.CONFIG)
        args = c["make"]()
        for variant in variants:
            configured(module, variant, base)
            try:
                module.kernel_fn(*args, *c["extra"])
            except Exception:
                continue
        torch.cuda.synchronize()
        del args
        torch.cuda.empty_cache()


FLUSH = None


def time_us(fn, reps=REPS):
    """Median device time of fn with a cold L2: a 512 MB buffer is read before each call, longer than a launch takes."""
    global FLUSH
    if FLUSH is None:
        FLUSH = torch.ones(128 << 20, device="cuda")
    fn()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)
    events = []
    for _ in range(reps):
        FLUSH.sum()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        fn()
        b.record()
        events.append((a, b))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in events)


def worst(out, ref, rms):
    """max |out - ref| / rms(ref) in float64, in slices to bound memory."""
    if out.dim() == 0:
        return abs(out.double().item() - ref.item()) / rms
    return max((o.double() - r).abs().max().item() for o, r in zip(out.split(1024), ref.split(1024), strict=True)) / rms


def reference(c, args):
    args64 = [a.double() if a.is_floating_point() else a for a in args]
    if c["op"] == "cross_entropy":
        rows = [F.cross_entropy(x.double(), t, reduction="sum") for x, t in zip(args[0].split(512), args[1].split(512),
                                                                            strict=True)]
        return sum(rows) / len(args[1])
    return c["torch_fn"](*args64)


def copy_rate():
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / (time_us(lambda: b.copy_(a)) * 1e-6)


def host_us(fn):
    for _ in range(20):
        fn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        fn()
    cost = (time.perf_counter() - start) / 200 * 1e6
    torch.cuda.synchronize()
    return cost


def run_case(c, copy_rate):
    module = load(c["op"])
    base = dict(module.CONFIG)
    args = c["make"]()
    fn = lambda: module.kernel_fn(*args, *c["extra"])  # noqa: E731
    ref = reference(c, args)
    rms = max(ref.pow(2).mean().sqrt().item(), 1e-30)
    eager_error = worst(c["torch_fn"](*args), ref, rms)
    out = fn()
    nbytes = sum(a.numel() * a.element_size() for a in args) + out.numel() * out.element_size()
    torch_us = time_us(lambda: c["torch_fn"](*args))
    results = []
    for variant in [{}, *c["variants"]]:
        configured(module, variant, base)
        try:
            error = worst(fn(), ref, rms)
            ok = error <= 4 * eager_error + 2e-6
            results.append(dict(config=variant, us=time_us(fn), error=error, ok=ok))
        except Exception as e:
            results.append(dict(config=variant, us=float("inf"), error=str(e)[:200], ok=False))
    configured(module, {}, base)
    return dict(op=c["op"], name=c["name"], torch_us=torch_us, target=c["target"], bytes=nbytes,
                torch_error=eager_error, floor_us=nbytes / copy_rate * 1e6, host_us=host_us(fn), results=results)


def show(r):
    good = sorted((x for x in r["results"] if x["ok"]), key=lambda x: x["us"])
    default = r["results"][0]
    if not good:
        print(f"{r['op'][:9]:9} {r['name']:19} NO CORRECT VARIANT: {r['results'][0]['error']}")
        return
    best = good[0]
    ratio = r["torch_us"] / best["us"]
    flag = "" if ratio >= r["target"] else " BELOW"
    bad = sum(not x["ok"] for x in r["results"])
    brief = lambda v: ",".join(f"{k}={x}" for k, x in v.items()) or "default"  # noqa: E731
    print(f"{r['op'][:9]:9} {r['name']:19} torch {r['torch_us']:7.1f} default {default['us']:7.1f} "
          f"best {best['us']:7.1f} ratio {ratio:5.2f}/{r['target']:.2f}{flag} copy "
          f"{100 * r['floor_us'] / best['us']:3.0f}% "
          f"host {r['host_us']:4.0f} bad {bad}")
    for x in good[:3]:
        print(f"{'':12}{x['us']:8.1f}  {brief(x['config'])}")


def main():
    start = time.time()
    wanted = sys.argv[1:]
    cases = [i for i, c in enumerate(CASES) if not wanted or c["op"] in wanted]
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    jobs = [(i, [v]) for i in cases for v in [{}, *CASES[i]["variants"]]]
    shares = [{} for _ in range(workers)]
    for k, (i, (v,)) in enumerate(jobs):                   # neighbours in the list cost alike: deal them out
        shares[k % workers].setdefault(i, []).append(v)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(warm, list(s.items())) for s in shares]
        [f.exception() and print("warm:", f.exception()) for f in futures]
    print(f"{torch.cuda.get_device_name()}: {len(jobs)} variants compiled in {time.time() - start:.0f} s")
    rate = copy_rate()
    print(f"copy {rate / 1e12:.2f} TB/s; an empty launch times as {time_us(lambda: torch.cuda._sleep(0)):.1f} us")
    records = []
    for i in cases:
        try:
            records.append(run_case(CASES[i], rate))
            show(records[-1])
        except Exception as e:
            print(f"{CASES[i]['op']} {CASES[i]['name']}: {type(e).__name__}: {str(e)[:300]}")
        torch.cuda.empty_cache()
        (OUT / "tune_mem.json").write_text(json.dumps(records, indent=1))
    print(f"total {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
