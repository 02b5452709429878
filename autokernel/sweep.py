"""A sweep: a kernel with other values in CONFIG, or several kernel files; the best of them judged and put in place.

Variants are screened and timed by `lab`, here or on several GPUs (`scale`); a last heat on one GPU times the best few
and the present kernel; the winner goes through all five stages, paired with the present kernel. Only then, and only if
it is faster beyond the noise, kernel.py is changed. A sweep makes one row in the ledger. Without a GPU it screens only.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autokernel import landscape
from autokernel.integrity import Harness
from autokernel.judge import Bench
from autokernel.keep import record_sweep
from autokernel.lab import FINAL, Finding, Job, Lab, Variant
from autokernel.night import Rules, decide, noise_pct
from autokernel.ops import get
from autokernel.paths import atomic_write, repo_root, workspace
from autokernel.process import Launcher
from autokernel.records import Row, RunRecord, now
from autokernel.run import Options, UsageError, device_values, run, timed_cases
from autokernel.scale import Cluster, Gpus, cores_each
from autokernel.source import KernelError, KernelSource, read_kernel
from autokernel.space import Config, Search, parse, rewrite, tunables
from autokernel.targets import active_target

FINALISTS = 4
JUDGED = 3  # winners that may fail the whole judge before the present kernel stays
NOT_TIMED = "without a GPU a sweep only screens: nothing is timed, chosen, judged or recorded"
REFUSED = "fails the whole judge"
ROUNDS = 6  # of a search whose grid is larger than its budget


@dataclass(frozen=True)
class Request:
    """What is swept, and how long. ranges: see `space.parse`; or candidates: a folder of kernel files."""

    ranges: str = ""
    candidates: Path | None = None
    max_variants: int = 256
    minutes: float | None = None
    begun: float = field(default_factory=time.monotonic)  # when the command started: what it costs includes that
    timed: bool | None = None  # default: where there is a GPU; in the interpreter times mean nothing
    say: Callable[[str], None] = lambda text: None  # hears at once what the sweep will not do


@dataclass
class Sweep:
    """One sweep under way: its variants and what is known about them. Number 0 is the present kernel."""

    options: Options
    request: Request
    source: KernelSource
    progress: Callable[[str], None]
    variants: dict[int, Variant] = field(default_factory=dict)
    configs: dict[int, Config] = field(default_factory=dict)
    findings: dict[int, Finding] = field(default_factory=dict)
    finalists: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, data: bytes, backend: str, family: bytes, config: Config) -> int:
        number = len(self.variants)
        self.variants[number] = Variant(number, name, data, backend, family)
        self.configs[number] = config
        return number

    def ranked(self) -> list[int]:
        """Timed variants, the fastest first; those of the last heat before the others, whose few pairs may flatter."""
        timed = [n for n, f in self.findings.items() if f.status == "timed"]
        return sorted(timed, key=lambda n: (n not in self.finalists, self.findings[n].score))

    def faster(self) -> list[int]:
        """Finalists that beat the present kernel on the whole and lose nowhere, the fastest first."""
        before = self.findings[0].us
        found = [n for n in self.ranked() if n in self.finalists and n and not self.gain(n)[0] <= 0]
        return [n for n in found if all(us <= 1.01 * before.get(s, math.inf) for s, us in self.findings[n].us.items())]

    def gain(self, number: int) -> tuple[float, float]:
        """Percent over the present kernel and the noise of that, from pairs with the same anchor."""
        ours, now_ = self.findings[number], self.findings[0]
        if not (ours.speedup and now_.speedup):
            return math.nan, math.nan
        spread = math.hypot((ours.spread or 0.0), (now_.spread or 0.0))
        return 100 * (ours.speedup / now_.speedup - 1), noise_pct({"gain_spread_pct": 100 * spread})


class Here:
    """The place that is this process and its GPU; its children stay for the whole sweep."""

    width = 1

    def __init__(self, children: Launcher, progress: Callable[[str], None]):
        self.children, self.progress, self.cores = children, progress, cores_each()
        self.lab: Lab | None = None

    def spread(self, function: str, jobs: Sequence[Job]) -> Iterator[tuple[int, list[Finding]]]:
        for index, job in enumerate(jobs):
            self.lab = self.lab or Lab(job, self.children, self.progress)
            yield index, self.lab.evaluate(job)

    def close(self) -> None:
        if self.lab:
            self.lab.close()
        self.lab = None


def sweep(
    options: Options, request: Request, children: Launcher, progress: Callable[[str], None], harness: Harness,
    elsewhere: Gpus | Cluster | None = None,
) -> tuple[RunRecord, Sweep]:  # fmt: skip
    """Run a sweep to its end: files, row and record are written. The record is the winner's, with a part "sweep".

    Where nothing is timed there is no winner: the record has no verdict, and neither it nor a row is written.
    children: of the judge, and of the sweep unless it runs `elsewhere`, which is closed when the variants are done.
    Raises UsageError, SpaceError for what cannot be swept, GpuBusy, HarnessFailure, ScaleError, RecordError.
    """
    started = now()
    this, job = _prepared(options, request, progress)
    end = request.begun + 60 * request.minutes if request.minutes is not None else math.inf
    with contextlib.ExitStack() as stack:
        where: Here | Gpus | Cluster = elsewhere or Here(children, progress)
        stack.callback(where.close)
        _explore(this, job, where, end)
        if job.timed and (best := this.ranked()[:FINALISTS]):
            progress("last heat")
            this.finalists = [*dict.fromkeys([0, *best])]
            _measure(this, replace(job, rungs=FINAL), this.finalists, where, math.inf, together=True)
    swept = time.monotonic() - request.begun
    this.values |= {"gpus": where.width, "sweep_seconds": swept, "case": ", ".join(c.label for c in job.cases)}
    record, winner = _judged(this, children, harness) if job.timed else (RunRecord(_unjudged(this)), None)
    record.values |= {"started": started, "variants": len(this.findings), "sweep": this.values}
    record.values["bench_time_seconds"] = time.monotonic() - request.begun
    _count(this, record)
    if winner is None:
        for name, data in _files(this).items():
            atomic_write(workspace() / name, data)
    else:
        _finish(this, record, winner)
    return record, this


def _prepared(options: Options, request: Request, progress: Callable[[str], None]) -> tuple[Sweep, Job]:
    """What is swept, and the cases: those on which `bench.py` times the kernel, the operator's primary size first."""
    target = active_target()
    try:
        source = read_kernel(options.kernel, target.spec.name if target else None)
    except KernelError as error:
        raise UsageError(str(error)) from None
    spec, device = get(source.kernel_type), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(spec, device, allow_tf32=options.allow_tf32)
    dtype = options.dtype or (target.dtype if target else spec.dtypes[0])
    cases = timed_cases(bench, options.sizes, dtype, target.cases(bench.on_gpu) if target else [], spec.timed)
    cases.sort(key=lambda case: case.name != spec.primary)
    timed = bench.on_gpu if request.timed is None else request.timed
    job = Job(spec.name, tuple(cases), (), timed, seconds=options.timeout, allow_tf32=options.allow_tf32,
              sweep=uuid.uuid4().hex)  # fmt: skip
    return Sweep(options, request, source, progress), job


# ---- which, and how fast --------------------------------------------------------------------------------------------


def _explore(this: Sweep, job: Job, where: Here | Gpus | Cluster, end: float) -> None:
    """Find out about the present kernel and the others, in as many rounds as the search takes."""
    request, data = this.request, this.source.data
    if request.candidates:
        _measure(this, job, _read_candidates(this, request.candidates), where, end)
        return
    space, config = parse(request.ranges, data), tunables(data)
    family = rewrite(data, {name: values[0] for name, values in space.items()})
    seed = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")  # another kernel.py, another walk
    batch = max(16, where.width * where.cores, request.max_variants // ROUNDS)
    search = Search(space, {name: config[name] for name in space}, request.max_variants, seed, batch)
    this.values["grid"] = search.size
    while (found := search.propose()) and (time.monotonic() < end or not this.findings):
        numbers = [
            this.add(landscape.named(c), rewrite(data, c), this.source.backend, family, c) for c in found
        ]
        _measure(this, job, numbers, where, end)
        for number in numbers:
            search.tell(this.configs[number], this.findings[number].score)


def _read_candidates(this: Sweep, folder: Path) -> list[int]:
    """Number every .py file of a folder; what is no kernel for this operator is found wrong here. The present first."""
    if not folder.is_dir() or not (paths := sorted(folder.glob("*.py"))):
        raise UsageError(f"--candidates {folder}: no folder with kernel files (*.py)")
    numbers = [this.add("(kernel.py)", this.source.data, this.source.backend, this.source.data, {})]
    for path in paths[: this.request.max_variants]:
        try:
            found = read_kernel(path, this.source.kernel_type)
            numbers.append(this.add(path.name, found.data, found.backend, found.data, {}))
        except KernelError as error:
            number = this.add(path.name, b"", "", b"", {})
            this.findings[number] = Finding(number, "wrong", str(error))
    return numbers


def _measure(this: Sweep, job: Job, numbers: list[int], where, end: float, together: bool = False) -> None:
    """Have the places evaluate these variants, dealt out evenly, or together in one place."""
    if not job.timed and 0 in numbers:  # the first of all
        this.request.say(NOT_TIMED)
    parts = 1 if together else max(1, min(where.width, len(numbers)))
    left = None if math.isinf(end) else max(1.0, end - time.monotonic())
    jobs = [
        replace(job, variants=tuple(this.variants[n] for n in numbers[part::parts]), left=left, cores=where.cores)
        for part in range(parts)
    ]
    for done, (_, findings) in enumerate(where.spread("autokernel.lab:evaluate", jobs), 1):
        this.findings |= {f.number: f for f in findings}
        if where.width > 1:
            this.progress(f"{done} of {parts} GPUs are done with {len(numbers)} variants")
    atomic_write(workspace() / "sweep.tsv", landscape.tsv(this))  # of a sweep that is killed later


# ---- the winner -----------------------------------------------------------------------------------------------------


def _judged(this: Sweep, children: Launcher, harness: Harness) -> tuple[RunRecord, int]:
    """The whole judge on the fastest that passes it; where none is faster than the present kernel, on that."""
    present, best = this.findings[0], this.options.best
    faster = this.faster()[:JUDGED]
    if not this.ranked():  # the time was up
        faster = [] if present.status == "right" else [n for n, f in this.findings.items() if f.status == "right"][:1]
    for number in [*faster, 0]:
        path, rival = this.options.kernel, best
        if number:
            path = children.run_dir / "winner" / "kernel.py"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(this.variants[number].data)
            rival = best or (this.options.kernel if present.status == "timed" else None)
        options = replace(this.options, kernel=path, best=rival)
        record = run(options, children, lambda text: this.progress(f"winner: {text}"), harness)
        if record.values["correctness"] == "PASS" or not number:
            return record, number
        this.findings[number].reason = f"{REFUSED}: {record.values['reason']}"
    raise AssertionError("the present kernel is judged last")


def _why_not(this: Sweep, record: RunRecord, winner: int) -> str:
    """Why the winner does not take the place of the present kernel; "" if it does."""
    values, present = record.values, this.findings[0]
    untimed = "the time was up before anything was timed"
    if not winner:
        return "no variant is faster" if this.ranked() else untimed
    if values["correctness"] != "PASS":
        return str(values["reason"])
    if not this.ranked():
        return untimed
    if values["quick"] or values["harness"] == "dirty":
        return "--quick is never kept" if values["quick"] else "the harness is changed: nothing is kept"
    if this.options.kernel.read_bytes() != this.source.data:
        return f"{this.options.kernel.name} was changed while the sweep ran"
    rules, (gain, noise) = Rules.read(), this.gain(winner)
    if present.status == "timed" and values.get("best_sha256") == this.source.sha256:
        decision, why = decide(values, this.variants[winner].data, this.source.data, [values["paired_gain_pct"]], rules)
        return "" if decision == "keep" else why
    if present.status == "timed" and not gain > max(noise, rules.min_gain_pct):
        return f"{gain:+.2f} %: not above the least gain of {rules.min_gain_pct:g} % and the noise of {noise:.2f} %"
    return ""


def _unjudged(this: Sweep) -> dict[str, Any]:
    """The values of a record without a verdict."""
    target, source = active_target(), this.source
    this.values |= {"winner": None, "written_back": False, "gain_pct": None, "reason": NOT_TIMED}
    return {"kernel_type": source.kernel_type, "backend": source.backend, "source_sha256": source.sha256,
            "target": target.name if target else None, **device_values(torch.device("cpu")), "correctness": None,
            "reason": NOT_TIMED}  # fmt: skip


def _count(this: Sweep, record: RunRecord) -> None:
    """How many variants came out how, and at what rate."""
    this.values |= {
        "variants": len(this.findings), "right": sum(f.status in ("timed", "right") for f in this.findings.values()),
        "timed": len(this.ranked()), "variants_per_hour": 3600 * len(this.findings) / this.values["sweep_seconds"],
        "judge_seconds": record.values["bench_time_seconds"] - this.values["sweep_seconds"],
    }  # fmt: skip


def _files(this: Sweep) -> dict[str, bytes]:
    return {"sweep.tsv": landscape.tsv(this), "sweep.png": landscape.picture(this)}


def _finish(this: Sweep, record: RunRecord, winner: int) -> None:
    """Put the winner in place if it earned that; write the record, the files and the row."""
    why, variant, gain = _why_not(this, record, winner), this.variants[winner], this.gain(winner)[0]
    refused = next((f.reason for f in this.findings.values() if f.reason.startswith(REFUSED)), "")
    reason = why if record.values["correctness"] == "PASS" else str(record.values["reason"])
    this.values |= {
        "winner": variant.name, "written_back": not why, "gain_pct": None if math.isnan(gain) else gain,
        "reason": f"{reason} (a faster one {refused})" if refused and reason else reason,
    }
    if not why:
        atomic_write(workspace() / "unrecorded" / f"kernel-{this.source.sha256[:12]}.py", this.source.data)
        atomic_write(this.options.kernel, variant.data)
    record.write()
    what = f"candidates of {this.request.candidates}" if this.request.candidates else f"sweep {this.request.ranges}"
    in_run = this.options.kernel.resolve() == repo_root() / "kernel.py"
    row: Row = record_sweep(record, variant.data, f"{what}: {variant.name}", why, _files(this), in_run)
    this.values["experiment"] = row.experiment
