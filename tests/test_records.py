"""The ledger under attack: kill -9, four writers, torn lines, a full disk, a read-only folder, an edited row."""

import errno
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autokernel import paths
from autokernel.records import COLUMNS, SCHEMA, Ledger, RecordError, Row, RunRecord, escape, unescape

ROOT = Path(__file__).resolve().parent.parent
FIRST_TEN = ("experiment tag kernel_type throughput_tflops latency_us pct_peak speedup_vs_pytorch correctness "
             "peak_vram_mb description")
# A process that appends `count` rows with their attempts; its rows carry its name and a running number.
WRITER = """
import sys
from pathlib import Path
from autokernel.records import Ledger, Row
home, name, first, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ledger = Ledger(home / "results.tsv", home / "workspace")
for i in range(first, first + count):
    ledger.append(Row(description=f"{name}\\t{i}\\n" + "x" * 300, run_id=f"{name}-{i}"), b"# %d" % i, {"i": i})
    print(i, flush=True)
"""

# Children that die at the 1st, 2nd, 3rd, ... system call of an append (a write dies half-way), until one survives.
DIES_AT_EVERY_CALL = """
import os, sys
from pathlib import Path
from autokernel.records import Ledger, Row
home = Path(sys.argv[1])
def append(n, die_at):
    calls = 0
    def counted(name, real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == die_at:
                if name == "write":
                    real(args[0], bytes(args[1])[:len(args[1]) // 2])
                os._exit(9)
            return real(*args, **kwargs)
        return call
    for name in ("open", "write", "fsync", "replace", "rename", "mkdir", "chmod", "truncate", "close"):
        setattr(os, name, counted(name, getattr(os, name)))
    Ledger(home / "results.tsv", home / "workspace").append(Row(run_id=f"r{n}", description="x" * 200), b"# %d" % n, {})
die_at = 0
while True:
    die_at += 1
    if (pid := os.fork()) == 0:
        append(die_at, die_at)
        os._exit(0)
    if (status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) != 9:
        break
    rows = Ledger(home / "results.tsv", home / "workspace").rows()
    print(die_at, *[row.run_id for row in rows], flush=True)
print("end", status, flush=True)
"""


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "results.tsv", tmp_path / "workspace", timeout=5)


def writer(home, name, first, count, **kwargs):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(home), name, str(first), str(count)], cwd=ROOT,
                            stdout=subprocess.PIPE, **kwargs)


def test_columns_begin_with_the_documented_ten():
    assert " ".join(COLUMNS[:10]) == FIRST_TEN and COLUMNS[-1] == "chain" and len(set(COLUMNS)) == len(COLUMNS)


@pytest.mark.parametrize("text", ["", "plain", "a\tb", "a\nb\r\nc", "\\", "\\t", "\\\\n", "ends in \\",
                                  "é中\x85\u2028\x0b",
                                  "\udcff from argv", '"quoted', "\t\n\\\t"])
def test_any_description_comes_back(ledger, text):
    assert unescape(escape(text)) == text
    ledger.append(Row(description=text))
    ledger.append(Row(description="next"))
    assert [row.description for row in ledger.rows()] == [text, "next"]
    assert ledger.verify_chain() == []


def test_missing_is_an_empty_cell_and_comes_back_as_none(ledger):
    ledger.append(Row(tag="night", latency_us=12.3456789, pct_peak=float("nan"), quick=False, parent=7))
    header, line = (text.split("\t") for text in ledger.path.read_text().splitlines())
    cells = dict(zip(header, line, strict=True))
    assert cells["latency_us"] == "12.3457" and cells["pct_peak"] == cells["throughput_tflops"] == ""
    (row,) = ledger.rows()
    assert (row.experiment, row.tag, row.pct_peak, row.quick, row.parent) == (1, "night", None, False, 7)


def test_numbers_go_up_and_a_run_is_recorded_once(ledger):
    assert [ledger.append(Row(run_id=f"r{i}")).experiment for i in range(3)] == [1, 2, 3]
    with pytest.raises(RecordError, match="run r1 is experiment 2 already"):
        ledger.append(Row(run_id="r1"), b"source")
    assert len(ledger.rows()) == 3 and not ledger.attempt(4).exists()


def test_attempt_is_kept_with_the_row(ledger):
    row = ledger.append(Row(), b"print('kernel')\n", {"latency_us": float("inf"), "sizes": ({"a": 1},)},
                        extra={"sweep.tsv": b"BLOCK\tus\n"})
    folder = ledger.attempt(row.experiment)
    assert (folder / "kernel.py").read_bytes() == b"print('kernel')\n"
    assert json.loads((folder / "record.json").read_text()) == {"latency_us": None, "sizes": [{"a": 1}]}
    assert (folder / "sweep.tsv").read_bytes() == b"BLOCK\tus\n"


def test_attempt_without_a_row_is_moved_aside_not_lost(ledger):
    paths.atomic_write(ledger.attempt(1) / "kernel.py", b"orphan")      # as a kill between attempt and row leaves it
    ledger.append(Row(), b"new", {})
    assert (ledger.attempt(1) / "kernel.py").read_bytes() == b"new"
    (orphan,) = (ledger.workspace / "quarantine").glob("experiment-1-*")
    assert (orphan / "kernel.py").read_bytes() == b"orphan"


@pytest.mark.parametrize("torn", [b"3\tnight", b"\x00\xff", b"3" + b"\t" * (len(COLUMNS) - 1)])
def test_torn_last_line_is_quarantined_and_reported(ledger, torn, caplog):
    ledger.append(Row(tag="a"))
    ledger.append(Row(tag="b"))
    with open(ledger.path, "ab") as file:
        file.write(torn)
    assert [row.tag for row in ledger.rows()] == ["a", "b"]         # a reader neither sees nor repairs it
    assert ledger.append(Row(tag="c")).experiment == 3
    assert "ended in half a row" in caplog.text
    (kept,) = (ledger.workspace / "quarantine").iterdir()
    assert kept.read_bytes() == torn
    assert [row.tag for row in ledger.rows()] == ["a", "b", "c"] and ledger.verify_chain() == []
    assert ledger.repair() is None


def test_torn_header_and_empty_file_start_anew(ledger):
    ledger.path.write_bytes(b"experiment\tta")
    assert ledger.rows() == [] and ledger.repair() is not None and ledger.path.read_bytes() == b""
    assert ledger.append(Row()).experiment == 1


def test_unknown_header_is_one_clear_error(ledger):
    ledger.path.write_text("\t".join([*COLUMNS, "from_the_future"]) + "\n")
    for act in (ledger.rows, ledger.verify_chain, lambda: ledger.append(Row())):
        with pytest.raises(RecordError, match="unknown columns: from_the_future.*mv ") as error:
            act()
        assert "\n" not in str(error.value)


def test_older_ledger_is_read_by_name_but_not_continued(ledger):
    older = [name for name in COLUMNS if name not in ("cost", "worker")]
    ledger.path.write_text("\t".join(older) + "\n" + "\t".join("1" if c == "experiment" else "" for c in older) + "\n")
    assert ledger.rows()[0] == Row(experiment=1)
    with pytest.raises(RecordError, match=rf"has {len(older)} columns where this version writes {len(COLUMNS)}"):
        ledger.append(Row(), b"source")
    assert not ledger.attempt(2).exists()


@pytest.mark.parametrize("line", ["1\tshort", "x" + "\t" * (len(COLUMNS) - 1)])
def test_line_written_by_hand_is_named(ledger, line):
    ledger.append(Row())
    with open(ledger.path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordError, match="line 3 has"):
        ledger.rows()


def test_edited_removed_or_swapped_rows_are_noticed(ledger):
    for gain in (1.5, 2.5, 3.5, 4.5):
        ledger.append(Row(paired_gain_pct=gain, decision="revert"))
    good = ledger.path.read_text()
    assert ledger.verify_chain() == []
    ledger.path.write_text(good.replace("revert\t", "keep\t", 1))
    assert any("experiment 1" in p for p in ledger.verify_chain())
    lines = good.splitlines(keepends=True)
    for changed in (lines[:2] + lines[3:], [*lines[:2], lines[3], lines[2], lines[4]], [*lines, lines[-1]]):
        ledger.path.write_text("".join(changed))
        assert ledger.verify_chain()


def test_four_processes_append_at_once(tmp_path):
    processes = [writer(tmp_path, f"w{n}", 0, 15) for n in range(4)]
    assert [p.wait(timeout=60) for p in processes] == [0] * 4
    ledger = Ledger(tmp_path / "results.tsv", tmp_path / "workspace")
    rows = ledger.rows()
    assert [row.experiment for row in rows] == list(range(1, 61)) and ledger.verify_chain() == []
    assert {row.run_id for row in rows} == {f"w{n}-{i}" for n in range(4) for i in range(15)}
    for row in rows:
        assert (ledger.attempt(row.experiment) / "kernel.py").read_text() == f"# {row.run_id.split('-')[1]}"


def test_kill_9_at_any_moment_loses_and_doubles_nothing(tmp_path):
    """Writers are killed at random moments; whatever they had announced is there, once, whole, with its attempt."""
    ledger, rng, acknowledged, first = Ledger(tmp_path / "results.tsv", tmp_path / "workspace"), random.Random(7), 0, 0
    deadline, kills = time.monotonic() + 15, 0
    while kills < 25 and time.monotonic() < deadline:
        process = writer(tmp_path, "w", first, 1000)
        assert process.stdout.readline().strip()                    # it is in its loop
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        acknowledged = max([first, *map(int, process.stdout.read().split())])
        process.wait()
        rows = ledger.rows()
        assert [row.run_id for row in rows] == [f"w-{i}" for i in range(len(rows))]
        assert len(rows) - 1 in (acknowledged, acknowledged + 1)    # killed between the row and the announcement
        assert all((ledger.attempt(row.experiment) / "kernel.py").exists() for row in rows[first:])
        first, kills = len(rows), kills + 1
    assert kills >= 5 and ledger.verify_chain() == []
    ledger.append(Row(), b"", {})                                   # clears what the kills left half built
    assert not list((ledger.workspace / "experiments").glob(".tmp-*"))


@pytest.mark.parametrize("old_rows", [0, 2])
def test_death_at_every_system_call_of_an_append(ledger, old_rows):
    for n in range(old_rows):
        ledger.append(Row(run_id=f"old{n}"), b"old", {})
    out = subprocess.run([sys.executable, "-c", DIES_AT_EVERY_CALL, str(ledger.path.parent)], cwd=ROOT, timeout=120,
                         capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[-1] == "end 0" and len(out) > 15
    seen = [line.split()[1:] for line in out[:-1]]
    assert all(after[:len(before)] == before and len(after) - len(before) <= 1
               for before, after in zip(seen, seen[1:], strict=False))      # the old state or the new one
    rows = ledger.rows()
    assert len({row.run_id for row in rows}) == len(rows) > old_rows and ledger.verify_chain() == []
    assert [row.experiment for row in rows] == list(range(1, len(rows) + 1))
    for row in rows[old_rows:]:
        assert (ledger.attempt(row.experiment) / "kernel.py").read_text() == f"# {row.run_id[1:]}"
    torn = [f.read_text() for f in (ledger.workspace / "quarantine").glob("ledger-*")]
    # The write that died half-way; on a fresh ledger the calls shift while the header appears and may skip it.
    assert (len(torn) == 1 or old_rows == 0) and all(text.split("\t")[0].isdigit() for text in torn)


def test_held_lock_names_its_holder(ledger):
    code = ("import sys; from pathlib import Path; from autokernel.records import Ledger\n"
            "with Ledger(Path(sys.argv[1]), Path('.')).lock(): print('held', flush=True); sys.stdin.read()")
    process = subprocess.Popen([sys.executable, "-c", code, str(ledger.path)], cwd=ROOT, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    ledger.timeout = 0.2
    with pytest.raises(RecordError, match=rf"in use by process {process.pid} \(waited 0.2 s\)"):
        ledger.append(Row())
    process.kill()                                                  # a dead holder holds nothing
    process.wait()
    assert ledger.append(Row()).experiment == 1


def test_lock_may_be_held_around_an_append(ledger):
    ledger.timeout = 1
    with ledger.lock():
        assert ledger.append(Row()).experiment == 1
        with pytest.raises(RecordError, match=f"in use by process {os.getpid()}"):
            Ledger(ledger.path, ledger.workspace, timeout=0.1).append(Row())
    assert Ledger(ledger.path, ledger.workspace, timeout=1).append(Row()).experiment == 2


def test_full_disk_in_the_middle_of_a_row_leaves_no_half_row(ledger):
    ledger.append(Row(tag="before"))
    before = ledger.path.read_bytes()
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, old[1]))       # the write is cut after 40 bytes
    try:
        with pytest.raises(RecordError, match="nothing was recorded. Free space") as error:
            ledger.append(Row(tag="after", description="x" * 500))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(ledger.path) in str(error.value) and "\n" not in str(error.value)
    assert ledger.path.read_bytes() == before
    assert ledger.append(Row(tag="later")).experiment == 2


def test_failed_fsync_takes_the_row_back(ledger, monkeypatch):
    ledger.append(Row())
    before = ledger.path.read_bytes()

    def no_space(fd):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(RecordError, match="No space left on device; nothing was recorded"):
        ledger.append(Row())
    with pytest.raises(RecordError, match="No space left on device"):
        ledger.append(Row(), b"source", {})                        # the attempt fails first, and leaves no folder
    assert ledger.path.read_bytes() == before and not list((ledger.workspace / "experiments").iterdir())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_read_only_folder_is_one_clear_error(ledger, monkeypatch, code):
    real = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(ledger.path.parent)):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *args, **kwargs)
    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(RecordError, match=os.strerror(code)) as error:
        ledger.append(Row())
    assert "\n" not in str(error.value) and not ledger.path.exists()


def test_run_record_round_trip_and_row(tmp_path):
    record = RunRecord.new(b"source", "PASS", latency_us=3.5, kernel_type="rmsnorm", quick=True, sizes=[{"n": 1}])
    path = record.write(tmp_path / "deep" / "last_run.json")
    again = RunRecord.read(path)
    assert again.values == record.values                            # unknown keys included
    assert again.values["source_sha256"] == hashlib.sha256(b"source").hexdigest()
    row = again.row(decision="keep", experiment=None)
    assert (row.latency_us, row.kernel_type, row.quick, row.decision, row.correctness) == (3.5, "rmsnorm", True, "keep",
                                                                                         "PASS")
    assert row.run_id == record.values["run_id"] and row.started.endswith("Z")


@pytest.mark.parametrize("change, message", [
    ({"schema": SCHEMA + 1}, "schema"), ({"outcome": "GREAT"}, "none of PASS, FAIL, TIMEOUT, CRASH"),
    ({"run_id": None}, "no run_id"), (None, "not a readable record"), ("missing", "nothing was measured yet")])
def test_bad_run_record_is_one_clear_error(tmp_path, change, message):
    path = tmp_path / "last_run.json"
    values = RunRecord.new(b"", "FAIL").values
    if isinstance(change, dict):
        values = {key: value for key, value in {**values, **change}.items() if value is not None}
    if change != "missing":
        path.write_text("{half" if change is None else json.dumps(values))
    with pytest.raises(RecordError, match=message) as error:
        RunRecord.read(path)
    assert "\n" not in str(error.value)


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "f"
    paths.atomic_write(path, b"old")

    def fail(*args):
        raise OSError(errno.ENOSPC, "full")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        paths.atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


def test_paths_follow_the_environment(monkeypatch, tmp_path):
    for variable in ("WORKSPACE", "CACHE", "LEDGER"):
        monkeypatch.delenv(f"AUTOKERNEL_{variable}", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert paths.workspace() == ROOT / "workspace" and paths.ledger() == ROOT / "results.tsv"
    assert paths.cache_dir() == Path.home() / ".cache" / "autokernel"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / "autokernel"
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path / "c"))
    monkeypatch.setenv("AUTOKERNEL_WORKSPACE", str(tmp_path / "w"))
    assert paths.cache_dir() == tmp_path / "c" and Ledger().workspace == tmp_path / "w"
