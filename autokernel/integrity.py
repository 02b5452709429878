"""Is the judge the judge? The frozen files against the commit they should come from, and against themselves later."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from autokernel.paths import repo_root

# what judges, or steers what is judged; a model or a kernel may change at any time
FROZEN = (
    "bench.py", "reference.py", "orchestrate.py", "verify.py", "profile.py", "extract.py", "autokernel", "kernels",
    "kernelbench",
)  # fmt: skip


@dataclass(frozen=True)
class Harness:
    """status: clean, dirty (files differ from `commit`, or are new) or "no git" (nothing to compare with)."""

    status: str
    commit: str
    changed: tuple[str, ...]
    sha256: str


class HarnessChanged(RuntimeError):
    """The judge's own files are not those of the commit: its verdict would be worth nothing."""


def required(allow_dirty: bool = False) -> Harness:
    """The harness as it is. Raises HarnessChanged, with the command that takes the files back, unless allowed."""
    found = harness()
    if found.status == "dirty" and not allow_dirty:
        names = " ".join(found.changed[:5]) + " ..." * (len(found.changed) > 5)
        raise HarnessChanged(
            f"frozen files differ from commit {found.commit[:9]}: {names}; take them back with: git checkout "
            f"{found.commit[:9]} -- {names} (delete new ones), or develop with --allow-dirty-harness, never keepable"
        )
    return found


def frozen_files(root: Path) -> list[Path]:
    """Every frozen file there is, compiled code excepted: bench.py removes that before it imports anything."""
    found: list[Path] = []
    for name in FROZEN:
        path = root / name
        found += [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    return [p for p in found if "__pycache__" not in p.parts]


def digest(root: Path | None = None) -> str:
    """SHA-256 over names and bytes of the frozen files."""
    root = root or repo_root()
    lines = [f"{p.relative_to(root)} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in frozen_files(root)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def harness(root: Path | None = None, commit: str = "HEAD") -> Harness:
    """Compare the frozen files with a commit, by content: index flags and ignore rules hide nothing."""
    root = root or repo_root()
    listed = _git(root, "ls-tree", "-r", "-z", "--full-tree", commit, "--", *FROZEN)
    top = _git(root, "rev-parse", "--show-toplevel", commit)
    if listed is None or top is None or Path(top.split("\n")[0]).resolve() != root.resolve():
        return Harness("no git", "", (), digest(root))
    committed = {}
    for entry in filter(None, listed.split("\0")):
        facts, _, name = entry.partition("\t")
        committed[name] = facts.split()[2]
    present = {str(p.relative_to(root)): _blob(p, len(next(iter(committed.values()), ""))) for p in frozen_files(root)}
    changed = tuple(sorted(n for n in present.keys() | committed.keys() if present.get(n) != committed.get(n)))
    return Harness("dirty" if changed else "clean", top.split("\n")[1], changed, digest(root))


def _blob(path: Path, length: int) -> str:
    """The name git gives to a file's content."""
    data = path.read_bytes()
    new = hashlib.sha256 if length == 64 else hashlib.sha1
    return new(f"blob {len(data)}\0".encode() + data).hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    """What a git command prints; None where there is no git or no such commit."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
