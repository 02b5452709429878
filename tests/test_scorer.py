"""KernelBench levels: fast_p, the scorer, and problems as targets of the night. The judge is a stand-in but once."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autokernel import kbscore
from autokernel import kernelbench as kb
from tests.test_orchestrate import ROOT, Repo

PROBLEM = '''import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, n):
        super(Model, self).__init__()
        self.scale = nn.Parameter(torch.rand(n))

    def forward(self, x):
        return torch.relu(x - 0.5) * self.scale * {factor}


def get_inputs():
    return [torch.rand(7, 33)]


def get_init_inputs():
    return [33]
'''

STAND_IN = '''import json, os, sys, time
from pathlib import Path
o = dict(zip(sys.argv, sys.argv[1:]))
text = Path(o["--kernel"]).read_text()
with open(os.environ["JUDGED"], "a") as log:
    log.write(f"begin {o['--problem']} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
time.sleep(0.3)
if "too large" in text:
    print("bench_kb.py: needs 900 GiB", file=sys.stderr)
    sys.exit(2)
if "hangs" in text:
    time.sleep(600)
right = "wrong" not in text
speed = float(text.split("SPEED = ")[1].split()[0]) if right else None
print(json.dumps({"correctness": "PASS" if right else "FAIL", "reason": None if right else "zeros", "quick": False,
                  "latency_us": right and 100 / speed, "speedup_vs_pytorch": speed, "gpu_name": None,
                  "speedup_vs_compile": speed and speed / 2 if "--compile-baseline" in sys.argv else None}))
with open(os.environ["JUDGED"], "a") as log:
    log.write(f"end {o['--problem']}\\n")
sys.exit(0 if right else 1)
'''


@pytest.fixture
def level(tmp_path):
    """A repository whose cache has a level 1 of twelve problems, with a stand-in for the judge."""
    clone = tmp_path / "KernelBench" / "level1"
    clone.mkdir(parents=True)
    for number in range(1, 13):
        (clone / f"{number}_Scaled_{number}.py").write_text(PROBLEM.format(factor=number))
    (folder := tmp_path / "repo").mkdir()
    repo = Repo(folder, git=False)
    ours = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernelbench", folder / "kernelbench", ignore=ours)
    (folder / "kernelbench" / "bench_kb.py").write_text(STAND_IN)
    repo.git("init", "-q", "-b", "main")
    repo.git("config", "user.name", "Somebody"), repo.git("config", "user.email", "somebody@example.com")
    repo.git("add", "-A"), repo.git("commit", "-qm", "all")
    repo.env |= {"AUTOKERNEL_CACHE": str(tmp_path / "cache"), "JUDGED": str(tmp_path / "judged"), "COLUMNS": "110"}
    done = repo.start("kernelbench/bridge.py", "fetch", "--repo", str(clone.parent))
    assert "level 1: 12" in done.communicate()[0]
    return repo


def solve(repo: Repo, number: int, text: str, name: str = "best.py") -> None:
    folder = repo.root / "workspace" / "kb" / "1" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def score(repo: Repo, *options: str, rc: int = 0) -> tuple[str, str]:
    done = repo.start("kernelbench/scorer.py", "--level", "1", *options)
    out, err = done.communicate(timeout=100)
    assert done.returncode == rc, out + err
    return out, err


def judged(repo: Repo) -> list[str]:
    path = Path(repo.env["JUDGED"])
    return path.read_text().splitlines() if path.exists() else []


# ---- fast_p ---------------------------------------------------------------------------------------------------------


def test_fast_p_is_the_official_one():
    """By the definition of KernelBench's score: right and speedup > p, over all problems, missing ones wrong."""
    dice = random.Random(1)
    for _ in range(50):
        n = dice.randint(1, 40)
        times = {i: (dice.uniform(1, 9), dice.choice([1.0, 2.0, 3.0, dice.uniform(1, 9)])) for i in range(1, n + 1)}
        verdict = {i: dice.choice(["PASS", "PASS", "FAIL", "missing"]) for i in times}
        rows = {i: {"correctness": v, "speedup_vs_pytorch": times[i][0] / times[i][1] if v == "PASS" else None}
                for i, v in verdict.items() if v != "missing"}  # fmt: skip
        found = kbscore.Score("1", {i: "" for i in times}, tuple(rows), rows, ()).fast("speedup_vs_pytorch")
        for p in (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0):
            quick = sum(verdict[i] == "PASS" and times[i][0] / times[i][1] > p for i in times)
            assert found[p] == quick / n
    rows = {1: {"correctness": "PASS", "speedup_vs_compile": 1.0}, 2: {"correctness": "PASS"}}
    exactly_one = kbscore.Score("1", {1: "", 3: ""}, (1,), {1: rows[1]}, ())
    assert exactly_one.fast("speedup_vs_compile")[1.0] == 0  # more than p, not p
    unknown = kbscore.Score("1", {1: "", 2: ""}, (1, 2), rows, ())
    assert unknown.fast("speedup_vs_compile")[1.0] is None and unknown.geomean("speedup_vs_compile") is None


def test_select(tmp_path, monkeypatch):
    clone = tmp_path / "level1"
    clone.mkdir()
    for number in (1, 2, 3, 5, 8):
        (clone / f"{number}_X.py").write_text(PROBLEM.format(factor=number))
    kb.fetch_folder(tmp_path)
    assert [p.id for p in kb.select("1", "5, 1-3,2")] == [1, 2, 3, 5] and len(kb.select("1")) == 5
    for bad in ("4", "3-1", "x", "1-", "-2", "0", "1-99999999999", "1;2", "2-4"):
        with pytest.raises(kb.ProblemError, match="--problems"):
            kb.select("1", bad)


# ---- the scorer -----------------------------------------------------------------------------------------------------


def test_a_level_is_scored_once(level):
    for number in range(1, 7):
        solve(level, number, f"SPEED = {number / 2}\n")
    solve(level, 7, "wrong\n"), solve(level, 8, "too large\n")
    solve(level, 9, "SPEED = 4.0\n", "kernel.py")
    before = {p: p.read_bytes() for p in level.root.rglob("*.py")}
    stamp = level.kernel.stat().st_mtime_ns
    out, err = score(level, rc=1)
    assert "not judged: kb/1/8: needs 900 GiB (exit status 2)" in out
    assert "12 problems, 9 with a solution, 8 scored on cpu" in out
    assert err.count("\n") == 9 and "[1/9, " in err
    v = json.loads(score(level, "--report", "--json", rc=1)[0])
    assert (v["problems"], v["solutions"], v["scored"], v["right"]) == (12, 9, 8, 7)
    # 0.5 1 1.5 2 2.5 3 and 4, of twelve
    quick = {"1.0": 5, "1.1": 5, "1.25": 5, "1.5": 4, "2.0": 3, "3.0": 1, "5.0": 0}
    assert v["fast_p"]["pytorch"] == {p: n / 12 for p, n in quick.items()}
    assert v["fast_p"]["compile"] == dict.fromkeys(v["fast_p"]["pytorch"]) and v["devices"] == ["cpu"]
    number = len(judged(level))
    score(level, "--problems", "1-7,9")
    assert len(judged(level)) == number  # nothing anew
    solve(level, 2, "SPEED = 8.0\n")
    v = json.loads(score(level, "--report", "--json", rc=1)[0])
    assert v["scored"] == 7  # the score of a solution that is no more
    out, _ = score(level, "--problems", "2-3", "--compile-baseline")
    assert "PyTorch, asked for (2)" in out and len([j for j in judged(level)[number:] if "begin" in j]) == 2
    assert "torch.compile, level 1 (12)" in out and score(level, "--problems", "2")[1] == ""
    picture = (level.root / "workspace/kb/1/scores.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and level.kernel.stat().st_mtime_ns == stamp
    assert {p: p.read_bytes() for p in level.root.rglob("*.py")} == {
        **before, level.root / "workspace/kb/1/2/best.py": b"SPEED = 8.0\n"}  # fmt: skip
    assert not (level.root / "workspace/last_run.json").exists()


def test_the_active_problems_kernel_is_its_solution(level):
    solve(level, 3, "SPEED = 9.0\n", "kernel.py")
    (level.root / "workspace/active").write_text("kb/1/3\n")
    level.kernel.write_text("SPEED = 2.5\n")
    assert json.loads(score(level, "--json")[0])["rows"][0]["speedup_vs_pytorch"] == 2.5
    solve(level, 3, "SPEED = 3.5\n")
    assert json.loads(score(level, "--json")[0])["rows"][0]["speedup_vs_pytorch"] == 3.5


def test_kill_9_and_go_on(level):
    for number in range(1, 13):
        solve(level, number, f"SPEED = {number}\n")
    for _ in range(3):
        process = level.start("kernelbench/scorer.py", "--level", "1")
        seen = sum("end" in j for j in judged(level))
        while process.poll() is None and sum("end" in j for j in judged(level)) < seen + 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    v = json.loads(score(level, "--json")[0])
    assert v["scored"] == 12 and [r["speedup_vs_pytorch"] for r in v["rows"]] == list(range(1, 13))
    assert sum("begin" in j for j in judged(level)) <= 12 + 2 * 3  # what was under way at most, not all over


def test_gpus_budgets_and_interrupts(level):
    for number in range(1, 13):
        solve(level, number, f"SPEED = {number}\n")
    level.env["CUDA_VISIBLE_DEVICES"] = "4,6"
    assert "no GPU '2'" in score(level, "--gpus", "2", rc=2)[1]
    score(level, "--gpus", "all")
    used = [j.split()[2] for j in judged(level) if "begin" in j]
    assert set(used) == {"4", "6"} and len(used) == 12 and min(map(used.count, "46")) >= 2
    steps = [1 if "begin" in j else -1 for j in judged(level)]
    assert max(sum(steps[:i]) for i in range(len(steps))) == 2 * kbscore.LANES
    out, _ = score(level, "--again", "--minutes", "0.004", rc=0)  # scores that hold are not lost by a budget
    assert "12 scored on cpu" in out
    for path in (level.root / "workspace/kb/1").glob("*/score.json"):
        path.unlink()
    out, _ = score(level, "--minutes", "0.004", rc=1)
    assert re.search(r"not scored yet: \d+ problems \(", out)
    solve(level, 1, "hangs\n")
    out, _ = score(level, "--problems", "1", "--problem-minutes", "0.02", rc=1)
    assert "not judged: kb/1/1: not done in 1 s" in out
    process = level.start("kernelbench/scorer.py", "--level", "1", "--problems", "1")
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.communicate(timeout=20)[1]
    for bad in (("--problems", "13"), ("--level", "2"), ("--gpus", "x"), ("--level", "7")):
        assert score(level, *bad, rc=2)[1].count("\n") == 1


def test_the_real_judge(tmp_path):
    """A right and a wrong solution; kernel.py and last_run.json are left alone."""
    clone = tmp_path / "clone" / "level1"
    clone.mkdir(parents=True)
    for number in (1, 2, 3):
        (clone / f"{number}_Scaled.py").write_text(PROBLEM.format(factor=number))
    kb.fetch_folder(clone.parent)
    one, two, _ = kb.list_problems("1")
    for problem in (one, two):
        problem.folder.mkdir(parents=True)
        (problem.folder / "kernel.py").write_text(kb.starter(one.code, "x"))  # wrong for the second
    before = (ROOT / "kernel.py").read_bytes()
    command = [sys.executable, str(ROOT / "kernelbench/scorer.py"), "--level", "1", "--json", "--allow-dirty-harness"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    v = json.loads(done.stdout)
    assert [r["correctness"] for r in v["rows"]] == ["PASS", "FAIL"] and "elements off" in v["rows"][1]["reason"]
    assert v["correct"] == 1 / 3 and v["rows"][0]["speedup_vs_pytorch"] > 0
    assert (ROOT / "kernel.py").read_bytes() == before
    assert not (one.folder.parents[2] / "last_run.json").exists() and not (one.folder / "history.tsv").exists()


# ---- problems as targets --------------------------------------------------------------------------------------------


def measure(repo: Repo, speed: float, verdict: str = "PASS", **values) -> None:
    """A new kernel.py and its record, as bench_kb.py would write it."""
    repo.write(speed, verdict, op="kernelbench", note=str(random.random()))
    repo.bench()
    path = repo.root / "workspace/last_run.json"
    official = {"precision": "fp32", "n_trials": 5, "atol": 1e-4, "rtol": 1e-4, "shrunk": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **official, **values}))


def test_problems_are_targets(level):
    solve(level, 2, "# what bench_kb.py found best\n")
    said = level.run("start", "--kernelbench", "--level", "1", "--problems", "1-3")
    assert "branch autokernel/kb1: made" in said and "3 problems are targets, 3 of them new" in said
    assert "4 problems are targets, 1 of them" in level.run("start", "kb1", "--kernelbench", "--level", "1",
                                                            "--problems", "2,5")  # fmt: skip
    assert level.run("next").startswith("NEXT kb/1/1: Scaled_1, problem 1 of level 1")
    assert "class ModelNew" in level.kernel.read_text()
    best = level.root / "workspace/kb/1/1/best.py"
    for speed, verdict, decision in ((1.0, "PASS", "BASELINE"), (1.5, "PASS", "KEEP"), (9.0, "FAIL", "REVERT")):
        measure(level, speed, verdict)
        said = level.run("record", "-m", f"to {speed}")
        assert decision in said and "edit kernel.py, uv run kernelbench/bench_kb.py" in said
    assert "SPEED = 1.5" in best.read_text() and "SPEED = 1.5" in level.kernel.read_text()
    for lenient in ({"n_trials": 1}, {"atol": 1e-2}, {"rtol": 1.0}, {"shrunk": True}, {"precision": "fp16"},
                    {"speedup_vs_pytorch": None}):  # fmt: skip
        measure(level, 3.0, **lenient)
        assert "which is never kept" in level.run("record", "-m", "lenient", rc=2)
    measure(level, 1.5)
    level.run("record", "-m", "same")
    assert len(level.rows) == 4 and {r.target for r in level.rows} == {"kb/1/1"}
    assert "to 1.5" in level.run("history", "--kernel", "kb/1/1") and "kb/1/5" in level.run("plan")
    level.run("skip", "-m", "enough")
    assert level.run("next").startswith("NEXT kb/1/2") and "found best" in level.kernel.read_text()
    assert "program_kb.md" in (brief := _brief(level)) and "kernelbench/bench_kb.py" in brief
    assert "bench.py" not in brief.replace("kernelbench/bench_kb.py", "")
    assert json.loads(score(level, "--problems", "1", "--json")[0])["rows"][0]["speedup_vs_pytorch"] == 1.5
    level.run("report")
    report = (level.root / "workspace/report.md").read_text()
    assert "Level 1, all 12 problems: 1 scored, 1 right; fast_1.0 8.33 %" in report and "verify.py" not in report
    level.run("start", "again", "--kernelbench", "--level", "1", "--problems", "1")
    assert level.run("next", "kb/1/1").startswith("NEXT kb/1/1") and "SPEED = 1.5" in level.kernel.read_text()
    assert "SPEED = 1.5" in best.read_text()  # until the new run has its own


def _brief(repo: Repo) -> str:
    code = ("from autokernel import digest; from autokernel.night import Night; from autokernel.records import Ledger; "
            "print(digest.brief(Night.read(Ledger(), 'kb1'), False))")  # fmt: skip
    return subprocess.check_output([sys.executable, "-c", code], cwd=repo.root, env=repo.env, text=True)


def test_problems_do_not_displace_a_model(level):
    level.run("start", "may")
    level.plan(t1_rmsnorm=0.5)
    before = (level.root / "workspace/plan.json").read_bytes()
    assert "plans a model (1_rmsnorm)" in level.run("start", "--kernelbench", "--level", "1", rc=2)
    assert (level.root / "workspace/plan.json").read_bytes() == before
    for wrong in (("start",), ("start", "x", "--level", "1"), ("start", "--kernelbench"),
                  ("start", "--kernelbench", "--level", "3"),
                  ("start", "--kernelbench", "--level", "1", "--problems", "77")):  # fmt: skip
        assert level.run(*wrong, rc=2)


def test_two_workers_share_a_level(level):
    level.run("start", "--kernelbench", "--level", "1", "--problems", "1-2")
    level.run("worker", "a")
    place = Repo.__new__(Repo)
    place.root, place.env = level.root / "workspace/workers/a", level.env
    place.kernel = place.root / "kernel.py"
    assert level.run("next").startswith("NEXT kb/1/1") and place.run("next").startswith("NEXT kb/1/2")
    assert "kb/1/1 is worker main's" in place.run("next", "kb/1/1", rc=2)
    measure(place, 2.0)
    assert "BASELINE" in place.run("record", "-m", "a's")
    assert "SPEED = 2.0" in (level.root / "workspace/kb/1/2/best.py").read_text()
    assert json.loads(score(level, "--problems", "2", "--json")[0])["rows"][0]["speedup_vs_pytorch"] == 2.0
