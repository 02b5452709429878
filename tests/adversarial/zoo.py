"""The zoo: every cheat and every unusual legal kernel, judged by the real judge. Used by test_zoo.py and table.py.

A file of the zoo is a complete kernel.py. Its docstring says the family (an id of the catalogue of cheats) and how it
tries to win. Its constants say what must become of it:

    EXPECT = "FAIL"          outcomes that are right, "FAIL|CRASH" if several; DIED: the judge itself was ended
    NEEDS = "gpu"            the only kind of machine it can be tried on: "gpu" or "cpu"
    OPTIONS = {"timeout": 5} fields of autokernel.run.Options
    VIA = "bench"            run bench.py as a command, not the judge in this process
    RUNS = 2                 judge it so many times; the last outcome counts
    VENDOR = True            what `vendor_library` must say
    ALONE = True             nothing else can be judged on the GPU meanwhile
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from nursery import Nursery  # noqa: E402

from autokernel import judge, process, run, spec, worker  # noqa: E402
from autokernel.process import Child, launcher  # noqa: E402

FRESH = False  # start each child as bench.py does, not by fork
CANARY = "experiment\ttag\nnot a real ledger\n"


@dataclass(frozen=True)
class Specimen:
    """One file of the zoo and what must become of it."""

    path: Path
    legal: bool
    title: str
    expect: tuple[str, ...]
    needs: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    via: str = ""
    runs: int = 1
    vendor: bool | None = None
    alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @classmethod
    def read(cls, path: Path) -> Specimen:
        tree = ast.parse(path.read_text())
        values = {
            n.targets[0].id: ast.literal_eval(n.value)
            for n in tree.body
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and n.targets[0].id.isupper()
            and n.targets[0].id in ("EXPECT", "NEEDS", "OPTIONS", "VIA", "RUNS", "VENDOR", "ALONE")
        }  # fmt: skip
        legal = path.parent.name == "legal"
        expect = values.get("EXPECT", "PASS" if legal else "FAIL")
        title = (ast.get_docstring(tree) or "").splitlines()[0]
        return cls(
            path, legal, title, tuple(expect.split("|")), values.get("NEEDS", ""), values.get("OPTIONS", {}),
            values.get("VIA", ""), values.get("RUNS", 1), values.get("VENDOR"), values.get("ALONE", False),
        )  # fmt: skip


def able(specimen: Specimen, on_gpu: bool) -> bool:
    return specimen.needs in ("", "gpu" if on_gpu else "cpu", "triton")


def specimens() -> list[Specimen]:
    return [Specimen.read(p) for folder in ("cheats", "legal") for p in sorted((HERE / folder).glob("*.py"))]


@dataclass(frozen=True)
class Result:
    specimen: Specimen
    outcome: str
    reason: str
    seconds: float
    values: dict[str, Any]

    @property
    def as_expected(self) -> bool:
        vendor = self.specimen.vendor
        return self.outcome in self.specimen.expect and vendor in (None, self.values.get("vendor_library"))


def examine(specimen: Specimen) -> Result:
    """Judge one specimen; TAMPERED or SURVIVORS if it changed files that are not its own or outlived the run."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder, _own_files(Path(folder)) as guarded:
        before = {path: path.read_bytes() for path in guarded}
        for _ in range(specimen.runs):
            values = _by_command(specimen) if specimen.via == "bench" else _in_process(specimen)
        outcome, reason = values["correctness"], str(values.get("reason") or "")
        if changed := [p.name for p, data in before.items() if not p.exists() or p.read_bytes() != data]:
            outcome, reason = "TAMPERED", ", ".join(changed)
        if left := _survivors():
            outcome, reason = "SURVIVORS", f"{len(left)} processes"
    return Result(specimen, outcome, reason, time.perf_counter() - started, values)


@contextlib.contextmanager
def _own_files(folder: Path) -> Iterator[list[Path]]:
    """A workspace and a ledger of this run's own; yields the files that no kernel may change."""
    own = {"AUTOKERNEL_WORKSPACE": folder / "workspace", "AUTOKERNEL_LEDGER": folder / "results.tsv"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update({name: str(path) for name, path in own.items()})
    (folder / "workspace").mkdir()
    (folder / "results.tsv").write_text(CANARY)
    frozen = [ROOT / "bench.py", ROOT / "reference.py", *sorted((ROOT / "autokernel").rglob("*.py"))]
    try:
        yield [folder / "results.tsv", *frozen]
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _in_process(specimen: Specimen) -> dict[str, Any]:
    with _nursery(), launcher(ahead=1) as children, _shared_baseline():
        options = {"timeout": 20, "allow_dirty_harness": True, **specimen.options}
        try:
            return run.run(run.Options(specimen.path, **options), children).values
        except run.HarnessFailure as failure:
            return {"correctness": "NO VERDICT", "reason": str(failure)}


def _by_command(specimen: Specimen) -> dict[str, Any]:
    """bench.py as users call it. A judge that was killed gives no verdict: DIED, and no record."""
    command = [sys.executable, str(ROOT / "bench.py"), "--kernel", str(specimen.path), "--json"]
    command += ["--allow-dirty-harness"]
    command += [f"--{name}={value}" for name, value in specimen.options.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    if done.returncode in (0, 1):
        values = json.loads(done.stdout)
        if (values["correctness"] == "PASS") == (done.returncode == 0):
            return values
    record = Path(os.environ["AUTOKERNEL_WORKSPACE"]) / "last_run.json"
    died = "DIED" if done.returncode < 0 and not record.exists() else "NO VERDICT"
    return {"correctness": died, "reason": f"exit status {done.returncode} {done.stderr.strip()[-200:]}"}


# ---- children by fork: importing PyTorch costs more than judging a kernel --------------------------------------------

_nurseries: list[Nursery] = []


@contextlib.contextmanager
def _nursery() -> Iterator[None]:
    """The process that is forked has no CUDA context, and no kernel ever runs in it."""
    if FRESH:
        yield
        return
    if not _nurseries:
        _nurseries.append(Nursery())
        Child.started.add(_nurseries[0].process.pid)
    original, process.subprocess = process.subprocess, _Subprocess(_nurseries[0])
    try:
        yield
    finally:
        process.subprocess = original


class _Subprocess:
    """The module, with another Popen."""

    DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT

    def __init__(self, nursery: Nursery):
        self.Popen = nursery.popen


# ---- one PyTorch child for many kernels ------------------------------------------------------------------------------


class _Baseline:
    """A baseline worker that outlives a run: importing PyTorch costs more than judging a kernel."""

    kept: dict[str, worker.Worker] = {}
    folder = tempfile.TemporaryDirectory(prefix="zoo-baselines-")

    def __init__(self, bench: judge.Bench, cache: Path, cases: list[spec.Case]):
        self.bench, self.place, self.bytes = bench, cache, max(bench.layout(case).total for case in cases)

    def share(self, flush_bytes: int, timeout: float) -> None:
        op = self.bench.spec.name
        real = self.kept.get(op)
        self.fresh = real is None or real.arena_bytes < self.bytes or real.child.process.poll() is not None
        if self.fresh:
            if real:
                real.close()
            child = Child(Path(self.folder.name), "baseline")
            real = self.kept[op] = worker.Worker(child, self.bench.device, self.place, self.bytes)
            real.share(flush_bytes, timeout)
        self.real = real

    def ask(self, do: str, timeout: float, **request: Any) -> dict[str, Any]:
        return self.real.ask(do, timeout, **request) if do != "load" or self.fresh else {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@contextlib.contextmanager
def _shared_baseline() -> Iterator[None]:
    original = judge.Bench.worker

    def worker_or_shared(self, cache, cases, under=()):
        return _Baseline(self, cache, cases) if cache.name == "baseline" else original(self, cache, cases, under)

    judge.Bench.worker = worker_or_shared
    try:
        yield
    finally:
        judge.Bench.worker = original


def close_baselines() -> None:
    while _nurseries:
        _nurseries.pop().close()
    for kept in _Baseline.kept.values():
        kept.close()
    _Baseline.kept.clear()


def _survivors() -> list[int]:
    """Processes of ours that run child.py and are no baseline: what a kernel left behind."""
    known = {kept.child.process.pid for kept in _Baseline.kept.values()}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
            if parent in (os.getpid(), 1) and b"autokernel/child.py" in command and int(entry.name) not in known:
                found.append(int(entry.name))
    return found


# ---- several at once on one GPU --------------------------------------------------------------------------------------


@contextlib.contextmanager
def side_by_side() -> Iterator[None]:
    """Let several processes judge on one GPU: correctness side by side, timing alone."""
    path = Path(tempfile.gettempdir()) / "autokernel-zoo.lock"

    @contextlib.contextmanager
    def held(kind: int):
        with open(path, "w") as file:
            fcntl.flock(file, kind)
            yield

    stages, timed, lock, ahead = run.run_stages, run._Session._timed, run.gpu_lock, run._Session._compile_ahead

    def shared_stages(*args, **kwargs):
        with held(fcntl.LOCK_SH):
            return stages(*args, **kwargs)

    def timed_alone(*args, **kwargs):
        with held(fcntl.LOCK_EX):
            return timed(*args, **kwargs)

    run.run_stages, run._Session._timed, run.gpu_lock = shared_stages, timed_alone, contextlib.nullcontext
    run._Session._compile_ahead = lambda *_: None  # six more children for each
    try:
        yield
    finally:
        run.run_stages, run._Session._timed, run.gpu_lock = stages, timed, lock
        run._Session._compile_ahead = ahead


__all__ = ["Result", "Specimen", "able", "close_baselines", "examine", "side_by_side", "specimens"]
