"""Sweeps: ranges, CONFIG in place, the search, failures that cost one variant, the winner, the files, the places."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autokernel import landscape, scale, space
from autokernel.integrity import Harness, digest
from autokernel.lab import STATUSES, Finding, Job, Lab, Variant
from autokernel.paths import workspace
from autokernel.process import launcher
from autokernel.records import Ledger, RunRecord
from autokernel.run import Options, UsageError
from autokernel.spec import Case
from autokernel.sweep import NOT_TIMED, Request, sweep

ROOT = Path(__file__).resolve().parent.parent
CLEAN = Harness("clean", "", (), digest())
KERNEL = '''import os, time, torch
KERNEL_TYPE = "reduce"
BACKEND = "triton"
CONFIG = {"MODE": "good", "MS": 4}  # what a test asks for
SWEEP = {"MODE": ["good", "fine"], "MS": [0, 4]}
class CompilationError(Exception): pass
class OutOfResources(Exception): pass

def kernel_fn(x, dim=-1):
    mode = CONFIG["MODE"]
    if mode == "wrong": return torch.zeros_like(x.sum(dim))
    if mode == "raises": raise ValueError("boom")
    if mode == "segfault":
        import ctypes
        ctypes.string_at(0)
    if mode == "exits": os._exit(0)
    if mode == "hangs": time.sleep(3600)
    if mode == "no compile": raise CompilationError("no")
    if mode == "no room": raise OutOfResources("shared memory")
    if mode == "writes inputs": x.zero_()
    if mode == "narrow" and x.shape[-1] % 2: raise ValueError("an odd width")
    time.sleep(0.001 if mode == "narrow" else CONFIG["MS"] / 1000)
    return x.sum(dim)
'''
sys.path.insert(0, str(ROOT / "tests" / "adversarial"))
import zoo  # noqa: E402


@pytest.fixture(autouse=True)
def forked_children():
    """Children that fork from a process with PyTorch in it: the same, sooner."""
    with zoo._nursery():
        yield


SLOW = KERNEL.replace('"MS": 4}', '"MS": 60}')


@pytest.fixture
def kernel(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    return path


@pytest.fixture
def slow(tmp_path):
    """The same, at 60 ms a call: other programs on this machine cost some of these."""
    path = tmp_path / "kernel.py"
    path.write_text(SLOW)
    return path


def swept(kernel, *ranges, children=0, **more):
    """(record, the sweep) of a sweep in this process."""
    options = {k: more.pop(k) for k in ("quick", "timeout", "best", "sizes", "dtype") if k in more}
    options = Options(kernel, **{"quick": True, "sizes": "small", "timeout": 20} | options)
    with launcher(children) as started:
        return sweep(options, Request(" ".join(ranges), **more), started, lambda text: None, CLEAN)


# ---- ranges and CONFIG ----------------------------------------------------------------------------------------------

CONFIG = b'CONFIG = {"M": 128, "name": "a", "on": True, "rate": 0.5}\nSWEEP = {"M": [64, 128], "on": [True, False]}\n'


def test_ranges_in_their_three_forms(tmp_path):
    file = tmp_path / "ranges.json"
    file.write_text('{"M": [1, 2], "name": ["", "b"]}')
    assert space.parse("M=64,128,256 on=true,false name=,b rate=1,0.25", CONFIG) == {
        "M": [64, 128, 256], "on": [True, False], "name": ["", "b"], "rate": [1, 0.25]}  # fmt: skip
    assert space.parse("M=2..5", CONFIG) == {"M": [2, 3, 4, 5]} and space.parse("M=3,1..3", CONFIG) == {"M": [3, 1, 2]}
    assert space.parse("auto", CONFIG) == {"M": [64, 128], "on": [True, False]}
    assert space.parse(str(file), CONFIG) == {"M": [1, 2], "name": ["", "b"]}


BAD = {
    "N=1": "CONFIG has no 'N'; it has: M, name, on, rate",
    "M=four": "M is int in CONFIG \\(128\\), not 'four'",
    "M=1.5": "M is int",
    "on=1": "on is bool in CONFIG",
    "M": "'M' is no range; write NAME=1,2,4",
    "M=": "M is int in CONFIG \\(128\\), not ''",
    "M=5..2": "M needs a list of values",
    "M=1..999999999999": "more than 10000 values",
    "nowhere.json": "nowhere.json: .*No such file",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_ranges_get_one_line(text):
    with pytest.raises(space.SpaceError, match=BAD[text]) as caught:
        space.parse(text, CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source,words", [
    (b"x = 1\n", "no CONFIG to sweep"), (b"CONFIG = dict(M=1)\n", "no CONFIG"), (b"CONFIG = {\n", "kernel.py:1"),
    (b'CONFIG = {"M": 1}\nCONFIG = other()\n', "no CONFIG"), (b'CONFIG = {"M": [1]}\n', "only numbers"),
])  # fmt: skip
def test_a_kernel_that_cannot_be_swept(source, words):
    with pytest.raises(space.SpaceError, match=words):
        space.parse("M=1,2", source)
    with pytest.raises(space.SpaceError, match="declares no ranges"):
        space.parse("auto", b'CONFIG = {"M": 1}\n')


SHAPES = {
    "comments and layout": 'CONFIG = {  # é ü\n    "M":  (128),   # tiles\n\t"name" :"a", \'on\': not_,\n}\n',
    "one line, repeated": 'CONFIG = {"M": 1}\nCONFIG = {"é": "ü", "M": 0x80, "name": "a" "b"}; y = "M"\n',
    "carriage returns": 'x = """\r\n"""\r\nCONFIG = {\r\n  "M": -1,\r\n  "name": """two\r\nlines""",\r\n}\r\n',
    "form feed and other separators": '# a\x0cb\u2028c\nCONFIG = {"M": 1, "name": "a"}\n# \x85\n',
    "annotated": 'CONFIG: dict = {"M": 1, "name": "a"}',
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_rewriting_touches_nothing_else(shape, encoding):
    text = SHAPES[shape].replace("not_", "True")
    if encoding == "latin-1":
        text = "# -*- coding: latin-1 -*-\n" + text.replace("\u2028", "")
    data = text.encode(encoding)
    assert space.rewrite(data, space.tunables(data)) == data
    changed = space.rewrite(data, {"M": 4096, "name": "é\n"})
    assert space.tunables(changed) == space.tunables(data) | {"M": 4096, "name": "é\n"}
    # what is left when the two values are cut out is the same on both sides
    tokens = {k: v for k, v in (("(128)", "(4096)"), ("0x80", "4096"), ("-1,", "4096,"), ('"M": 1,', '"M": 4096,'))}
    old = next(k for k in tokens if k in text.rpartition("CONFIG")[2])
    before, _, after = text.rpartition("CONFIG")[2].partition(old)
    new = changed.decode(encoding).rpartition("CONFIG")[2]
    assert new.startswith(before + tokens[old]) and changed.startswith(text.rpartition("CONFIG")[0].encode(encoding))
    assert new.endswith(after[after.rindex("}") :])
    assert space.rewrite(changed, space.tunables(data)).split(b"CONFIG")[0] == data.split(b"CONFIG")[0]


def test_the_starters_declare_ranges_that_hold_their_config():
    for path, grid in (("matmul.py", 97), ("rmsnorm.py", 33), ("cuda/rmsnorm.py", 32)):
        data = (ROOT / "kernels" / path).read_bytes()
        found, config = space.parse("auto", data), space.tunables(data)
        assert all(config[name] in values for name, values in found.items()), path
        assert math.prod(map(len, found.values())) >= grid, path


# ---- the search -----------------------------------------------------------------------------------------------------

GRID = {"M": [16, 32, 64, 128, 256], "N": [32, 64, 128, 256], "K": [16, 32, 64, 128], "G": [1, 2, 4, 8, 16],
        "warps": [1, 2, 4, 8], "stages": [1, 2, 3, 4, 5, 6], "persistent": [True, False]}  # fmt: skip
START = {"M": 64, "N": 64, "K": 32, "G": 1, "warps": 4, "stages": 2, "persistent": False}


def landscape_of(c, seed=0):
    """Shared memory and registers forbid a part; the rest has a valley along tile shapes, ripples, and noise."""
    lanes = c["M"] * c["N"] / (c["warps"] * 32)
    if (c["M"] + c["N"]) * c["K"] * 2 * c["stages"] > 227 * 1024 or lanes > 512:
        return math.inf
    log = math.log2
    t = 1 + 0.15 * (log(c["M"]) - 7) ** 2 + 0.1 * (log(c["N"]) - 7.5) ** 2 + 0.08 * (log(c["K"]) - 6) ** 2
    t += 0.03 * (log(c["G"]) - 3) ** 2 + 0.1 * max(0, 4 - c["stages"]) + 0.15 * abs(log(lanes) - 7)
    t += 0.07 * c["persistent"] + 0.2 * math.sin(3 * log(c["M"] * c["N"])) ** 2
    return t * (1 + 0.02 * random.Random(f"{seed}{sorted(c.items())}").random())


def searched(seed, budget):
    search, count = space.Search(GRID, START, budget, seed), 0
    while batch := search.propose():
        for config in batch:
            search.tell(config, landscape_of(config))
            count += 1
    assert count == budget == len(search.scores)
    return min(search.scores.values())


def at_random(seed, budget):
    dice, seen = random.Random(seed), {}
    while len(seen) < budget:
        config = {name: dice.choice(values) for name, values in GRID.items()}
        seen[tuple(config.values())] = landscape_of(config)
    return min(seen.values())


@pytest.mark.parametrize("budget", [64, 128])
def test_the_search_beats_chance(budget):
    ours, chance = ([f(seed, budget) for seed in range(30)] for f in (searched, at_random))
    assert sum(a < b for a, b in zip(ours, chance, strict=True)) >= 24
    floor = min(filter(math.isfinite, map(landscape_of, (dict(zip(GRID, k, strict=True))
                                                         for k in itertools.product(*GRID.values())))))  # fmt: skip
    assert statistics.mean(ours) - floor < 0.6 * (statistics.mean(chance) - floor)
    assert searched(3, budget) == searched(3, budget)


def test_a_grid_within_the_budget_is_tried_whole():
    search = space.Search({"M": [1, 2], "N": [3, 4, 5]}, {"M": 7, "N": 3}, 7)
    found = search.propose()
    assert len(found) == 7 and found[0] == {"M": 7, "N": 3} and not search.propose()
    assert len({tuple(c.values()) for c in found}) == 7
    assert len(space.Search({"M": [1, 2], "N": [3, 4, 5]}, {"M": 2, "N": 3}, 6).propose()) == 6
    huge = space.Search({f"P{i}": list(range(100)) for i in range(30)}, {f"P{i}": 0 for i in range(30)}, 20)
    assert len(huge.propose()) == 16 and len(huge.propose()) == 4 and not huge.propose()


# ---- variants that fail ---------------------------------------------------------------------------------------------

MODES = {
    "good": "right", "wrong": "wrong", "raises": "crash", "segfault": "crash", "exits": "crash", "hangs": "timeout",
    "no compile": "compile_error", "no room": "out_of_resources", "writes inputs": "wrong", "fine": "right",
}  # fmt: skip


def job_of(*modes, ms=0, timed=False, **more) -> Job:
    data = KERNEL.encode()
    family = space.rewrite(data, {"MODE": ""})
    variants = tuple(Variant(i, m, space.rewrite(data, {"MODE": m, "MS": ms}), "triton", family)
                     for i, m in enumerate(modes))  # fmt: skip
    size = {"shape": (16, 33), "dim": -1}
    return Job("reduce", (Case("small", "timing", size, "fp16"),), variants, timed, **{"seconds": 3.0} | more)


def test_a_failing_variant_costs_only_itself():
    modes = [*MODES, "good", "wrong", "no room"]
    with launcher() as children:
        lab = Lab(job_of(*modes, cores=3), children)
        found = lab.evaluate(job_of(*modes))
        lab.close()
    assert [f.status for f in found] == [MODES[m] for m in modes]
    assert {f.status for f in found} <= set(STATUSES)
    assert all(f.reason and "\n" not in f.reason for f in found if f.status != "right")
    assert "SIGSEGV" in found[modes.index("segfault")].reason and "3 s" in found[modes.index("hangs")].reason


TRAPS = """
import importlib.util, sys
space = {"found": []}
exec(compile('''
import sys

def look(*_, **__):
    frame = sys._getframe(1)
    while frame is not None:
        found.extend(["runner"] * hasattr(frame.f_locals.get("self"), "clock"))
        frame = frame.f_back
''', "elsewhere.py", "exec"), space)
sys.found = space["found"]


def trap(function):
    return lambda *a, **k: (space["look"](), function(*a, **k))[1]


class Name(str):
    def __hash__(self):
        return hash(str(self))

    def __eq__(self, other):
        space["look"]()
        return str.__eq__(self, other)


importlib.util.spec_from_file_location = trap(importlib.util.spec_from_file_location)
importlib.util.module_from_spec = trap(importlib.util.module_from_spec)
for name in ("kernel", "autokernel.cuda"):
    module = sys.modules.pop(name, None)
    sys.modules[Name(name)] = module
"""


def test_a_variant_sets_no_traps_for_the_next():
    job = job_of("good", "fine", "good", ms=1)
    trapping, good, another = job.variants
    trapping = replace(trapping, data=trapping.data + TRAPS.encode())
    another = replace(another, data=another.data + b"\nimport sys\nif sys.found: raise ValueError(sys.found[0])\n")
    with launcher() as children:
        lab = Lab(job, children)
        lab.findings = {v.number: Finding(v.number, "right") for v in job.variants}
        with lab._seated(trapping) as seat:
            for variant in (trapping, good, trapping, another, good):
                worker = seat.use(variant, 20)
                assert lab._screen(worker, variant) == ("right", "")
                assert worker.resources()
        lab.close()
    assert [f.reason for f in lab.findings.values()] == [""] * 3


def test_time_that_is_up_leaves_the_rest_unmeasured():
    with launcher() as children:
        lab = Lab(job_of("good", cores=2), children)
        found = lab.evaluate(job_of(*["good"] * 6, ms=700, left=1.5))
        lab.close()
    states = [f.status for f in found]
    assert states[0] == "right" and states[-1] == "not_run" and found[-1].reason == "the time was up"


# ---- timing and the winner ------------------------------------------------------------------------------------------


def test_the_winner_takes_its_place_and_the_row_says_so(slow, tmp_path):
    record, this = swept(slow, "MS=10,30,60,100,200 MODE=good,wrong", quick=False, timed=True)
    assert slow.read_text() == SLOW.replace('"MS": 60', '"MS": 10')
    assert record.values["correctness"] == "PASS" and record.values["shape_sweep"].startswith("PASS")
    assert record.values["speedup_vs_best"] > 2 and this.values["gain_pct"] > 100 and this.values["reason"] == ""
    ranking = [this.configs[n]["MS"] for n in this.ranked()]
    assert ranking == [10, 30, 60, 100, 200]
    pairs = {this.configs[n]["MS"]: this.findings[n].pairs for n in this.ranked()}
    assert pairs[10] == 40 and pairs[200] == 2 and pairs[100] < 40  # successive halving
    us = {this.configs[n]["MS"]: this.findings[n].us["small"] for n in this.ranked()}
    assert 15_000 < us[30] < 60_000
    [row] = Ledger().rows()
    assert row.variants == 10 and row.run_id == record.values["run_id"] and "written back" in row.reason
    folder = Ledger().attempt(1)
    lines = [line.split("\t") for line in (folder / "sweep.tsv").read_text().splitlines()]
    assert len(lines) == 11 and all(len(line) == len(lines[0]) for line in lines)
    assert [line[1] for line in lines[1:]].count("wrong") == 5 and {"MS", "MODE", "us", "reason"} <= set(lines[0])
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    [before] = (tmp_path / "workspace" / "unrecorded").iterdir()
    assert before.read_text() == SLOW and (folder / "kernel.py").read_bytes() == slow.read_bytes()
    assert RunRecord.read().values["variants"] == 10 and RunRecord.read().values["outcome"] == "PASS"


def test_nothing_faster_leaves_the_kernel_byte_for_byte(slow):
    record, this = swept(slow, "MS=60,90", timed=True)
    assert slow.read_text() == SLOW and not this.values["written_back"]
    assert this.values["reason"] == "no variant is faster" and record.values["correctness"] == "PASS"
    assert Ledger().rows()[0].reason == "no variant is faster"


def test_a_winner_that_is_right_only_here_makes_room_for_the_next(slow):
    """Fast and right on the swept size, wrong on others: only the whole judge knows."""
    record, this = swept(slow, "MODE=narrow,good", quick=False, timed=True)
    assert this.findings[1].us["small"] < 0.5 * this.findings[0].us["small"]
    assert "an odd width" in this.findings[1].reason and "whole judge" in this.values["reason"]
    assert slow.read_text() == SLOW and record.values["correctness"] == "PASS"
    _, this = swept(slow, "MODE=narrow,good MS=20,60", quick=False, timed=True)
    assert slow.read_text() == SLOW.replace('"MS": 60', '"MS": 20') and this.values["reason"] == ""


def test_a_broken_present_kernel_is_replaced(kernel):
    kernel.write_text(KERNEL.replace('"MODE": "good"', '"MODE": "raises"'))
    record, this = swept(kernel, "MODE=good,raises", quick=False, timed=True)
    assert space.tunables(kernel.read_bytes())["MODE"] == "good" and record.values["correctness"] == "PASS"
    assert this.findings[0].status == "crash"


def test_quick_and_a_changed_file_are_not_written_back(slow, monkeypatch):
    _, this = swept(slow, "MS=10,60", timed=True)
    assert slow.read_text() == SLOW and "--quick" in this.values["reason"]
    from autokernel import sweep as module

    def run_and_edit(options, *rest):
        record = real(options, *rest)
        slow.write_text(SLOW + "# mine\n")
        return record

    real = module.run
    monkeypatch.setattr(module, "run", run_and_edit)
    _, this = swept(slow, "MS=10,60", quick=False, timed=True)
    assert slow.read_text() == SLOW + "# mine\n" and "was changed" in this.values["reason"]


def test_candidates(slow, tmp_path):
    folder = tmp_path / "batch"
    folder.mkdir()
    (folder / "a_fast.py").write_text(SLOW.replace('"MS": 60', '"MS": 2') + "# mine\n")
    (folder / "b_wrong.py").write_text(KERNEL.replace('"MODE": "good"', '"MODE": "wrong"'))
    (folder / "c_broken.py").write_text("def kernel_fn(:\n")
    (folder / "d_other.py").write_text(KERNEL.replace('"reduce"', '"softmax"'))
    record, this = swept(slow, candidates=folder, quick=False, timed=True)
    assert slow.read_bytes() == (folder / "a_fast.py").read_bytes() and this.values["winner"] == "a_fast.py"
    states = {this.variants[n].name: f.status for n, f in this.findings.items()}
    assert states == {"(kernel.py)": "timed", "a_fast.py": "timed", "b_wrong.py": "wrong", "c_broken.py": "wrong",
                      "d_other.py": "wrong"}  # fmt: skip
    assert "c_broken.py:1: syntax error" in this.findings[3].reason and "softmax" in this.findings[4].reason
    assert [f.read_text() for f in (tmp_path / "workspace" / "unrecorded").iterdir()] == [SLOW]
    with pytest.raises(UsageError, match="no folder with kernel files"):
        swept(slow, candidates=tmp_path / "none")


def test_more_variants_than_the_budget(kernel):
    _, this = swept(kernel, "MS=0..9 MODE=good,fine", max_variants=6, timed=True)
    assert len(this.findings) == 6 and this.values["grid"] == 20 and this.configs[0] == {"MS": 4, "MODE": "good"}


IN_RUN = """
import sys; sys.path.append(".")
from pathlib import Path
from autokernel.integrity import required
from autokernel.paths import best_kernel
from autokernel.process import launcher
from autokernel.run import Options
from autokernel.sweep import Request, sweep
kernel = Path("kernel.py")
with launcher() as children:
    options = Options(kernel, sizes="small", best=best_kernel(kernel))
    record, this = sweep(options, Request(sys.argv[1], timed=True), children, lambda text: None, required())
    print(this.values["written_back"], this.values["reason"])
"""


def test_in_a_run_the_winner_is_kept_like_any_kernel(tmp_path):
    """One row, one commit and best.py; the loop's own `record` knows that it is written down already."""
    from tests.test_orchestrate import Repo

    repo = Repo(tmp_path / "repo")
    repo.kernel.write_text(SLOW)
    repo.git("commit", "-qam", "slow")
    repo.run("start", "night")

    def sweep_it(ranges):
        done = subprocess.run([sys.executable, "-B", "-c", IN_RUN, ranges], cwd=repo.root, env=repo.env,
                              capture_output=True, text=True, timeout=200)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    best = repo.root / "workspace" / "best" / "reduce.py"
    assert sweep_it("MS=60,80") == "False no variant is faster\n" and best.read_text() == SLOW
    assert sweep_it("MS=10,60").startswith("True")
    assert repo.kernel.read_text() == SLOW.replace('"MS": 60', '"MS": 10') == repo.git("show", "HEAD:kernel.py")
    assert best.read_text() == repo.kernel.read_text()
    assert "experiment 2 already" in repo.run("record", "-m", "again")
    rows = [(r.experiment, r.tag, r.decision, r.variants, bool(r.commit)) for r in repo.rows]
    assert rows == [(1, "night", "baseline", 2, True), (2, "night", "keep", 2, True)]
    assert "CONTINUE" in repo.run("next")


# ---- the command ----------------------------------------------------------------------------------------------------


def bench(*arguments, kernel, rc):
    env = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-B", "bench.py", "--kernel", str(kernel), "--allow-dirty-harness", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == rc, done.stdout + done.stderr
    return done


OTHERS = ("MODE=good MS=0", "MODE=fine MS=0", "MODE=fine MS=4")


def test_a_sweep_without_a_gpu_only_screens(kernel):
    last = workspace() / "last_run.json"
    last.parent.mkdir()
    last.write_text("an earlier verdict")
    done = bench("--sweep", "auto", "--sizes", "small", "--quick", kernel=kernel, rc=0)
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[: len(landscape.KEYS)]] == list(landscape.KEYS)
    assert max(map(len, lines)) <= 100 and done.stderr == f"bench.py: {NOT_TIMED}\n"
    block = {k: v.strip() for k, _, v in (line.partition(":") for line in lines[: len(landscape.KEYS)])}
    assert block["right"] == block["variants"] == block["grid"] == "4" and block["timed"] == "0"
    assert block["written_back"] == "no" and "without a GPU" in block["reason"] and float(block["judge_seconds"]) < 1
    nothing = ("winner", "winner_us", "present_us", "gain_pct", "correctness", "experiment", "speedup_vs_pytorch")
    assert {block[key] for key in nothing} == {"n/a"} and block["files"] == "workspace/sweep.tsv, sweep.png"
    assert lines[-4:] == ["0  MODE=good MS=4 (present)", *(f"{i}  {v}" for i, v in enumerate(OTHERS, 1))]
    assert kernel.read_text() == KERNEL and not Ledger().rows() and last.read_text() == "an earlier verdict"
    assert (last.parent / "sweep.tsv").read_text().count("right") == 4
    bench("--sweep", "MODE=wrong,raises", "--sizes", "small", kernel=kernel, rc=0)  # the present one is right
    kernel.write_text(KERNEL.replace('"MODE": "good"', '"MODE": "wrong"'))
    bench("--sweep", "MODE=wrong,raises", "--sizes", "small", kernel=kernel, rc=1)


@pytest.mark.parametrize("arguments,words", [
    (("--sweep", "NOPE=1"), "CONFIG has no 'NOPE'"),
    (("--sweep", "MS=1", "--sizes", "huge"), "unknown --sizes 'huge'"),
    (("--candidates", "/nowhere"), "--candidates /nowhere: no folder"),
    (("--gpus", "0,1", "--sweep", "MS=1,2"), "there is no GPU here"),
    (("--cluster", "127.0.0.1:1"), "several GPUs need several kernels"),
])  # fmt: skip
def test_bad_options_get_one_line(arguments, words, kernel):
    done = bench(*arguments, kernel=kernel, rc=2)
    assert done.stderr.count("\n") == 1 and words in done.stderr and not done.stdout


@pytest.mark.nvcc
@pytest.mark.skipif(not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()), reason="no nvcc")
def test_cuda_variants_are_compiled_where_there_is_no_gpu(tmp_path):
    kernel = tmp_path / "kernel.py"
    shutil.copy(ROOT / "kernels" / "cuda" / "rmsnorm.py", kernel)
    record, this = swept(kernel, "VECS=2,4,-1", timeout=100)
    states = {this.configs[n]["VECS"]: f.status for n, f in this.findings.items()}
    assert states == {4: "compiled", 2: "compiled", -1: "compile_error"}
    registers = {this.configs[n]["VECS"]: f.resources.get("registers") for n, f in this.findings.items()}
    assert registers[4] > registers[2] > 16  # VECS is a definition of the preprocessor: fewer vectors, fewer registers
    assert record.values["correctness"] is None and not Ledger().rows()


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with scale.places(["A", "B"], "") as where:
        yield where


ECHO = "tests.errands:echo"


def test_two_gpus_share_the_jobs_and_stay_warm(two):
    began = dict(two.spread(ECHO, [{"n": n, "sleep": 0.3} for n in range(6)]))
    assert sorted(began) == list(range(6)) and all(began[n]["n"] == n for n in began)
    assert {r["gpu"] for r in began.values()} == {"A", "B"} and len({r["pid"] for r in began.values()}) == 2
    again = dict(two.spread(ECHO, [{"n": n, "sleep": 0.3} for n in range(4)]))
    assert {r["pid"] for r in again.values()} == {r["pid"] for r in began.values()}


def test_a_lost_worker_is_made_up_for_elsewhere(two, tmp_path):
    jobs = [{"n": n, "once": str(tmp_path / "died") if n == 2 else ""} for n in range(5)]
    results = list(two.spread(ECHO, jobs))
    assert sorted(index for index, _ in results) == list(range(5)) and (tmp_path / "died").exists()


def test_a_job_that_always_kills_its_worker_is_given_up(two, tmp_path):
    with pytest.raises(scale.ScaleError, match="lost 3 times"):
        list(two.spread("tests.errands:die", [{"n": 0}]))


def test_an_exception_comes_home(two):
    with pytest.raises(ValueError, match="no such tile"):
        list(two.spread(ECHO, [{"n": 0}, {"n": 1, "fail": "no such tile"}]))
    assert dict(two.spread(ECHO, [{"n": 5}]))[0]["n"] == 5


def test_names_of_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-b,7")
    assert scale.gpu_ids("0,2") == ["4", "7"] and scale.gpu_ids("all") == ["4", "GPU-b", "7"]
    with pytest.raises(scale.ScaleError, match="no GPU '3'; here are 0, 1, 2, or all"):
        scale.gpu_ids("0,3")


def states(results):
    """number -> status, of all parts of a sweep, each variant once."""
    found = [f for _, part in results for f in part]
    assert len({f.number for f in found}) == len(found)
    return {f.number: f.status for f in found}


def test_a_sweep_is_the_same_on_two_gpus(two):
    whole = job_of(*MODES)
    parts = [Job(**{**vars(whole), "variants": whole.variants[i::2], "cores": 1}) for i in range(2)]
    assert states(two.spread("autokernel.lab:evaluate", parts)) == dict(enumerate(MODES.values()))


NODES = """
import ctypes, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # Ray's orphans stay here: the judge would end them as strays of its kernels
from ray.cluster_utils import Cluster
node = dict(num_cpus=1, num_gpus=1, object_store_memory=80_000_000)
cluster = Cluster(initialize_head=True, head_node_args=node | dict(include_dashboard=False))
cluster.add_node(**node)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def cluster():
    """The address of two nodes of one GPU each, as Ray counts, on this machine."""
    pytest.importorskip("ray")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    nodes = subprocess.Popen([sys.executable, "-c", NODES], env=env, text=True, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
    yield next(line.split()[1] for line in nodes.stdout if line.startswith("address"))
    nodes.stdin.close()
    nodes.wait(60)


@pytest.mark.timeout(280)
def test_ray_gives_what_one_machine_gives_also_when_a_worker_dies(cluster, tmp_path):
    whole = job_of("good", "wrong", "segfault", "no room", "fine", "raises")
    with launcher() as children:
        lab = Lab(whole, children)
        here = {f.number: f.status for f in lab.evaluate(whole)}
        lab.close()
    parts = [Job(**{**vars(whole), "variants": whole.variants[i::2]}) for i in range(2)]
    with scale.places([], cluster) as where:
        assert where.width == 2
        assert states(where.spread("autokernel.lab:evaluate", parts)) == here
        jobs = [{"n": n, "once": str(tmp_path / "died") if n == 1 else "", "sleep": 0.2} for n in range(4)]
        results = list(where.spread(ECHO, jobs))
        assert sorted(i for i, _ in results) == list(range(4)) and (tmp_path / "died").exists()
        assert all(r["n"] == i for i, r in results)
        with pytest.raises(ValueError, match="no such tile"):
            list(where.spread(ECHO, [{"n": 1, "fail": "no such tile"}]))


def test_a_cluster_that_is_not_there(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(scale.ScaleError, match="--cluster 127.0.0.1:1"):
        scale.Cluster("127.0.0.1:1")


def test_ray_is_not_imported_without_cluster():
    code = "import sys; from autokernel import scale, sweep, lab; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_json_record(kernel):
    done = bench("--sweep", "MS=0,4", "--sizes", "small", "--quick", "--json", kernel=kernel, rc=0)
    values = json.loads(done.stdout)
    assert values["variants"] == values["sweep"]["right"] == 2 and values["correctness"] is None
