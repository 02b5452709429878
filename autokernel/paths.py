"""Where AutoKernel keeps things, and how a file is replaced so that a reader never sees half of it."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any


def repo_root() -> Path:
    """The folder that holds the scripts, `kernel.py` and the `autokernel` package."""
    return Path(__file__).resolve().parent.parent


def _from_env(variable: str, default: Path) -> Path:
    value = os.environ.get(variable)
    return Path(value).expanduser() if value else default


@functools.lru_cache(maxsize=None)  # noqa: UP033  (cli.py says on Python 3.8, too, that it is too old)
def worker() -> dict[str, str]:
    """What `orchestrate.py worker` wrote as the reason of this git worktree's lock; empty where this is no worker.

    Keys: worker (its name), gpu (as CUDA_VISIBLE_DEVICES has it), main, workspace and ledger (of the run). Empty as
    well for a command whose AUTOKERNEL_WORKSPACE is another than the run's: it works for itself.
    """
    try:
        facts = lock_facts(Path((repo_root() / ".git").read_text().partition(":")[2].strip()))
    except OSError:
        return {}  # a clone's .git is a folder
    run = Path(facts.get("workspace", ""))
    return facts if _from_env("AUTOKERNEL_WORKSPACE", run).absolute() == run.absolute() else {}


def lock_facts(gitdir: Path) -> dict[str, str]:
    """The facts in the lock of the worktree that this folder of git's describes; empty for somebody else's worktree."""
    try:
        facts = json.loads((gitdir / "locked").read_text())
        return facts if isinstance(facts, dict) and "worker" in facts else {}
    except (OSError, ValueError):
        return {}


def workspace() -> Path:
    """Run-time files of this checkout: AUTOKERNEL_WORKSPACE, else `workspace/` in it. Not created here."""
    own = repo_root() / "workspace"
    return own if worker() else _from_env("AUTOKERNEL_WORKSPACE", own)


def shared() -> Path:
    """What the workers of a run have in common: plan, rules, targets, best kernels, experiments, claims.

    The main workspace, so that what any of them keeps is where verify, export and report look.
    """
    return Path(worker()["workspace"]) if worker() else workspace()


def ledger() -> Path:
    """The ledger, one for all workers: AUTOKERNEL_LEDGER, else `results.tsv` in the repository."""
    return Path(worker()["ledger"]) if worker() else _from_env("AUTOKERNEL_LEDGER", repo_root() / "results.tsv")


def cache_dir() -> Path:
    """What outlives a checkout (calibrations, compiled kernels): AUTOKERNEL_CACHE, else the user's cache folder."""
    base = _from_env("XDG_CACHE_HOME", Path.home() / ".cache")
    return _from_env("AUTOKERNEL_CACHE", base / "autokernel")


def config_dir() -> Path:
    """The user's own settings: XDG_CONFIG_HOME/autokernel, else ~/.config/autokernel."""
    return _from_env("XDG_CONFIG_HOME", Path.home() / ".config") / "autokernel"


def target_folder(name: str) -> Path:
    """Where a target lies: workspace/targets/<name>/, or workspace/kb/<level>/<id>/ for a KernelBench problem."""
    return shared() / name if name.startswith("kb/") else shared() / "targets" / name


def best_path(target: str, op: str) -> Path:
    """Where the best kernel so far lies: beside its target, or for an operator without a model in best/."""
    return target_folder(target) / "best.py" if target else shared() / "best" / f"{op}.py"


def best_kernel(kernel: Path) -> Path | None:
    """What `orchestrate.py record` kept for the active target, or for the operator of `kernel`; None before that."""
    active = workspace() / "active"
    target = active.read_text().strip() if active.exists() else ""
    path = best_path(target, operator_of(kernel.read_bytes() if kernel.is_file() else b""))
    return path if path.is_file() else None


def operator_of(source: bytes) -> str:
    """KERNEL_TYPE of a kernel's text, also where that is no valid Python; "" without one."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        names = [
            node.value.value
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id == "KERNEL_TYPE"
        ]
        return str(names[-1]) if names else ""
    found = re.search(rb"^KERNEL_TYPE\s*=\s*[\"'](\w+)[\"']", source, re.MULTILINE)
    return found[1].decode() if found else ""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError, and ValueError for anything else that lies there."""
    return as_object(path.read_bytes())


def as_object(data: bytes) -> dict[str, Any]:
    """The JSON object that a file's bytes are. Raises ValueError for anything else."""
    values = json.loads(data)
    if not isinstance(values, dict):
        raise ValueError(f"holds {type(values).__name__}, expected a JSON object")
    return values


def fsync_dir(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader, and a kill at any moment, sees the old file or the new one.

    Creates the folder. Raises OSError (disk full, read-only folder): the old file is untouched, nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)                       # mkstemp gives 0600; these are ordinary files
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    fsync_dir(path.parent)
