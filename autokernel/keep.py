"""What the night writes: rows, commits, kernel.py and each target's best.py. One command at a time, safe to be killed.

Order of `record`: decide, commit, append the row (which saves the source), then best.py and kernel.py. What a kill
leaves undone after the row, the next `record` or `next` does: best.py follows from the ledger, and a kernel.py that the
last row rejected is restored. A kill between commit and row leaves a commit that the repeated `record` finds and uses.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from autokernel import integrity, workers
from autokernel.gitkeep import GitError, Repo
from autokernel.kernelbench import lenient
from autokernel.night import (
    KEPT,
    Night,
    NightError,
    Work,
    code_lines,
    decide,
    duration,
    kernel_bytes,
    other_runs,
)
from autokernel.paths import atomic_write, best_path, operator_of, repo_root, target_folder, workspace
from autokernel.records import Ledger, RecordError, Row, RunRecord, now


@contextmanager
def opened() -> Iterator[tuple[Ledger, Repo, Night]]:
    """Ledger, repository and state, under the ledger's lock. Raises GitError, RecordError, NightError."""
    repo, ledger = Repo.here(), Ledger()
    tag = repo.tag()
    with ledger.lock():
        yield ledger, repo, Night.read(ledger, tag)


def record(message: str, simpler: bool = False) -> tuple[Row, Night, list[str], bool]:
    """Decide on the last bench run, keep or restore kernel.py, append the row. Returns it, state, remarks, is it new.

    Run again after a kill it ends what was begun. Raises GitError, RecordError, NightError: then nothing was recorded.
    """
    with opened() as (ledger, repo, night):
        run, source = RunRecord.read(), kernel_bytes()
        done = next((r for r in night.rows if r.run_id == run.values["run_id"]), None)
        remarks: list[str] = []
        new = done is None
        if done is None:
            work = _measured(run, source, night)
            best = _source_of(ledger, repo, work.best) if work.best else None
            row, remarks = _judged(run, source, work, best, night, message, simpler)
            if row.decision in KEPT:
                row, warning = _committed(row, repo, source, len(ledger.rows()) + 1)
                remarks += [warning] * bool(warning)
            done = ledger.append(row, source, run.values)
            night = Night.read(ledger, night.tag)
        else:
            rest = {done.source_sha256, *(w.best.source_sha256 for w in night.works if w.best)}
            if hashlib.sha256(source).hexdigest() not in rest:
                measure = night.current.bench if night.current else "uv run bench.py"
                raise NightError(f"the last run is experiment {done.experiment} already, and kernel.py was not "
                                 f"measured since: run {measure} first")  # fmt: skip
        if night.current and (other := night.holder(night.current)):
            remarks.append(f"{night.current.name} is worker {other}'s by now; take another: uv run orchestrate.py next")
        elif night.current:
            workers.claim(night.current.name)
        sync(ledger, repo, night)
        return done, night, remarks, new


def record_sweep(run: RunRecord, source: bytes, message: str, why_not: str, files: dict[str, bytes],
                 in_run: bool) -> Row:  # fmt: skip
    """The one row of a sweep, with its files. why_not: why its winner is not in kernel.py; "" if it is.

    In a run, a winner that is in kernel.py is kept as any kernel is. Outside of one there is nobody to decide: the row
    says what came out. kernel.py is not touched. Raises RecordError.
    """
    try:
        if not in_run:
            raise NightError("not the run's kernel.py")
        with opened() as (ledger, repo, night):
            work = _measured(run, source, night)
            best = _source_of(ledger, repo, work.best) if work.best else None
            row, _ = _judged(run, source, work, best, night, message, False)
            if row.decision in KEPT and kernel_bytes() != source:
                row = replace(row, decision="revert", reason=why_not)
            if row.decision in KEPT:
                row, _ = _committed(row, repo, source, len(ledger.rows()) + 1)
            row = ledger.append(row, source, run.values, files)
            if row.decision in KEPT:
                sync(ledger, repo, Night.read(ledger, night.tag))
            return row
    except (GitError, NightError):
        gain = run.values["sweep"]["gain_pct"]
        than = "what was there did not run" if gain is None else f"{gain:+.2f} % over what was there"
        reason = why_not or f"written back: {than}"
        return Ledger().append(_row(run, source, message, reason=reason), source, run.values, files)


def _measured(run: RunRecord, source: bytes, night: Night) -> Work:
    """What a run may be recorded for. Raises NightError for a stale or an unclean one."""
    v, work = run.values, night.current
    again = f"measure it: {work.bench if work else 'uv run bench.py'}"
    if v["source_sha256"] != hashlib.sha256(source).hexdigest():
        raise NightError(f"kernel.py is not the source that was measured last; {again}")
    if work is None:
        raise NightError('kernel.py has no KERNEL_TYPE; write e.g. KERNEL_TYPE = "rmsnorm" and measure it again')
    if (v.get("target") or "") != (work.name if work.plan else ""):
        raise NightError(f"the last run was for target {v.get('target') or '(none)'}, now it is {work.name}; {again}")
    if v["outcome"] != "PASS":
        return work
    if v.get("quick"):
        raise NightError(f"the last run was --quick, which is never kept; {again}")
    if work.problem and (options := lenient(v)):
        raise NightError(f"the last run was with {options}, which is never kept; {again}")
    if v.get("harness") != "clean":
        raise NightError(f"the last run's harness was {v.get('harness')}, not clean: see git status, then {again}")
    if v.get("harness_sha256") != integrity.digest():
        raise NightError(f"bench.py or another frozen file changed since the run: see git status; {again}")
    first = next((r for r in night.experiments if r.decision in KEPT), None)
    if first and first.harness != v["harness_sha256"][:16]:
        raise NightError(f"the frozen files are not those of experiment {first.experiment}: take them back, or begin a "
                         "new run with: uv run orchestrate.py start <tag>")  # fmt: skip
    if work.best and v.get("best_sha256") != work.best.source_sha256:
        raise NightError(f"the last run was not timed against the best, experiment {work.best.experiment}; {again}")
    return work


def _row(run: RunRecord, source: bytes, message: str, **more: Any) -> Row:
    """The facts of a run as a row."""
    v = run.values
    bound = "compute" if v.get("bottleneck") == "compute" else "bandwidth"
    return run.row(
        description=" ".join(message.split()), harness=(v.get("harness_sha256") or "")[:16],
        device=v.get("gpu_name") or "cpu", pct_peak=v.get(f"pct_peak_{bound}"),
        pct_peak_measured=v.get(f"pct_measured_{bound}"),
        code_lines=code_lines(source) if v["outcome"] == "PASS" else None, worker=workers.me(), **more,
    )  # fmt: skip


def _judged(run: RunRecord, source: bytes, work: Work, best: bytes | None, night: Night, message: str,
            simpler: bool) -> tuple[Row, list[str]]:  # fmt: skip
    v = run.values
    decision, reason = decide(v, source, best, other_runs(run), night.rules, simpler)
    same = [r.experiment for r in work.experiments if r.source_sha256 == v["source_sha256"]]
    row = _row(
        run, source, message, tag=night.tag, kernel_type=work.op, target=work.name if work.plan else "",
        decision=decision, reason=reason, parent=work.best.experiment if work.best else None,
        duration_s=duration(run, night.mine, night.rules),
        **({"size": work.size, "dtype": work.plan["dtype"]} if work.plan else {}),  # the plan's, failures included
    )  # fmt: skip
    return row, [f"the same source as experiment {number}" for number in same[-1:]]


def _committed(row: Row, repo: Repo, source: bytes, number: int) -> tuple[Row, str]:
    gain = f" ({row.paired_gain_pct:+.1f} %)" if row.paired_gain_pct is not None else ""
    facts = {
        "Experiment": number, "Target": row.target or row.kernel_type, "Decision": f"{row.decision}, {row.reason}",
        "Device": row.device, "Latency-us": row.latency_us, "Speedup-vs-pytorch": row.speedup_vs_pytorch,
        "Speedup-vs-best": row.speedup_vs_best, "Run": row.run_id,
    }  # fmt: skip
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in facts.items() if v is not None}
    name = row.target or row.kernel_type
    what = textwrap.shorten(row.description, max(20, 70 - len(name + gain)), placeholder=" ...")
    commit, warning = repo.commit(source, f"{name}: {what}{gain}", row.description, shown)
    return Row(**{**vars(row), "commit": commit[:12]}), warning


def _source_of(ledger: Ledger, repo: Repo, row: Row) -> bytes:
    """The kernel of a kept experiment. Raises RecordError when neither the workspace nor git has it."""
    path = ledger.attempt(row.experiment or 0) / "kernel.py"
    for data in (path.read_bytes() if path.exists() else None, repo.show(row.commit) if row.commit else None):
        if data is not None and hashlib.sha256(data).hexdigest() == row.source_sha256:
            return data
    raise RecordError(f"the best kernel, experiment {row.experiment}, is neither in {path} nor in commit "
                      f"{row.commit or '?'}; begin anew: uv run orchestrate.py reset {row.target or row.kernel_type}")


def sync(ledger: Ledger, repo: Repo, night: Night) -> None:
    """Make every best.py, and a kernel.py that the last experiment's row rejected, what the ledger says."""
    for work in night.works:
        path = best_path(work.name if work.plan else "", work.op)
        if not work.plan and work.name != work.op:
            continue  # a target of an earlier plan
        if work.best is None:
            if not (work.problem and work.earlier):  # a problem's solution stays until this run has its own
                path.unlink(missing_ok=True)
        elif not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != work.best.source_sha256:
            atomic_write(path, _source_of(ledger, repo, work.best))
    last = next(iter(night.mine[-1:]), None)
    if last and last.decision == "revert" and last.source_sha256 == hashlib.sha256(kernel_bytes()).hexdigest():
        work = next(w for w in night.works if last in w.rows)
        if work.best and work is night.current and not unrecorded(night):
            atomic_write(repo_root() / "kernel.py", _source_of(ledger, repo, work.best))


def unrecorded(night: Night) -> RunRecord | None:
    """The last bench run, where it has no row yet and could get one."""
    try:
        run = RunRecord.read()
        if all(r.run_id != run.values["run_id"] for r in night.rows):
            _measured(run, kernel_bytes(), night)
            return run
    except (RecordError, NightError):
        pass
    return None


def install(ledger: Ledger, repo: Repo, night: Night, work: Work) -> list[str]:
    """Make `work` the current one, with its best kernel, or its starter, as kernel.py. Returns remarks."""
    present = kernel_bytes()
    source, remarks = _start_of(ledger, repo, work), []
    if work is night.current and operator_of(present) == work.op and present != source:
        return ["kernel.py is not the best kernel and was not recorded: left as it is"] if work.best else []
    known = {r.source_sha256 for r in night.rows} | {hashlib.sha256(source).hexdigest()}
    digest = hashlib.sha256(present).hexdigest()
    if present and digest not in known and present not in (repo.show("HEAD"), *_starters()):
        aside = workspace() / "unrecorded" / f"kernel-{digest[:12]}.py"
        atomic_write(aside, present)
        remarks.append(f"kernel.py was never recorded: saved as {aside}")
    if present != source:
        atomic_write(repo_root() / "kernel.py", source)
    pointer = workspace() / "active"  # after kernel.py: a kill between leaves the old target active, and `next` repeats
    if work.plan:
        atomic_write(pointer, f"{work.name}\n".encode())
    else:
        pointer.unlink(missing_ok=True)
    return remarks


def _starters() -> list[bytes]:
    return [p.read_bytes() for p in (repo_root() / "kernels").rglob("*.py")]


def _start_of(ledger: Ledger, repo: Repo, work: Work) -> bytes:
    if kept := work.best or work.earlier:
        return _source_of(ledger, repo, kept)
    if not work.plan and operator_of(kernel_bytes()) == work.op:
        return kernel_bytes()
    own = target_folder(work.name) / "kernel.py"
    path = own if work.plan else repo_root() / "kernels" / f"{work.op}.py"
    try:
        return path.read_bytes()
    except OSError as error:
        raise NightError(f"no starter for {work.name} ({path}: {error.strerror}); run uv run extract.py") from None


def _control_row(night: Night, work: Work, decision: str, why: str) -> Row:
    where = {"target": work.name, "size": work.size, "dtype": work.plan["dtype"]} if work.plan else {}
    return Row(tag=night.tag, kernel_type=work.op, decision=decision, description=why, started=now(),
               worker=workers.me(), **where)  # fmt: skip


def control(decision: str, name: str | None, message: str) -> tuple[Row, Night]:
    """Append a row that skips, reopens or resets a target: the state is nowhere but in the ledger."""
    with opened() as (ledger, repo, night):
        work = night.find(name) if name else night.current
        if work is None:
            raise NightError(f"no target is active; name one: uv run orchestrate.py {decision} NAME")
        row = ledger.append(_control_row(night, work, decision, message))
        night = Night.read(ledger, night.tag)
        sync(ledger, repo, night)
        return row, night


def choose(name: str | None = None) -> tuple[str, Work | None, str, Night, list[str]]:
    """Decide what is next, or take `name`, and install it. Returns verb, target, why, state, remarks."""
    with opened() as (ledger, repo, night):
        sync(ledger, repo, night)
        verb, work, why = night.choose()
        if name:
            work = night.find(name)
            if other := night.holder(work):
                raise NightError(f"{name} is worker {other}'s; take another: uv run orchestrate.py next, see status")
            if reason := work.closed(night.rules)[0]:
                raise NightError(f"{name}: {reason}; open it again with: uv run orchestrate.py revisit {name}")
            verb, why = ("CONTINUE" if work is night.current and work.rows else "NEXT"), "asked for by name"
        if verb in ("NEXT", "REVISIT") and work is not night.current and (run := unrecorded(night)):
            raise NightError(f"the last run ({run.values['outcome']}) has no row yet: first run "
                             "uv run orchestrate.py record -m 'what was tried'")  # fmt: skip
        workers.claim(work.name if work else "")
        remarks = install(ledger, repo, night, work) if work else []
        if work and verb == "REVISIT":
            ledger.append(_control_row(night, work, "revisit", why))
            night = Night.read(ledger, night.tag)
            work = night.current
    return verb, work, why, night, remarks
