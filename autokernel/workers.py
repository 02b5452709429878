"""Workers: several agents side by side, each in a git worktree of its own, on one GPU, with one ledger.

A worker is a git worktree in workspace/workers/ whose lock says so: its reason holds worker, GPU and run as JSON. A
target is claimed by a file workspace/claims/<target> with the worker's name in it, written under the ledger's lock. The
claim ends when its worker takes another target or is done, when it is removed, and when it showed no sign of life for
the rule idle_minutes: then whoever asks `next` may have the target. Kept kernels lie in the main workspace from the
start, so removing a worker loses none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from autokernel import integrity, paths
from autokernel.gitkeep import PREFIX, GitError, Repo
from autokernel.records import Ledger
from autokernel.scale import ScaleError, gpu_ids

MAIN = "main"  # the repository itself


def me() -> str:
    """The worker whose worktree this is, or MAIN."""
    return paths.worker().get("worker", MAIN)


@dataclass(frozen=True)
class Worker:
    """gpu: as CUDA_VISIBLE_DEVICES has it, "" where the worker sees what its shell sees."""

    name: str
    root: Path
    workspace: Path
    gpu: str = ""

    def bench(self) -> str:
        """Process id of a bench run at work here, or ""."""
        pids = (folder.name.partition("-")[0] for folder in (self.workspace / "runs").glob("[0-9]*-*"))
        return next((pid for pid in pids if Path("/proc", pid).exists()), "")

    def silent(self) -> float:
        """Minutes since its last sign of life: kernel.py edited, something measured, chosen or recorded, a driver."""
        if self.bench():
            return 0.0
        signs = [self.root / "kernel.py", *_claimed_by(self.name)]
        signs += [self.workspace / name for name in ("runs", "last_run.json", "heartbeat.json")]
        return (time.time() - max((s.stat().st_mtime for s in signs if s.exists()), default=0.0)) / 60


def everyone() -> list[Worker]:
    """The repository itself, then its workers by name, as git lists its worktrees."""
    main = Path(paths.worker().get("main") or paths.repo_root())
    git = main / ".git"
    if git.is_file():  # the main checkout is a linked worktree, or a submodule
        git = main / git.read_text().partition(":")[2].strip()
        git = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    found = [Worker(MAIN, main, paths.shared())]
    for pointer in sorted((git / "worktrees").glob("*/gitdir")):
        facts, root = paths.lock_facts(pointer.parent), (pointer.parent / pointer.read_text().strip()).parent
        if facts.get("main") == str(main) and root.is_dir():
            found.append(Worker(facts["worker"], root, root / "workspace", facts["gpu"]))
    return found


# ---- claims ---------------------------------------------------------------------------------------------------------


def claims(idle_minutes: float) -> dict[str, str]:
    """Target, or operator without a model, to the living worker that has it."""
    alive = {w.name for w in everyone() if w.silent() < idle_minutes}
    return {_target(path): name for path, name in _claims() if name in alive}


def claim(target: str) -> None:
    """Make `target` the only one this worker has; "" gives up all. Needs the ledger's lock, and that it is free."""
    if target:
        paths.atomic_write(paths.shared() / "claims" / target, f"{me()}\n".encode())
    _release(me(), target)


def _claims() -> list[tuple[Path, str]]:
    found = []
    for path in (paths.shared() / "claims").rglob("[!.]*"):  # a problem's name has slashes
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # given up meanwhile
            found.append((path, path.read_text().strip()))
    return found


def _target(path: Path) -> str:
    return path.relative_to(paths.shared() / "claims").as_posix()


def _claimed_by(name: str) -> list[Path]:
    return [path for path, holder in _claims() if holder == name]


def _release(name: str, but: str = "") -> None:
    for path in _claimed_by(name):
        if _target(path) != but:
            path.unlink(missing_ok=True)


# ---- making and removing --------------------------------------------------------------------------------------------


def add(name: str, gpu: int | None = None) -> tuple[Worker, bool]:
    """The worker of this name on branch autokernel/<tag>+<name>, and whether it was made now.

    gpu: index among the GPUs that this shell sees; None takes the one with the fewest workers, the main checkout being
    on the first. Safe to be killed and run again. Raises GitError, RecordError.
    """
    repo = _main_repo(f"worker {name}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}", name) or name == MAIN:
        raise GitError(f"{name!r} cannot name a worker; use letters, digits and dashes, and not {MAIN!r}")
    branch, gpus = f"{PREFIX}{repo.tag()}+{name}", _gpus()
    if gpu is not None and not 0 <= gpu < len(gpus):
        raise GitError(f"--gpu {gpu}: there are {len(gpus)} GPUs here, numbered from 0; leave it out to take any")
    with Ledger().lock():
        if known := next((w for w in everyone() if w.name == name), None):
            if gpu is not None and gpus[gpu] != known.gpu:
                raise GitError(f"worker {name} is on GPU {known.gpu or 'n/a'}, not {gpu}; first run: "
                               f"uv run orchestrate.py worker {name} --remove")  # fmt: skip
            return known, False
        worker = Worker(name, root := paths.shared() / "workers" / name, root / "workspace",
                        _least_used(gpus) if gpu is None else gpus[gpu])  # fmt: skip
        _set_aside(repo, worker)  # what a killed `worker` left
        old = repo.run("rev-parse", "-q", "--verify", f"refs/heads/{branch}")[0] == 0
        rc, said = repo.run("worktree", "add", "-q", *([str(root), branch] if old else ["-b", branch, str(root)]))
        if rc:
            raise GitError(f"cannot make a worktree of {branch}: {' '.join(said.split())[:300]}")
        if integrity.digest(root) != integrity.digest():
            _set_aside(repo, worker)
            raise GitError(f"the frozen files of {branch} are not those here: commit them or take them back (see "
                           f"git status), or rename the branch: git branch -m {branch} {branch}.old")  # fmt: skip
        if (environment := repo.root / ".venv").is_dir():
            (root / ".venv").symlink_to(environment)  # `uv run` in the worker: the same packages, not another copy
        facts = {"worker": name, "gpu": worker.gpu, "main": str(repo.root), "workspace": str(paths.shared().absolute()),
                 "ledger": str(paths.ledger().absolute())}  # fmt: skip
        rc, said = repo.run("worktree", "lock", "--reason", json.dumps(facts), str(root))  # last: now it is a worker
        if rc:
            raise GitError(f"cannot lock the worktree {root}: {' '.join(said.split())[:300]}")
        return worker, True


def remove(name: str) -> Path:
    """End a worker: its claims are free, and its whole folder is moved to the path returned. Its branch stays.

    Raises GitError where there is no such worker or something is at work in it, RecordError.
    """
    repo = _main_repo(f"worker {name} --remove")
    with Ledger().lock():
        worker = next((w for w in everyone() if w.name == name and name != MAIN), None)
        if worker is None:
            known = ", ".join(w.name for w in everyone()[1:]) or "none"
            raise GitError(f"no worker {name!r}; known: {known}; see: uv run orchestrate.py status")
        if pid := worker.bench():
            raise GitError(f"a bench run, process {pid}, works in {worker.root}; wait for it, or end it: kill {pid}")
        driver = worker.workspace / "run.lock"
        try:
            with FileLock(driver, timeout=0) if driver.exists() else contextlib.nullcontext():
                _release(name)
                return _set_aside(repo, worker)
        except Timeout:
            stop = worker.workspace / "stop"
            raise GitError(f"a driver works in {worker.root}; end it first: touch {stop}") from None


def _set_aside(repo: Repo, worker: Worker) -> Path:
    """Move a worktree's folder to workspace/removed/ in one step, and let git forget it, and one that is gone."""
    aside = paths.shared() / "removed" / f"{worker.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if worker.root.exists():
        aside.parent.mkdir(parents=True, exist_ok=True)
        worker.root.rename(aside)
        if (aside / ".venv").is_symlink():
            (aside / ".venv").unlink()
    repo.run("worktree", "remove", "--force", "--force", str(worker.root))
    return aside


def _main_repo(command: str) -> Repo:
    if facts := paths.worker():
        raise GitError(f"this is worker {facts['worker']}; go to the main checkout: cd {facts['main']} && "
                       f"uv run orchestrate.py {command}")  # fmt: skip
    return Repo.here()


def _gpus() -> list[str]:
    """The GPUs this shell sees, as CUDA_VISIBLE_DEVICES may name them."""
    try:
        return gpu_ids("all")
    except ScaleError:
        return []


def _least_used(gpus: list[str]) -> str:
    used = Counter(w.gpu or gpus[0] for w in everyone()) if gpus else Counter()
    return min(gpus, key=lambda g: used[g], default="")
