"""One run of the judge, from a kernel file to a record: stages, timing, roofline. `bench.py` prints what it returns."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from autokernel import counters, gpu, integrity, ops
from autokernel.judge import OUT_OF_MEMORY, Bench, Limits, Stage, correctness_cases, run_stages, varied
from autokernel.night import Rules, keep_above_pct
from autokernel.paths import atomic_write, cache_dir, workspace
from autokernel.process import Launcher, compiled_mark
from autokernel.records import RunRecord, now
from autokernel.review import scan, vendor_calls
from autokernel.source import KernelError, KernelUnreadable, read_kernel
from autokernel.spec import STAGES, Case
from autokernel.targets import Target, active_target
from autokernel.timing import Timing, foul_play, time_case
from autokernel.worker import Worker, WorkerFailure

AUTOTUNE_SECONDS = 900  # torch.compile max-autotune of one shape

# the key block, in order; every run prints every key, `n/a` where there is no number
KEYS = (
    "kernel_type", "backend", "device", "gpu_name", "target", "source_sha256",
    *STAGES, "correctness", "reason",
    "size", "dtype", "latency_us", "throughput_tflops", "bandwidth_gb_s", "pct_peak_compute", "pct_peak_bandwidth",
    "pct_measured_compute", "pct_measured_bandwidth", "arithmetic_intensity", "ridge_point", "bottleneck", "flops",
    "bytes", "peak_vram_mb", "pytorch_latency_us", "speedup_vs_pytorch", "speedup_vs_compile", "speedup_vs_best",
    "noise_pct", "keep_above_pct", "launch_us", "compile_seconds", "registers", "spill_bytes", "smem_bytes",
    "vendor_library", "review", "harness", "quick", "bench_time_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a run may be asked for; the fields are bench.py's options."""

    kernel: Path
    sizes: str = ""
    quick: bool = False
    compile_baseline: bool = False
    allow_tf32: bool = False
    profile: bool = False
    ncu: bool = False
    best: Path | None = None
    dtype: str = ""
    device: str = ""
    timeout: float = 60.0
    allow_dirty_harness: bool = False


class HarnessFailure(RuntimeError):
    """What the kernel is compared with could not be run: no verdict on the kernel."""


class UsageError(ValueError):
    """An option that cannot be honoured; one line with what is allowed."""


def run(
    options: Options,
    launcher: Launcher,
    progress: Callable[[str], None] = lambda text: None,
    harness: integrity.Harness | None = None,
    spent: float = 0.0,
) -> RunRecord:
    """Judge a kernel. Returns a record: a kernel that is no Python or cannot be run is a verdict too.

    harness: what `integrity.required` has found already, where the caller asked it. spent: seconds that the caller has
    waited already; they count as the run's.
    Raises UsageError for options or a file that name nothing, GpuBusy when another run holds the GPU, HarnessChanged.
    """
    target = active_target()
    values = dict.fromkeys(KEYS) | dict.fromkeys(STAGES, "not run") | {"target": target.name if target else None}

    def session(source, best, device, digest):
        return _Session(source, best, device, options, target, progress, digest)

    return recorded(options, launcher, harness, values, target.spec.name if target else None, session, spent)


def recorded(
    options: Options, launcher: Launcher, harness: integrity.Harness | None, values: dict[str, Any], kind: str | None,
    open_session: Callable[..., Any], spent: float = 0.0,
) -> RunRecord:  # fmt: skip
    """The record of one kernel file, judged by what `open_session(source, best, device, digest)` returns.

    kind: the KERNEL_TYPE that the file must have, if one is asked for. spent: as for `run`. Raises NightError for rules
    that cannot be read.
    """
    started, clock, rules = now(spent), time.perf_counter(), Rules.read()
    harness = harness or integrity.required(options.allow_dirty_harness)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    values |= {"started": started, "quick": options.quick, "sizes": []} | device_values(device)
    values |= {"harness": harness.status, "harness_commit": harness.commit, "harness_sha256": harness.sha256}
    try:
        source = read_kernel(options.kernel, kind)
        data = source.data
        values |= {"kernel_type": source.kernel_type, "backend": source.backend}
        values["review"] = [f"{line}: {reason}" for line, reason in scan(data)]
        try:
            best = read_kernel(options.best, source.kernel_type) if options.best else None
        except KernelError as error:
            raise UsageError(f"--best: {error}") from None
        values["best_sha256"] = best.sha256 if best else None
        with gpu_lock(device):
            values |= open_session(source, best, device, harness.sha256).run(launcher)
    except KernelUnreadable as error:
        raise UsageError(f"nothing was judged: {error}") from None
    except KernelError as error:
        data = options.kernel.read_bytes()
        values |= {"correctness": "FAIL", "reason": str(error)}
    if values.get("paired_gain_pct") is not None:
        values["keep_above_pct"] = keep_above_pct(values, rules)
    values["bench_time_seconds"] = spent + time.perf_counter() - clock
    record = RunRecord.new(data, values["correctness"])
    return RunRecord({**values, **record.values, "started": started})


class _Session:
    """The steps of one run, with what they share."""

    def __init__(self, source, best, device, options: Options, target: Target | None, progress, digest: str):
        self.source, self.best, self.options, self.target = source, best, options, target
        self.device, self.progress, self.digest = device, progress, digest
        self.limits = Limits(call=options.timeout, load=options.timeout)
        self.varied: list[Case] = []  # timed sizes with other options and layouts: asked between the timed calls
        self.laps: dict[str, float] = {}  # where the time of a run went
        self._lap = time.perf_counter()

    def lap(self, name: str) -> None:
        """Note the seconds since the last lap."""
        self.laps[name] = time.perf_counter() - self._lap
        self._lap = time.perf_counter()

    def bench(self, launcher: Launcher) -> Bench:
        self.spec = ops.get(self.source.kernel_type)
        self.dtype = self.options.dtype or (self.target.dtype if self.target else self.spec.dtypes[0])
        return Bench(self.spec, self.device, launcher, self.options.allow_tf32)

    def cases(self, bench: Bench) -> tuple[list[Case], list[Case], list[str]]:
        """What is asked, what is timed, and the labels of what was left out for its size."""
        primary = self.target.cases(bench.on_gpu) if self.target else []
        near = self.target.neighbours(bench.on_gpu) if self.target else []
        timed = timed_cases(bench, self.options.sizes, self.dtype, primary, self.spec.timed)
        self.varied = varied(bench, self.source, [case for case in timed if case not in primary])
        cases, left_out = correctness_cases(bench, self.source, primary + near, self.dtype)
        if self.options.quick:
            cases = [c for c in cases if c.stage in ("smoke_test", "determinism")]
        return cases, timed, left_out

    def run(self, launcher: Launcher) -> dict[str, Any]:
        bench = self.bench(launcher)
        cases, timed, left_out = self.cases(bench)
        # read before the kernel runs: nothing it does can move the physical floor
        self.gpu = gpu.detect() if bench.on_gpu else None
        self.calibration = gpu.load_calibration(self.gpu) if self.gpu else None
        cache = cache_dir() / "kernels" / "baseline"
        workers = {"candidate": bench.open_kernel(self.source, cases + timed + self.varied)}
        if timed:
            workers["baseline"] = bench.worker(cache, timed)
        if self.options.compile_baseline and not all(compiled_ratio(bench, case) for case in timed):
            workers["compiled"] = bench.worker(cache, timed)
        if timed and self.best:
            workers["best"] = bench.open_kernel(self.best, timed)
        return {"left_out": left_out, **self._judged(bench, workers, cases, timed)}

    def _judged(self, bench: Bench, workers, cases: list[Case], timed: list[Case]) -> dict[str, Any]:
        stages = [Stage(name, total=sum(c.stage == name for c in cases)) for name in bench.stages]
        values: dict[str, Any] = {}
        try:
            self.progress("starting")
            load_seconds = bench.load_kernel(workers["candidate"], self.limits)
            self.lap("start")
            if self.source.backend == "cuda" and not bench.on_gpu and b"CUDA_SRC" in self.source.data:
                return self._compiled_only(workers["candidate"])
            stages, replies = run_stages(
                bench, workers["candidate"], cases, self.limits, self.source.nondeterministic, self.progress,
                lambda: self._compile_ahead(bench, workers["candidate"], cases + self.varied),
            )  # fmt: skip
            values["compile_seconds"] = load_seconds + (replies[0]["host_s"] if replies else 0.0)
        except WorkerFailure as failure:
            stages[0].outcome, stages[0].detail = failure.outcome, failure.detail
            stages[0].failures.append(f"loading kernel.py: {failure}")
        self.lap("stages")
        values |= stage_values(stages, self.options.quick)
        if values["correctness"] != "PASS":
            return values
        try:
            return values | (self._timed(bench, workers, timed) if timed else self._ended(bench, workers, []))
        except WorkerFailure as failure:
            if failure.worker is not workers["candidate"]:
                name = next((n for n, worker in workers.items() if worker is failure.worker), "another")
                raise HarnessFailure(f"the {name} child failed, not kernel.py: {failure}") from None
            reason = {"correctness": failure.outcome, "reason": f"while timing: {failure}"}
            return values | reason | {"traceback": failure.detail}
        except torch.OutOfMemoryError:
            return values | {"correctness": "CRASH", "reason": f"while timing: {OUT_OF_MEMORY}"}

    def _compiled_only(self, candidate: Worker) -> dict[str, Any]:
        """Without a GPU a CUDA kernel can be compiled, not judged: a FAIL that says how far it came."""
        began = time.perf_counter()
        try:
            candidate.ask("compile", 10 * self.limits.load)
        except WorkerFailure as failure:
            if failure.kind == "CudaCompilerMissing":
                return {"correctness": "FAIL", "reason": f"not compiled, not run: no GPU here, and {failure}"}
            return {"correctness": failure.outcome, "reason": str(failure), "traceback": failure.detail}
        values = {"correctness": "FAIL", "reason": "compiled, not run: CUDA C++ needs a GPU to be judged"}
        return values | {"compile_seconds": time.perf_counter() - began, **candidate.resources()}

    def _compile_ahead(self, bench: Bench, candidate: Worker, cases: list[Case]) -> None:
        done = compiled_mark(candidate.cache)  # so that a source is compiled ahead once, not in every run
        if bench.on_gpu and not done.exists():
            if self.source.backend != "cuda":  # one source, compiled whole by the smoke test
                self.progress("compiling")
                bench.compile_ahead(self.source, [c for c in cases if c.stage != "smoke_test"], self.limits)
            self.lap("compile_ahead")
            done.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # never through a link that the kernel left there
                done.touch(exist_ok=False)

    def _timed(self, bench: Bench, workers, timed: list[Case]) -> dict[str, Any]:
        self._start_others(bench, workers, timed)
        self.lap("start_others")
        device, calibration = self.gpu, self.calibration
        timings = []
        for case in timed:
            timing = time_case(
                bench, case, workers, self.limits, device.spec if device else None, calibration, self.progress,
                [other for other in self.varied if other.name == case.name],
            )
            if timing.invalid:
                return {"correctness": "FAIL", "reason": f"timing {case.label}: {timing.invalid}"}
            timings.append(timing)
        # a target's own shape comes first; otherwise the spec names the size that stands for the operator
        main = next((t for t in timings if t.case.name == self.spec.primary and not self.target), timings[0])
        self.lap("timing")
        extra = self._looked_into(bench, workers["candidate"], main.case)
        if refused := self._ended(bench, workers, timings):
            return refused
        self.lap("audit")
        rows = [size_values(bench, timing, device, calibration) for timing in timings]
        return rows[timings.index(main)] | {"sizes": rows, "laps": self.laps} | extra

    def _ended(self, bench: Bench, workers, timings: list[Timing]) -> dict[str, Any]:
        """End the candidate's process. Why the run does not count, if it does not."""
        if fault := foul_play(bench, timings, workers, self.limits):
            return {"correctness": "FAIL", "reason": fault}
        if integrity.digest() != self.digest:
            return {"correctness": "FAIL", "reason": "files of the harness changed while kernel.py ran: see git status"}
        return {}

    def _looked_into(self, bench: Bench, worker: Worker, case: Case) -> dict[str, Any]:
        """What the kernel is made of: resources, library calls, and a profile if one was asked for."""
        layout = bench.stage_fresh(worker, case)
        values: dict[str, Any] = worker.resources()
        library = vendor_calls(*worker.audit(layout, case.scalars, self.limits.call))
        values |= {"vendor_library": bool(library), "vendor_calls": library, "confinement": worker.confinement}
        if self.options.profile:
            values["profile"] = worker.profile(layout, case.scalars, self.limits.call)
            folder = workspace() / "profile"
            folder.mkdir(parents=True, exist_ok=True)
            if not (worker.folder / "trace.json").is_symlink():
                shutil.copyfile(worker.folder / "trace.json", folder / "trace.json")
        if self.options.ncu:
            values |= self._counted(bench, case)
        return values

    def _counted(self, bench: Bench, case: Case) -> dict[str, Any]:
        """Hardware counters from a child of their own under ncu, or the line that says why there are none."""
        try:
            if not bench.on_gpu:
                raise counters.CountersMissing("no GPU here")
            worker = bench.open_kernel(self.source, [case], tuple(counters.command()))
            bench.load_kernel(worker, self.limits, confined=False)
            layout = bench.stage_fresh(worker, case)
            worker.count(layout, case.scalars, 3 * self.limits.call)  # each kernel is replayed for groups of metrics
            return {"counters": counters.read(worker)}
        except (counters.CountersMissing, WorkerFailure) as error:
            return {"counters": {"ncu": f"no counters: {error}"}}

    def _start_others(self, bench: Bench, workers, timed: list[Case]) -> None:
        for name in ("baseline", "compiled"):
            if name in workers:
                bench.load_baseline(workers[name], name == "compiled")
        if "best" in workers:
            bench.load_kernel(workers["best"], self.limits)
        if "compiled" in workers:
            self.progress("torch.compile, once per shape and device")
            try:
                for case in timed:
                    layout = bench.stage_fresh(workers["compiled"], case)
                    workers["compiled"].call(layout, case.scalars, AUTOTUNE_SECONDS)
            except WorkerFailure as failure:
                raise HarnessFailure(f"torch.compile failed; run without --compile-baseline: {failure}") from None


def timed_cases(
    bench: Bench, sizes: str, dtype: str, targets: list[Case], default: tuple[str, ...]
) -> list[Case]:
    """The target's own shapes, then the sizes named (without a target: or the default). Raises UsageError."""
    spec = bench.spec
    shapes = spec.shapes if bench.on_gpu else spec.cpu_shapes
    names = [name for name in sizes.split(",") if name]
    if unknown := [name for name in names if name != "all" and name not in shapes]:
        known = ", ".join(["all", *shapes])
        raise UsageError(f"unknown --sizes {unknown[0]!r} for {spec.name}; known: {known}")
    if not names:
        names = [] if targets else list(default)
    names = list(shapes) if "all" in names else names
    optional = tuple(n for n, a in spec.args.items() if a.optional)  # the plain operator is what is timed
    named = [Case(n, "timing", shapes[n], dtype, omit=optional) for n in names]
    found = [case for case in targets + named if bench.fits(case)]
    if not found:
        raise UsageError("no size fits in this GPU's free memory; name a smaller one with --sizes")
    return found


# ---- from stages and timings to keys --------------------------------------------------------------------------------


def stage_values(stages: list[Stage], quick: bool) -> dict[str, Any]:
    """The stage keys, `correctness`, and the reason of the first failure."""
    broken = next((s for s in stages if s.outcome not in ("PASS", "not run")), None)
    values: dict[str, Any] = {s.name: s.line if s.total else "not run (--quick)" for s in stages}
    values |= {"correctness": broken.outcome if broken else "PASS", "failures": [f for s in stages for f in s.failures]}
    if broken:
        values |= {"reason": broken.failures[0], "traceback": broken.detail}
    return values


def size_values(bench: Bench, timing: Timing, device: gpu.Device | None, calibration) -> dict[str, Any]:
    """The numbers of one size."""
    case, seconds = timing.case, timing.seconds()
    spec = device.spec if device else None
    roof = gpu.roofline(timing.flops, timing.bytes, seconds, case.dtype, spec, calibration, bench.allow_tf32)
    pytorch, best = timing.speedup_over("baseline"), timing.speedup_over("best")
    assert pytorch is not None  # PyTorch is timed in every run
    input_bytes = bench.layout(case).input_bytes
    values = {
        "size": case.name,
        "axes": {k: list(v) if isinstance(v, tuple) else v for k, v in case.size.items()},
        "dtype": case.dtype,
        "latency_us": seconds * 1e6,
        "throughput_tflops": roof.throughput_tflops,
        "bandwidth_gb_s": roof.bandwidth_gb_s,
        "arithmetic_intensity": roof.arithmetic_intensity,
        "ridge_point": roof.ridge_point,
        "bottleneck": roof.bottleneck,
        "flops": timing.flops,
        "bytes": timing.bytes,
        "peak_vram_mb": (timing.samples["candidate"].peak_bytes + input_bytes) / 2**20 if bench.on_gpu else None,
        "pytorch_latency_us": timing.seconds("baseline") * 1e6,
        "speedup_vs_pytorch": pytorch.value,
        "speedup_vs_pytorch_spread": pytorch.spread,
        "noise_pct": 100 * timing.noise,
        "launch_us": timing.launch_seconds * 1e6,
        "repetitions": len(timing.samples["candidate"].device),
        "wall_us": {n: round(statistics.median(sample.wall) * 1e6, 1) for n, sample in timing.samples.items()},
        "outside_us": {n: [round(s * 1e6, 1) for s in sample.outside] for n, sample in timing.samples.items()},
        "device_us": {n: [round(s * 1e6, 3) for s in sample.device] for n, sample in timing.samples.items()},
    }
    for name in ("pct_peak_compute", "pct_peak_bandwidth", "pct_measured_compute", "pct_measured_bandwidth"):
        values[name] = getattr(roof, name)
    if "compiled" in timing.samples:
        keep_compiled_ratio(bench, case, timing.seconds("baseline") / timing.seconds("compiled"))
    if ratio := compiled_ratio(bench, case):
        values["speedup_vs_compile"] = pytorch.value / ratio
    if best:
        values |= {"speedup_vs_best": best.value, "gain_spread_pct": 100 * best.spread}
        values["paired_gain_pct"] = 100 * (best.value - 1)
    return values


def _compiled_path(bench: Bench, case: Case) -> Path:
    """Where the cached comparison of torch.compile with eager PyTorch lies: one file per shape, device and version."""
    tensors = [str(t) for t in bench.spec.tensors(case).values()]
    found = gpu.detect() if bench.on_gpu else None
    device = found.key if found else "cpu"
    key = "|".join([bench.spec.name, device, torch.__version__, str(dict(case.scalars)), *tensors])
    return cache_dir() / "compiled" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def compiled_ratio(bench: Bench, case: Case) -> float | None:
    """How many times faster torch.compile (max-autotune) is than the eager operator, if it was ever measured here."""
    try:
        return float(json.loads(_compiled_path(bench, case).read_text())["faster_than_eager"])
    except (OSError, ValueError, KeyError):
        return None


def keep_compiled_ratio(bench: Bench, case: Case, ratio: float) -> None:
    values = {"op": bench.spec.name, "case": case.label, "faster_than_eager": ratio, "measured": now()}
    atomic_write(_compiled_path(bench, case), json.dumps(values).encode())


def device_values(device: torch.device) -> dict[str, Any]:
    """What a record says of the device."""
    if device.type == "cuda":
        return {"device": "cuda", "gpu_name": torch.cuda.get_device_name(device), "torch": torch.__version__,
                "gpu_memory_mb": torch.cuda.get_device_properties(device).total_memory / 2**20}  # fmt: skip
    label = "cpu (Triton's interpreter: timings are not a measurement)"
    return {"device": label, "gpu_name": None, "torch": torch.__version__}


class GpuBusy(RuntimeError):
    """Another run is being timed on this GPU."""


@contextlib.contextmanager
def gpu_lock(device: torch.device, timeout: float = 600):
    """One run per GPU at a time: a timing beside another job is worth nothing."""
    if device.type != "cuda":
        yield
        return
    name = str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index or 0))
    path = cache_dir() / "locks" / f"gpu-{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=timeout):
            yield
    except Timeout:
        raise GpuBusy(f"another run holds this GPU ({path}); waited {timeout:.0f} s") from None


def calibrate() -> gpu.Calibration:
    """Measure this GPU's ceilings with nothing beside it, and keep them. Raises UsageError where there is no GPU."""
    device = gpu.detect()
    if device is None:
        raise UsageError("--calibrate measures a GPU and there is none here")
    from autokernel.calibrate import calibrate as measure  # Triton, which a run of the judge leaves to its children

    with gpu_lock(torch.device("cuda")):
        return measure(device)
