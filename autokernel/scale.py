"""The same jobs here, on the GPUs of this machine, or on a Ray cluster: each result arrives once.

    with places(gpu_ids("0,1"), "") as where:                 # or places([], ADDRESS)
        for index, result in where.spread("autokernel.lab:evaluate", jobs): ...

A job is any value that pickle takes, a result too; the function is named, so that it can run elsewhere. One process per
GPU, which stays warm between jobs and sees that GPU alone; the function takes the GPU's lock (`run.gpu_lock`). A job
whose worker is lost is done again, elsewhere where there is another place; one that raises raises here. Needs no
PyTorch: the processes of several GPUs start while this one still imports it.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

from autokernel.paths import repo_root
from autokernel.process import Launcher, cores, launcher

children: list[Launcher] = []  # in a GPU's process: its own children, some of them started ahead
TRIES = 3  # of a job whose worker is lost
LEFT_AT_HOME = [".git", "workspace", "tests", "docs", ".venv", "uv.lock"]  # of the folder that a cluster's nodes get
BOOT = "import sys; sys.path.append({root!r}); from autokernel.scale import serve; serve({fd}, {ahead})"


class ScaleError(RuntimeError):
    """A GPU, cluster or worker that is not there; one line with what is."""


def call(function: str, job: Any) -> Any:
    """Run "package.module:name" on a job."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(job)


def gpu_ids(text: str) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of "0,1" or "all": numbers count as nvidia-smi does, among those visible.

    Raises ScaleError for a GPU that is not there.
    """
    known = [i.strip() for i in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if i.strip()] or _present()
    if not known:
        raise ScaleError(f"--gpus {text}: there is no GPU here; leave --gpus out")
    wanted = [str(i) for i in range(len(known))] if text == "all" else text.replace(" ", "").split(",")
    if bad := [w for w in wanted if not w.isdecimal() or int(w) >= len(known)]:
        here = ", ".join(map(str, range(len(known))))
        raise ScaleError(f"--gpus {text}: no GPU {bad[0]!r}; here are {here}, or all")
    return [known[int(w)] for w in dict.fromkeys(wanted)]


def _present() -> list[str]:
    """UUIDs in nvidia-smi's order; CUDA's own numbers where the driver does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except Exception:  # noqa: BLE001 - no library, no driver, no permission: each raises its own
        return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def cores_each() -> int:
    """A GPU's share of the processors: other GPUs of the machine have their own sweeps and agents."""
    return max(1, cores() // max(1, len(_present())))


# ---- GPUs of this machine -------------------------------------------------------------------------------------------


@dataclass
class Errand:
    """A job under way."""

    index: int
    job: Any
    tries: int = 0
    lost_at: set[str] = field(default_factory=set)


class Gpus:
    """One warm process per GPU of this machine. ahead: children that each starts before its first job comes."""

    def __init__(self, ids: Sequence[str], ahead: int = 0):
        self.ids, self.width, self.ahead = list(ids), len(ids), ahead
        self.cores = min(cores_each(), max(1, cores() // len(ids)))
        self.processes: dict[str, tuple[subprocess.Popen, Connection]] = {}
        for place in self.ids:
            self._start(place)

    def spread(self, function: str, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(index, result) of each job as it is done. Raises what a job raised; ScaleError for one lost TRIES times."""
        todo = [Errand(index, job) for index, job in enumerate(jobs)]
        done: queue.Queue = queue.Queue()
        changed, open_jobs = threading.Condition(), set(range(len(jobs)))
        work = function, todo, open_jobs, changed, done
        threads = [threading.Thread(target=self._work, args=(place, *work), daemon=True) for place in self.ids]
        for thread in threads:
            thread.start()
        try:
            for _ in jobs:
                index, result, error = done.get()
                if error is not None:
                    raise error
                yield index, result
        finally:
            with changed:
                if open_jobs:  # given up: an answer that comes later must not be taken for the next job's
                    for process, _ in list(self.processes.values()):
                        process.kill()
                open_jobs.clear()
                changed.notify_all()
            for thread in threads:
                thread.join()

    def _work(self, place: str, function: str, todo: list[Errand], open_jobs: set[int], changed, done) -> None:
        while True:
            with changed:
                while open_jobs and not (mine := [e for e in todo if place not in e.lost_at or self.width == 1]):
                    changed.wait()
                if not open_jobs:
                    return
                errand = mine[0]
                todo.remove(errand)
            result, error, lost = None, None, False
            try:
                result, error = self._ask(place, function, errand.job)
            except (EOFError, OSError):
                self._end(place)
                lost, errand.tries = True, errand.tries + 1
                if errand.tries == TRIES:
                    lost, error = False, ScaleError(f"a job's worker was lost {TRIES} times, last on GPU {place}")
            with changed:
                if lost:
                    errand.lost_at.add(place)
                    if len(errand.lost_at) == self.width:  # everywhere once: anywhere again
                        errand.lost_at.clear()
                    todo.append(errand)
                elif errand.index in open_jobs:
                    open_jobs.discard(errand.index)
                    done.put((errand.index, result, error))
                changed.notify_all()

    def _start(self, place: str) -> None:
        ours, theirs = Pipe()
        boot = BOOT.format(root=str(repo_root()), fd=theirs.fileno(), ahead=self.ahead)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": place}
        process = subprocess.Popen([sys.executable, "-B", "-c", boot], env=environment, pass_fds=[theirs.fileno()],
                                   stdin=subprocess.DEVNULL)  # fmt: skip
        theirs.close()
        self.processes[place] = process, ours

    def _ask(self, place: str, function: str, job: Any) -> tuple[Any, BaseException | None]:
        if place not in self.processes:
            self._start(place)
        connection = self.processes[place][1]
        connection.send((function, job))
        return connection.recv()

    def _end(self, place: str) -> None:
        process, connection = self.processes.pop(place)
        connection.close()  # it ends by itself, and what it started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()

    def close(self) -> None:
        for place in list(self.processes):
            self._end(place)


def _end_with(parent: int) -> None:
    """A command that is killed leaves no job running. (PR_SET_PDEATHSIG counts threads of it: too early.)"""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve(fd: int, ahead: int) -> None:
    """A GPU's process: do jobs until the other end closes."""
    connection = Connection(fd)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with launcher(ahead) as mine:
        children.append(mine)
        with contextlib.suppress(EOFError, OSError):
            while True:
                function, job = connection.recv()
                answer: tuple[Any, Exception | None]
                try:
                    answer = call(function, job), None
                except Exception as error:  # noqa: BLE001 - it is raised where the job came from
                    answer = None, error
                connection.send(answer)
    os._exit(0)  # shared CUDA memory has nothing left to tear down in order


# ---- machines of a cluster ------------------------------------------------------------------------------------------


class Cluster:
    """GPUs of a Ray cluster, one task each; Ray starts a lost task again. The nodes get this folder's code."""

    def __init__(self, address: str):
        try:
            import ray
        except ImportError:
            raise ScaleError("--cluster needs Ray, which is not here; get it with: uv sync --extra cluster") from None
        self.ray = ray
        _reachable(address)
        code = {"working_dir": str(repo_root()), "excludes": LEFT_AT_HOME}
        try:
            ray.init(address=address, runtime_env=code, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # noqa: BLE001 - refused, not found, another version: Ray has many kinds
            raise ScaleError(f"--cluster {address}: {' '.join(str(error).split())[:300]}") from None
        found = ray.cluster_resources()
        self.width = int(found.get("GPU", 0))
        if not self.width:
            self.close()
            raise ScaleError(f"--cluster {address}: no node has a GPU (ray start --num-gpus=N says so)")
        self.cores = max(1, int(found.get("CPU", 1)) // self.width)

    def spread(self, function: str, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """As Gpus.spread."""
        task = self.ray.remote(num_gpus=1, num_cpus=0, max_retries=TRIES - 1)(call)
        pending = {task.remote(function, job): index for index, job in enumerate(jobs)}
        try:
            while pending:
                for reference in self.ray.wait(list(pending))[0]:
                    try:
                        result = self.ray.get(reference)
                    except self.ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    except self.ray.exceptions.RayError as error:
                        raise ScaleError(f"a job was lost {TRIES} times: {str(error).splitlines()[0]}") from None
                    yield pending.pop(reference), result
        finally:
            for reference in pending:
                self.ray.cancel(reference, force=True)

    def close(self) -> None:
        self.ray.shutdown()


def _reachable(address: str) -> None:
    """Raises ScaleError where nobody listens: Ray itself tries for minutes, and may then end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5).close()
        except (OSError, ValueError) as error:
            raise ScaleError(f"--cluster {address}: {error}; start a cluster with: ray start --head") from None


@contextlib.contextmanager
def places(gpus: Sequence[str], cluster: str, ahead: int = 0) -> Iterator[Gpus | Cluster]:
    """Where jobs run: a cluster, or GPUs by name (`gpu_ids`). Raises ScaleError."""
    where = Cluster(cluster) if cluster else Gpus(gpus, ahead)
    try:
        yield where
    finally:
        where.close()
