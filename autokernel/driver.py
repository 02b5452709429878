"""`orchestrate.py run`: starts a coding agent headless, again and again, until a budget, DONE or a stop file ends it.

The agent is any command with `{brief}` in it, where the brief goes in as one argument; no shell is involved. What the
driver knows comes from the ledger, so it may be killed and started again at any moment. workspace/heartbeat.json is
written every few seconds; workspace/agent/ keeps each session's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from autokernel import digest
from autokernel.gitkeep import Repo
from autokernel.keep import unrecorded
from autokernel.night import Night, NightError, gains
from autokernel.paths import atomic_write, read_object, repo_root, workspace
from autokernel.records import Ledger, now

IDLE_SESSIONS = 30  # sessions in a row without an experiment before the driver gives up: about seven hours
LONGEST_PAUSE = 900.0  # seconds between such sessions; an agent out of quota comes back within hours
GRACE = 20.0  # seconds to end by itself after SIGTERM
DONE_GRACE = 300.0  # seconds to say goodbye after DONE
BEAT = 5.0


@dataclass
class Driver:
    """One run of the night. hours, experiments and cost are budgets of this run; None is no limit."""

    agent: str
    hours: float | None = None
    experiments: int | None = None
    cost_per_win: float | None = None  # in the unit of the agent's own total_cost_usd
    stall_minutes: float = 60.0
    pause: float = 10.0
    cost: float = 0.0
    session: int = 0
    began: float = field(default_factory=time.time)
    state: str = "starting"

    def run(self) -> str:
        """Returns why it ended. Raises NightError for what cannot work at all, GitError, RecordError."""
        if "{brief}" not in self.agent:
            raise NightError(f"--agent {self.agent!r} has no {{brief}}; e.g. --agent 'claude -p {{brief}}'")
        self.ledger, self.tag = Ledger(), Repo.here().tag()
        if self.stop_file.exists():
            raise NightError(f"{self.stop_file} is there; remove it, then run again")
        self.folder.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: the agent is ended too
        try:
            with FileLock(workspace() / "run.lock", timeout=0):
                self._refuse_orphan()
                self.first = len(self._night().mine)
                self.first_wins = self._wins(self._night())
                self.state = self._sessions()
        except Timeout:
            raise NightError(f"another `run` works in {workspace()}; see: uv run orchestrate.py status") from None
        except KeyboardInterrupt:
            self.state = "interrupted"
        self._beat(None)
        return self.state

    @property
    def folder(self) -> Path:
        return workspace() / "agent"

    @property
    def stop_file(self) -> Path:
        return workspace() / "stop"

    def _night(self) -> Night:
        return Night.read(self.ledger, self.tag)

    @staticmethod
    def _wins(night: Night) -> int:
        return gains(night.mine)

    def _sessions(self) -> str:
        idle = 0
        while not (why := self._over()):
            before = len(self._night().mine)
            status = self._one_session()
            if status in (126, 127):
                raise NightError(f"the agent's command does not run: {self._tail()}")
            idle = 0 if len(self._night().mine) > before else idle + 1
            if idle >= IDLE_SESSIONS:
                return f"gave up: {idle} sessions of the agent without an experiment, last exit status {status}"
            if idle and not self._over():
                self.state = f"the agent did nothing (exit status {status}); waiting"
                self._wait(min(LONGEST_PAUSE, self.pause * 2 ** (idle - 1)))
        return why

    def _over(self) -> str:
        """Why the run ends now, or ""."""
        night = self._night()
        done, wins = len(night.mine) - self.first, self._wins(night) - self.first_wins
        if self.stop_file.exists():
            return f"stopped by {self.stop_file}"
        if self.hours is not None and time.time() - self.began >= 3600 * self.hours:
            return f"{self.hours:g} hours are over"
        if self.experiments is not None and done >= self.experiments:
            return f"{done} experiments are done"
        if self.cost_per_win is not None and self.cost / max(1, wins) > self.cost_per_win:
            return f"{self.cost:.2f} spent for {wins} gains: more than {self.cost_per_win:g} each"
        return "DONE: no target is open" if night.choose()[0] == "DONE" and not unrecorded(night) else ""

    def _one_session(self) -> int:
        """Start the agent, watch it to its end, and return its exit status."""
        night = self._night()
        brief = digest.brief(night, unrecorded(night) is not None)
        self.session = 1 + max((int(p.stem.split("-")[1]) for p in self.folder.glob("session-*.log")), default=0)
        atomic_write(self.folder / "brief.md", brief.encode())
        command = [word.replace("{brief}", brief) for word in shlex.split(self.agent)]
        with open(self.log, "wb") as log:
            try:
                process = subprocess.Popen(command, cwd=repo_root(), stdin=subprocess.DEVNULL, stdout=log,
                                           stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
            except OSError as error:
                log.write(f"{command[0]}: {error.strerror}\n".encode())
                return 127
        self.state = "the agent works"
        try:
            self._watch(process)
        finally:
            self._end(process)
        found = re.findall(rb'"total_cost_usd":\s*([0-9.]+)', self.log.read_bytes())
        self.cost += float(found[-1]) if found else 0.0
        return process.returncode

    def _watch(self, process: subprocess.Popen) -> None:
        """Until the agent ends, must end, or stalls."""
        finished, seen, alive = 0.0, None, time.monotonic()
        while process.poll() is None:
            self._beat(process.pid)
            sizes = [p.stat().st_size if p.exists() else 0 for p in (self.log, self.ledger.path)]
            if sizes != seen:
                seen, alive = sizes, time.monotonic()
            if time.monotonic() - alive > 60 * self.stall_minutes:
                return
            why = self._over()
            finished = (finished or time.monotonic()) if why.startswith("DONE") else 0.0
            if why and (not finished or time.monotonic() - finished > DONE_GRACE):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)

    @property
    def log(self) -> Path:
        return self.folder / f"session-{self.session}.log"

    def _tail(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split())[-300:] or "it printed nothing"

    def _end(self, process: subprocess.Popen) -> None:
        """End the agent and what it started. The commands it may have been running are safe to be killed."""
        for sign, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._over():
            self._beat(None)
            time.sleep(min(1.0, max(0.0, until - time.monotonic())))

    _last_beat: float = 0.0

    def _beat(self, pid: int | None) -> None:
        if pid and time.monotonic() - self._last_beat < BEAT:
            return
        self._last_beat = time.monotonic()
        night = self._night()
        values = {
            "time": now(), "state": self.state, "driver_pid": os.getpid(), "agent_pid": pid, "session": self.session,
            "experiments": len(night.mine) - self.first, "gains": self._wins(night) - self.first_wins,
            "cost": round(self.cost, 4), "hours": round((time.time() - self.began) / 3600, 3),
        }  # fmt: skip
        atomic_write(workspace() / "heartbeat.json", (json.dumps(values, indent=1) + "\n").encode())

    def _refuse_orphan(self) -> None:
        """An agent whose driver was killed may still be at work on the same kernel.py."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            pid = read_object(workspace() / "heartbeat.json")["agent_pid"]
            if os.getsid(pid) == pid:
                raise NightError(f"an earlier run's agent, process {pid}, still works here; end it: kill -- -{pid}")
