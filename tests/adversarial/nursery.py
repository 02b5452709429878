"""Children by fork from a process that has imported PyTorch: for the tests, which judge a hundred kernels on a CPU.

What runs in a child is child.py as ever, under its own name, in its own session, folder and environment; only the two
seconds of importing PyTorch are shared. Run as a script it is that process: requests come over a socket, each with the
file descriptors that the child gets.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time


class Forked:
    """As much of subprocess.Popen as the judge uses, for a process that it adopted."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("child.py", timeout or 0)
            time.sleep(0.002)
        return self.returncode


class Nursery:
    """A process with PyTorch in it, and a stand-in for subprocess.Popen that forks from it."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-B", __file__, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()

    def popen(self, command: list[str], *, stdout, pass_fds, cwd, env, **_) -> Forked:
        """`command` is [python, "-I", "-B", child.py, socket fd, memory fd]."""
        message = json.dumps({"argv": command[3:], "env": env, "cwd": str(cwd)}).encode()
        socket.send_fds(self.ours, [message], [stdout.fileno(), *pass_fds])
        return Forked(int(self.ours.recv(64)))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.ours.close()


def serve(sock: socket.socket) -> None:
    import torch  # noqa: F401 - what this process is for

    while True:
        message, fds, _, _ = socket.recv_fds(sock, 1 << 16, 3)
        if not message:
            return
        read, write = os.pipe()
        if os.fork() == 0:
            between = os.getpid()
            if pid := os.fork():
                os.write(write, str(pid).encode())
                os._exit(0)  # so the judge, which adopts orphans, becomes the parent
            os.close(write)
            sock.close()
            while os.getppid() == between:
                time.sleep(0.001)
            child(json.loads(message), fds)
        os.wait()
        os.close(write)
        sock.send(os.read(read, 64))
        for fd in (read, *fds):
            os.close(fd)


def child(request: dict, fds: list[int]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    log, *passed = fds
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # what PyTorch's import has asked for
    os.environ.clear()
    os.environ.update(request["env"])
    script, *_ = request["argv"]
    sys.argv = [script, *map(str, passed)]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
