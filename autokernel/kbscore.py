"""Scores of a KernelBench level: its saved solutions judged, one process a problem, and what comes of it: fast_p.

fast_p (Ouyang et al. 2025, and the scoring of KernelBench's repository): the share of all problems of a level whose
solution is right and more than p times as fast as the baseline. A problem without a solution counts as one that failed.

A solution is best.py in the problem's folder, else kernel.py there (for the active problem the repository's, which is
only read). Its score is kept beside it in score.json and holds as long as solution, problem, options, device and the
frozen files stay what they were; so an interrupted run is continued by the same command.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from autokernel import integrity
from autokernel.kernelbench import FAST, Problem, starter
from autokernel.paths import atomic_write, repo_root, shared, workspace
from autokernel.scale import Cluster

LANES = 2  # processes a GPU: one is judged under the GPU's lock, the next starts meanwhile and waits for the lock
LATE = "not done in"
KEPT = ("correctness", "reason", "latency_us", "pytorch_latency_us", "speedup_vs_pytorch", "speedup_vs_compile",
        "noise_pct", "official_check", "weak_problem", "vendor_library", "peak_vram_mb", "gpu_name", "device", "shrunk",
        "harness", "bench_time_seconds")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """All that judging a solution takes, so that it can be done anywhere. options: of bench_kb.py."""

    problem: Problem
    solution: bytes
    options: tuple[str, ...]
    seconds: float  # for the whole problem

    @property
    def key(self) -> str:
        """What a score holds for, device and torch.compile apart."""
        parts = [self.solution, self.problem.code.encode(), suffix(self.options).encode(), _harness().encode()]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


@functools.cache
def _harness() -> str:
    return integrity.digest()


def suffix(options: tuple[str, ...], starters: bool = False) -> str:
    """What tells scores by other options apart in a file's name."""
    words = [o.removeprefix("--") for o in options if o not in ("--precision", "--compile-baseline", "fp32")]
    return "".join("-" + w for w in ["starters"] * starters + words)


def solution(problem: Problem) -> bytes | None:
    """The saved solution of a problem, or None."""
    pointer = workspace() / "active"
    active = pointer.exists() and pointer.read_text().strip() == problem.key
    places = [problem.folder / "best.py", (repo_root() if active else problem.folder) / "kernel.py"]
    return next((p.read_bytes() for p in places if p.is_file()), None)


def jobs(problems: list[Problem], options: tuple[str, ...], seconds: float, starters: bool = False) -> list[Job]:
    """One for each problem with a solution. starters: the untouched starters instead, whatever was saved."""
    found = []
    for p in problems:
        source = starter(p.code, f"{p.level}/{p.id} {p.name}").encode() if starters else solution(p)
        if source is not None:
            found.append(Job(p, source, options, seconds))
    return found


# ---- one problem ----------------------------------------------------------------------------------------------------


def judged(job: Job, gpu: str = "", running: Callable[[subprocess.Popen], None] = lambda process: None) -> dict:
    """The record of bench_kb.py on a solution, run in a workspace of its own; {"failed": why} where it judged nothing.

    gpu: for CUDA_VISIBLE_DEVICES, "" leaves it as it is. running: is told the process.
    """
    with tempfile.TemporaryDirectory(prefix="autokernel-score-") as place:
        folder = Path(place) / "kb" / job.problem.level / str(job.problem.id)
        folder.mkdir(parents=True)
        (folder / "problem.py").write_text(job.problem.code)
        (folder / "problem.json").write_text(json.dumps(job.problem.facts))
        (Path(place) / "solution.py").write_bytes(job.solution)
        command = [sys.executable, "-B", str(repo_root() / "kernelbench" / "bench_kb.py"), "--json", "--level",
                   job.problem.level, "--problem", str(job.problem.id), "--kernel", f"{place}/solution.py",
                   *job.options]  # fmt: skip
        environment = {**os.environ, "AUTOKERNEL_WORKSPACE": place} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
        running(process)
        try:
            out, err = process.communicate(timeout=job.seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"{LATE} {job.seconds:.0f} s (--problem-minutes)"}
        finally:
            end(process)
            process.wait()
    if process.returncode in (0, 1):
        with contextlib.suppress(ValueError):
            return {k: v for k, v in json.loads(out).items() if k in KEPT}
    said = err.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return {"failed": f"{said[-1].removeprefix('bench_kb.py: ')[:300]} (exit status {process.returncode})"}


def end(process: subprocess.Popen) -> None:
    """End a judge and what it started, if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


# ---- many -----------------------------------------------------------------------------------------------------------


def spread(todo: list[Job], gpus: list[str], cluster: str, deadline: float) -> Iterator[tuple[Job, dict]]:
    """(job, record or {"failed": why}) of each job as it is done; none is begun after `deadline` (time.monotonic()).

    gpus: by name (`scale.gpu_ids`); none is a machine without a GPU. A problem that was not judged beside another's
    preparations is tried once more by itself. Raises ScaleError for a cluster that is not there.
    """
    if cluster:
        where = Cluster(cluster)
        try:
            for first in range(0, len(todo), where.width):  # so that the deadline is kept
                if time.monotonic() < deadline:
                    part = todo[first : first + where.width]
                    for index, record in where.spread("autokernel.kbscore:judged", part):
                        yield part[index], record
        finally:
            where.close()
        return
    again = []
    for job, record in _here(todo, [g for g in gpus for _ in range(LANES)] or [""], deadline):
        if "failed" in record and gpus and not record["failed"].startswith(LATE):
            again.append(job)
        else:
            yield job, record
    yield from _here(again, gpus, deadline)


def _here(todo: list[Job], lanes: list[str], deadline: float) -> Iterator[tuple[Job, dict]]:
    free: queue.Queue[str] = queue.Queue()
    for lane in lanes:
        free.put(lane)
    started: list[subprocess.Popen] = []
    over = False

    def note(process: subprocess.Popen) -> None:
        started.append(process)
        if over:
            end(process)

    def one(job: Job) -> dict | None:
        gpu = free.get()
        try:
            return None if over or time.monotonic() >= deadline else judged(job, gpu, note)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        futures = {pool.submit(one, job): job for job in todo}
        try:
            for future in as_completed(futures):
                if (record := future.result()) is not None:
                    yield futures[future], record
        finally:  # Ctrl-C too: what is under way ends now
            over = True
            for process in started:
                end(process)


# ---- kept scores ----------------------------------------------------------------------------------------------------


def keep(job: Job, record: dict, starters: bool = False) -> None:
    """Write a score beside its problem. Raises OSError."""
    values = {**record, "key": job.key, "name": job.problem.name}
    atomic_write(_path(job, starters), (json.dumps(values, indent=1) + "\n").encode())


def kept(job: Job, device: str = "", starters: bool = False) -> dict | None:
    """The score of exactly this job on this kind of device ("": any), or None."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        values = json.loads(_path(job, starters).read_text())
        compared = values.get("speedup_vs_compile") is not None or values["correctness"] != "PASS"
        same = values["key"] == job.key and str(values.get("gpu_name") or "cpu").startswith(device)
        if same and (compared or "--compile-baseline" not in job.options):
            return values
    return None


def device_here() -> str:
    """The kind of GPU here, as its driver names it, or "cpu"."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except Exception:  # noqa: BLE001 - no library, no driver, no GPU: each raises its own
        return "cpu"


def _path(job: Job, starters: bool) -> Path:
    return job.problem.folder / f"score{suffix(job.options, starters)}.json"


@dataclass(frozen=True)
class Score:
    """What a level comes to. rows: problem id -> its record, for the solutions that are scored."""

    level: str
    problems: dict[int, str]  # id -> name, the whole level
    solved: tuple[int, ...]  # ids with a solution
    rows: dict[int, dict]
    asked: tuple[int, ...]

    def ratios(self, key: str) -> list[float | None]:
        """Speedups of the right solutions, None where it was not measured."""
        return [r.get(key) for r in self.rows.values() if r["correctness"] == "PASS"]

    def fast(self, key: str, over: tuple[int, ...] | None = None) -> dict[float, float | None]:
        """p -> fast_p over these problems, by default the level; None where a right solution was not compared."""
        ids = tuple(self.problems) if over is None else over
        right = [self.rows[i].get(key) for i in ids if i in self.rows and self.rows[i]["correctness"] == "PASS"]
        known = [r for r in right if r is not None]
        return {p: sum(r > p for r in known) / len(ids) if len(known) == len(right) and ids else None for p in FAST}

    def geomean(self, key: str) -> float | None:
        """Of the speedups of right solutions; None where there is none, or one was not compared."""
        ratios = [r for r in self.ratios(key) if r]
        return statistics.geometric_mean(ratios) if ratios and len(ratios) == len(self.ratios(key)) else None

    def values(self) -> dict[str, Any]:
        """All of it, for --json."""
        kinds = {"pytorch": "speedup_vs_pytorch", "compile": "speedup_vs_compile"}
        right = len(self.ratios("latency_us"))
        found = {k: v for k, v in asdict(self).items() if k in ("level", "asked")}
        found |= {"problems": len(self.problems), "solutions": len(self.solved), "scored": len(self.rows),
                  "right": right, "correct": right / len(self.problems)}  # fmt: skip
        found["fast_p"] = {kind: {str(p): v for p, v in self.fast(key).items()} for kind, key in kinds.items()}
        found["geomean"] = {kind: self.geomean(key) for kind, key in kinds.items()}
        found["devices"] = sorted({r.get("gpu_name") or "cpu" for r in self.rows.values()})
        found["rows"] = [{"problem": i, "name": self.problems[i], **r} for i, r in sorted(self.rows.items())]
        return found


# ---- what people see ------------------------------------------------------------------------------------------------


def tables(score: Score, columns: int) -> str:
    """The solutions, and fast_p, as text of that width."""
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, form: str = ".3g", unit: str = "") -> str:
        return "n/a" if value is None else f"{value:{form}}{unit}"

    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    rows.add_column("#", justify="right", no_wrap=True)
    rows.add_column("problem", no_wrap=True, overflow="ellipsis", width=min(36, columns // 5))
    rows.add_column("verdict", min_width=7)
    for name in ("us", "PyTorch", "speedup", "compile"):
        rows.add_column(name, justify="right", min_width=7, no_wrap=True)
    rows.add_column("remark")
    for i, r in sorted(score.rows.items()):
        weak = str(r.get("weak_problem"))
        remarks = [f"weak problem: {weak}" * weak.startswith("yes"),
                   "vendor" * bool(r.get("vendor_library")), "shrunk" * bool(r.get("shrunk"))]  # fmt: skip
        why = shorten(str(r.get("reason")), columns - 50)
        remark = "; ".join(filter(None, remarks)) if r["correctness"] == "PASS" else why
        rows.add_row(str(i), score.problems[i], r["correctness"], number(r.get("latency_us"), ".4g"),
                     number(r.get("pytorch_latency_us"), ".4g"), number(r.get("speedup_vs_pytorch"), ".3g", "x"),
                     number(r.get("speedup_vs_compile"), ".3g", "x"), remark)  # fmt: skip
    shares = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shares.add_column("fast_p over")
    for p in FAST:
        shares.add_column(f"{p:g}", justify="right")
    scopes = {f"level {score.level}": None} | ({"asked for": score.asked} if score.asked else {})
    for scope, ids in scopes.items():
        for kind, key in (("PyTorch", "speedup_vs_pytorch"), ("torch.compile", "speedup_vs_compile")):
            shares.add_row(f"{kind}, {scope} ({len(ids or score.problems)})",
                           *(number(v and 100 * v, ".3g", "%") for v in score.fast(key, ids).values()))  # fmt: skip
    text = io.StringIO()
    console = Console(file=text, width=columns, highlight=False)
    console.print(rows, "", shares, "", sep="\n")
    v = score.values()
    console.print(f"{v['problems']} problems, {v['solutions']} with a solution, {v['scored']} scored "
                  f"on {' and '.join(v['devices']) or 'no device'}, "
                  f"{v['right']} right ({100 * v['correct']:.3g} %); geometric mean of the right ones: "
                  f"{number(v['geomean']['pytorch'], '.3g', 'x')} PyTorch, "
                  f"{number(v['geomean']['compile'], '.3g', 'x')} torch.compile")  # fmt: skip
    if "cpu" in v["devices"]:
        console.print("Without a GPU the times are no measurement.")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def plot(score: Score) -> bytes:
    """A PNG: the speedup of each right solution, in order, and fast_p as a curve over p."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2))
    found = sorted((r["speedup_vs_pytorch"], i) for i, r in score.rows.items()
                   if r["correctness"] == "PASS" and r.get("speedup_vs_pytorch"))  # fmt: skip
    colours = ["tab:green" if s > 1 else "tab:orange" for s, _ in found]
    left.bar(range(len(found)), [s - 1 for s, _ in found], bottom=1, color=colours)  # bars from 1: up is quicker
    left.axhline(1, color="0.3", lw=0.8)
    if len(found) <= 60:
        left.set_xticks(range(len(found)), [str(i) for _, i in found], rotation=90, fontsize=7)
    left.set(yscale="log", xlabel="problem", ylabel="speedup over PyTorch",
             title=f"level {score.level}: {len(found)} of {len(score.problems)} solved")  # fmt: skip
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}x")
    left.yaxis.set_minor_formatter(NullFormatter())
    ends = [0.5, *FAST, 8.0]
    steps = [ends[0] * (ends[-1] / ends[0]) ** (k / 400) for k in range(401)]
    for name, key in (("PyTorch", "speedup_vs_pytorch"), ("torch.compile", "speedup_vs_compile")):
        ratios = [r for r in score.ratios(key) if r]
        if ratios and len(ratios) == len(score.ratios(key)):
            shares = [100 * sum(r > p for r in ratios) / len(score.problems) for p in steps]
            right.step(steps, shares, label=f"over {name}")
    right.set(xscale="log", xlabel="p", ylabel="problems of the level [%]", ylim=(0, 100), title="fast_p")
    right.set_xticks(marks := [0.5, 1, 1.5, 2, 3, 5, 8], [f"{p:g}" for p in marks])
    right.minorticks_off()
    right.grid(alpha=0.3)
    if right.get_legend_handles_labels()[0]:
        right.legend()
    buffer = io.BytesIO()
    figure.tight_layout()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def write(score: Score, name: str) -> list[Path]:
    """<name>.json and <name>.png of the level. Returns where they are."""
    path = shared() / "kb" / score.level / name
    data = {".json": (json.dumps(score.values(), indent=1) + "\n").encode(), ".png": plot(score)}
    for ending, content in data.items():
        atomic_write(path.with_suffix(ending), content)
    return [path.with_suffix(ending) for ending in data]
