"""The process that runs a kernel: `python -I child.py FD`. It answers with raw tensors and raw times, never a verdict.

Every call, checked or timed or warm-up, takes the same path, so a kernel cannot tell them apart:

    wait kernel -> inputs copied from the stage -> L2 flushed -> start event -> kernel_fn -> end event -> output copied

The wait hides the launch gap. Inputs arrive on the stream behind it, so work on another stream that does not wait reads
stale bytes; the output leaves on the stream right behind the end event, so work that was not joined is missing in it.
Functions the loop needs are bound before the candidate is imported, the clock readings around a call never pass through
a Python variable while the kernel runs, and what a call may not leave behind (threads, hooks, changed settings) is
reported. None of this is proof against native code in this process: the judge's own clock bounds that (docs/trust.md).

Messages are length-prefixed JSON over one socket; neither side ever unpickles.
"""

from __future__ import annotations

import _signal
import builtins
import ctypes
import functools
import gc
import importlib.util
import inspect
import json
import operator
import os
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

DEVICES = ("CPU", "CUDA")
ROOT = Path(__file__).resolve().parent.parent


def send(sock: socket.socket, message: dict) -> None:
    data = json.dumps(message).encode()
    sock.sendall(struct.pack("<I", len(data)) + data)


def receive(sock: socket.socket, limit: int = 1 << 24) -> dict | None:
    """The next message, or None at the end of the stream. A longer message than `limit` bytes is a ValueError."""
    head = _exactly(sock, 4)
    if head is None:
        return None
    (length,) = struct.unpack("<I", head)
    if length > limit:
        raise ValueError(f"message of {length} bytes")
    data = _exactly(sock, length)
    return None if data is None else json.loads(data)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            return None
        data += part
    return data


def prepare_interpreter() -> None:
    """Make Triton's interpreter do what hardware does, and autotuned kernels run in it.

    It truncates float32 to bfloat16, hardware rounds to nearest. Autotuning finds nothing to time: the first
    configuration is taken.
    """
    import numpy
    import torch
    from triton import language
    from triton.runtime import autotuner, interpreter

    original = interpreter._convert_float

    def convert(data, input_dtype, output_dtype, rounding_mode):
        if input_dtype == language.float32 and output_dtype == language.bfloat16:
            values = torch.from_numpy(numpy.array(data, copy=True)).view(torch.float32)
            return values.to(torch.bfloat16).view(torch.int16).numpy().view(numpy.uint16)
        return original(data, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert
    autotuner.Autotuner._bench = lambda self, *args, config, **options: [0.0, 0.0, 0.0]


class Runner:
    """Holds the shared arena and calls the kernel on views into it."""

    def __init__(self, setup: dict, memory: int):
        import torch

        os.environ.update(setup["environment"])  # before Triton is imported, which reads it once
        torch.set_grad_enabled(False)
        self.torch = torch
        self.device = torch.device(setup["device"])
        self.on_gpu = self.device.type == "cuda"
        self.arena = self._open_arena(setup["arena"], memory)
        if not self.on_gpu and importlib.util.find_spec("triton"):
            prepare_interpreter()
        self.function = None
        self.held = None  # the previous output, kept alive through the next call
        self.clock = time.perf_counter
        self.invoke = operator.methodcaller("__call__")
        self.tensor_type = torch.Tensor
        self.copy_, self.fill_, self.equal = torch.Tensor.copy_, torch.Tensor.fill_, torch.equal
        self.as_strided, self.view = torch.as_strided, torch.Tensor.view
        if self.on_gpu:
            base = torch._C._CudaEventBase
            self.events = [base(enable_timing=True) for _ in range(4)]
            self.record, self.elapsed = base.record, base.elapsed_time
            self.synchronize, self.sleep = torch._C._cuda_synchronize, torch.cuda._sleep
            self.stream = torch.cuda.current_stream()
            self.persisting = PersistingL2()
            self.persisting.clear()
            # read, not written: a written flush leaves dirty lines whose write-back is then charged to the kernel
            self.flush = torch.randint(1, 9, (setup["flush_bytes"] // 4,), dtype=torch.int32, device=self.device)
            self.flushed = torch.empty((), dtype=torch.int64, device=self.device)
            self.sum = torch.sum
            torch.cuda.reset_peak_memory_stats()
        self.unheld = self._unheld()
        self.settings = settings_of(torch)
        self.before = self._state()

    def _unheld(self) -> list[int]:
        """What `holders` says at most of a tensor that only a local variable holds."""
        whole, part = self.torch.empty(2), self.torch.empty(2)[:1]
        return [max(pair) for pair in zip(holders(self.torch, whole), holders(self.torch, part), strict=True)]

    def _open_arena(self, arena: dict, memory: int):
        torch = self.torch
        if arena["kind"] == "memory":
            return torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=arena["bytes"], dtype=torch.uint8)
        import base64

        handle = [base64.b64decode(v[1:]) if isinstance(v, str) else v for v in arena["handle"]]
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, arena["offset"], (arena["bytes"],))

    # ---- loading -----------------------------------------------------------------------------------------------

    def load(self, request: dict) -> dict:
        """Import the candidate, or build a trusted baseline; answer with what `kernel_fn` takes."""
        start = self.clock()
        if "op" in request:
            self.function, module = self._baseline(request), None
        else:
            self.originals = watched(self.torch, self)
            # neither `import __main__` nor the garbage collector's lists lead the kernel to this object
            sys.modules["__main__"] = types.ModuleType("__main__")
            gc.collect()
            gc.freeze()
            module = self._import(Path(request["path"]))
            self.function = getattr(module, "kernel_fn", None)
            if not callable(self.function):
                raise AttributeError("kernel.py defines no function kernel_fn")
        parameters = {
            name: p.default is inspect.Parameter.empty
            for name, p in inspect.signature(self.function).parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        return {"parameters": parameters, "seconds": self.clock() - start}

    def _import(self, path: Path):
        # `autokernel.cuda` is there for CUDA kernels; reference.py, the oracle, is not importable
        package = type(sys)("autokernel")
        package.__path__ = [str(ROOT / "autokernel")]
        sys.modules["autokernel"] = package
        spec = importlib.util.spec_from_file_location("kernel", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["kernel"] = module
        spec.loader.exec_module(module)
        return module

    def _baseline(self, request: dict):
        sys.path.append(str(ROOT))  # last: nothing in the repository stands in for a library
        from autokernel import ops

        function = ops.get(request["op"]).baseline
        if request.get("compile"):
            function = self.torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
        return function

    def compile(self, request: dict) -> dict:
        """Compile the kernel's CUDA_SRC without calling it: all that can be done where there is no GPU."""
        from autokernel.cuda import compile_cuda

        module = sys.modules["kernel"]
        compile_cuda(module.CUDA_SRC, defines=getattr(module, "CONFIG", {}))
        return {}

    def inspect(self, request: dict) -> dict:
        """Names of functions that were replaced since the kernel was loaded."""
        changed = []
        for name, (owner, members) in self.originals.items():
            now = functions_of(owner)
            expected = members if owner is not self else members | {"function": now["function"]}
            names = now.keys() | expected.keys() if owner is self else expected.keys()
            changed += [f"{name}.{key}" for key in names if now.get(key) != expected.get(key)]
        changed = [name for name in changed if name != "torch.manual_seed"]  # torch._dynamo wraps it
        return {"changed": changed[:20]}

    # ---- one call ----------------------------------------------------------------------------------------------

    def tensor(self, spec: dict, region: str):
        """A view into the arena; spec: shape, strides, dtype, start (byte offset of the region), offset (elements)."""
        dtype = getattr(self.torch, spec["dtype"])
        start = spec[region]
        usable = (self.arena.numel() - start) // dtype.itemsize * dtype.itemsize
        flat = self.view(self.arena[start : start + usable], dtype)
        return self.as_strided(flat, spec["shape"], spec["strides"], flat.storage_offset() + spec.get("offset", 0))

    def call(self, request: dict) -> dict:
        kwargs = {name: self.tensor(spec, "work") for name, spec in request["inputs"].items()}
        stage, work, count = request["stage"], request["work"], request["bytes"]
        # `.data`: new content leaves no trace in the version counter, as a Triton kernel's writes leave none
        source, target = self.arena[stage : stage + count], self.arena[work : work + count].data
        output = self.tensor(request["output"], "start").data
        before = {name: facts_of(tensor) for name, tensor in kwargs.items()}
        run = self._timed_gpu if self.on_gpu else self._timed_cpu
        out, reply = run(source, target, output, kwargs | request["scalars"], request)
        reply["left"] += [f"another tensor in place of {k}" for k, v in before.items() if facts_of(kwargs[k]) != v]
        if self._matches(out, output) and any(map(operator.gt, holders(self.torch, out), self.unheld)):
            gc.collect()  # perhaps only a cycle of the kernel's own variables
            if any(map(operator.gt, holders(self.torch, out), self.unheld)):
                reply["left"].append("a reference to its output, a buffer that the next calls overwrite")
        reply["out"] = self._describe(out, request)
        self._release(out, request["poison"])
        return reply

    def _timed_gpu(self, source, target, output, kwargs, request):
        first, start, end, done = self.events
        stream, partial = self.stream, functools.partial
        self.torch.cuda.reset_peak_memory_stats()
        self.record(first, stream)
        self.sleep(request["wait_cycles"])
        self.copy_(target, source)
        self.sum(self.flush, 0, out=self.flushed)
        steps = partial(self.record, start, stream), self.clock, partial(self.function, **kwargs), self.clock
        _, began, out, ended, _ = tuple(map(self.invoke, (*steps, partial(self.record, end, stream))))
        left = self._leftovers()
        self._hand_over(out, output)
        self.synchronize()
        self.record(done, stream)
        self.synchronize()
        intervals = {"before_s": (first, start), "device_s": (start, end), "after_s": (end, done)}
        times = {name: self.elapsed(*pair) / 1e3 for name, pair in intervals.items()}
        peak = self.torch.cuda.max_memory_allocated() - self.flush.numel() * 4
        times["host_s"] = ended - began
        return out, {**times, "late": self._late(out, output), "peak_bytes": peak, "left": left}

    def _timed_cpu(self, source, target, output, kwargs, request):
        self.copy_(target, source)
        steps = self.clock, functools.partial(self.function, **kwargs), self.clock
        began, out, ended = tuple(map(self.invoke, steps))
        left = self._leftovers()
        self._hand_over(out, output)
        times = {"before_s": 0.0, "device_s": ended - began, "after_s": 0.0, "host_s": ended - began}
        return out, {**times, "late": self._late(out, output), "peak_bytes": 0, "left": left}

    def profile(self, request: dict) -> dict:
        """Five calls under PyTorch's profiler: the device's kernels with their times, and trace.json in this folder."""
        from torch.profiler import ProfilerActivity, profile

        kwargs = {name: self.tensor(spec, "work") for name, spec in request["inputs"].items()} | request["scalars"]
        stage, work, count = request["stage"], request["work"], request["bytes"]
        self.copy_(self.arena[work : work + count], self.arena[stage : stage + count])
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
        with profile(activities=activities) as profiler:
            for _ in range(5):
                self.function(**kwargs)
            if self.on_gpu:
                self.synchronize()
        profiler.export_chrome_trace("trace.json")
        events = [e for e in profiler.events() if e.device_type.name == ("CUDA" if self.on_gpu else "CPU")]
        kernels: dict[str, list[float]] = {}
        for event in events:
            kernels.setdefault(event.name, []).append(event.device_time if self.on_gpu else event.self_cpu_time_total)
        rows = [{"kernel": k[:200], "calls": len(v) / 5, "us": sum(v) / len(v)} for k, v in kernels.items()]
        return {"kernels": sorted(rows, key=lambda r: -r["calls"] * r["us"])[:30]}

    def launch(self, request: dict) -> dict:
        """Host seconds of one call among 20 back to back: what launching costs a model that never waits."""
        kwargs = {name: self.tensor(spec, "work") for name, spec in request["inputs"].items()} | request["scalars"]
        for count in (3, 20):
            began = self.clock()
            for _ in range(count):
                self.function(**kwargs)
            seconds = (self.clock() - began) / count
            if self.on_gpu:
                self.synchronize()
        return {"host_s": seconds}

    def count(self, request: dict) -> dict:
        """One warm and one profiled call, for Nsight Compute around this process."""
        kwargs = {name: self.tensor(spec, "work") for name, spec in request["inputs"].items()} | request["scalars"]
        stage, work, count = request["stage"], request["work"], request["bytes"]
        self.copy_(self.arena[work : work + count], self.arena[stage : stage + count])
        self.function(**kwargs)
        self.synchronize()
        self.torch.cuda.cudart().cudaProfilerStart()
        self.function(**kwargs)
        self.synchronize()
        self.torch.cuda.cudart().cudaProfilerStop()
        return {}

    def resources(self, request: dict) -> dict:
        """Registers, spills and shared memory of the compiled kernels, the largest of each."""
        found = []
        if cuda := sys.modules.get("autokernel.cuda"):
            modules = [m for m in gc.get_objects() if type(m) is cuda.CudaModule]
            found += [kernel for module in modules for kernel in module.resources.values()]
        if self.on_gpu and "triton" in sys.modules:
            from autokernel.cuda import triton_resources

            for value in vars(sys.modules["kernel"]).values():
                function = getattr(value, "fn", value) if not hasattr(value, "device_caches") else value
                for caches in getattr(function, "device_caches", {}).values():
                    found += [triton_resources(compiled) for compiled in caches[0].values()]
        names = ("registers", "spill_bytes", "smem_bytes")
        return {"resources": {n: max((r[n] for r in found if r.get(n) is not None), default=None) for n in names}}

    def audit(self, request: dict) -> dict:
        """One more call, watched: which PyTorch operators it runs, and the names of the device's kernels."""
        kwargs = {name: self.tensor(spec, "work") for name, spec in request["inputs"].items()} | request["scalars"]
        stage, work, count = request["stage"], request["work"], request["bytes"]
        self.copy_(self.arena[work : work + count], self.arena[stage : stage + count])
        # torch.profiler and TorchDispatchMode import all of torch._dynamo, which takes seconds; this does not
        profile = self.torch.autograd.profiler.profile(use_device="cuda" if self.on_gpu else None, use_kineto=True)
        with profile as seen:
            self.function(**kwargs)
            if self.on_gpu:
                self.synchronize()
        names = {kind: {e.name[:300] for e in seen.function_events if e.device_type.name == kind} for kind in DEVICES}
        operators, kernels = {n for n in names["CPU"] if n.startswith("aten::")}, names["CUDA"]
        return {"operators": sorted(operators), "kernels": sorted(kernels)}

    def _state(self) -> dict:
        """Whatever a call could leave behind that outlives it, by the name a reader knows."""
        found = {name: value_of(getter) for name, getter in self.settings.items()}
        found["a signal handler"] = list(map(_signal.getsignal, range(1, _signal.NSIG)))
        found["an interval timer"] = _signal.getitimer(_signal.ITIMER_REAL)[0] > 0
        found["a profile or trace hook"] = (sys.getprofile(), sys.gettrace(), *gc.callbacks)
        if hasattr(sys, "monitoring"):
            found["a profile or trace hook"] += tuple(map(sys.monitoring.get_tool, range(6)))
        return found

    def _leftovers(self) -> list[str]:
        left = [name for name, value in self._state().items() if value != self.before[name]]
        if len(sys._current_frames()) > 1:
            left.append("a running thread")
        if self.on_gpu and self.torch.cuda.current_stream() != self.stream:
            self.torch.cuda.set_stream(self.stream)
            left.append("another current stream")
        if self.on_gpu and self.persisting.set_aside():
            self.persisting.clear()
            left.append("a part of L2 set aside, which no flush reaches")
        return left

    def _matches(self, out, output) -> bool:
        same = type(out) is self.tensor_type and out.dtype == output.dtype and out.shape == output.shape
        return same and out.device == output.device and out.layout == self.torch.strided

    def _hand_over(self, out, output) -> None:
        """Copy the result where the judge reads it, on the stream, at once; a wrong one is left to the judge."""
        if self._matches(out, output):
            self.copy_(output, out)

    def _late(self, out, output) -> bool:
        """Whether the result changed after it was handed over. NaNs are unequal to themselves: look again without."""
        if not self._matches(out, output) or self.equal(out, output):
            return False
        return not self.equal(out.nan_to_num(), output.nan_to_num())

    def _describe(self, out, request) -> dict:
        """Facts about the returned object, for the judge to weigh."""
        if type(out) is not self.tensor_type:
            return {"type": f"{type(out).__module__}.{type(out).__qualname__}"}
        storage = out.untyped_storage() if out.layout == self.torch.strided else None
        low = storage.data_ptr() if storage else 0
        high = low + (storage.nbytes() if storage else 0)
        arena = self.arena.data_ptr()
        held = self.held
        return {
            "type": "torch.Tensor",
            "dtype": str(out.dtype).removeprefix("torch."),
            "shape": list(out.shape),
            "strides": list(out.stride()) if storage else None,
            "device": out.device.type,
            "layout": str(out.layout),
            "attributes": sorted(vars(out)),
            "requires_grad": out.requires_grad,
            "aliases_input": bool(low < arena + self.arena.numel() and arena < high and high > low),
            "aliases_previous": bool(held is not None and low < high and low < held[1] and held[0] < high),
        }

    def _release(self, out, poison: int) -> None:
        """Keep this output until after the next call; overwrite the one before with noise as it is given back.

        So what torch.empty hands to the kernel next never holds an earlier answer.
        """
        old, self.held = self.held, None
        if old is not None and old[2].dtype.is_floating_point and old[2].numel():
            with self.torch.inference_mode():  # where the kernel made the tensor, perhaps
                self.fill_(old[2], float(poison))
        if type(out) is self.tensor_type and out.layout == self.torch.strided:
            storage = out.untyped_storage()
            # the bytes are read before the handle is kept: a resized storage would move
            self.held = (storage.data_ptr(), storage.data_ptr() + storage.nbytes(), out)


def settings_of(torch) -> dict[str, Callable]:
    """Process-wide settings of PyTorch by name: a change would reach the model around the kernel."""
    c = torch._C
    return {
        "torch.set_default_dtype": torch.get_default_dtype,
        "torch.set_default_device": torch.get_default_device,
        "torch.set_num_threads": torch.get_num_threads,
        "torch.set_grad_enabled": torch.is_grad_enabled,
        "torch.inference_mode": torch.is_inference_mode_enabled,
        "torch.autocast": torch.is_autocast_enabled,
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision,
        "torch.backends.cuda.matmul.allow_tf32": c._get_cublas_allow_tf32,
        "torch.backends.cudnn.allow_tf32": c._get_cudnn_allow_tf32,
        "torch.backends.cudnn.benchmark": c._get_cudnn_benchmark,
        "allow_fp16_reduced_precision_reduction": c._get_cublas_allow_fp16_reduced_precision_reduction,
        "allow_bf16_reduced_precision_reduction": c._get_cublas_allow_bf16_reduced_precision_reduction,
        "a torch function mode": c._len_torch_function_stack,
        "a torch dispatch mode": c._len_torch_dispatch_stack,
    }


def facts_of(tensor) -> tuple:
    """What a tensor is besides its values."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, len(vars(tensor))


def holders(torch, tensor) -> list[int]:
    """How many hold a tensor's memory: its storage, the tensor and its base, each counted by their owners."""
    base = tensor._base
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - (base is not None)
    return [storage, sys.getrefcount(tensor), sys.getrefcount(base) if base is not None else 0]


def value_of(getter: Callable) -> object:
    """What a getter returns; PyTorch raises where its old and new precision settings were mixed."""
    try:
        return getter()
    except RuntimeError as error:
        return type(error)


class PersistingL2:
    """The part of L2 that a kernel can set aside for data that shall outlive a flush: there must be none."""

    def __init__(self):
        driver, limit = ctypes.CDLL("libcuda.so.1"), 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        self.bytes = ctypes.c_size_t(0)
        self.read = functools.partial(driver.cuCtxGetLimit, ctypes.byref(self.bytes), limit)
        self.drop = functools.partial(driver.cuCtxSetLimit, limit, ctypes.c_size_t(0))
        self.reset = driver.cuCtxResetPersistingL2Cache

    def set_aside(self) -> bool:
        self.read()
        return self.bytes.value > 0

    def clear(self) -> None:
        self.drop()
        self.reset()


def watched(torch, runner) -> dict[str, tuple[object, dict]]:
    """What a careless or hostile kernel might replace: modules and types by name, with the callables they hold now."""
    owners = {
        "builtins": builtins, "time": time, "json": json, "struct": struct, "os": os, "gc": gc, "operator": operator,
        "functools": functools, "socket.socket": socket.socket, "torch": torch, "torch.Tensor": torch.Tensor,
        "torch.cuda": torch.cuda, "torch.cuda.Event": torch.cuda.Event, "torch.cuda.Stream": torch.cuda.Stream,
        "PersistingL2": PersistingL2,
        "Runner": Runner, "runner": runner, "__main__": sys.modules[__name__],
    }  # fmt: skip
    return {name: (owner, functions_of(owner)) for name, owner in owners.items()}


def functions_of(owner) -> dict[str, tuple[object, object]]:
    """Callables of a module, type or object by name, each with its code, which can be swapped as well."""
    return {k: (v, getattr(v, "__code__", None)) for k, v in vars(owner).items() if callable(v)}


def error_of(error: BaseException) -> dict:
    """An exception as data: type, message, the line in kernel.py, and the traceback for those who ask."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == "kernel.py"]
    return {
        "type": type(error).__name__,
        "message": str(error)[:4000] or type(error).__name__,
        "line": getattr(error, "lineno", None) or (frames[-1].lineno if frames else None),
        "traceback": "".join(traceback.format_exception(error))[-8000:],
    }


def confine(writable: list[str]) -> str:
    """Give up privileges and writing elsewhere. Loaded by path: the package is not importable here."""
    spec = importlib.util.spec_from_file_location("sandbox", Path(__file__).with_name("sandbox.py"))
    sandbox = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sandbox)
    sandbox.drop_privileges()
    return sandbox.confine(writable)


def main(fd: int, memory: int) -> None:
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context costs a second: now, while the judge is starting too
    runner: Runner | None = None
    while (request := receive(sock)) is not None:
        try:
            if request["do"] == "setup":
                runner = Runner(request, memory)
                os.close(memory)
                answer = {"confinement": confine(request["writable"]) if request["writable"] else "off"}
            else:
                answer = getattr(runner, request["do"])(request)
        except BaseException as error:  # noqa: BLE001 - SystemExit from a kernel is an answer too
            answer = {"error": error_of(error)}
        send(sock, {"id": request["id"], **answer})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
