"""Many variants of a kernel on one device: compiled and screened side by side, then timed one at a time.

A variant is loaded once, into a confined child (a seat) that holds several of one file and lives on; a failure costs
its variant, and its seat, which a fresh one replaces. The screen is a call on fresh inputs against float64. Times come
from the judge's own paired calls; the anchor is PyTorch's operator in its own child, so that drift cancels between
variants, rounds and GPUs. Successive halving: every right variant gets a few pairs, the best of them more (Jamieson and
Talwalkar 2016, arXiv:1502.07943). Nothing here is a verdict: the winner goes through the whole judge alone.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from autokernel import gpu, ops
from autokernel.judge import OUT_OF_MEMORY, START_SECONDS, Bench, Limits, ask_once, value_fault
from autokernel.paths import cache_dir
from autokernel.process import Launcher, kernel_cache, launcher
from autokernel.run import HarnessFailure, gpu_lock
from autokernel.scale import children, cores_each
from autokernel.spec import Case
from autokernel.timing import Timing, below_floor, more_pairs
from autokernel.worker import COMPILE_ERRORS, Worker, WorkerFailure

# timed: right and timed; right: not timed (no GPU, or the time was up); compiled: CUDA C++ without a GPU; others failed
STATUSES = ("timed", "right", "compiled", "wrong", "compile_error", "out_of_resources", "crash", "timeout",
            "impossible", "not_run")  # fmt: skip
RUNGS = ((5, 1.0), (10, 1 / 3))  # pairs added, and for which share of the right variants
FINAL = ((25, 1.0),)
GOOD = ("timed", "right", "compiled")
FEWEST = 4  # variants that a rung keeps at least
REFUSALS = ("OutOfResources", *COMPILE_ERRORS, "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct")
CHILD_BYTES = 1 << 30  # a child's context and its own tensors on the GPU, beside the arena


@dataclass(frozen=True)
class Variant:
    """One kernel text. family: what its compile cache goes by, and its seats: the variants of one file share them."""

    number: int
    name: str
    data: bytes
    backend: str
    family: bytes


@dataclass(frozen=True)
class Job:
    """Variants to find out about, on which cases. seconds: deadline of one call; left: of the whole job, if any.

    sweep: names the sweep, by which a process knows what it has found out already.
    """

    op: str
    cases: tuple[Case, ...]
    variants: tuple[Variant, ...]
    timed: bool
    rungs: tuple[tuple[int, float], ...] = RUNGS
    seconds: float = 60.0
    left: float | None = None
    allow_tf32: bool = False
    cores: int = 0
    sweep: str = ""


@dataclass
class Finding:
    """What was found out about a variant. us: of the first case; speedup over PyTorch: geometric mean of the cases."""

    number: int
    status: str = "not_run"
    reason: str = ""
    speedup: float | None = None
    spread: float | None = None  # relative half-width of the speedup's 95 % interval
    us: dict[str, float] = field(default_factory=dict)
    pairs: int = 0
    resources: dict[str, int | None] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Smaller is better; infinite for what failed."""
        return 1 / self.speedup if self.speedup else 1.0 if self.status in GOOD else math.inf

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason, self.speedup, self.spread, self.us = status, reason, None, None, {}


def evaluate(job: Job) -> list[Finding]:
    """A job in this process, which keeps its children for the sweep's next one: what runs on each GPU of several."""
    if not children:  # not a process of `scale`: a task of a cluster
        children.append(_open.enter_context(launcher()))
    if _kept and _kept[0].sweep != job.sweep:
        _kept.pop().close()
    if not _kept:
        _kept.append(Lab(job, children[0]))
    return _kept[0].evaluate(job)


_kept: list[Lab] = []
_open = contextlib.ExitStack()


def status_of(failure: WorkerFailure) -> str:
    """One of STATUSES for a call that gave no answer."""
    text = str(failure)
    if failure.outcome != "CRASH":
        return "timeout" if failure.outcome == "TIMEOUT" else "wrong"
    if failure.kind in ("OutOfResources", "OutOfMemoryError") or "too much shared data" in text or "error 701" in text:
        return "out_of_resources"
    if failure.kind == "CudaCompilerMissing":
        return "not_run"
    return "compile_error" if failure.kind in REFUSALS or "PassManager" in text else "crash"


@dataclass(eq=False)
class Seat:
    """A child that holds variants of one family."""

    family: bytes
    worker: Worker
    loaded: set[int] = field(default_factory=set)

    def use(self, variant: Variant, seconds: float) -> Worker:
        """The child with `variant` as the kernel that it calls."""
        path = self.worker.folder / str(variant.number) / "kernel.py"
        if variant.number not in self.loaded:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(variant.data)
        self.worker.ask("use" if variant.number in self.loaded else "load", seconds, path=str(path))
        self.loaded.add(variant.number)
        return self.worker


class Lab:
    """A device with its seats, its anchor and what was found out so far."""

    def __init__(self, job: Job, launcher: Launcher, progress: Callable[[str], None] = lambda text: None):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.bench = Bench(ops.get(job.op), self.device, launcher, job.allow_tf32)
        self.cases, self.limits, self.progress = list(job.cases), Limits(job.seconds, job.seconds), progress
        self.sweep, self.gpu = job.sweep, gpu.detect() if self.bench.on_gpu else None
        self.calibration = gpu.load_calibration(self.gpu) if self.gpu else None
        self.most = self._most_seats(job.cores or cores_each())
        self.pool = ThreadPoolExecutor(self.most)  # kept: a child ends with the thread that started it
        self.lock, self.oracle = threading.Lock(), threading.Lock()
        self.seats: list[Seat] = []
        self.idle: list[Seat] = []
        self.findings: dict[int, Finding] = {}
        self.timings: dict[int, dict[str, Timing]] = {}
        self.anchor = self.bench.worker(cache_dir() / "kernels" / "baseline", self.cases) if job.timed else None
        self.anchored = False

    def _most_seats(self, processors: int) -> int:
        """One a core, as far as the GPU's memory goes: each has an arena, a flush buffer and outputs of its own."""
        most = max(1, processors - 1)
        if self.bench.on_gpu:
            arena = max(self.bench.layout(case).total for case in self.cases)
            each = 2 * arena + self.bench.flush_bytes + CHILD_BYTES
            most = max(1, min(most, int(0.6 * torch.cuda.mem_get_info(self.device)[0] / each)))
        return most

    def evaluate(self, job: Job) -> list[Finding]:
        """Screen what is new, then time. Raises GpuBusy, HarnessFailure."""
        end = time.monotonic() + job.left if job.left is not None else math.inf
        with gpu_lock(self.device):
            new = [v for v in job.variants if v.number not in self.findings]
            for done, _ in enumerate(self.pool.map(lambda v: self._screened(v, end), new), 1):
                self.progress(f"compiling and screening: {done} of {len(new)}")
            if job.timed:
                self._timed(job, end)
                self._microseconds()
        return [self.findings[v.number] for v in job.variants]

    # ---- seats -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _seated(self, variant: Variant, fresh: bool = False) -> Iterator[Seat]:
        """A seat for a variant. What goes wrong in it becomes the variant's finding, and costs the seat."""
        finding, seat, clean = self.findings[variant.number], self._seat(variant, fresh), False
        try:
            yield seat
            clean = finding.status in GOOD
        except WorkerFailure as failure:
            if failure.worker is self.anchor:
                raise HarnessFailure(f"PyTorch's child failed, not a variant: {failure}") from None
            finding.fail(status_of(failure), str(failure))
            clean = failure.kind in REFUSALS  # refused before anything ran: the child is as it was
        except torch.OutOfMemoryError:
            finding.fail("out_of_resources", OUT_OF_MEMORY)
        finally:
            with self.lock:
                (self.idle.append if clean else self.seats.remove)(seat)
            if not clean:
                seat.worker.close()

    def _seat(self, variant: Variant, fresh: bool) -> Seat:
        """An idle seat, best the one that holds the variant; else a new one, for which another may have to go."""
        with self.lock:
            mine = [] if fresh else [seat for seat in self.idle if seat.family == variant.family]
            found = max(mine, key=lambda seat: variant.number in seat.loaded, default=None)
            crowded = self.idle[0] if not found and len(self.seats) >= self.most and self.idle else None
            for taken in filter(None, (found, crowded)):
                self.idle.remove(taken)
            if crowded:
                self.seats.remove(crowded)
        if crowded:
            crowded.worker.close()
        if found:
            return found
        for _ in range(2):
            worker = self.bench.worker(kernel_cache(variant.family), self.cases)
            try:
                worker.share(self.bench.flush_bytes, START_SECONDS)
                break
            except WorkerFailure as failure:
                worker.close()
                why = failure
        else:
            raise HarnessFailure(f"a child process does not start, nothing more was measured: {why}")
        with self.lock:
            self.seats.append(Seat(variant.family, worker))
            return self.seats[-1]

    # ---- screening ---------------------------------------------------------------------------------------------

    def _screened(self, variant: Variant, end: float) -> None:
        finding = self.findings[variant.number] = Finding(variant.number)
        for fresh in (False, True):
            if time.monotonic() > end:
                finding.fail("not_run", "the time was up")
                return
            with self._seated(variant, fresh) as seat:
                alone = seat.loaded <= {variant.number}
                worker = seat.use(variant, self.limits.load)
                finding.status, finding.reason = self._screen(worker, variant)
                finding.resources = worker.resources() if finding.status in GOOD else {}
            if alone or finding.status not in ("wrong", "crash"):
                return  # else perhaps another variant of this seat is to blame

    def _screen(self, worker: Worker, variant: Variant) -> tuple[str, str]:
        """One call of each case on fresh inputs, compared with float64."""
        if variant.backend == "cuda" and not self.bench.on_gpu:
            worker.ask("compile", self.limits.load)
            return "compiled", "CUDA C++ needs a GPU to be run"
        for case in self.cases:
            private = self.bench.draw(case, self.bench.layout(case))
            _, fault = ask_once(self.bench, worker, case, private, self.limits)
            with self.oracle:  # one float64 reference at a time: they are what takes memory
                fault = fault or value_fault(self.bench, worker, case, private)
            if fault:
                return "wrong", f"{case.label}: {fault}"
        return "right", ""

    # ---- timing ------------------------------------------------------------------------------------------------

    def _timed(self, job: Job, end: float) -> None:
        right = [v for v in job.variants if self.findings[v.number].status in ("right", "timed")]
        for rung, (pairs, share) in enumerate(job.rungs):
            right = [v for v in right if self.findings[v.number].score < math.inf]
            right.sort(key=lambda v: self.findings[v.number].score)
            right = right[: max(FEWEST, math.ceil(share * len(right)))]
            for done, variant in enumerate(right, 1):
                if time.monotonic() > end:
                    return
                self.progress(f"timing, rung {rung + 1}: {done} of {len(right)}")
                self._time(variant, pairs)

    def _time(self, variant: Variant, pairs: int) -> None:
        finding = self.findings[variant.number]
        with self._seated(variant) as seat:
            fault = self._pairs(seat.use(variant, self.limits.load), variant, pairs)
            if fault:
                finding.fail("impossible" if "floor" in fault else "wrong", fault)
            else:
                finding.status = "timed"

    def _pairs(self, worker: Worker, variant: Variant, pairs: int) -> str:
        """Time every case; "" if the times can be believed."""
        finding, timings = self.findings[variant.number], self.timings.setdefault(variant.number, {})
        workers = {"candidate": worker, "baseline": self._anchor()}
        for case in self.cases:
            timing = timings.setdefault(case.name, Timing.of(self.bench, case, workers))
            known = [t[case.name] for t in self.timings.values() if case.name in t and not t[case.name].invalid]
            best = min((t.seconds() for t in known if t.samples["candidate"].device), default=math.inf)
            more_pairs(self.bench, timing, workers, self.limits, pairs, best)
            device = self.gpu.spec if self.gpu else None
            if fault := timing.invalid or below_floor(self.bench, timing, device, self.calibration):
                return f"{case.label}: {fault}"
        ratios = [t.speedup_over("baseline") for t in timings.values()]
        finding.speedup = math.exp(statistics.mean(math.log(r.value) for r in ratios if r))
        finding.spread = max(r.spread / r.value for r in ratios if r)
        finding.pairs = min(len(t.samples["candidate"].device) for t in timings.values())
        return ""

    def _microseconds(self) -> None:
        """Turn ratios into times by PyTorch's median over all that was done here, so that clocks drift for nobody."""
        for case in self.cases:
            timed = {n: t[case.name] for n, t in self.timings.items() if self.findings[n].status == "timed"}
            anchor = statistics.median([s for t in timed.values() for s in t.samples["baseline"].device] or [math.nan])
            for number, timing in timed.items():
                ratio = timing.speedup_over("baseline")
                self.findings[number].us[case.name] = 1e6 * anchor / ratio.value if ratio else math.nan

    def _anchor(self) -> Worker:
        assert self.anchor is not None
        if not self.anchored:
            self.anchor.share(self.bench.flush_bytes, START_SECONDS)
            self.anchor.ask("load", START_SECONDS, op=self.bench.spec.name, compile=False)
            self.anchored = True
        return self.anchor

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in [*(seat.worker for seat in self.seats), *filter(None, [self.anchor])]:
            worker.close()
