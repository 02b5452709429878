"""KernelBench problems of our own, in the form of theirs: a starter of each passes, every cheat is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "adversarial"))
import zoo  # noqa: E402

from autokernel import kernelbench as kb  # noqa: E402
from autokernel.kbjudge import ProblemOptions, judge_problem  # noqa: E402
from autokernel.process import launcher  # noqa: E402

PROBLEMS = sorted((Path(__file__).parent / "problems").glob("*.py"))


def problem(path: Path) -> kb.Problem:
    number, _, name = path.stem.partition("_")
    return kb.Problem("custom", int(number), name, path.read_text(), "tests")


def named(part: str) -> kb.Problem:
    return problem(next(p for p in PROBLEMS if part in p.stem))


@pytest.fixture(scope="module", autouse=True)
def children():
    with zoo._nursery():
        yield
    zoo.close_baselines()


@pytest.fixture
def judged(tmp_path):
    """judged(problem, source or None for the starter, **options) -> the values of one run."""

    def run(what: kb.Problem, source: str | None = None, **options):
        path = tmp_path / "kernel.py"
        path.write_text(kb.starter(what.code, what.key) if source is None else source)
        options = {"allow_dirty_harness": True, "timeout": 60, "correctness_only": True, **options}
        with launcher() as children:
            return judge_problem(what, ProblemOptions(path, **options), children).values

    return run


@pytest.mark.parametrize("path", PROBLEMS, ids=[p.stem for p in PROBLEMS])
def test_starter_passes(path, judged):
    values = judged(problem(path), n_trials=3)
    assert values["correctness"] == "PASS", values["reason"]
    assert values["official_check"] == "PASS" and values["deterministic"] is True
    assert values["weak_problem"].startswith("yes") == ("softmax" in path.stem and "wide" in path.stem), values
