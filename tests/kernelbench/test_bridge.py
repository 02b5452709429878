"""Fetching problems from three places, starters, and that setup and history lose nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from autokernel import kernelbench as kb
from autokernel import paths
from autokernel.footprint import footprint, shrunk_code

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = sorted((Path(__file__).parent / "problems").glob("*.py"))
RELU = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x.relu()\n\n\n" \
       "def get_inputs():\n    return [torch.randn(8, 8)]\n"  # fmt: skip


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository of the test's own: setup writes its kernel.py."""
    folder = tmp_path / "repo"
    folder.mkdir()
    monkeypatch.setattr(kb, "repo_root", lambda: folder)
    return folder


@pytest.fixture
def clone(tmp_path):
    """A clone of KernelBench with two levels."""
    for level, paths_ in (("level1", PROBLEMS[:3]), ("level2", PROBLEMS[3:5])):
        folder = tmp_path / "clone" / "KernelBench" / level
        folder.mkdir(parents=True)
        for number, path in enumerate(paths_, 1):
            (folder / f"{number}_{path.stem[3:]}.py").write_text(path.read_text())
    return tmp_path / "clone"


def bridge(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "kernelbench" / "bridge.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_fetch_a_clone_then_list_and_info(clone):
    said = bridge("fetch", "--repo", str(clone))
    assert said.returncode == 0 and "level 1: 3, level 2: 2" in said.stdout
    listed = bridge("list", "--level", "1").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["1", "2", "3"]
    info = bridge("info", "--level", "2", "--problem", "1").stdout
    assert "conv2d_bias_relu" in info and "inputs_mib" in info and kb.load_problem("2", 1).sha256 in info
    refusals = {"list --level 3": "was not fetched yet", "info --level 2 --problem 9": "it has 1 to 2",
                f"fetch --repo {clone}/nowhere": "no level*/*.py"}  # fmt: skip
    for arguments, text in refusals.items():
        refused = bridge(*arguments.split())
        assert refused.returncode == 2 and text in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_fetching_again_replaces_a_level_whole(clone):
    kb.fetch_folder(clone)
    (clone / "KernelBench" / "level1" / "2_no_init_inputs_and_a_scalar.py").unlink()
    kb.fetch_folder(clone)
    assert [p.id for p in kb.list_problems("1")] == [1, 3]
    assert not [p for p in kb.store().iterdir() if p.name.startswith(".")]


def hub(monkeypatch, rows=None, error=None):
    """A Hub in this process: what `datasets` and `huggingface_hub` would answer."""
    asked = []

    class HTTPError(Exception):
        pass

    class HfHubHTTPError(HTTPError):
        pass

    class HfApi:
        def dataset_info(self, name, revision):
            asked.append(revision)
            if error:
                raise HTTPError(error)
            return types.SimpleNamespace(sha="a" * 40 if revision == "main" else revision)

    modules = {"datasets": {"load_dataset": lambda name, revision: rows}, "huggingface_hub": {"HfApi": HfApi},
               "huggingface_hub.errors": {"HfHubHTTPError": HfHubHTTPError}}  # fmt: skip
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_fetch_all_levels_of_the_hub_at_one_revision(monkeypatch):
    rows = {f"level_{n}": [{"problem_id": 7, "name": "7_Sum", "code": RELU, "level": n}] for n in (1, 2, 3, 4)}
    asked = hub(monkeypatch, rows)
    assert kb.fetch_hub() == {"1": 1, "2": 1, "3": 1, "4": 1}
    found = kb.load_problem("4", 7)
    assert (found.name, found.code) == ("Sum", RELU) and found.source.endswith("a" * 40)
    kb.fetch_hub()
    kb.fetch_hub("b" * 40)
    assert asked == ["main", "a" * 40, "b" * 40], "what was fetched once is what is fetched again"


def test_without_a_network_one_line_names_the_other_sources(monkeypatch):
    hub(monkeypatch, error="[Errno -2] Name or service not known")
    with pytest.raises(kb.ProblemError, match=r"^nothing from .*not known.*--repo CLONE.*--file PROBLEM.py$") as caught:
        kb.fetch_hub()
    assert "\n" not in str(caught.value)


def test_one_file(tmp_path):
    path = tmp_path / "19_My ReLU.py"
    path.write_text(RELU)
    first = kb.fetch_file(path)
    assert (first.key, first.name) == ("kb/custom/1", "My_ReLU")
    assert kb.fetch_file(path) == first
    path.write_text(RELU + "\n")
    assert kb.fetch_file(path).id == 2 and kb.load_problem("custom", 1).code == RELU
    for text, said in {"def get_inputs(): ...": "defines no Model", "class Model: (": "not Python", "": "no M"}.items():
        path.write_text(text)
        with pytest.raises(kb.ProblemError, match=said):
            kb.fetch_file(path)


@pytest.mark.parametrize("path", PROBLEMS, ids=[p.stem for p in PROBLEMS])
def test_starter_is_a_complete_rewriting(path):
    for backend in ("triton", "cuda"):
        tree = ast.parse(kb.starter(path.read_text(), "custom/1 it's", backend))
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        defined = {n for node in tree.body for n in kb.bound(node)}
        assert "Model" not in names | defined and "ModelNew" in defined
        assert not defined & set(kb.GIVEN)
        assert f"BACKEND = '{backend}'" in ast.unparse(tree)


def test_setup_never_loses_work(root, clone):
    kb.fetch_folder(clone)
    one, two = kb.load_problem("1", 1), kb.load_problem("1", 2)
    kernel = root / "kernel.py"
    kernel.write_text("KERNEL_TYPE = 'softmax'  # never recorded")
    kb.setup(one)
    (aside,) = (paths.workspace() / "unrecorded").iterdir()
    assert aside.read_text() == "KERNEL_TYPE = 'softmax'  # never recorded"
    assert kb.active_problem() == one and "ModelNew" in kernel.read_text()
    work = kernel.read_text() + "# an hour of work\n"
    kernel.write_text(work)
    kb.setup(two, "cuda")
    assert (one.folder / "kernel.py").read_text() == work and 'BACKEND = "cuda"' in kernel.read_text()
    kernel.write_text("class ModelNew: half of it (")  # not even Python
    kb.setup(one)
    assert kernel.read_text() == work and (two.folder / "kernel.py").read_text() == "class ModelNew: half of it ("
    kb.setup(one, fresh=True)
    assert kernel.read_text() == kb.starter(one.code, f"1/1 {one.name}")
    kernel.write_text(kernel.read_text() + "# the second try\n")
    kb.setup(one)  # the working copy of before is kept beside, under its digest
    kept = {p.read_text() for p in one.folder.glob("kernel*.py")}
    assert work in kept and "# the second try\n" in kernel.read_text()


def test_a_problem_stays_what_its_history_was_measured_on(root, clone):
    kb.fetch_folder(clone)
    kb.setup(kb.load_problem("1", 1))
    path = clone / "KernelBench" / "level1" / "1_matmul_two_inputs.py"
    path.write_text(path.read_text().replace("67, 129, 35", "64, 128, 32"))
    kb.fetch_folder(clone)
    assert "67, 129, 35" in kb.load_problem("1", 1).code
    (kb.load_problem("1", 1).folder / "problem.py").write_text("easier")
    with pytest.raises(kb.ProblemError, match="not the file that was set up"):
        kb.load_problem("1", 1)


def values(**more) -> dict:
    known = {"correctness": "PASS", "quick": False, "shrunk": False, "harness": "clean", "started": "", "reason": None}
    return {**known, "speedup_vs_pytorch": 1.5, "latency_us": 10.0, "source_sha256": None, "run_id": "r", **more}


def test_history_and_best(root, tmp_path):
    import hashlib

    problem, kernel = kb.Problem("1", 5, "x", RELU, "tests"), tmp_path / "kernel.py"

    def run(text: str, **more) -> bool:
        kernel.write_text(text)
        return kb.note(problem, values(source_sha256=hashlib.sha256(text.encode()).hexdigest(), **more), kernel)

    assert not run("quick", quick=True) and not run("small", shrunk=True) and not run("dirty", harness="dirty")
    assert not run("wrong", correctness="FAIL", reason="off\tby\none") and not run("untimed", speedup_vs_pytorch=None)
    assert run("first")
    assert not run("noise", speedup_vs_best=1.01, gain_spread_pct=2.0)
    assert run("quicker", speedup_vs_best=1.2, gain_spread_pct=2.0)
    assert (problem.folder / "best.py").read_text() == "quicker"
    kernel.write_text("edited while it ran")
    assert not kb.note(problem, values(source_sha256="0" * 64, speedup_vs_best=9.0, gain_spread_pct=0.0), kernel)
    rows = kb.history(problem)
    assert [row["best"] for row in rows] == [""] * 5 + ["best", "", "best", ""]
    assert rows[3]["reason"] == "off by one" and kb.load_problem("1", 5) == problem


def test_command_line_judges_the_active_problem(clone, tmp_path):
    """setup and bench_kb as users call them, in a copy of the repository without git."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "tests", "workspace", ".*_cache"))

    def call(script: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(copy / "kernelbench" / script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)

    assert call("bridge.py", "fetch", "--repo", str(clone)).returncode == 0
    nothing = call("bench_kb.py")
    assert nothing.returncode == 2 and "bridge.py setup" in nothing.stderr
    assert call("bridge.py", "setup", "--level", "2", "--problem", "1").returncode == 0
    right = call("bench_kb.py", "--n-timed", "3")
    assert right.returncode == 0, right.stdout + right.stderr
    shown = dict(line.split(":", 1) for line in right.stdout.splitlines() if ":" in line)
    assert shown["correctness"].strip() == "PASS" and shown["fast_5.0"].strip() == "no"
    assert {f"fast_{p}" for p in ("1.0", "1.1", "1.25", "1.5", "2.0", "3.0", "5.0")} <= shown.keys()
    kernel = copy / "kernel.py"
    kernel.write_text(kernel.read_text().replace("torch.relu", "torch.abs"))
    wrong = call("bench_kb.py", "--correctness-only", "--json")
    record = json.loads(wrong.stdout)
    assert wrong.returncode == 1 and record["correctness"] == "FAIL" and "elements off" in record["reason"]
    problem = kb.load_problem("2", 1)
    assert [row["best"] for row in kb.history(problem)] == ["best", ""]
    assert "torch.relu" in (problem.folder / "best.py").read_text()
    assert "best" in call("bridge.py", "list", "--level", "2").stdout
    operator = subprocess.run([sys.executable, str(copy / "bench.py")], capture_output=True, text=True, timeout=100)
    assert operator.returncode == 2 and "bench_kb.py" in operator.stderr


def test_footprint_and_smaller_sizes():
    large = RELU.replace("8, 8", "1 << 16, 4096")
    found = footprint(large)
    assert (found.inputs, found.outputs, found.working, found.seen) == (2**30, 2**30, 2**30, "all")
    assert found.needed(2) > 10 * 2**30 and footprint(large, "fp16").inputs == 2**29
    assert footprint(shrunk_code(large)).inputs <= 4e7 / 2
    tied = RELU.replace("x.relu()", "x[0] @ x[1]").replace("randn(8, 8)", "randn(2, 8192, 8192)")
    assert footprint(shrunk_code(tied)).seen == "all" and footprint(shrunk_code(tied)).inputs < 4e7
    looks = RELU.replace("x.relu()", "x if x.sum() > 0 else x")
    assert footprint(looks).seen == "none" and shrunk_code(looks) == ast.unparse(ast.parse(looks))
