"""Child processes of the judge, started before anything heavy is imported: this module needs no PyTorch.

A child has its own session, an allow-listed environment, an isolated interpreter, and a private folder for home and
temporary files. It imports PyTorch while the judge does the same, which halves the time to the first answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from autokernel.paths import cache_dir, repo_root, workspace

SCRIPT = Path(__file__).with_name("child.py")
KEPT_VARIABLES = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUTLASS_PATH",
    "CUTLASS_HOME", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_NUM_THREADS", "CC", "CXX",
)  # fmt: skip

# of Intel's OpenMP, GNU's, and numpy's OpenBLAS: their threads would spin after their work, as if the kernel went on
QUIET_POOLS = {"KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_THREAD_TIMEOUT": "4"}


def keep_bytecode() -> None:
    """Have Python keep what it compiles of the libraries in our cache: PyTorch without bytecode takes seconds more.

    An installation may come without any and may not be written to, and bench.py writes nothing outside its folders. Of
    our own modules none is kept: what runs is what git and a reader see.
    """
    sys.pycache_prefix, sys.dont_write_bytecode = str(cache_dir() / "bytecode"), False
    ours = Path(f"{sys.pycache_prefix}{repo_root()}")
    shutil.rmtree(ours / "autokernel", ignore_errors=True)
    for compiled in ours.glob("*.pyc"):
        compiled.unlink(missing_ok=True)


class Child:
    """One process that runs child.py, its folder and our end of its socket."""

    def __init__(self, run_dir: Path, name: str, under: tuple[str, ...] = ()):
        """under: a program that runs the child, with its options (a profiler)."""
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=run_dir))
        self.log = self.folder / "output.log"
        self.memory = os.memfd_create("arena", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)  # no path: nobody else opens it
        environment = {k: os.environ[k] for k in KEPT_VARIABLES if k in os.environ}
        environment |= {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        environment |= QUIET_POOLS
        known = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
        _adopt_orphans()
        self.sock, theirs = socket.socketpair()
        with theirs, open(self.log, "wb") as log, Child.counting:
            self.said = open(self.log, "rb")  # now: later its name may be a pipe's that nobody writes to
            self.process = subprocess.Popen(
                [*under, sys.executable, "-I", "-B", *known, str(SCRIPT), str(theirs.fileno()), str(self.memory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno(), self.memory],
                cwd=self.folder,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            Child.started.add(self.process.pid)
        self.scheduling = _scheduling(self.process.pid)

    started: ClassVar[set[int]] = set()  # process ids: any other child of ours in a foreign session is a stray
    counting: ClassVar[threading.Lock] = threading.Lock()  # so that no thread takes another's new child for a stray

    def size_memory(self, count: int) -> None:
        """Give the shared memory its size, for good."""
        os.ftruncate(self.memory, count)
        fcntl.fcntl(self.memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def companions(self) -> list[int]:
        """Living processes that the child started, those that left its session included."""
        with Child.counting:
            return [pid for pid in _strays(self.process.pid) if pid != self.process.pid]

    def rescheduled(self) -> bool:
        """Whether somebody changed the child's or the judge's priority or processors."""
        return self.scheduling != _scheduling(self.process.pid)

    def strike(self) -> None:
        """Begin to end the process group: where it holds a GPU, that takes the driver a while."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process group and whatever left it, and wait until they are gone."""
        self.strike()
        self.process.wait()
        for _ in range(100):
            left = self.companions()
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not left:
                break
            time.sleep(0.01)

    def close(self) -> None:
        if self.memory < 0:
            return
        self.kill()
        Child.started.discard(self.process.pid)
        self.sock.close()
        self.said.close()
        os.close(self.memory)
        self.memory = -1
        shutil.rmtree(self.folder, ignore_errors=True)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def age() -> float:
    """Seconds since this process was started, the interpreter's own start included; 0.0 where /proc does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def compilers() -> int:
    """Children that compile a new kernel side by side."""
    return min(6, (os.cpu_count() or 1) // 2 - 1)


def kernel_cache(source: bytes) -> Path:
    """Where compilers keep what they made of a kernel: apart for each source, so that none finds another's files."""
    return cache_dir() / "kernels" / hashlib.sha256(source).hexdigest()[:32]


def compiled_mark(cache: Path) -> Path:
    """There once every variant of a kernel has been compiled into its cache."""
    return cache / "compiled"


def wanted(kernel: Path, best: bool) -> int:
    """How many children a run of this kernel will need soon: the kernel, PyTorch, the best one, and compilers."""
    if not kernel.is_file() or not Path("/dev/nvidiactl").exists():
        return 2 + best
    source = kernel.read_bytes()
    one_piece = re.search(rb"^BACKEND\s*=\s*.cuda", source, re.MULTILINE)  # nvcc compiles a source once, whole
    return 2 + best + (0 if one_piece or compiled_mark(kernel_cache(source)).exists() else max(0, compilers()))


class Launcher:
    """Children of one run: some started ahead of need, all of them ended with the run."""

    def __init__(self, run_dir: Path, ahead: int = 0):
        self.run_dir = run_dir
        self.children: list[Child] = []
        self.waiting = [self._start("child") for _ in range(ahead)]

    def _start(self, name: str, under: tuple[str, ...] = ()) -> Child:
        self.children.append(Child(self.run_dir, name, under))
        return self.children[-1]

    def take(self, under: tuple[str, ...] = ()) -> Child:
        return self.waiting.pop(0) if self.waiting and not under else self._start("child", under)

    def close(self) -> None:
        for child in self.children:  # all at once, then wait for each
            if child.memory >= 0:
                child.strike()
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


def _adopt_orphans() -> None:
    """A process whose parent died becomes our child, not init's: so a daemon that a kernel started stays in reach."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _strays(child: int) -> list[int]:
    """Living descendants of a child, and orphans: our children in a foreign session that we did not start."""
    processes: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent, _, session = entry.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if state != "Z":
                processes[int(entry.parent.name)] = int(parent), int(session)
    me, here = os.getpid(), os.getsid(0)
    found = [p for p, (up, session) in processes.items() if up == me and session != here and p not in Child.started]
    found.append(child)
    for pid in found:
        found += [p for p, (up, _) in processes.items() if up == pid and p not in found]
    return found


def _scheduling(pid: int) -> list[Any]:
    """Priority, policy and processors of a process and of this one."""
    ask = (lambda p: os.getpriority(os.PRIO_PROCESS, p), os.sched_getscheduler, os.sched_getaffinity)
    return [get(p) for get in ask for p in (pid, 0)]
