"""The judge's hold on a child process: share memory with it, ask it for one call at a time, end it for good.

Tensors are shared through one arena of bytes (CUDA IPC on a GPU, anonymous memory otherwise) with two input regions:
the stage, which the judge writes, and the working copy, which the kernel reads, and which the judge compares bit for
bit with its own private copy after the call, the random bytes between the tensors included. The output is copied out
of the arena the moment the answer comes, and compared with it again when the judge has computed its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import random
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autokernel.compare import same_bits
from autokernel.process import Child
from autokernel.spec import TensorSpec

CONFINED = True  # only the measurement of what the defences cost turns this off
LONGEST_ANSWER = 1 << 18
SHIFT = 4096  # bytes by which the inputs lie elsewhere in every second call
LAUNCHES = 24  # calls back to back, whose host time is taken; the first few do not count
GUARD = 512  # bytes of noise before, between and after the tensors of an arena


INTERPRETED = "; Triton's interpreter needs so long for many small tiles: larger blocks, or a smaller --input-shape"
COMPILE_ERRORS = ("CudaCompileError", "CompilationError")


class WorkerFailure(Exception):
    """The child gave no answer. outcome: TIMEOUT or CRASH; detail: the child's own traceback, if it could send one."""

    def __init__(self, outcome: str, message: str, detail: str = "", kind: str = ""):
        super().__init__(message)
        self.outcome, self.detail, self.kind = outcome, detail, kind
        self.worker: Worker | None = None  # whose child it was


@dataclass(frozen=True)
class Layout:
    """Where a case's tensors lie: byte offsets inside an input region, and the sizes of the regions."""

    inputs: Mapping[str, TensorSpec]
    starts: Mapping[str, int]
    input_bytes: int
    outputs: tuple[TensorSpec, ...]
    output_starts: tuple[int, ...]  # from where the output region begins
    output_bytes: int

    @classmethod
    def of(cls, inputs: Mapping[str, TensorSpec], *outputs: TensorSpec) -> Layout:
        starts, position = {}, GUARD
        for name, spec in inputs.items():
            starts[name] = position
            position += _aligned(spec.span * spec.dtype.itemsize) + GUARD
        output_starts, end = [], 0
        for spec in outputs:
            output_starts.append(end)
            end += _aligned(spec.span * spec.dtype.itemsize) + GUARD
        return cls(inputs, starts, position, outputs, tuple(output_starts), end)

    @property
    def total(self) -> int:
        return 2 * self.input_bytes + SHIFT + self.output_bytes

    def views(self, region: torch.Tensor) -> dict[str, torch.Tensor]:
        """The input tensors inside a byte tensor that begins where the region begins."""
        return {name: view_of(region, self.starts[name], spec) for name, spec in self.inputs.items()}


def device_nodes() -> list[str]:
    """What a kernel's process may write to below /dev: no disk, no terminal, nothing that other programs share."""
    patterns = ("nvidia*", "nvidia-caps/*", "dri/*", "kfd", "dxg")
    return [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")] + sorted(
        str(path) for pattern in patterns for path in Path("/dev").glob(pattern) if not path.is_dir()
    )


def _aligned(count: int) -> int:
    return -(-count // GUARD) * GUARD


def noise(region: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Fill bytes, a multiple of eight of them, with random ones."""
    region.view(torch.int64).random_(-(2**63), None, generator=generator)


def view_of(region: torch.Tensor, start: int, spec: TensorSpec) -> torch.Tensor:
    size = spec.dtype.itemsize
    flat = region[start : start + _aligned(spec.span * size)].view(spec.dtype)
    return torch.as_strided(flat, spec.shape, spec.strides, spec.offset + flat.storage_offset())


class Worker:
    """One child process and the arena shared with it."""

    def __init__(self, child: Child, device: torch.device, cache: Path, arena_bytes: int):
        self.child, self.device, self.arena_bytes = child, device, arena_bytes
        self.cache = cache
        self.cache.mkdir(parents=True, exist_ok=True)
        self.confinement = ""
        self.shift = self.mask = 0
        self.factor = 1

    @property
    def folder(self) -> Path:
        return self.child.folder

    def _environment(self) -> dict[str, str]:
        """Where compilers keep what they made: apart for each source, so that no kernel finds another's files."""
        places = {"TRITON_CACHE_DIR": self.cache / "triton", "TORCHINDUCTOR_CACHE_DIR": self.cache / "inductor"}
        places |= {"AUTOKERNEL_CACHE": self.cache, "TORCH_EXTENSIONS_DIR": self.cache / "extensions"}
        # models that the user has are found where they are: HOME is another, and there is no network
        places["HF_HOME"] = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
        # torch.compile in a kernel compiles without a pool of processes that would outlive the call
        fixed = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if self.device.type == "cpu":
            fixed["TRITON_INTERPRET"] = "1"
        return {k: str(v) for k, v in places.items()} | fixed

    # ---- memory ------------------------------------------------------------------------------------------------

    def share(self, flush_bytes: int, timeout: float, confined: bool = True) -> None:
        """Make the arena and have the child open it. Waits for the child's start. A profiler needs it unconfined."""
        if self.device.type == "cuda":
            self.arena = self._cuda_arena()
            storage = self.arena.untyped_storage()
            handle = [_coded(v) for v in storage._share_cuda_()]
            described = {"kind": "ipc", "handle": handle, "offset": self.arena.storage_offset()}
        else:
            self.child.size_memory(self.arena_bytes)
            path = f"/proc/self/fd/{self.child.memory}"
            self.arena = torch.from_file(path, shared=True, size=self.arena_bytes, dtype=torch.uint8)
            described = {"kind": "memory"}
        described["bytes"] = self.arena_bytes
        writable = [*device_nodes(), str(self.folder), str(self.cache)] if CONFINED and confined else []
        answer = self.ask(
            "setup", timeout, device=str(self.device), arena=described, flush_bytes=flush_bytes,
            environment=self._environment(), writable=writable,
        )  # fmt: skip
        self.confinement = str(answer.get("confinement"))

    def _cuda_arena(self) -> torch.Tensor:
        """Memory of its own: an IPC handle opens the whole allocation, so nothing else of the judge may lie in it."""
        self.pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self.pool):
            return torch.empty(self.arena_bytes, dtype=torch.uint8, device=self.device)

    def stage(self, layout: Layout, private: torch.Tensor) -> None:
        """Write the inputs, masked, and noise over the output.

        The kernel will find the inputs where they were the call before last: a model, too, brings other content at
        known addresses, and known shapes at other addresses. The mask goes with the request.
        """
        self.shift, self.mask = SHIFT - self.shift, random.SystemRandom().getrandbits(63)
        # odd, so the product can be undone: a mask alone would show in the distribution of the words
        self.factor = random.SystemRandom().getrandbits(63) | 1
        staged = self.arena[: layout.input_bytes].view(torch.int64)
        torch.bitwise_xor(private.view(torch.int64), self.mask, out=staged).mul_(self.factor)
        noise(self.arena[2 * layout.input_bytes + SHIFT : layout.total])

    def inputs_untouched(self, layout: Layout, private: torch.Tensor) -> bool:
        start = layout.input_bytes + self.shift
        return torch.equal(self.arena[start : start + layout.input_bytes], private)

    def outputs(self) -> list[torch.Tensor]:
        """The last call's outputs, copied out of the arena when its answer came."""
        return self.taken

    def outputs_settled(self, layout: Layout) -> bool:
        """Whether the arena still holds what was taken: nothing wrote there after the answer."""
        return all(map(same_bits, self._arena_outputs(layout), self.taken))

    def _arena_outputs(self, layout: Layout) -> list[torch.Tensor]:
        base = 2 * layout.input_bytes + SHIFT
        return [view_of(self.arena, base + at, s) for at, s in zip(layout.output_starts, layout.outputs, strict=True)]

    def call(
        self, layout: Layout, scalars: Mapping[str, Any], timeout: float, wait_s: float = 0.0, seed: int | None = None
    ) -> dict[str, Any]:
        """One call of the kernel on the staged inputs; the reply holds raw times and facts about what it returned.

        `wall_s` is the judge's own clock from the request until the output is in the judge's own memory, `queued_s` how
        long the child stood ready on a busy CPU meanwhile. seed: of the random numbers that a model draws in forward.
        """
        self.taken = []  # a large one is freed before the next is taken
        self._synchronize()
        queued, started = self._queued(), time.perf_counter()
        reply = self._ask_about(layout, scalars, timeout, "call", wait_s, seed)
        self.taken = [output.clone() for output in self._arena_outputs(layout)]
        self._synchronize()
        if fault := malformed(reply):
            self.child.kill()
            raise WorkerFailure("CRASH", f"the child's answer is malformed: {fault}")
        return reply | {"wall_s": time.perf_counter() - started, "queued_s": self._queued() - queued}

    def audit(self, layout: Layout, scalars: Mapping[str, Any], timeout: float) -> tuple[list[str], list[str]]:
        """Names of the PyTorch operators and of the device's kernels in one more call."""
        reply = self._ask_about(layout, scalars, timeout, "audit")
        return strings(reply.get("operators")), strings(reply.get("kernels"))

    def profile(self, layout: Layout, scalars: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
        """The device's kernels with their times; the child leaves trace.json in its folder."""
        return self._ask_about(layout, scalars, timeout, "profile")["kernels"]

    def count(self, layout: Layout, scalars: Mapping[str, Any], timeout: float) -> None:
        """One call between the profiler's start and stop."""
        self._ask_about(layout, scalars, timeout, "count")

    def launch_seconds(
        self, layout: Layout, scalars: Mapping[str, Any], timeout: float, seed: int | None = None
    ) -> float:
        """Host time of one call among many back to back, as the child says; one of them can be checked."""
        judged = random.SystemRandom().randrange(1, LAUNCHES)
        value = self._ask_about(layout, scalars, timeout, "launch", seed=seed, judged=judged).get("host_s")
        self.taken = [output.clone() for output in self._arena_outputs(layout)]
        return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e6 else math.nan

    def replaced(self) -> list[str]:
        """Functions of Python, PyTorch or the runner that the kernel replaced."""
        return strings(self.ask("replaced", 30).get("changed"))

    def resources(self) -> dict[str, int | None]:
        """Registers, spilled bytes and shared memory of the compiled kernels, as far as the child knows."""
        found = self.ask("resources", 30).get("resources")
        found = found if isinstance(found, dict) else {}
        values = {name: found.get(name) for name in ("registers", "spill_bytes", "smem_bytes")}
        return {name: value if type(value) is int else None for name, value in values.items()}

    def _ask_about(
        self, layout: Layout, scalars: Mapping[str, Any], timeout: float, do: str, wait_s: float = 0.0,
        seed: int | None = None, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        work, base = layout.input_bytes + self.shift, 2 * layout.input_bytes + SHIFT
        outputs = zip(layout.output_starts, layout.outputs, strict=True)
        described = {
            name: {**_described(spec), "work": work + layout.starts[name], "offset": spec.offset}
            for name, spec in layout.inputs.items()
        }
        return self.ask(
            do,
            timeout,
            inputs=described,
            outputs=[{**_described(spec), "start": base + at} for at, spec in outputs],
            seed=seed,
            stage=0,
            work=work,
            mask=self.mask,
            inverse=signed(pow(self.factor, -1, 1 << 64)),
            bytes=layout.input_bytes,
            scalars=dict(scalars),
            wait_cycles=int(wait_s * 2e9),  # about 2 GHz: longer on a slower clock, which does no harm
            poison=random.SystemRandom().randrange(1, 0x70),  # a byte; four or two of them are a small number
            launches=LAUNCHES,
            **more,
        )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- messages ----------------------------------------------------------------------------------------------

    def ask(self, do: str, timeout: float, **request: Any) -> dict[str, Any]:
        """Send one request, wait for its answer.

        Raises WorkerFailure: TIMEOUT after `timeout` seconds, CRASH if the child ended, answered before it was asked
        or something else than it was asked, or if it reports an exception.
        """
        try:
            return self._exchange(do, timeout, request)
        except WorkerFailure as failure:
            failure.worker = self
            raise

    def _exchange(self, do: str, timeout: float, request: Mapping[str, Any]) -> dict[str, Any]:
        token = secrets.token_hex(8)
        message = json.dumps({"do": do, "id": token, **request}).encode()
        deadline = time.monotonic() + timeout
        try:
            early = bool(select.select([self.child.sock], [], [], 0)[0]) and self.child.sock.recv(1, socket.MSG_PEEK)
            self.child.sock.settimeout(timeout)
            self.child.sock.sendall(struct.pack("<I", len(message)) + message)
            (length,) = struct.unpack("<I", self._read(4, deadline))
            if early or length > LONGEST_ANSWER:
                raise ValueError(f"answer of {length} bytes")
            answer = json.loads(self._read(length, deadline))
            if not isinstance(answer, dict) or answer.get("id") != token:
                raise ValueError("the answer does not belong to the request")
        except TimeoutError:
            self.child.kill()
            why = INTERPRETED * (self.device.type == "cpu")
            raise WorkerFailure("TIMEOUT", f"no answer within {timeout:.0f} s, killed{why}") from None
        except (ValueError, RecursionError):
            self.child.kill()
            raise WorkerFailure("CRASH", "the kernel's process answered out of turn", self._tail()) from None
        except OSError as error:
            raise self._gone(error) from None
        if "error" in answer:
            raise _reported(answer["error"])
        return printable(answer)

    def _read(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.child.sock.settimeout(left)
            part = self.child.sock.recv(count - len(data))
            if not part:
                raise ConnectionError("closed")
            data += part
        return data

    def _gone(self, error: Exception) -> WorkerFailure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.process.wait(2)
        self.child.kill()
        code = self.child.process.returncode
        if code is not None and code < 0 and code != -signal.SIGKILL:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"ended by itself with exit code {code}" if code != -signal.SIGKILL else f"gave no answer ({error})"
        tail = self._tail()
        # what it died of, as far as its own output says: an illegal access shows when the device is synchronised
        died = re.compile(r"\s*what\(\):|[\w.]*(Error|Exception)\b")  # C++'s words, Python's
        said = next((line.strip() for line in reversed(tail.splitlines()) if died.match(line)), "")
        return WorkerFailure("CRASH", f"the kernel's process {how}" + f": {printable(said)}" * bool(said), tail)

    def _tail(self) -> str:
        """The end of what the child printed."""
        log = self.child.said
        log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
        return log.read(2000).decode(errors="replace").strip()

    # ---- the end -----------------------------------------------------------------------------------------------

    def idle_activity(self, seconds: float = 0.1, settling: float = 0.2) -> tuple[float, float]:
        """What the child does while nobody asks it anything: share of a core, and wake-ups per second.

        PyTorch's own threads spin for a while after their work, so it is left alone first.
        """
        time.sleep(settling)
        (ran, wakes), started = self._ran(), time.perf_counter()
        time.sleep(seconds)
        (later, woken), elapsed = self._ran(), time.perf_counter() - started
        return (later - ran) / elapsed, (woken - wakes) / elapsed

    def _queued(self) -> float:
        """Seconds that the child's first thread has waited for a processor; 0.0 where a GPU does the work."""
        if self.device.type == "cpu":
            with contextlib.suppress(OSError, ValueError, IndexError):
                return int(Path(f"/proc/{self.child.process.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def _ran(self) -> tuple[float, int]:
        """Seconds on a core and time slices so far, over all threads; coarse seconds alone where that is not kept."""
        ran = wakes = 0
        for entry in Path(f"/proc/{self.child.process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                nanoseconds, _, slices = map(int, entry.read_text().split())
                ran, wakes = ran + nanoseconds, wakes + slices
        if not ran:
            with contextlib.suppress(OSError, ValueError):
                ticks = Path(f"/proc/{self.child.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                ran = sum(map(int, ticks)) * 10**7
        return ran / 1e9, wakes

    def close(self) -> None:
        self.child.close()
        self.arena, self.taken = torch.empty(0, dtype=torch.uint8), []


def _reported(error: Any) -> WorkerFailure:
    error = error if isinstance(error, dict) else {}
    line = f" (kernel.py line {error['line']})" if isinstance(error.get("line"), int) else ""
    kind, text = printable(str(error.get("type")))[:100], str(error.get("message"))
    detail = str(error.get("traceback", ""))
    if kind == "LeftBehind":
        return WorkerFailure("FAIL", f"kernel.py does more than compute: {printable(text)}")
    if kind in COMPILE_ERRORS:  # a compiler's messages with their context say more than where it was called
        text, detail = _first_message(text), text[:3000]
    detail = "\n".join(map(printable, detail.splitlines()))
    return WorkerFailure("CRASH", f"{kind}{line}: {' '.join(printable(text).split())}", detail, kind)


def _first_message(text: str) -> str:
    """One line of a compiler's output: nvcc's first message, or Triton's place and, at its end, its cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if line.startswith("CUDA_SRC line")]
    if found or not lines:
        return found[0] if found else text
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else lines[0]


def strings(value: Any) -> list[str]:
    """A child's list of names, as far as it is one."""
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def printable(value: Any) -> Any:
    """An answer whose strings are short lines: what a kernel says must not look like what the judge says."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)[:600]
    if isinstance(value, dict):
        return {printable(k): printable(v) for k, v in value.items()}
    return [printable(v) for v in value] if isinstance(value, list) else value


def malformed(reply: Mapping[str, Any]) -> str:
    """Why a reply to `call` has not the form that the child sends; "" if it has. It came from where the kernel ran."""
    for name in ("drop_s", "before_s", "flush_s", "device_s", "after_s", "host_s"):
        value = reply.get(name)
        if not isinstance(value, (int, float)) or type(value) is bool or not 0 <= value < 1e6:
            return f"{name} = {str(value)[:40]}"
        if name == "device_s" and value == 0:
            return f"{name} = {str(value)[:40]}"
    kinds: dict[str, type] = {"type": str, "dtype": str, "layout": str, "device": str, "shape": list}
    kinds |= {"attributes": list, "aliases_input": bool, "aliases_previous": bool, "requires_grad": bool}
    outs = reply.get("outs")
    if not isinstance(outs, list) or not all(isinstance(o, dict) and isinstance(o.get("type"), str) for o in outs):
        return "no description of the output"
    for out in (o for o in outs if o["type"] == "torch.Tensor"):
        if bad := [k for k, kind in kinds.items() if type(out.get(k)) is not kind]:
            return f"output {bad[0]}"
    if type(reply.get("late")) is not bool or type(reply.get("peak_bytes")) is not int:
        return "no facts about the call"
    return "" if isinstance(reply.get("left"), list) else "no list of leftovers"


def signed(word: int) -> int:
    """64 bits as the integer that int64 takes them for."""
    return word - (word >> 63 << 64)


def _described(spec: TensorSpec) -> dict[str, Any]:
    name = str(spec.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(spec.shape), "strides": list(spec.strides)}


def _coded(value: Any) -> Any:
    return "b" + base64.b64encode(value).decode() if isinstance(value, bytes) else value
