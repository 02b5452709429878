"""Paired timing: the candidate, the best kernel so far and PyTorch on the same fresh inputs, in alternating order.

Each is its own child process, so each is measured under the same conditions. One repetition draws new content, hands it
to every child, and calls them one after the other, the order reversed every time, so that drift in clocks and
temperature cancels in the ratios. The number of repetitions follows from PyTorch's time, never from the candidate's.
Every timed output is checked: against PyTorch's, or against the oracle where the judge chooses to; calls with the hard
contents of the stability stage come between. All answers to check by are computed after the candidate's own has come.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from autokernel.gpu import Calibration, GpuSpec, floor_seconds
from autokernel.judge import Bench, Limits, ask_once, values_compared
from autokernel.spec import Case, content_dtypes
from autokernel.worker import Worker

REPETITIONS = (12, 40)  # fewest and most timed repetitions of a size
ATTEMPTS = 3  # a size whose clocks disagree is timed again: what chance does does not recur, what a kernel does would
STEADY = 0.004  # half-width of the paired gain's interval: over it a size gets its repetitions again,
MORE = 2  # so many times at most
SLOW = 4  # times the best variant's time: such a variant of a sweep is not worth many repetitions
CPU_REPETITIONS = (3, 5)  # the interpreter's times mean nothing; they only let the loop be tried
TARGET_SECONDS = 0.12  # device time of PyTorch's share of one size
ORACLE_CHECKS = 3  # timed outputs checked against float64; the others against PyTorch's output
FLOOR_SLACK = 0.90  # a time below this share of the physical floor is impossible
CLOCK_SLACK_S = 400e-6  # judge's clock beside the child's, against PyTorch's child: contexts take turns on the GPU, and
# on an H200 quarters of honest kernels were seen at -250 to +520 us, one of some 50 above this
AFTER_SLACK_S = 40e-6  # a process with more streams is synchronised later: 23 us were seen with a CUDA graph on an H200
CPU_CLOCK_SLACK_S, CPU_AFTER_SLACK_S = 3e-3, 200e-6
CPU_FLOOR_S, CPU_FLOOR_BANDWIDTH = 0.5e-6, 1e12  # calling an empty Python function; no CPU moves a terabyte a second
ON_FREEING = "of work ran as the last results were freed, between the calls"
SETTLING_S, WATCHED_S = 0.01, 0.02  # PyTorch's threads spin up to some 5 ms after their work; then none may run
OUTSIDE = "that the child's does not: work outside the timed window"
BASELINE_FACTOR, CPU_BASELINE_FACTOR = 1.2, 4.0  # beside the kernel's process over without it


@dataclass
class Sample:
    """One child's timed calls of one size: device seconds, host seconds to launch, the judge's own wall seconds."""

    drop: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    flush: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def outside(self) -> list[float]:
        """What the judge's clock saw beside the intervals that the child tells of, call by call."""
        inside = zip(self.drop, self.before, self.flush, self.device, self.after, strict=True)
        return [wall - sum(told) for wall, told in zip(self.wall, inside, strict=True)]

    def quiet(self, interval: list[float]) -> float:
        """The lower quartile of an interval in those calls whose times make the result, the quicker half.

        Work that each of them hides moves it, a busy host or a late switch between processes does not.
        """
        quick = statistics.median(self.device)
        found = sorted(i for i, device in zip(interval, self.device, strict=True) if device <= quick)
        return found[len(found) // 4]

    def add(self, reply: dict) -> None:
        for name in ("drop", "before", "flush", "device", "host", "after", "wall", "queued"):
            getattr(self, name).append(reply[f"{name}_s"])
        self.peak_bytes = max(self.peak_bytes, reply["peak_bytes"])


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios and the half-width of its 95 % interval, both as plain numbers."""

    value: float
    spread: float

    @classmethod
    def of(cls, slower: list[float], faster: list[float]) -> Ratio:
        """How many times faster the second is than the first, pair by pair."""
        ratios = [a / b for a, b in zip(slower, faster, strict=True)]
        return cls(statistics.median(ratios), median_spread(ratios))


def median_spread(values: list[float]) -> float:
    """Half-width of the median's 95 % interval: 1.96 * 1.2533 * sigma / sqrt(n), sigma from the absolute deviations."""
    middle = statistics.median(values)
    sigma = 1.4826 * statistics.median([abs(v - middle) for v in values])
    return 1.96 * 1.2533 * sigma / math.sqrt(len(values))


@dataclass
class Timing:
    """One size, timed. samples by child: "candidate", "baseline", and "best" and "compiled" where they took part.

    invalid: why the numbers must not be believed, or "".
    """

    case: Case
    flops: float
    bytes: int
    samples: dict[str, Sample]
    launch_seconds: float = 0.0  # host time of one call among many back to back
    invalid: str = ""
    wait: float = 0.0  # seconds of the wait kernel before each timed call
    usual: float = 0.0  # the rms error that PyTorch makes in this case

    @classmethod
    def of(cls, bench: Bench, case: Case, names: Iterable[str]) -> Timing:
        """Of a size that is still to be timed."""
        flops = bench.spec.flops(case.size, {**bench.spec.scalars, **case.scalars})
        return cls(case, flops, bench.spec.bytes_moved(case), {name: Sample() for name in names})

    def seconds(self, name: str = "candidate") -> float:
        return statistics.median(self.samples[name].device)

    def speedup_over(self, name: str) -> Ratio | None:
        """How many times faster the candidate is than another child; None if that did not take part."""
        if name not in self.samples:
            return None
        return Ratio.of(self.samples[name].device, self.samples["candidate"].device)

    @property
    def clock_gap(self) -> float:
        """Seconds that the judge's clock sees beside the candidate's own, more than beside PyTorch's."""
        ours, theirs = (self.samples[name].quiet(self.samples[name].outside) for name in ("candidate", "baseline"))
        return ours - theirs

    @property
    def noise(self) -> float:
        """Relative half-width of the candidate's median."""
        return median_spread(self.samples["candidate"].device) / self.seconds()


def time_case(
    bench: Bench,
    case: Case,
    workers: dict[str, Worker],
    limits: Limits,
    gpu: GpuSpec | None = None,
    calibration: Calibration | None = None,
    progress: Callable[[str], None] = lambda text: None,
    varied: Sequence[Case] = (),
) -> Timing:
    """Time one size on loaded workers, "candidate" and "baseline" among them.

    varied: the size with other options and layouts, asked between the timed calls.
    """
    progress(f"timing: {case.label}")
    timing = Timing.of(bench, case, workers)
    hosts, devices = _warm_up(bench, timing, workers, limits)
    if timing.invalid:
        return timing
    fewest, most = bench.repetitions or (REPETITIONS if bench.on_gpu else CPU_REPETITIONS)
    repetitions = max(fewest, min(most, int(TARGET_SECONDS / max(devices["baseline"], 1e-9))))
    oracle = random.SystemRandom().sample(range(repetitions), min(ORACLE_CHECKS, repetitions))
    slow = not bench.on_gpu and hosts["candidate"] > 0.02
    plan = [*range(repetitions), *_between(bench, case, varied, slow)]
    for _ in range(ATTEMPTS):
        _attempt(bench, timing, workers, limits, plan, repetitions, oracle)
        if timing.invalid:
            return timing
        timing.invalid = _impossible(bench, timing, gpu, calibration)
        if not timing.invalid:
            break
    if bench.on_gpu:
        timing.invalid = timing.invalid or _launched(bench, timing, workers["candidate"], limits)
    else:
        timing.launch_seconds = statistics.median(timing.samples["candidate"].host)
    return timing


def _attempt(bench: Bench, timing: Timing, workers, limits: Limits, plan: list, repetitions: int, oracle) -> None:
    """Time a size from the beginning; on a GPU until the gain over the best kernel is known well enough."""
    dice = random.SystemRandom()
    timing.samples = {name: Sample() for name in workers}
    dice.shuffle(plan)
    _take_turns(bench, timing, workers, limits, plan, oracle, looks=dice.sample(range(len(plan)), 2))
    for _ in range(MORE if bench.on_gpu and not bench.repetitions else 0):
        gain = timing.speedup_over("best")
        if not timing.invalid and gain and gain.spread > STEADY:
            _take_turns(bench, timing, workers, limits, list(range(repetitions)))


def _launched(bench: Bench, timing: Timing, worker: Worker, limits: Limits) -> str:
    """Take the host time of calls back to back; what is wrong with one of their outputs."""
    case, layout = timing.case, bench.layout(timing.case)
    private = bench.draw(case, layout)
    worker.stage(layout, private)
    timing.launch_seconds = worker.launch_seconds(layout, case.scalars, limits.call, bench.seed_of(private))
    fault = _wrong(bench, case, worker, private, timing, True)
    return f"one of many calls back to back: {fault}" if fault else ""


def more_pairs(
    bench: Bench, timing: Timing, workers: dict[str, Worker], limits: Limits, repetitions: int, best: float
) -> None:
    """Add pairs to a size's samples, taken in the same way and with every output checked: what a sweep's variants get.

    best: seconds of the fastest variant so far; one that takes SLOW times as long gets two pairs. Sets timing.invalid.
    """
    _, devices = _warm_up(bench, timing, workers, limits, calls=1)
    if not timing.invalid:
        slow = devices["candidate"] > SLOW * best
        _take_turns(bench, timing, workers, limits, list(range(2 if slow else repetitions)))


def _take_turns(bench: Bench, timing: Timing, workers, limits: Limits, plan: list, oracle=(), looks=()) -> None:
    """The timed calls of a size, all workers in turns, and the candidate's untimed ones (cases) between them.

    oracle: calls that are checked against float64; looks: turns in which processes, threads and replaced
    functions are looked up as the candidate has answered.
    """
    case = timing.case
    answered = bench.draw(case, bench.layout(case))
    for turn, step in enumerate(plan):
        timed = not isinstance(step, Case)
        asked = case if timed else step
        private = bench.draw(asked, bench.layout(asked))
        for name in list(workers)[:: 1 if step % 2 else -1] if timed else ["candidate"]:
            # the others get what the candidate has answered before: nobody else ever holds an answer it could use
            content = private if name == "candidate" else answered
            reply, fault = ask_once(bench, workers[name], asked, content, limits, timing.wait)
            if timed:
                timing.samples[name].add(reply)
            if name == "candidate":
                by_oracle = not timed or step in oracle
                fault = fault or (_looked_at(workers[name]) if turn in looks else "")
                timing.invalid = fault or _wrong(bench, asked, workers[name], private, timing, by_oracle)
                if timing.invalid:
                    return
            workers[name].taken.clear()
        answered = private if timed else answered


def _between(bench: Bench, case: Case, varied: Sequence[Case], slow: bool) -> list[Case]:
    """The case with contents of the stability stage, other options and layouts: asked between the timed calls.

    So a kernel that handles only easy numbers or the usual options at the timed sizes is found out: it cannot tell
    which calls are timed.
    """
    dice = random.SystemRandom()
    contents = [c for c in bench.spec.stability.values() if case.dtype in content_dtypes(c)]
    if slow:  # Triton's interpreter, in which another option may take a thousand times as long
        contents = dice.sample(contents, min(2, len(contents)))
        varied = [replace(v, scalars=case.scalars) for v in dice.sample(varied, min(1, len(varied)))]
    return [replace(case, stage="numerical_stability", content=content) for content in contents] + list(varied)


def _wrong(bench: Bench, case: Case, worker: Worker, private, timing: Timing, by_oracle: bool) -> str:
    """What is wrong with the values of a timed call; "" if nothing."""
    if by_oracle:
        result = values_compared(bench, worker, case, private)
        fault = result.reason
        if case is timing.case:
            timing.usual = max(timing.usual, result.usual)
    else:
        fault = bench.roughly(case, bench.layout(case), private, timing.usual, *worker.outputs()).reason
    return f"{'output of a timed call' if case is timing.case else case.label}: {fault}" if fault else ""


def _warm_up(
    bench: Bench, timing: Timing, workers: dict[str, Worker], limits: Limits, calls: int = 2
) -> tuple[dict[str, float], dict[str, float]]:
    """Calls that the kernels cannot tell from timed ones, and checked like them.

    Sets the seconds that the wait kernel must hide, the same for every child so that their wall times compare. Returns
    host and device seconds of the last call by child.
    """
    case = timing.case
    hosts: dict[str, float] = {}
    devices: dict[str, float] = {}
    for _ in range(calls):
        private = bench.draw(case, bench.layout(case))
        for name, worker in workers.items():
            reply, fault = ask_once(bench, worker, case, private, limits)
            hosts[name], devices[name] = reply["host_s"], reply["device_s"]
            if name == "candidate":
                timing.invalid = fault or _wrong(bench, case, worker, private, timing, True)
            if timing.invalid:
                return hosts, devices
    timing.wait = 1.5 * max(min(s, 2e-3) if bench.on_gpu else s for s in hosts.values()) + 30e-6
    return hosts, devices


def _impossible(bench: Bench, timing: Timing, gpu: GpuSpec | None, calibration: Calibration | None) -> str:
    """Why a time cannot be true: under the physical floor, or under what the judge's own clock allows."""
    return below_floor(bench, timing, gpu, calibration) or (
        _hidden_on_gpu(timing) if bench.on_gpu else _hidden_on_cpu(timing)
    )


def below_floor(bench: Bench, timing: Timing, gpu: GpuSpec | None, calibration: Calibration | None) -> str:
    """Why a time is under what the hardware could do; "" if it is not."""
    case, seconds = timing.case, timing.seconds()
    if bench.on_gpu:
        floor = floor_seconds(
            timing.flops if bench.spec.least_flops else 0.0, bench.spec.bytes_read(case), case.dtype, gpu, calibration,
            write_bytes=bench.spec.bytes_written(case), allow_tf32=bench.allow_tf32,
        )  # fmt: skip
        floor = FLOOR_SLACK * floor if floor else 0.0
    else:
        floor = CPU_FLOOR_S + timing.bytes / CPU_FLOOR_BANDWIDTH
    if seconds < floor:
        return f"{seconds * 1e6:.3g} us is below the physical floor of {floor * 1e6:.3g} us"
    return ""


def _hidden_on_gpu(timing: Timing) -> str:
    """Work beside the two events. Both children do the same there, so PyTorch's child says what it should take."""
    ours, theirs = timing.samples["candidate"], timing.samples["baseline"]
    late = ours.quiet(ours.after) - theirs.quiet(theirs.after)
    if late > AFTER_SLACK_S + 0.1 * timing.seconds():
        return f"{late * 1e6:.0f} us of work ran after the call's end event: join your streams"
    freed = ours.quiet(ours.drop) - theirs.quiet(theirs.drop)
    if freed > AFTER_SLACK_S + 0.1 * timing.seconds():
        return f"{freed * 1e6:.0f} us {ON_FREEING}"
    # before the start event: the wait, in which the inputs are not known yet, and the flush, which fills the memory
    # bus, so that work on another stream shows in its time
    intervals = {"wait": (ours.before, theirs.before, 10e-6), "flush": (ours.flush, theirs.flush, 3e-6)}
    for name, (mine, other, slack) in intervals.items():
        early = statistics.median(mine) - statistics.median(other)
        if abs(early) > slack + 0.1 * statistics.median(other):
            return f"the {name} before the call took {early * 1e6:+.0f} us more than PyTorch's: something ran beside it"
    if timing.clock_gap > CLOCK_SLACK_S + 0.1 * timing.seconds("baseline"):
        return f"the judge's clock sees {timing.clock_gap * 1e6:.0f} us {OUTSIDE}"
    return ""


def _hidden_on_cpu(timing: Timing) -> str:
    """The same by the judge's clock alone: the quietest call against PyTorch's noisiest, as other programs run here."""
    ours, theirs = timing.samples["candidate"], timing.samples["baseline"]
    late = min(ours.after) - max(theirs.after)
    if late > CPU_AFTER_SLACK_S + 0.1 * timing.seconds():
        return f"{late * 1e6:.0f} us of work ran after the call had returned"
    freed = min(ours.drop) - max(theirs.drop)
    if freed > CPU_CLOCK_SLACK_S + 0.1 * timing.seconds():
        return f"{freed * 1e6:.0f} us {ON_FREEING}"
    # the queue may have been inside of the child's window or not: whichever speaks for the kernel
    extra = min(o - q for o, q in zip(ours.outside, ours.queued, strict=True)) - max(theirs.outside)
    if extra > CPU_CLOCK_SLACK_S + 0.1 * timing.seconds():
        return f"the judge's clock sees {extra * 1e3:.1f} ms {OUTSIDE}"
    return ""


def _replaced(worker: Worker) -> str:
    names = ", ".join(worker.replaced())[:300]
    return f"kernel.py replaced {names} for the whole process" if names else ""


def _looked_at(worker: Worker) -> str:
    """What the kernel's process does or is between two calls that it should not; "" if nothing."""
    busy, _ = worker.idle_activity(WATCHED_S, SETTLING_S)
    if busy > 0.5:
        return f"kernel.py keeps working between calls: {100 * busy:.0f} % of a core"
    return _companions(worker) or _replaced(worker)


def _companions(worker: Worker) -> str:
    """Processes of the kernel's between two calls, when all of it should wait for the judge."""
    companions = worker.child.companions()
    return f"kernel.py left {len(companions)} processes running" if companions else ""


# ---- after the last size --------------------------------------------------------------------------------------------


def foul_play(bench: Bench, timings: list[Timing], workers: dict[str, Worker], limits: Limits) -> str:
    """What the candidate's process did besides answering; "" if nothing. Ends that process.

    Functions it replaced, processes and threads it keeps, and whether PyTorch is faster once it is gone.
    """
    candidate = workers["candidate"]
    if moved := [name for name, worker in workers.items() if worker.child.rescheduled()]:
        return f"priority or processors of {', '.join(moved)} were changed"
    if fault := _replaced(candidate) or _companions(candidate):
        return fault
    busy, wakes = candidate.idle_activity()
    if busy > 0.25 or wakes > 400:
        return f"kernel.py keeps working between calls: {100 * busy:.0f} % of a core, {wakes:.0f} wake-ups a second"
    candidate.child.kill()
    for timing in timings:
        for name in timing.samples.keys() - {"candidate"}:
            private = bench.draw(timing.case, bench.layout(timing.case))
            replies = [ask_once(bench, workers[name], timing.case, private, limits, timing.wait)[0] for _ in range(5)]
            alone, beside = [r["device_s"] for r in replies], timing.samples[name].device
            if _disturbed(alone, beside, bench.on_gpu):
                by, without = statistics.median(beside) * 1e6, statistics.median(alone) * 1e6
                return (
                    f"{name} at {timing.case.label} took {by:.0f} us beside kernel.py, {without:.0f} us without it: "
                    "the kernel's process disturbs what it is compared with"
                )
    return ""


def _disturbed(alone: list[float], beside: list[float], on_gpu: bool) -> bool:
    """Whether a time is too long to be chance. On a CPU, where other programs run: the quickest against the slowest."""
    if on_gpu:
        return statistics.median(beside) > BASELINE_FACTOR * statistics.median(alone) + 5e-6
    return min(beside) > CPU_BASELINE_FACTOR * max(alone) + CPU_CLOCK_SLACK_S
