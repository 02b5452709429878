"""Git for the night: kernel.py alone is committed, on a branch autokernel/<tag>. No reset, no hook skipped.

Restoring is not git's business: the source of every experiment lies in workspace/experiments, and kernel.py is written
from there. So a commit that fails loses nothing, and files that the user changed or staged stay as they are.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from autokernel.paths import atomic_write, repo_root, worker

PREFIX = "autokernel/"
LOCK_SECONDS = 10.0  # another git may be at work: an orphan of a killed command, an editor
SECONDS = 120  # for one command, hooks included


class GitError(Exception):
    """One line: what is wrong and the command that mends it."""


@dataclass(frozen=True)
class Repo:
    """The git repository that holds kernel.py."""

    root: Path

    @classmethod
    def here(cls) -> Repo:
        """Raises GitError: no git, no repository, a repository that begins in another folder."""
        repo = cls(repo_root())
        rc, top = repo.run("rev-parse", "--show-toplevel")
        if rc:
            raise GitError(f"{repo.root} is no git repository ({_line(top)}); make one with: "
                           "git init && git add -A && git commit -m 'AutoKernel'")  # fmt: skip
        if Path(top.strip()).resolve() != repo.root.resolve():
            raise GitError(f"{repo.root} lies inside another repository ({top.strip()}); clone AutoKernel by itself")
        return repo

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output (stdout on success, else both). Waits for another git's index.lock."""
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true", "LC_ALL": "C"}
        command = ["git", "-C", str(self.root), *arguments]
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                      errors="replace", timeout=SECONDS, env=environment)  # fmt: skip
            except FileNotFoundError:
                raise GitError("git is not installed; AutoKernel keeps every good kernel as a commit") from None
            except subprocess.TimeoutExpired:
                return 124, f"git {arguments[0]} did not end within {SECONDS} s (a hook, or a signing prompt?)"
            if done.returncode and "index.lock': File exists" in done.stderr and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            return done.returncode, done.stdout if not done.returncode else done.stderr + done.stdout

    def tag(self) -> str:
        """The run's tag, from the branch. Raises GitError on a detached HEAD, another branch."""
        rc, branch = self.run("symbolic-ref", "-q", "--short", "HEAD")
        if rc:
            raise GitError("HEAD is detached: nothing was changed; go to the run's branch with: "
                           "git switch autokernel/<tag>, or start one: uv run orchestrate.py start <tag>")  # fmt: skip
        if not branch.startswith(PREFIX):
            raise GitError(f"on branch {branch.strip()}, not on an autokernel/<tag>: nothing was changed; "
                           "start with: uv run orchestrate.py start <tag>")  # fmt: skip
        return branch.strip().removeprefix(PREFIX).removesuffix(f"+{worker().get('worker', '')}")

    def start(self, tag: str) -> str:
        """Go to branch autokernel/<tag>, made here if there is none. Returns what was done. Raises GitError."""
        branch = PREFIX + tag
        if worker():
            raise GitError(f"this is worker {worker()['worker']} of a run; start another in {worker()['main']}")
        if "+" in tag or self.run("check-ref-format", "--branch", branch)[0]:  # + parts the tag from a worker's name
            raise GitError(f"{tag!r} cannot be part of a branch name; use letters, digits and dashes")
        if self.run("rev-parse", "--verify", "-q", "HEAD")[0]:
            raise GitError("the repository has no commit yet; make one with: git add -A && git commit -m 'AutoKernel'")
        if self.run("var", "GIT_COMMITTER_IDENT")[0]:
            raise GitError("git does not know who commits: nothing was changed; tell it with: "
                           "git config user.name NAME && git config user.email EMAIL")  # fmt: skip
        known = self.run("rev-parse", "-q", "--verify", f"refs/heads/{branch}")[0] == 0
        rc, said = self.run("switch", *([] if known else ["-c"]), branch)
        if rc:
            raise GitError(f"cannot switch to {branch}: {_line(said)}")
        return f"branch {branch}: {'continued' if known else 'made here'}"

    def commit(self, source: bytes, subject: str, text: str, trailers: dict[str, object]) -> tuple[str, str]:
        """Commit kernel.py, which holds `source`, and nothing else. Returns (the commit or "", warning)."""
        path, warning = self.root / "kernel.py", ""
        if self.show("HEAD") != source:
            if self.run("ls-files", "--error-unmatch", "--", "kernel.py")[0]:
                self.run("add", "--", "kernel.py")
            body = "\n".join(f"{name}: {value}" for name, value in trailers.items())
            parts = [word for part in (subject, text, body) for word in ("-m", part)]
            rc, said = self.run("commit", "-q", *parts, "--", "kernel.py")
            if path.read_bytes() != source:  # a hook that formats
                atomic_write(path, source)
            if rc:
                return "", f"not committed: {_line(said)}; the kernel is kept in workspace/, see: git status"
            if self.show("HEAD") != source:
                warning = "the commit's kernel.py is not the one that was measured: a commit hook or filter changed it"
        return self.run("rev-parse", "HEAD")[1].strip(), warning

    def show(self, commit: str) -> bytes | None:
        """kernel.py as a commit holds it."""
        command = ["git", "-C", str(self.root), "cat-file", "blob", f"{commit}:kernel.py"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        return done.stdout if done.returncode == 0 else None


def in_run() -> bool:
    """Whether this checkout is on a run's branch."""
    try:
        return bool(Repo.here().tag())
    except GitError:
        return False


def _line(text: str) -> str:
    """The telling line of git's output: its error if there is one."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[0])[:300]
