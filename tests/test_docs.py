"""The documents do what they say: the worked example is built and judged, commands and options exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel.paths import repo_root

ROOT = repo_root()
PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "program.md", "program_kb.md", "CLAUDE.md")]
PAGES += sorted(ROOT.glob("docs/*.md"))


@pytest.fixture
def clone(tmp_path):
    """A clone of this checkout as it lies, uncommitted changes included, committed."""
    there = tmp_path / "clone"
    run(tmp_path, "git", "clone", "--quiet", str(ROOT), str(there))
    changed = run(ROOT, "git", "ls-files", "--modified", "--others", "--exclude-standard").splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), changed):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes((ROOT / name).read_bytes())
    commit(there)
    return there


def run(folder: Path, *command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOKERNEL_", "PYTEST"))}
    environment |= {"AUTOKERNEL_CACHE": os.environ["AUTOKERNEL_CACHE"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def commit(folder: Path) -> None:
    run(folder, "git", "add", "--all")
    who = ("-c", "user.name=n", "-c", "user.email=n@n")
    run(folder, "git", *who, "commit", "--quiet", "--allow-empty", "-m", "as it lies")


def test_the_tenth_operator_of_the_page(clone):
    page = (ROOT / "docs/new-operator.md").read_text()
    blocks = re.findall(r"```python (\S+)\n(.*?)```", page, re.S)
    assert [name for name, _ in blocks] == [
        "reference.py", "autokernel/ops/silu_mul.py", "kernels/silu_mul.py", "tests/test_silu_mul.py",
    ]  # fmt: skip
    for name, body in blocks:
        path = clone / name
        path.write_text(path.read_text() + "\n\n" + body if path.exists() else body)
    commit(clone)
    said = run(clone, sys.executable, "bench.py", "--kernel", "kernels/silu_mul.py")
    assert re.search(r"^correctness: +PASS$", said, re.M)
    tests = ("tests/test_silu_mul.py", "tests/test_spec.py", "tests/test_controls.py")
    assert " passed" in run(clone, sys.executable, "-m", "pytest", "-n", "0", "-q", "-k", "silu_mul", *tests)
    run(clone, sys.executable, "-m", "ruff", "check", "--quiet", ".")


def test_troubleshooting_quotes_what_the_code_says():
    """Each quoted message of the symptom column is a piece of a string in our sources."""
    sources = " ".join(p.read_text() for folder in ("autokernel", ".") for p in sorted((ROOT / folder).glob("*.py")))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    quoted = [words for row in rows for text in re.findall(r"`([^`]+)`", row) for words in text.split(" ... ")]
    missing = [words for words in quoted if re.sub(r" \S+\.py$", "", words) not in sources]
    assert len(quoted) > 15 and not missing


def documented() -> list[tuple[str, str]]:
    """(page, command) of every command of ours in the documents."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            for command in re.findall(r"(?:uv run |uv run python |[^`]python )((?:[\w/]+/)?\w+\.py\b[^`#|;]*)", line):
                found.append((page.name, command.strip()))
    return found


def test_documented_scripts_and_options_exist():
    """Whatever a page tells people to type: the script is there, and its --help knows each option and subcommand."""
    helps: dict[str, str] = {}
    wrong = []
    for page, command in documented():
        script, *words = shlex.split(command)
        if not (ROOT / script).is_file():
            wrong.append(f"{page}: {command}: no {script}")
            continue
        if script not in helps:
            helps[script] = run(ROOT, sys.executable, script, "--help")
        options = [w.split("=")[0] for w in words if re.match(r"--\w", w)]
        known = helps[script]
        if words and re.match(r"[a-z]+$", words[0]) and "{" in known:
            subcommand = f"{script} {words[0]}"
            helps.setdefault(subcommand, run(ROOT, sys.executable, script, words[0], "--help"))
            known += helps[subcommand]
        wrong += [f"{page}: {command}: no {o}" for o in options if not re.search(rf"{o}\b", known)]
    assert len(documented()) > 30
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(900)
def test_the_tour(clone):
    """examples/tour.sh from end to end, as a newcomer without a GPU runs it."""
    said = run(clone, "env", f"PYTHON={sys.executable}", "sh", "examples/tour.sh")
    decisions = re.findall(r"^decision: +(\w+)$", said, re.M)
    assert decisions == ["BASELINE", "REVERT", "REVERT"] and "That was the tour." in said
    assert re.search(r"^correct: +yes", said, re.M)
