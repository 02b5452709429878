"""The records of a run: the ledger `results.tsv`, one JSON record per bench run, and every attempt's source.

The ledger is a tab-separated table, one row per experiment. Its columns are the fields of `Row`; `Ledger` alone writes
and reads it. A row is appended under a lock by one write and an fsync, after its attempt is safe in
`workspace/experiments/<n>/`: whoever sees the row can see the source. `chain` hashes a row with the chain of the row
before it, so `verify_chain` notices a row edited, inserted or removed in the middle. There is no secret in it: it shows
careless edits, not a forger who recomputes the rest of the file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from autokernel import paths

log = logging.getLogger(__name__)
OUTCOMES = ("PASS", "FAIL", "TIMEOUT", "CRASH")
SCHEMA = 1


class RecordError(Exception):
    """One line: what went wrong, the file, and the next command."""


@dataclass(frozen=True)
class Row:
    """One experiment. Fields are the columns of results.tsv, in order; None is an empty cell.

    Append new columns at the end only: an older ledger is then still readable by name.
    """

    experiment: int | None = None           # given by the ledger: 1, 2, 3, ...
    tag: str = ""                           # the run: branch autokernel/<tag>
    kernel_type: str = ""
    throughput_tflops: float | None = None
    latency_us: float | None = None
    pct_peak: float | None = None           # of the datasheet peak of whatever bounds the kernel
    speedup_vs_pytorch: float | None = None  # against the fused PyTorch op
    correctness: str = ""                   # PASS, FAIL, TIMEOUT or CRASH
    peak_vram_mb: float | None = None
    description: str = ""
    decision: str = ""                      # baseline, keep, revert; skip, revisit, reset are no experiments
    reason: str = ""
    commit: str = ""
    run_id: str = ""                        # of the bench run; one run makes at most one row
    source_sha256: str = ""                 # of kernel.py as measured
    parent: int | None = None               # experiment it was compared with: the best so far
    target: str = ""
    device: str = ""
    dtype: str = ""
    size: str = ""
    backend: str = ""
    bottleneck: str = ""
    pct_peak_measured: float | None = None  # of the calibrated peak of this very GPU
    speedup_vs_best: float | None = None
    paired_gain_pct: float | None = None
    gain_spread_pct: float | None = None
    noise_pct: float | None = None
    speedup_vs_compile: float | None = None
    launch_us: float | None = None
    compile_seconds: float | None = None
    code_lines: int | None = None
    variants: int | None = None             # of a sweep: how many were timed
    worker: str = ""
    quick: bool | None = None
    harness: str = ""                       # hash of the judge's own files
    started: str = ""                       # ISO 8601, UTC
    bench_time_seconds: float | None = None
    duration_s: float | None = None         # since the end of the run's previous experiment
    cost: float | None = None               # what the agent's turn cost, where it says so
    chain: str = ""                         # given by the ledger


COLUMNS = tuple(f.name for f in fields(Row))
_KIND = {f.name: str(f.type).split(" ")[0] for f in fields(Row)}
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escaped: char for char, escaped in _ESCAPES.items()}


def escape(text: str) -> str:
    """One cell: backslash, tab, newline and carriage return become two characters each."""
    return text.translate({ord(char): escaped for char, escaped in _ESCAPES.items()})


def unescape(cell: str) -> str:
    """Inverse of `escape`."""
    return re.sub(r"\\[\\tnr]", lambda m: _UNESCAPES[m[0]], cell)


def _to_cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""                                   # a figure that is not a number is not known
    if isinstance(value, bool):
        return "true" if value else "false"
    return format(value, ".6g") if isinstance(value, float) else escape(str(value))


def _from_cell(name: str, cell: str) -> Any:
    kind = _KIND[name]
    if kind == "str":
        return unescape(cell)
    if cell == "":
        return None
    if kind == "bool":
        return {"true": True, "false": False}[cell]
    return int(cell) if kind == "int" else float(cell)


def _line(cells: Iterable[str]) -> bytes:
    return ("\t".join(cells) + "\n").encode("utf-8", "surrogateescape")


def _chain(previous: str, cells: Mapping[str, str]) -> str:
    body = (cell for name, cell in cells.items() if name != "chain")
    return hashlib.sha256(_line([previous, *body])).hexdigest()[:16]


def now(ago: float = 0.0) -> str:
    """The time `ago` seconds before now, as the ledger writes it: ISO 8601, UTC, to the second."""
    return (datetime.now(timezone.utc) - timedelta(seconds=ago)).isoformat(timespec="seconds").replace("+00:00", "Z")


@contextlib.contextmanager
def _clear_errors(what: str, path: Path) -> Iterator[None]:
    """Disk full, read-only folder, missing permission: one line instead of a traceback."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"{what} {path}: {error.strerror or error}; nothing was recorded. "
                          f"Free space or permissions there, then run the command again") from error


@dataclass
class Ledger:
    """results.tsv and the attempts beside it. Paths default to the repository's; tests give their own.

    Raises RecordError: unknown header, unreadable row, lock not had in `timeout` seconds, disk full, read-only folder.
    """

    path: Path = field(default_factory=paths.ledger)
    workspace: Path = field(default_factory=paths.shared)
    timeout: float = 30.0

    def __post_init__(self) -> None:
        # beside the ledger, so that workers with their own workspace share it
        self._lock = FileLock(str(self.path.parent / "workspace" / f"{self.path.name}.lock"))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One writer at a time; may be held around several calls of this Ledger (decide, commit, append)."""
        lock_file = Path(self._lock.lock_file)
        holder = lock_file.with_suffix(".pid")      # not in the lock file: some filelock versions truncate it
        with _clear_errors("cannot lock", lock_file):
            lock_file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=self.timeout)
            except Timeout:
                pid = holder.read_text().strip() if holder.exists() else "unknown"
                raise RecordError(f"{self.path} is in use by process {pid} (waited {self.timeout:g} s); "
                                  f"wait for it, or look at it with: ps -p {pid}") from None
        try:
            with _clear_errors("cannot write", holder):
                holder.write_text(str(os.getpid()))
            yield
        finally:
            self._lock.release()

    def append(self, row: Row, source: bytes | None = None, record: Mapping[str, Any] | None = None,
               extra: Mapping[str, bytes] | None = None) -> Row:
        """Give `row` the next number, keep its attempt (and `extra` files, by name), write it; return it as written.

        A kill at any moment leaves the ledger without or with the whole row. A run that already has a row is refused.
        """
        with self.lock():
            self.repair()
            header, rows = self._read()
            if header not in ((), COLUMNS):
                raise self._error(f"has {len(header)} columns where this version writes {len(COLUMNS)}", aside=True)
            if same := [cells["experiment"] for cells in rows if row.run_id and cells["run_id"] == row.run_id]:
                raise self._error(f"run {row.run_id} is experiment {same[0]} already; measure again: uv run bench.py")
            number = max((int(cells["experiment"]) for cells in rows), default=0) + 1
            if source is not None:
                files = {**(extra or {}), "kernel.py": source, "record.json": _dump(record or {})}
                self._save_attempt(number, files)
            cells = {name: _to_cell(getattr(replace(row, experiment=number), name)) for name in COLUMNS}
            cells["chain"] = _chain(rows[-1]["chain"] if rows else "", cells)
            with _clear_errors("cannot write", self.path):
                if not header:
                    paths.atomic_write(self.path, _line(COLUMNS))
                self._append_line(_line(cells.values()))
        return replace(row, experiment=number, chain=cells["chain"])

    def rows(self) -> list[Row]:
        """All experiments, oldest first. Does not wait for the lock; a row still being written is not yet there."""
        out = []
        for cells in self._read()[1]:
            try:
                out.append(Row(**{name: _from_cell(name, cell) for name, cell in cells.items()}))
            except (ValueError, KeyError) as error:
                raise self._error(f"experiment {cells['experiment']} has a bad cell ({error})", aside=True) from None
        return out

    def verify_chain(self) -> list[str]:
        """What is wrong with the ledger's rows, one line each; empty when each row is as it was written."""
        problems, previous = [], ""
        for index, cells in enumerate(self._read()[1], start=1):
            if cells["experiment"] != str(index):
                problems.append(f"experiment {cells['experiment']} is row {index}: rows are missing or out of place")
            if cells["chain"] != _chain(previous, cells):
                problems.append(f"experiment {cells['experiment']} or the row before it was changed after writing")
            previous = cells["chain"]
        return problems

    def repair(self) -> Path | None:
        """Move a torn last line to workspace/quarantine/ and return where; None when there was none."""
        with self.lock(), _clear_errors("cannot repair", self.path):
            data = self.path.read_bytes() if self.path.exists() else b""
            if not (torn := data[data.rfind(b"\n") + 1:]):
                return None
            # Named by content: a second kill between copy and cut does not make a second copy.
            kept = self.workspace / "quarantine" / f"ledger-{hashlib.sha256(torn).hexdigest()[:12]}.txt"
            paths.atomic_write(kept, torn)
            os.truncate(self.path, len(data) - len(torn))
        log.warning("%s ended in half a row (%d bytes); moved to %s", self.path, len(torn), kept)
        return kept

    def _error(self, what: str, aside: bool = False) -> RecordError:
        hint = f"; only the tool writes this file: restore it, or move it aside: mv {self.path} {self.path}.old"
        return RecordError(f"{self.path}: {what}{hint if aside else ''}")

    def _read(self) -> tuple[tuple[str, ...], list[dict[str, str]]]:
        """Header, and rows as column -> cell text. A torn last line is left out."""
        with _clear_errors("cannot read", self.path):
            data = self.path.read_bytes() if self.path.exists() else b""
        lines = [line.split("\t") for line in data.decode("utf-8", "surrogateescape").split("\n")[:-1]]
        if not lines:
            return (), []
        header = tuple(lines[0])
        if header[:10] != COLUMNS[:10] or not {"run_id", "chain"} <= set(header) <= set(COLUMNS):
            unknown = ", ".join(sorted(set(header) - set(COLUMNS)))[:200]
            raise self._error(f"not a known header (unknown columns: {unknown or 'none'})", aside=True)
        for number, cells in enumerate(lines[1:], start=2):
            if len(cells) != len(header) or not cells[0].isdigit():
                raise self._error(f"line {number} has {len(cells)} cells where the header has {len(header)}, "
                                  "or no experiment number", aside=True)
        return header, [dict(zip(header, cells, strict=True)) for cells in lines[1:]]

    def _append_line(self, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        size = os.fstat(fd).st_size
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)                  # no half row
            raise
        finally:
            os.close(fd)

    def attempt(self, n: int) -> Path:
        """Folder of experiment `n`: kernel.py, record.json, and for a sweep sweep.tsv."""
        return self.workspace / "experiments" / str(n)

    def _save_attempt(self, n: int, files: Mapping[str, bytes]) -> None:
        """Write workspace/experiments/<n>/: all of these files or none."""
        folder = self.attempt(n)
        with _clear_errors("cannot write", folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            for stale in folder.parent.glob(".tmp-*"):          # of a process that was killed; we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
            try:
                building.chmod(0o755)
                for name, data in files.items():
                    paths.atomic_write(building / name, data)
                if folder.exists():                             # of an append killed before its row was written
                    aside = self.workspace / "quarantine" / f"experiment-{n}-{uuid.uuid4().hex[:8]}"
                    aside.parent.mkdir(parents=True, exist_ok=True)
                    folder.rename(aside)
                    log.warning("%s had no row in the ledger; moved to %s", folder, aside)
                building.rename(folder)
                paths.fsync_dir(folder.parent)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None          # JSON has no NaN
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def _dump(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(_finite(values), indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogateescape")


@dataclass
class RunRecord:
    """One bench run as JSON: `values` holds whatever bench.py measured; the core keys are always there and checked.

    Core: schema, run_id, outcome (PASS, FAIL, TIMEOUT, CRASH), source_sha256, started. Other keys are kept as they are.
    """

    values: dict[str, Any]

    CORE = ("schema", "run_id", "outcome", "source_sha256", "started")

    @classmethod
    def new(cls, source: bytes, outcome: str, **values: Any) -> RunRecord:
        """The record of a run of `source` (the bytes of kernel.py)."""
        core = {"schema": SCHEMA, "run_id": uuid.uuid4().hex, "outcome": outcome,
                "source_sha256": hashlib.sha256(source).hexdigest(), "started": now()}
        return cls({**core, **values})._checked("new record")

    @classmethod
    def read(cls, path: Path | None = None) -> RunRecord:
        """Read last_run.json. Raises RecordError when missing, not JSON, of another schema, or without a core key."""
        path = path or paths.workspace() / "last_run.json"
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise RecordError(f"{path} does not exist: nothing was measured yet; run: uv run bench.py") from None
        except (OSError, ValueError) as error:
            raise RecordError(f"{path} is not a readable record ({error}); run again: uv run bench.py") from None
        return cls(values if isinstance(values, dict) else {})._checked(str(path))

    def write(self, path: Path | None = None) -> Path:
        """Write last_run.json: a reader sees the old record or this one, never a mixture."""
        path = path or paths.workspace() / "last_run.json"
        self._checked("record")
        brief = {name: self.values.get(name) for name in ("run_id", "outcome", "source_sha256", "best_sha256", "target",
                                                          "paired_gain_pct", "started")}  # fmt: skip
        with _clear_errors("cannot write", path):
            paths.atomic_write(path, _dump(self.values))
            with open(path.with_name("runs.jsonl"), "a") as runs:   # all runs, so that a lucky one does not count alone
                runs.write(json.dumps(_finite(brief)) + "\n")
        return path

    def row(self, **more: Any) -> Row:
        """The ledger row of this run: every column that the record has under the same name, then `more`."""
        own = {name: self.values[name] for name in COLUMNS if self.values.get(name) is not None}
        return Row(**{"correctness": self.values["outcome"], **own, "experiment": None, "chain": "", **more})

    def _checked(self, where: str) -> RunRecord:
        if missing := [key for key in self.CORE if key not in self.values]:
            raise RecordError(f"{where}: no {', '.join(missing)}; run again: uv run bench.py")
        if self.values["schema"] != SCHEMA:
            raise RecordError(f"{where}: schema {self.values['schema']!r}, this version reads {SCHEMA}; "
                              "run again: uv run bench.py")
        if self.values["outcome"] not in OUTCOMES:
            raise RecordError(f"{where}: outcome {self.values['outcome']!r} is none of {', '.join(OUTCOMES)}")
        return self
