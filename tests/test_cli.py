"""Mistakes on the command line are one line that leads on, in every script."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from autokernel.paths import repo_root

ROOT = repo_root()
SCRIPTS = sorted(p.name for p in ROOT.glob("*.py") if "Parser(" in p.read_text())


def line(*command: str, path: str | None = None) -> str:
    """The one line on stderr of a command that must end with status 2, or 1 for a Python that cannot run us.

    verify.py, whose 1 and 2 are verdicts, ends with 3.
    """
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (3 if "verify.py" in command else 1 if path else 2) and not done.stdout
    (only,) = done.stderr.splitlines()
    return only


def test_all_scripts_are_tested():
    assert {"bench.py", "profile.py", "extract.py", "orchestrate.py", "verify.py", "export_hf.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_typo(script):
    said = line(sys.executable, script, *(["plan"] if script == "orchestrate.py" else []), "--no-such-option")
    assert said.startswith(f"{script}: ") and said.endswith("--help")


def test_a_typo_names_what_was_meant():
    said = line(sys.executable, "bench.py", "--size", "large")
    assert "unrecognized arguments: --size large (did you mean --sizes?)" in said


@pytest.mark.parametrize("script", ["bench.py", "profile.py"])
def test_a_wrong_choice_lists_the_right_ones(script):
    said = line(sys.executable, script, "--dtype", "float12")
    assert "fp16" in said and "''" not in said


@pytest.mark.parametrize("script", SCRIPTS)
def test_control_c_is_one_line(script, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import argparse\ndef interrupt(*_):\n    raise KeyboardInterrupt\n"
        "argparse.ArgumentParser.parse_args = interrupt\n"
    )
    done = subprocess.run([sys.executable, script], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{script}: interrupted\n")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("moment", ["at the end", "at once", "unbuffered", "at a socket"])
def test_a_closed_pipe_ends_in_silence(script, moment, tmp_path):
    """`| head -1`: what is printed last is written out at the end, a long text earlier. A socket's is an error."""
    text = {"at the end": "print('few')\n    sys.exit(0)", "at once": "print('x' * 100_000)",
            "unbuffered": "print('few')", "at a socket": "raise BrokenPipeError(32, 'Broken')"}[moment]  # fmt: skip
    (tmp_path / "sitecustomize.py").write_text(
        f"import argparse, sys\ndef parse(*_):\n    {text}\nargparse.ArgumentParser.parse_args = parse\n"
    )
    read, write = os.pipe()
    if moment != "at a socket":
        os.close(read)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1" * (moment == "unbuffered")}
    done = subprocess.run([sys.executable, script], cwd=ROOT, env=environment,
                          stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)  # fmt: skip
    os.close(write)
    if moment == "at a socket":
        os.close(read)
        assert done.returncode in (2, 3) and "Broken; AUTOKERNEL_TRACEBACK=1" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_python_without_the_packages(script, tmp_path):
    """Stands in for `python bench.py` outside the environment: a finder that knows no PyTorch."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
    )
    said = line(sys.executable, script, path=str(tmp_path))
    assert "has no torch; run: uv run " + script in said


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_old_python(script, tmp_path):
    """Stands in for an old interpreter: it parses the script and what tells its age, and is told so."""
    for path in (script, "autokernel/__init__.py", "autokernel/cli.py"):
        ast.parse((ROOT / path).read_text(), feature_version=(3, 8))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 9, 0)\n")
    said = line(sys.executable, script, path=str(tmp_path))
    assert "is too old, 3.10 or later is needed; run: uv run " + script in said
