"""Paired timing: the candidate, the best kernel so far and PyTorch on the same fresh inputs, in alternating order.

Each is its own child process, so each is measured under the same conditions. One repetition draws new content, hands it
to every child, and calls them one after the other, the order reversed every time, so that drift in clocks and
temperature cancels in the ratios. The number of repetitions follows from PyTorch's time, never from the candidate's.
Every timed output is checked: against PyTorch's output always, against the oracle where the judge chooses to.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from autokernel.compare import compare
from autokernel.gpu import Calibration, GpuSpec, floor_seconds
from autokernel.judge import Bench, Limits, reply_fault
from autokernel.spec import Case
from autokernel.worker import Worker

REPETITIONS = (12, 40)  # fewest and most timed repetitions of a size
CPU_REPETITIONS = (3, 5)  # the interpreter's times mean nothing; they only let the loop be tried
TARGET_SECONDS = 0.12  # device time of PyTorch's share of one size
ORACLE_CHECKS = 3  # timed outputs checked against float64; the others against PyTorch's output
FLOOR_SLACK = 0.90  # a time below this share of the physical floor is impossible
CLOCK_SLACK_S = 30e-6  # by how much the child's time may undercut the judge's clock, and PyTorch's child


@dataclass
class Sample:
    """One child's timed calls of one size: device seconds, host seconds to launch, the judge's own wall seconds."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def add(self, reply: dict) -> None:
        self.device.append(reply["device_s"])
        self.host.append(reply["host_s"])
        self.after.append(reply["after_s"])
        self.wall.append(reply["wall_s"])
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

    def seconds(self, name: str = "candidate") -> float:
        return statistics.median(self.samples[name].device)

    def speedup_over(self, name: str) -> Ratio | None:
        """How many times faster the candidate is than another child; None if that did not take part."""
        if name not in self.samples:
            return None
        return Ratio.of(self.samples[name].device, self.samples["candidate"].device)

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
) -> Timing:
    """Time one size on loaded workers, "candidate" and "baseline" among them."""
    progress(f"timing: {case.label}")
    layout = bench.layout(case)
    flops = bench.spec.flops(case.size, {**bench.spec.scalars, **case.scalars})
    timing = Timing(case, flops, bench.spec.bytes_moved(case), {name: Sample() for name in workers})
    wait, repetitions = _warm_up(bench, case, layout, workers, limits)
    oracle = set(random.SystemRandom().sample(range(repetitions), min(ORACLE_CHECKS, repetitions)))
    for index in range(repetitions):
        private = bench.draw(case, layout)
        for name in workers if index % 2 == 0 else reversed(workers):
            workers[name].stage(layout, private)
            reply = workers[name].call(layout, case.scalars, limits.call, wait)
            timing.samples[name].add(reply)
            if name == "candidate":
                timing.invalid = reply_fault(reply, layout)
        timing.invalid = timing.invalid or _wrong(bench, case, layout, private, workers, index in oracle)
        if timing.invalid:
            return timing
    if bench.on_gpu:
        timing.launch_seconds = workers["candidate"].call(layout, case.scalars, limits.call, do="launch")["host_s"]
    else:
        timing.launch_seconds = statistics.median(timing.samples["candidate"].host)
    timing.invalid = _impossible(bench, timing, gpu, calibration)
    return timing


def _wrong(bench: Bench, case: Case, layout, private, workers: dict[str, Worker], by_oracle: bool) -> str:
    """What a timed call did wrong; "" if nothing."""
    if not workers["candidate"].inputs_untouched(layout, private):
        return "an input was overwritten in a timed call"
    out = workers["candidate"].output(layout)
    if by_oracle:
        result = bench.judged(case, layout, private, out)
    else:
        result = _against_torch(bench, case, out, workers["baseline"].output(layout))
    return "" if result.ok else f"output of a timed call: {result.reason}"


def _against_torch(bench: Bench, case: Case, out, torch_out):
    """A cheap check of a whole timed output. PyTorch's rounding is in the yardstick, so the tolerance is wider."""
    return compare(
        out, torch_out.double(), depth=bench.spec.depth(case.size), factor=4 * bench.spec.tolerance,
        allow_tf32=bench.allow_tf32,
    )  # fmt: skip


def _warm_up(bench: Bench, case: Case, layout, workers: dict[str, Worker], limits: Limits) -> tuple[float, int]:
    """Two calls each that the kernels cannot tell from timed ones.

    Returns the seconds that the wait kernel must hide, the same for every child so that their wall times compare, and
    the number of repetitions.
    """
    host, base = 0.0, 1.0
    for _ in range(2):
        private = bench.draw(case, layout)
        hosts = []
        for name, worker in workers.items():
            worker.stage(layout, private)
            reply = worker.call(layout, case.scalars, limits.call, bench.random_wait())
            hosts.append(min(reply["host_s"], 2e-3))
            if name == "baseline":
                base = reply["device_s"]
        host = max(hosts)
    fewest, most = REPETITIONS if bench.on_gpu else CPU_REPETITIONS
    return 1.5 * host + 30e-6, max(fewest, min(most, int(TARGET_SECONDS / max(base, 1e-9))))


def _impossible(bench: Bench, timing: Timing, gpu: GpuSpec | None, calibration: Calibration | None) -> str:
    """Why a time cannot be true: under the physical floor, or under what the judge's own clock allows."""
    if not bench.on_gpu:
        return ""
    case, out_bytes = timing.case, bench.spec.output(timing.case).nbytes
    floor = floor_seconds(
        timing.flops, bench.spec.bytes_read(case), case.dtype, gpu, calibration, write_bytes=out_bytes,
        allow_tf32=bench.allow_tf32,
    )  # fmt: skip
    if floor and timing.seconds() < FLOOR_SLACK * floor:
        return f"{timing.seconds() * 1e6:.1f} us is below the physical floor of {floor * 1e6:.1f} us"
    ours, theirs = timing.samples["candidate"], timing.samples["baseline"]
    by_child = timing.seconds() - timing.seconds("baseline")
    by_judge = statistics.median(ours.wall) - statistics.median(theirs.wall)
    hidden = statistics.median(ours.after) - statistics.median(theirs.after)
    slack = CLOCK_SLACK_S + 0.15 * timing.seconds("baseline") + statistics.median(ours.host)
    if hidden > 10e-6 + 0.1 * timing.seconds():
        return f"{hidden * 1e6:.0f} us of work ran after the call's end event: join your streams"
    if by_judge - by_child > slack:
        return (
            f"the child's clock says {by_child * 1e6:+.0f} us against PyTorch, the judge's {by_judge * 1e6:+.0f} us: "
            "work outside the timed window"
        )
    return ""

