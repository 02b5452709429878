"""Times the memory-bound candidates on a GPU, side by side: python3 scratch/softmax/measure.py [--ops softmax,...]

Cold L2, launches hidden, variants interleaved in random order, medians. Each output is checked against float64 beside
PyTorch's own, and a second call must give the same bits. "copy" is a device-to-device copy of as many bytes.
"""

import argparse
import faulthandler
import importlib.util
import random
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from autokernel import ops  # noqa: E402
from autokernel.inputs import fill, fresh_generator  # noqa: E402
from autokernel.spec import Case  # noqa: E402

COPY = 4.24e12  # bytes/s, copy bandwidth of the H200 that the bars are set by
AHEAD, MAIN, OLD = "scratch/softmax/cuda_ahead.py", "kernels/cuda/softmax.py", "scratch/softmax/cuda_2ac2214.py"
SPLIT, TRITON = "scratch/softmax/triton_split.py", "kernels/softmax.py"
# op -> (sizes, [(file, changes to CONFIG)])
PLAN = {
    "softmax": (["large", "vocab_50257", "vocab_151936", "vocab_32000"], [
        (TRITON, {}),
        (TRITON, {"WIDE_HELD": 3, "WIDE_WARPS": 16, "WIDE_TILE": 4096, "WIDE_PROGRAMS": 2}),
        (SPLIT, {}),
        (SPLIT, {"WIDE_HELD": 8}),
        (SPLIT, {"WIDE_WARPS": 16, "WIDE_PROGRAMS": 2}),
        (SPLIT, {"WIDE_WARPS": 4, "WIDE_PROGRAMS": 8}),
        (MAIN, {}),
        (MAIN, {"VECS": 5, "SHARED_KB": 0}),
        (MAIN, {"VECS": 10, "MAX_THREADS": 256, "SHARED_KB": 0}),
        (OLD, {}),
        (OLD, {"WIDE_THREADS": 1024}),
        (AHEAD, {}),
        (AHEAD, {"WIDE_THREADS": 1024, "WIDE_BLOCKS": 1}),
        (AHEAD, {"WIDE_THREADS": 256, "WIDE_VECS": 10, "WIDE_BLOCKS": 3}),
        (AHEAD, {"WIDE_THREADS": 384, "WIDE_VECS": 7, "WIDE_BLOCKS": 2}),
    ]),
    "cross_entropy": (["medium", "vocab_50257", "large"], [
        ("kernels/cross_entropy.py", {}),
        ("kernels/cuda/cross_entropy.py", {}),
        ("kernels/cuda/cross_entropy.py", {"STAGES": 8}),
        ("kernels/cuda/cross_entropy.py", {"MAX_THREADS": 512}),
    ]),
    "rotary_embedding": (["large", "medium"], [
        ("kernels/rotary_embedding.py", {}),
        ("kernels/cuda/rotary_embedding.py", {}),
        ("kernels/cuda/rotary_embedding.py", {"HEADS": 4}),
        ("kernels/cuda/rotary_embedding.py", {"HEADS": 1}),
    ]),
}  # fmt: skip


def load(path, changes):
    spec = importlib.util.spec_from_file_location(f"variant_{random.getrandbits(48)}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    unknown = set(changes) - set(module.CONFIG)
    if unknown:
        raise KeyError(f"{path}: CONFIG has no {unknown}")
    module.CONFIG.update(changes)
    return module


def label(path, changes):
    short = {"kernels": "triton main", "kernels/cuda": "cuda main"}.get(str(Path(path).parent), Path(path).stem)
    return short + "".join(f" {k}={v}" for k, v in changes.items())


def errors(out, exact):
    """Largest and rms error, in units of rms(exact) + |exact|."""
    worst = square = count = 0.0
    size = exact.square().mean().sqrt()
    for o, e in zip(out.reshape(-1).split(1 << 26), exact.reshape(-1).split(1 << 26), strict=True):
        error = (o.double() - e).abs() / (size + e.abs())
        worst, square, count = max(worst, error.max().item()), square + error.square().sum().item(), count + e.numel()
    return worst, (square / count) ** 0.5


def measure(functions, tensors, repetitions):
    """{name: median microseconds}; the caches are flushed and the host runs ahead of every call."""
    junk = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = {name: [] for name in functions}
    for repetition in range(repetitions + 3):
        order = list(functions)
        random.shuffle(order)
        pending = []
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            junk.zero_()
            torch.cuda._sleep(400_000)  # cycles: about 0.2 ms, in which the host enqueues the call
            begin.record()
            functions[name](*tensors)
            end.record()
            pending.append((name, begin, end))
        torch.cuda.synchronize()
        if repetition >= 3:
            for name, begin, end in pending:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(PLAN))
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--only", default="", help="variants whose label contains this text")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy bandwidth taken as {COPY / 1e12} TB/s")
    for name in options.ops.split(","):
        spec, (sizes, variants) = ops.get(name), PLAN[name]
        kernels = {label(*v): load(*v).kernel_fn for v in variants if options.only in label(*v)}
        for size in sizes:
            case = Case(size, "shape_sweep", spec.shapes[size], "fp16")
            tensors = {
                n: torch.empty_strided(t.shape, t.strides, dtype=t.dtype, device="cuda")
                for n, t in spec.tensors(case).items()
            }
            fill(spec, case, tensors, fresh_generator(torch.device("cuda")))
            inputs, moved = list(tensors.values()), spec.bytes_moved(case)
            exact = spec.reference(*(t.double() if t.is_floating_point() else t for t in inputs))
            yard = errors(spec.baseline(*inputs), exact)
            notes, good = {}, {}
            for key, kernel in kernels.items():
                faulthandler.dump_traceback_later(90, exit=True)  # a kernel that hangs ends the run, not the lease
                print(f"  {name} {size}: {key}", file=sys.stderr, flush=True)
                try:
                    out, again = kernel(*inputs), kernel(*inputs)
                    torch.cuda.synchronize()
                    error = errors(out, exact)
                    ok = error[0] <= 4 * yard[0] + 1e-6 and error[1] <= 2 * yard[1] + 1e-6
                    notes[key] = " / ".join(f"{a / max(b, 1e-12):.2f}" for a, b in zip(error, yard, strict=True))
                    notes[key] += " of PyTorch's error" if ok else " of PyTorch's error: WRONG"
                    notes[key] += "" if torch.equal(out, again) else "  NOT DETERMINISTIC"
                    good[key] = kernel
                    del out, again
                except Exception as error:  # a variant that does not compile or launch must not end the others
                    notes[key] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            faulthandler.cancel_dump_traceback_later()
            del exact
            source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            functions = {
                "copy": lambda *_, s=source, t=target: t.copy_(s),
                spec.baseline_name: spec.baseline,
                **good,
            }
            found = measure(functions, inputs, options.repetitions)
            base = found[spec.baseline_name]
            print(f"\n{name} {size} {tuple(inputs[0].shape)}: {moved / 1e6:.0f} MB, floor {moved / COPY * 1e6:.1f} us")
            print(f"{'variant':<66} {'us':>8} {'% copy':>7} {'x torch':>8}")
            for key in [*functions, *(k for k in notes if k not in functions)]:
                if key in found:
                    share = moved / COPY * 1e8 / found[key]
                    print(f"{key:<66} {found[key]:>8.1f} {share:>7.1f} {base / found[key]:>8.2f}  {notes.get(key, '')}")
                else:
                    print(f"{key:<66} {'-':>8} {'-':>7} {'-':>8}  {notes[key]}")
            sys.stdout.flush()


main()
