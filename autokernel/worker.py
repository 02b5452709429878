"""The judge's hold on a child process: share memory with it, ask it for one call at a time, end it for good.

Tensors are shared through one arena of bytes (CUDA IPC on a GPU, a mapped file otherwise) with two input regions: the
stage, which the judge writes, and the working copy, which the kernel reads, and which the judge compares bit for bit
with its own private copy after the call, the random bytes between the tensors included.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import signal
import struct
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autokernel.paths import cache_dir
from autokernel.process import Child
from autokernel.spec import TensorSpec

GUARD = 512  # bytes of noise before, between and after the tensors of an arena


class WorkerFailure(Exception):
    """The child gave no answer. outcome: TIMEOUT or CRASH; detail: the child's own traceback, if it could send one."""

    def __init__(self, outcome: str, message: str, detail: str = "", kind: str = ""):
        super().__init__(message)
        self.outcome, self.detail, self.kind = outcome, detail, kind


@dataclass(frozen=True)
class Layout:
    """Where a case's tensors lie: byte offsets inside an input region, and the sizes of the regions."""

    inputs: Mapping[str, TensorSpec]
    starts: Mapping[str, int]
    input_bytes: int
    output: TensorSpec
    output_bytes: int

    @classmethod
    def of(cls, inputs: Mapping[str, TensorSpec], output: TensorSpec) -> Layout:
        starts, position = {}, GUARD
        for name, spec in inputs.items():
            starts[name] = position
            position += _aligned(spec.span * spec.dtype.itemsize) + GUARD
        return cls(inputs, starts, position, output, _aligned(output.span * output.dtype.itemsize) + GUARD)

    @property
    def total(self) -> int:
        return 2 * self.input_bytes + self.output_bytes

    def views(self, region: torch.Tensor) -> dict[str, torch.Tensor]:
        """The input tensors inside a byte tensor that begins where the region begins."""
        return {name: view_of(region, self.starts[name], spec) for name, spec in self.inputs.items()}


def _aligned(count: int) -> int:
    return -(-count // GUARD) * GUARD


def view_of(region: torch.Tensor, start: int, spec: TensorSpec) -> torch.Tensor:
    size = spec.dtype.itemsize
    flat = region[start : start + _aligned(spec.span * size)].view(spec.dtype)
    return torch.as_strided(flat, spec.shape, spec.strides, spec.offset + flat.storage_offset())


class Worker:
    """One child process and the arena shared with it."""

    def __init__(self, child: Child, device: torch.device, cache_key: str, arena_bytes: int):
        self.child, self.device, self.arena_bytes = child, device, arena_bytes
        self.cache = cache_dir() / "kernels" / cache_key
        self._count = 0

    @property
    def folder(self) -> Path:
        return self.child.folder

    def _environment(self) -> dict[str, str]:
        """Where compilers keep what they made: apart for each source, so that no kernel finds another's files."""
        places = {"TRITON_CACHE_DIR": self.cache / "triton", "TORCHINDUCTOR_CACHE_DIR": self.cache / "inductor"}
        places["AUTOKERNEL_CACHE"] = cache_dir()
        return {k: str(v) for k, v in places.items()} | ({"TRITON_INTERPRET": "1"} if self.device.type == "cpu" else {})

    # ---- memory ------------------------------------------------------------------------------------------------

    def share(self, flush_bytes: int, timeout: float) -> None:
        """Make the arena and have the child open it. Waits for the child's start."""
        if self.device.type == "cuda":
            self.arena = torch.empty(self.arena_bytes, dtype=torch.uint8, device=self.device)
            storage = self.arena.untyped_storage()
            handle = [_coded(v) for v in storage._share_cuda_()]
            described = {"kind": "ipc", "handle": handle, "offset": self.arena.storage_offset()}
        else:
            path = self.folder / "arena"
            with open(path, "wb") as file:
                file.truncate(self.arena_bytes)
            self.arena = torch.from_file(str(path), shared=True, size=self.arena_bytes, dtype=torch.uint8)
            described = {"kind": "file", "path": str(path)}
        described["bytes"] = self.arena_bytes
        self.ask(
            "setup", timeout, device=str(self.device), arena=described, flush_bytes=flush_bytes,
            environment=self._environment(),
        )  # fmt: skip

    def stage(self, layout: Layout, private: torch.Tensor) -> None:
        """Write the inputs, and noise over the output."""
        self.arena[: layout.input_bytes].copy_(private)
        self.arena[2 * layout.input_bytes : layout.total].random_(0, 256)

    def inputs_untouched(self, layout: Layout, private: torch.Tensor) -> bool:
        return torch.equal(self.arena[layout.input_bytes : 2 * layout.input_bytes], private)

    def output(self, layout: Layout) -> torch.Tensor:
        return view_of(self.arena, 2 * layout.input_bytes, layout.output)

    def call(
        self, layout: Layout, scalars: Mapping[str, Any], timeout: float, wait_s: float = 0.0, do: str = "call"
    ) -> dict[str, Any]:
        """One call of the kernel on the staged inputs; the reply holds raw times and facts about what it returned.

        do: "call", or "profile" or "launch", which are measurements without a verdict.
        """
        self._synchronize()
        described = {
            name: {**_described(spec), "work": layout.input_bytes + layout.starts[name], "offset": spec.offset}
            for name, spec in layout.inputs.items()
        }
        return self.ask(
            do,
            timeout,
            inputs=described,
            output={**_described(layout.output), "start": 2 * layout.input_bytes},
            stage=0,
            work=layout.input_bytes,
            bytes=layout.input_bytes,
            scalars=dict(scalars),
            wait_cycles=int(wait_s * 2e9),  # about 2 GHz: longer on a slower clock, which does no harm
            poison=random.SystemRandom().uniform(-100, 100),
        )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- messages ----------------------------------------------------------------------------------------------

    def ask(self, do: str, timeout: float, **request: Any) -> dict[str, Any]:
        """Send one request, wait for its answer. The judge's own clock goes into `wall_s`.

        Raises WorkerFailure: TIMEOUT after `timeout` seconds, CRASH if the child ended or answered out of turn, or
        if it reports an exception.
        """
        self._count += 1
        message = json.dumps({"do": do, "id": self._count, **request}).encode()
        started = time.perf_counter()
        deadline = time.monotonic() + timeout
        try:
            self.child.sock.settimeout(timeout)
            self.child.sock.sendall(struct.pack("<I", len(message)) + message)
            head = self._read(4, deadline)
            answer = json.loads(self._read(min(struct.unpack("<I", head)[0], 1 << 24), deadline))
        except TimeoutError:
            self.child.kill()
            raise WorkerFailure("TIMEOUT", f"no answer within {timeout:.0f} s, killed") from None
        except (OSError, ValueError) as error:
            raise self._gone(error) from None
        wall = time.perf_counter() - started
        if not isinstance(answer, dict) or answer.get("id") != self._count:
            self.child.kill()
            raise WorkerFailure("CRASH", "the child answered out of turn")
        if "error" in answer:
            raise _reported(answer["error"])
        return {**answer, "wall_s": wall}

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
        tail = self.child.log.read_text(errors="replace")[-2000:].strip() if self.child.log.exists() else ""
        return WorkerFailure("CRASH", f"the kernel's process {how}", tail)

    def close(self) -> None:
        self.child.close()
        self.arena = None


def _reported(error: Mapping[str, Any]) -> WorkerFailure:
    line = f" (kernel.py line {error['line']})" if error.get("line") else ""
    kind = str(error.get("type"))
    message = " ".join(str(error.get("message")).split())[:600]
    return WorkerFailure("CRASH", f"{kind}{line}: {message}", str(error.get("traceback", "")), kind)


def _described(spec: TensorSpec) -> dict[str, Any]:
    name = str(spec.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(spec.shape), "strides": list(spec.strides)}


def _coded(value: Any) -> Any:
    return "b" + base64.b64encode(value).decode() if isinstance(value, bytes) else value
