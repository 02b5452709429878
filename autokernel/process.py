"""Child processes of the judge, started before anything heavy is imported: this module needs no PyTorch.

A child has its own session, an allow-listed environment, an isolated interpreter, and a private folder for home and
temporary files. It imports PyTorch while the judge does the same, which halves the time to the first answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autokernel.paths import workspace

SCRIPT = Path(__file__).with_name("child.py")
KEPT_VARIABLES = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUTLASS_PATH",
    "CUTLASS_HOME", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_NUM_THREADS", "CC", "CXX",
)  # fmt: skip


class Child:
    """One process that runs child.py, its folder and our end of its socket."""

    def __init__(self, run_dir: Path, name: str):
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=run_dir))
        self.log = self.folder / "output.log"
        self.nonce = secrets.token_hex(16)
        environment = {k: os.environ[k] for k in KEPT_VARIABLES if k in os.environ}
        environment |= {"HOME": str(self.folder), "TMPDIR": str(self.folder), "AUTOKERNEL_RUN": self.nonce}
        self.sock, theirs = socket.socketpair()
        with theirs, open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                cwd=self.folder,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def kill(self) -> None:
        """End the process group and whatever left it, and wait until they are gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in _marked(self.nonce):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.sock.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Launcher:
    """Children of one run: some started ahead of need, all of them ended with the run."""

    def __init__(self, run_dir: Path, ahead: int = 0):
        self.run_dir = run_dir
        self.children: list[Child] = []
        self.waiting = [self._start("child") for _ in range(ahead)]

    def _start(self, name: str) -> Child:
        self.children.append(Child(self.run_dir, name))
        return self.children[-1]

    def take(self) -> Child:
        return self.waiting.pop(0) if self.waiting else self._start("child")

    def close(self) -> None:
        for child in self.children:
            child.close()


@contextlib.contextmanager
def launcher(ahead: int = 0) -> Iterator[Launcher]:
    """A private folder under workspace/runs and the children in it; leftovers of killed runs are removed."""
    base = workspace() / "runs"
    base.mkdir(parents=True, exist_ok=True)
    for old in base.iterdir():
        if old.name.split("-")[0].isdigit() and not Path(f"/proc/{old.name.split('-')[0]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base))
    started = Launcher(folder, ahead)
    try:
        yield started
    finally:
        started.close()
        shutil.rmtree(folder, ignore_errors=True)


def _die_with_parent() -> None:
    """A child must not outlive a judge that is killed (Linux; elsewhere it ends when the socket closes)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _marked(nonce: str) -> list[int]:
    """Processes that carry a child's mark in their environment: forks that left the process group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if nonce.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return found
