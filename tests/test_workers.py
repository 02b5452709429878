"""Workers: several agents on one ledger, each in a worktree of its own."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autokernel import workers
from tests.test_orchestrate import Repo


def at(repo: Repo, name: str) -> Repo:
    """The same commands in a worker's folder."""
    place = copy.copy(repo)
    place.root = repo.root / "workspace" / "workers" / name
    place.kernel = place.root / "kernel.py"
    return place


def made(repo: Repo, name: str) -> Repo:
    assert f"worker {name}: made" in repo.run("worker", name)
    return at(repo, name)


@pytest.fixture
def run(tmp_path):
    (folder := tmp_path / "repo").mkdir()
    repo = Repo(folder)
    repo.run("start", "may")
    repo.plan(t1_rmsnorm=0.4, t2_rmsnorm=0.3, t3_rmsnorm=0.2)
    return repo


def claims(repo: Repo) -> dict[str, str]:
    return {p.name: p.read_text().strip() for p in (repo.root / "workspace" / "claims").iterdir()}


def age(place: Repo, minutes: float) -> None:
    """Nothing of a worker's was touched for so long."""
    then, claimed = time.time() - 60 * minutes, place.root.parents[1] / "claims"
    signs = [place.kernel, *(place.root / "workspace").rglob("*"), *claimed.glob("*")]
    for path in signs:
        if path.parent != claimed or path.read_text().strip() == place.root.name:
            os.utime(path, (then, then))


def test_two_workers_and_the_main_checkout_share_a_run(run):
    a, b = made(run, "a"), made(run, "b")
    assert "there already" in run.run("worker", "a")
    before, source = run.git("rev-parse", "HEAD"), run.kernel.read_text()
    assert a.run("next").startswith("NEXT 1_rmsnorm") and b.run("next").startswith("NEXT 2_rmsnorm")
    assert "1_rmsnorm is worker a's" in b.run("next", "1_rmsnorm", rc=2)
    assert "BASELINE" in a.experiment(1.0) and "BASELINE" in b.experiment(1.0)
    assert "KEEP" in a.experiment(1.5, note="two rows") and "REVERT" in b.experiment(0.5)
    assert "SPEED = 1.0" in b.kernel.read_text() and a.run("next").startswith("CONTINUE 1_rmsnorm")

    best = run.root / "workspace/targets/1_rmsnorm/best.py"  # where verify and export look
    attempt = run.root / "workspace/experiments/3/kernel.py"
    assert "SPEED = 1.5" in best.read_text() and "SPEED = 1.5" in attempt.read_text()
    assert [(r.worker, r.target, r.decision) for r in run.rows] == [
        ("a", "1_rmsnorm", "baseline"), ("b", "2_rmsnorm", "baseline"), ("a", "1_rmsnorm", "keep"),
        ("b", "2_rmsnorm", "revert")]  # fmt: skip
    assert run.git("rev-parse", "HEAD") == before and run.kernel.read_text() == source
    assert a.git("log", "--format=%s", "autokernel/may..HEAD") == "1_rmsnorm: two rows (+50.0 %)\n"
    assert not run.git("status", "--porcelain") and not b.git("status", "--porcelain")

    assert run.run("next").startswith("NEXT 3_rmsnorm") and claims(run) == {
        "1_rmsnorm": "a", "2_rmsnorm": "b", "3_rmsnorm": "main"}  # fmt: skip
    c = made(run, "c")
    assert "DONE: rmsnorm is worker" not in (said := c.run("next")) and said.startswith("DONE: no other target is open")
    for place in (run, b):
        lines = {line.split()[0]: line.split() for line in place.run("status").splitlines() if str(run.root) in line}
        assert [lines[n][2] for n in ("main", "a", "b", "c")] == ["3_rmsnorm", "1_rmsnorm", "2_rmsnorm", "nothing"]
        assert lines["a"][3:5] == ["2", "2"] and lines["b"][3:5] == ["2", "1"]  # experiments, kept: baselines too
    run.run("report")
    assert "two rows" in (run.root / "workspace/report.md").read_text()
    assert "start another in" in a.run("start", "june", rc=2)
    assert "go to the main checkout" in a.run("worker", "d", rc=2)


def test_a_claim_ends_with_its_worker(run):
    a, b = made(run, "a"), made(run, "b")
    assert a.run("next").startswith("NEXT 1_rmsnorm") and b.run("next").startswith("NEXT 2_rmsnorm")
    age(a, 59)
    assert b.run("next").startswith("NEXT 2_rmsnorm")
    age(a, 61)
    assert "1_rmsnorm" in b.run("next", "1_rmsnorm") and claims(run) == {"1_rmsnorm": "b"}
    # a comes back: what it measured counts, and it is sent elsewhere
    assert "1_rmsnorm is worker b's by now" in a.experiment(1.0) and claims(run) == {"1_rmsnorm": "b"}
    assert a.run("next").startswith("NEXT 2_rmsnorm") and claims(run)["2_rmsnorm"] == "a"
    # a bench at work is a sign of life, however long it takes
    (b.root / "workspace/runs").mkdir(exist_ok=True)
    (b.root / f"workspace/runs/{os.getpid()}-x").mkdir()
    age(b, 500)
    assert "is worker b's" in a.run("next", "1_rmsnorm", rc=2)
    assert f"process {os.getpid()}, works in" in run.run("worker", "b", "--remove", rc=2)
    (b.root / f"workspace/runs/{os.getpid()}-x").rmdir()
    run.run("worker", "b", "--remove")
    assert claims(run) == {"2_rmsnorm": "a"} and a.run("next", "1_rmsnorm").startswith("NEXT 1_rmsnorm")
    run.run("skip", "3_rmsnorm")
    run.run("skip", "2_rmsnorm")
    run.run("skip", "1_rmsnorm")
    assert a.run("next").startswith("DONE") and claims(run) == {}


def test_an_operator_is_claimed_too(run):
    (run.root / "workspace/plan.json").unlink()
    a, b = made(run, "a"), made(run, "b")
    assert run.run("next").startswith("NEXT rmsnorm") and a.run("next").startswith("DONE: rmsnorm is worker main's")
    assert a.run("next", "softmax").startswith("NEXT softmax") and "worker a's" in b.run("next", "softmax", rc=2)


def test_removing_a_worker_loses_nothing(run):
    a = made(run, "a")
    a.run("next")
    a.experiment(1.0), a.experiment(1.5)
    a.write(2.0, note="never recorded")
    (a.root / "notes.txt").write_text("mine too")
    driver = a.drive(60)
    assert "touch" in run.run("worker", "a", "--remove", rc=2)
    driver.terminate(), driver.communicate()
    (a.root / "autokernel/paths.py").write_text("mine")
    folder = Path(run.run("worker", "a", "--remove").split()[-1])
    assert not a.root.exists() and "worktrees/a" not in run.git("worktree", "list")
    assert "never recorded" in (folder / "kernel.py").read_text() and (folder / "notes.txt").read_text() == "mine too"
    assert (folder / "autokernel/paths.py").read_text() == "mine" and (folder / "workspace/last_run.json").exists()
    assert "SPEED = 1.5" in (run.root / "workspace/targets/1_rmsnorm/best.py").read_text()
    assert "no worker 'a'; known: none" in run.run("worker", "a", "--remove", rc=2)
    assert run.run("next", "1_rmsnorm").startswith("NEXT") and "SPEED = 1.5" in run.kernel.read_text()
    made(run, "a")  # the branch is there still
    assert "SPEED = 1.5" in a.kernel.read_text() and a.run("next").startswith("NEXT 2_rmsnorm")


def test_refusals(run):
    for name in ("main", "a/b", "a+b", "-x", "", "../x"):
        assert "cannot name a worker" in run.run("worker", "--", name, rc=2)
    assert "--gpu 7: there are" in run.run("worker", "a", "--gpu", "7", rc=2)
    assert "cannot be part of a branch" in run.run("start", "may+a", rc=2)
    bench = run.root / "bench.py"
    bench.write_text(bench.read_text() + "# mine\n")
    assert "commit them or take them back" in run.run("worker", "a", rc=2)
    run.git("checkout", "bench.py")
    made(run, "a")
    run.git("worktree", "add", "-q", "-b", "own", str(run.root.parent / "own"))  # somebody's own worktree is none
    run.git("worktree", "lock", "--reason", "usb stick", str(run.root.parent / "own"))
    assert "own" not in run.run("status")


def test_a_worker_sees_its_gpu_only(run, monkeypatch):
    monkeypatch.setattr(workers, "everyone", lambda: [workers.Worker("main", Path(), Path()),
                                                      workers.Worker("a", Path(), Path(), "5")])  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    assert workers._gpus() == ["2", "5", "7"] and workers._least_used(workers._gpus()) == "7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert workers._least_used(["0", "5"]) == "0" and workers._least_used([]) == ""
    a = made(run, "a")
    lock = run.root / ".git/worktrees/a/locked"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "gpu": "7"}))
    code = "import autokernel.paths as p, os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), p.workspace(), p.ledger())"

    def seen(place: Repo, folder: str) -> list[str]:
        env = {**place.env, "CUDA_VISIBLE_DEVICES": "0,1", "AUTOKERNEL_WORKSPACE": folder, "AUTOKERNEL_LEDGER": "/x"}
        return subprocess.check_output([sys.executable, "-c", code], cwd=place.root, env=env, text=True).split()

    shared = str(run.root / "workspace")
    assert seen(a, shared) == ["7", str(a.root / "workspace"), str(run.root / "results.tsv")]
    assert seen(run, shared) == ["0,1", shared, "/x"]
    assert seen(a, "/nowhere") == ["0,1", "/nowhere", "/x"]
    a.env = run.env = {**run.env, "CUDA_VISIBLE_DEVICES": "3,7"}
    assert "worker a is on GPU 7, not 0" in run.run("worker", "a", "--gpu", "0", rc=2)
    assert "there already, GPU 7" in run.run("worker", "a", "--gpu", "1")
    assert "made, GPU 3" in run.run("worker", "b", "--gpu", "0") and "made, GPU 7" in run.run("worker", "c")


def test_kill_9_of_making_and_removing(run):
    """However `worker` dies, the same command ends what was begun, and what a worker made is somewhere."""
    dice, killed, place = random.Random(0), 0, at(run, "k")
    git = run.root / ".git/worktrees/k"
    for number in range(4):
        for arguments in (("worker", "k"), ("worker", "k", "--remove")):
            for _ in range(dice.randint(0, 2)):
                process = run.start("orchestrate.py", *arguments)
                before = place.root.exists(), git.exists()
                while process.poll() is None and (place.root.exists(), git.exists()) == before:
                    time.sleep(0.002)  # until the interesting part begins
                time.sleep(dice.uniform(0, 0.15))
                killed += process.poll() is None
                process.kill()
                process.communicate()
            done = run.start("orchestrate.py", *arguments)
            _, err = done.communicate(timeout=100)
            assert done.returncode == 0 or ("--remove" in arguments and "no worker" in err), err
            if "--remove" not in arguments:
                place.write(1.0, note=f"round {number}")
                assert place.git("status", "--porcelain").split() == ["M", "kernel.py"]
        assert not place.root.exists()
        aside = [p.read_text() for p in (run.root / "workspace/removed").glob("k-*/kernel.py")]
        assert sum(f"round {number}" in text for text in aside) == 1
    made(run, "k")
    assert run.git("worktree", "list").count("\n") == 2 and not run.git("status", "--porcelain")
    assert killed > 2, killed


def test_two_workers_record_at_once_and_are_killed(run):
    """Two agents on one ledger; their commands are killed and given again: every row once, nothing mixed."""
    places = {name: made(run, name) for name in ("a", "b")}
    asked = [place.start("orchestrate.py", "next") for place in places.values()]  # at once: each gets its own target
    assert {said.communicate(timeout=100)[0].split(":")[0] for said in asked} == {"NEXT 1_rmsnorm", "NEXT 2_rmsnorm"}
    expected: dict[str, list[tuple[str, str]]] = {"a": [], "b": []}
    began = time.monotonic()
    run.run("status")
    took = time.monotonic() - began  # kills fall inside a command on a slow machine and on a fast one
    kills: list[int] = []
    failures: list[BaseException] = []

    def agent(name: str) -> None:
        place, dice, best = places[name], random.Random(name), 0.0
        for number in range(14):
            speed, verdict = round(1 + dice.random() * (number + 1) / 10, 3), dice.choice(["PASS"] * 4 + ["CRASH"])
            place.write(speed, verdict, f"{name} {number}")
            for command in (("night.py", "bench"), ("orchestrate.py", "record", "-m", f"{name} {number}")):
                while True:
                    process = place.start(*command)
                    patience = took * dice.uniform(0.1, 1) if dice.random() < 0.5 else 100
                    try:
                        _, err = process.communicate(timeout=patience)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.communicate()
                        kills.append(number)
                        continue
                    assert process.returncode in (0, 1), err
                    break
            kept = verdict == "PASS" and speed >= best * 1.01
            expected[name].append((f"{name} {number}", ("keep" if best else "baseline") if kept else "revert"))
            best = speed if kept else best

    def guarded(name: str) -> None:
        try:
            agent(name)
        except BaseException as error:  # noqa: BLE001  (told in the main thread)
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(name,)) for name in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    rows = run.rows
    assert [r.experiment for r in rows] == list(range(1, 29)) and run.ledger.verify_chain() == []
    assert len(kills) >= 4
    for name, place in places.items():
        own = [r for r in rows if r.worker == name]
        assert [(r.description, r.decision) for r in own] == expected[name]
        kept = [r for r in own if r.decision != "revert"]
        commits = place.git("log", "--reverse", "--format=%H", "autokernel/may..HEAD").split()
        assert [c[:12] for c in commits] == [r.commit for r in kept]
        best = run.root / "workspace/targets" / kept[-1].target / "best.py"
        assert f"Idea {kept[-1].description}." in best.read_text()
        for row in own:
            source = (run.root / "workspace/experiments" / str(row.experiment) / "kernel.py").read_text()
            assert f"Idea {row.description}." in source
