"""What a kernel's process does: call the kernel on the judge's inputs, answer with raw tensors and times, no verdict.

Every call, checked or timed or warm-up, takes the same path, so a kernel cannot tell them apart:

    wait kernel -> inputs unmasked from the stage -> L2 flushed -> event -> kernel_fn -> event -> output copied

The wait hides the launch gap. The stage holds the inputs masked by a key that comes with the request, so that nothing
can be computed from them while the wait runs. The output leaves on the stream right behind the end event, so work that
was not joined is missing in it.

The kernel's Python code shall reach none of this. `outside` yields the calls of the kernel to child.py, so that our
frames are not on the stack below it; there are no classes here to be found by name; the garbage collector shows no
object of ours; builtins are a private copy; and before any code of ours goes on after a call, hooks, handlers and
threads are looked up and taken away, in C. Finalisers of what a call left run inside the next one. None of this is
proof against native code in this process: the judge's own clock bounds that (docs/trust.md).

Messages are length-prefixed JSON over one socket; neither side ever unpickles.
"""

import builtins

__builtins__ = dict(vars(builtins))  # the functions below look names up here, whatever a kernel puts into `builtins`

# ruff: noqa: E402
import ctypes
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
from functools import partial
from itertools import chain, pairwise
from operator import gt
from pathlib import Path
from sys import getrefcount
from types import GeneratorType, ModuleType, SimpleNamespace

DEVICES = ("CPU", "CUDA")
ROOT = Path(__file__).resolve().parent.parent
LONGEST_REQUEST = 1 << 24
AHEAD = 2  # results of `outside` before those of its steps
LeftBehind = type("LeftBehind", (RuntimeError,), {})  # without functions: nothing leads from it to this module


def link(fd: int, memory: int) -> tuple:
    """(function, generator): child.py feeds what the generator yields to the function."""
    box: list = []
    return box.extend, serve(socket.socket(fileno=fd), memory, box)


def by_path(name: str, path: Path):
    """A module under no name that a kernel could import it by."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sibling(name: str):
    """Another file of this package."""
    return by_path(name, Path(__file__).with_name(f"{name}.py"))


def serve(sock: socket.socket, memory: int, box: list):
    """Answer requests until the socket closes."""
    os.set_inheritable(sock.fileno(), False)
    import torch

    if importlib.util.find_spec("tqdm"):  # torch.compile shows its progress with it, and leaves its thread behind
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context costs a second: now, while the judge is starting too
    receive, send = channel(sock)
    handlers = {
        "load": load, "call": call, "launch": launch, "audit": audit, "resources": resources, "replaced": replaced,
        "compile": compile_only, "profile": profile, "count": count, "use": use,
    }  # fmt: skip
    self = None
    while (request := receive()) is not None:
        try:
            if request["do"] == "setup":
                self = set_up(request, memory, box, torch)
                os.close(memory)
                answer = {"confinement": confine(request["writable"]) if request["writable"] else "off"}
            else:
                answer = handlers[request["do"]](self, request)
                if isinstance(answer, GeneratorType):
                    answer = yield from answer
        except BaseException as error:  # noqa: BLE001 - whatever it is, the judge hears of it
            answer = {"error": error_of(error)}
        send({"id": request["id"], **answer})


def channel(sock: socket.socket) -> tuple:
    """Functions that receive and send one message, made of functions in C that were looked up now."""
    read, write = sock.recv, sock.sendall
    scan = json.JSONDecoder().scan_once
    encode = json.encoder.c_make_encoder(
        None, None, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, True
    )
    length = struct.Struct("<I")

    def exactly(count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            part = read(count - len(data))
            if not part:
                return None
            data += part
        return data

    def receive() -> dict | None:
        head = exactly(4)
        if head is None or length.unpack(head)[0] > LONGEST_REQUEST:
            return None
        data = exactly(length.unpack(head)[0])
        return None if data is None else scan(data.decode(), 0)[0]

    def send(message: dict) -> None:
        data = "".join(encode(message, 0)).encode()
        write(length.pack(len(data)) + data)

    return receive, send


# ---- setting up ------------------------------------------------------------------------------------------------------


def set_up(request: dict, memory: int, box: list, torch) -> SimpleNamespace:
    """Open the arena and look up, before a kernel is here, every function that is used while one is."""
    os.environ.update(request["environment"])  # before Triton is imported, which reads it once
    torch.set_grad_enabled(False)
    self = SimpleNamespace(torch=torch, box=box, function=None, last={}, kept={}, inputs={}, seen=[], model=None)
    self.generators = [torch.default_generator]
    self.loaded, self.hidden, self.compiled_before = {}, False, 0
    self.device = torch.device(request["device"])
    self.on_gpu = self.device.type == "cuda"
    exposed = sibling("exposed")
    self.outcome, self.attempt, self.Failure = exposed.outcome, exposed.attempt, exposed.Failure
    self.arena = open_arena(self, request["arena"], memory)
    if not self.on_gpu and importlib.util.find_spec("triton"):
        exposed.prepare_interpreter()
    self.clock, self.invoke = time.perf_counter, operator.methodcaller("__call__")
    self.enable, self.collect = gc.enable, gc.collect
    base, self.tensor_type, self.strided = torch._C.TensorBase, torch.Tensor, torch.strided
    self.copy_, self.equal, self.xor = base.copy_, torch.equal, torch.bitwise_xor
    self.fill_ = torch._C.StorageBase.fill_
    self.as_strided, self.view, self.cut, self.finite = torch.as_strided, base.view, base.narrow, base.nan_to_num
    self.dtypes = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    self.use_count, self.keys = torch._C._storage_Use_Count, torch._C._dispatch_keys
    with torch.inference_mode():
        made_there = torch.empty(1, device=self.device)
    # wrapped, lazily negated or functional tensors have the type of a plain one and other keys
    self.plain = {str(self.keys(t)) for t in (made_there, torch.empty(1, device=self.device))}
    watch = sibling("watch")
    settings = watch.settings_of(torch)
    if self.on_gpu:
        set_up_gpu(self, request["flush_bytes"])
        settings["another current stream"] = self.current_stream
    self.unheld = unheld(self)
    self.after, self.left_behind = watch.watch(torch, settings)
    return self


def set_up_gpu(self, flush_bytes: int) -> None:
    torch, c = self.torch, self.torch._C
    self.events = [c._CudaEventBase(enable_timing=True) for _ in range(5)]
    self.record, self.elapsed = c._CudaEventBase.record, c._CudaEventBase.elapsed_time
    self.synchronize, self.sleep, self.sum = c._cuda_synchronize, c._cuda_sleep, torch.sum
    self.stream, index = torch.cuda.current_stream(), torch.cuda.current_device()
    self.current_stream = partial(c._cuda_getCurrentStream, index)
    # read, not written: a written flush leaves dirty lines whose write-back is then charged to the kernel
    self.flush = torch.randint(1, 9, (flush_bytes // 4,), dtype=torch.int32, device=self.device)
    self.flushed = torch.empty((), dtype=torch.int64, device=self.device)
    driver, persisting = ctypes.CDLL("libcuda.so.1"), 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE: for what outlives a flush
    self.set_aside = ctypes.c_size_t(0)
    self.read_set_aside = partial(driver.cuCtxGetLimit, ctypes.byref(self.set_aside), persisting)
    driver.cuCtxSetLimit(persisting, ctypes.c_size_t(0))
    self.generators.append(torch.cuda.default_generators[index])
    self.reset_peak = partial(c._cuda_resetPeakMemoryStats, index)
    self.memory_stats = partial(c._cuda_memoryStats, index)


def open_arena(self, arena: dict, memory: int):
    torch = self.torch
    if arena["kind"] == "memory":
        return torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=arena["bytes"], dtype=torch.uint8)
    import base64

    handle = [base64.b64decode(v[1:]) if isinstance(v, str) else v for v in arena["handle"]]
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, arena["offset"], (arena["bytes"],))


def confine(writable: list[str]) -> str:
    """Give up privileges, and writing elsewhere."""
    sandbox = sibling("sandbox")
    sandbox.drop_privileges()
    return sandbox.confine(writable)


def facts_of(tensor) -> tuple:
    """What a tensor is besides its values."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, attributes_of(tensor)


def attributes_of(tensor) -> list[str]:
    """Names that were hung on a tensor; torch.compile keeps notes on the ones that it has seen."""
    return sorted(name for name in map(str, tensor.__dict__) if not name.startswith("_dynamo_"))


def holders(self, tensors: list) -> list[list[int]]:
    """How many hold each tensor's memory: its storage, the tensor and its base, each counted by their owners."""
    counts = []
    for tensor in tensors:
        base = tensor._base
        storage = self.use_count(tensor.untyped_storage()._cdata) - (base is not None)
        counts.append([storage, getrefcount(tensor), getrefcount(base) if base is not None else 0])
    return counts


def unheld(self) -> list[int]:
    """What `holders` says at most of tensors that only their list holds."""
    counts = holders(self, [self.torch.empty(2), self.torch.empty(2)[:1]])
    return list(map(max, *counts))


# ---- running the kernel's code ---------------------------------------------------------------------------------------


def outside(self, *steps):
    """Results of steps (functions in C, or `step`s) run where none of our variables are on the stack.

    Finalisers of what earlier calls left come first, the steps of `watch` last. Raises LeftBehind, or the exception
    of the first step that raised one.
    """
    yield map(self.invoke, (self.kept.clear, self.enable, *steps, *self.after()))  # AHEAD of the steps: two
    results, rest = self.box[AHEAD : AHEAD + len(steps)], self.box[AHEAD + len(steps) :]
    del self.box[:]
    if left := self.left_behind(rest) + self.seen:
        raise LeftBehind(", ".join(left)[:300])
    for result in results:
        if type(result) is self.Failure:
            raise result[0]
    return results


def step(self, function, *args, **kwargs):
    """A step that runs Python code, whose exception `outside` raises."""
    return partial(self.outcome, function, args, kwargs)


def load(self, request: dict):
    """Import the candidate, or build a trusted baseline; answer with what `kernel_fn` takes."""
    start = self.clock()
    self.aliasing = request.get("aliasing", False)
    if "model" in request:  # made by the judge: plain data and tensors
        self.model = self.torch.load(request["model"], map_location="cpu", weights_only=True)
        build = partial(sibling("modelcall").build, package=self.model, device=self.device)
        if self.model["init"] is None:  # the problem's constructor takes more than plain data
            self.model["init"] = by_path("problem", Path(request["problem"])).get_init_inputs()
    if "compile" in request:
        self.function, self.changed = baseline(self, request), list
    else:
        watch = sibling("watch")
        self.changed = watch.changed_in(watch.watched(self.torch), new_too=False)
        self.operators = watch.operators_of(self.torch._C._dispatch_dump)
        self.operators_before = self.operators()
        if not self.hidden:
            self.seen, self.hidden = watch.hide(), True
        module = yield from import_kernel(self, Path(request["path"]))
        name = "ModelNew" if self.model else "kernel_fn"
        (self.function,) = yield from outside(self, step(self, getattr, module, name, None))
        if not callable(self.function):
            raise AttributeError(f"kernel.py defines no {name}")
        if self.model:
            (self.function,) = yield from outside(self, step(self, build, self.function))
    (signature,) = yield from outside(self, step(self, inspect.signature, self.function))
    taken = signature.parameters.items()
    self.loaded[request.get("path")] = self.function, sys.modules.get("kernel")
    parameters = {n: p.default is p.empty for n, p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {"parameters": parameters, "seconds": self.clock() - start}


def use(self, request: dict) -> dict:
    """Go back to a kernel loaded earlier: the variants of a sweep live side by side."""
    self.function, sys.modules["kernel"] = self.loaded[request["path"]]
    return {}


def import_kernel(self, path: Path):
    # `autokernel.cuda` is there for CUDA kernels; reference.py, the oracle, is not importable
    package = ModuleType("autokernel")
    package.__path__ = [str(ROOT / "autokernel")]
    if cuda := sys.modules.get("autokernel.cuda"):
        self.compiled_before = len(cuda.loaded_modules())
    sys.modules["autokernel"] = package
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    yield from outside(self, step(self, spec.loader.exec_module, module))
    return module


def baseline(self, request: dict):
    sys.path.append(str(ROOT))  # last: nothing in the repository stands in for a library
    if self.model:
        cls, mode = by_path("problem", Path(request["problem"])).Model, "default" if request["compile"] else ""
        return sibling("modelcall").build(cls, self.model, self.device, mode)
    from autokernel import ops

    function = ops.get(request["op"]).baseline
    if request["compile"]:
        function = self.torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
    return function


def replaced(self, request: dict) -> dict:
    """Names of well-known functions and operators that the kernel replaced for the whole process."""
    now = self.operators()
    changed = [f"aten::{name}" for name, before in self.operators_before.items() if now[name] != before]
    return {"changed": (changed + self.changed())[:20]}


# ---- one call --------------------------------------------------------------------------------------------------------


def tensor(self, spec: dict, region: str):
    """A view into the arena; spec: shape, strides, dtype, start (byte offset of the region), offset (elements)."""
    dtype, start = self.dtypes[spec["dtype"]], spec[region]
    usable = (self.arena.numel() - start) // dtype.itemsize * dtype.itemsize
    flat = self.view(self.cut(self.arena, 0, start, usable), dtype)
    return self.as_strided(flat, spec["shape"], spec["strides"], flat.storage_offset() + spec.get("offset", 0))


def same_tensor(self, spec: dict):
    """An input that is the same object whenever it lies in the same place, as a model's weights are."""
    key = tuple(spec["shape"]), tuple(spec["strides"]), spec["dtype"], spec["work"], spec["offset"]
    if key not in self.inputs:
        self.inputs[key] = tensor(self, spec, "work")
    return self.inputs[key]


def arguments(self, request: dict):
    """(the call's arguments by name, a function that brings their content)."""
    inputs = {name: same_tensor(self, spec) for name, spec in request["inputs"].items()}
    stage, work, count = request["stage"], request["work"], request["bytes"]
    integers = self.dtypes["int64"]
    source = self.view(self.cut(self.arena, 0, stage, count), integers)
    # `.data`: new content leaves no trace in the version counter, as a Triton kernel's writes leave none
    target = self.view(self.cut(self.arena, 0, work, count), integers).data
    return inputs, partial(self.xor, source, request["mask"], out=target)


def call(self, request: dict):
    inputs, bring = arguments(self, request)
    outputs = [tensor(self, spec, "start").data for spec in request["outputs"]]
    before = {name: facts_of(value) for name, value in inputs.items()}
    job = step(self, self.function, **inputs, **request["scalars"])
    run = timed_gpu if self.on_gpu else timed_cpu
    out, reply = yield from run(self, bring, outputs, job, request)
    outs = list(out) if self.model else [out]
    del job, out
    reply["late"] = yield from late(self, outs, outputs, request["poison"])
    reply["left"] = [f"another tensor in place of {k}" for k, v in before.items() if facts_of(inputs[k]) != v]
    if held(self, outs, outputs):
        yield from outside(self, self.collect)  # perhaps only a cycle of the kernel's own variables
        if held(self, outs, outputs):
            reply["left"].append("a reference to its output, a buffer that the next calls overwrite")
    reply["outs"] = [describe(self, out) for out in outs]
    remember(self, outs)
    return reply


def held(self, outs: list, outputs: list) -> bool:
    """Whether an output is held by more than the list of outputs, which may share one memory."""
    if self.aliasing or len(outs) != len(outputs) or not all(map(partial(matches, self), outs, outputs)):
        return False
    most = [count + len(outs) - 1 for count in self.unheld]
    return any(any(map(gt, counts, most)) for counts in holders(self, outs))


def prelude(self, request) -> list:
    """Steps that give a model the random numbers and the state that the judge's own copy has in this call."""
    if request["seed"] is None:
        return []
    steps = [partial(generator.manual_seed, request["seed"]) for generator in self.generators]
    return steps + [step(self, self.function.reset)] * self.model["stateful"]


def timed_gpu(self, bring, outputs, job, request):
    first, flushing, start, end, done = (partial(self.record, event, self.stream) for event in self.events)
    self.reset_peak()
    wait, flush = partial(self.sleep, request["wait_cycles"]), partial(self.sum, self.flush, 0, out=self.flushed)
    steps = [*prelude(self, request), first, wait, bring, flushing, flush, start, self.clock, job, self.clock, end]
    at = steps.index(job)
    steps.append(hand_over(self, outputs, at))
    results = yield from outside(self, *steps, self.synchronize, done, self.synchronize, self.read_set_aside)
    began, out, ended = results[at - 1 : at + 2]
    del results
    if self.set_aside.value:
        raise LeftBehind("a part of L2 set aside, which no flush reaches")
    marks = dict(zip(("before_s", "flush_s", "device_s", "after_s"), pairwise(self.events), strict=True))
    times = {name: self.elapsed(*pair) / 1e3 for name, pair in marks.items()}
    peak = self.memory_stats()["allocated_bytes"]["all"]["peak"] - self.flush.numel() * 4
    return out, times | {"host_s": ended - began, "peak_bytes": peak}


def timed_cpu(self, bring, outputs, job, request):
    steps = [*prelude(self, request), bring, self.clock, job, self.clock]
    steps.append(hand_over(self, outputs, len(steps) - 2))
    began, out, ended, _ = (yield from outside(self, *steps))[-4:]
    times = {"before_s": 0.0, "flush_s": 0.0, "device_s": ended - began, "after_s": 0.0, "host_s": ended - began}
    return out, times | {"peak_bytes": 0}


def hand_over(self, outputs: list, at: int):
    """A step that copies the result of another one, `at`, where the judge reads it, on the stream, at once.

    A wrong result is left to the judge.
    """
    result = map(self.box.__getitem__, (at + AHEAD,))
    return partial(self.attempt, list, map(self.copy_, outputs, chain.from_iterable(result) if self.model else result))


def matches(self, out, output) -> bool:
    same = type(out) is self.tensor_type and out.dtype == output.dtype and out.shape == output.shape
    return same and out.device == output.device and out.layout == self.strided and str(self.keys(out)) in self.plain


def late(self, outs: list, outputs: list, poison: int):
    """Whether a result changed after it was handed over.

    Fills the output before with noise: so what torch.empty hands to the kernel next never holds an earlier answer.
    """
    pairs = [pair for pair in zip(outs, outputs, strict=False) if matches(self, *pair)]
    olds = [] if self.aliasing else [o for o in self.last.get("outs", ()) if type(o) is self.tensor_type]
    steps = [partial(self.equal, *pair) for pair in pairs]
    steps += [partial(self.fill_, o.untyped_storage(), poison) for o in olds if o.layout == self.strided and o.numel()]
    results = yield from outside(self, *steps)
    for (out, output), same in zip(pairs, results, strict=False):
        if not same:  # NaNs are unequal to themselves: look again without
            finite = yield from outside(self, partial(self.finite, out), partial(self.finite, output))
            (equal,) = yield from outside(self, partial(self.equal, *finite))
            if not equal:
                return True
    return False


def describe(self, out) -> dict:
    """Facts about the returned object, for the judge to weigh."""
    if type(out) is not self.tensor_type:
        return {"type": f"{type(out).__module__}.{type(out).__qualname__}"}
    storage = out.untyped_storage() if out.layout == self.strided else None
    low, high = span_of(storage) if storage else (0, 0)
    arena, last = self.arena.data_ptr(), self.last.get("spans", ())
    return {
        "type": "torch.Tensor",
        "dtype": str(out.dtype).removeprefix("torch."),
        "shape": list(out.shape),
        "strides": list(out.stride()) if storage else None,
        "device": out.device.type,
        "layout": str(out.layout) if str(self.keys(out)) in self.plain else str(self.keys(out)),
        "attributes": attributes_of(out),
        "requires_grad": out.requires_grad,
        "aliases_input": bool(low < arena + self.arena.numel() and arena < high and high > low),
        "aliases_previous": low < high and any(low < end and start < high for start, end in last),
    }


def remember(self, outs: list) -> None:
    """Keep these outputs until after the next call; the ones before will be freed in `outside`."""
    self.kept, self.last = self.last, {"outs": outs}
    plain = [out for out in outs if type(out) is self.tensor_type and out.layout == self.strided]
    # read before the handles are kept: a resized storage would move
    self.last["spans"] = [span_of(out.untyped_storage()) for out in plain]


def span_of(storage) -> tuple[int, int]:
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


# ---- measurements without a verdict ----------------------------------------------------------------------------------


def launch(self, request: dict):
    """Host seconds of one call among 20 back to back: what launching costs a model that never waits."""
    inputs, _ = arguments(self, request)
    job = step(self, self.function, **inputs, **request["scalars"])
    for count in (3, 20):
        began, *_, ended = yield from outside(self, self.clock, *[job] * count, self.clock)
        if self.on_gpu:
            self.synchronize()
    return {"host_s": (ended - began) / 20}


def audit(self, request: dict):
    """One more call, watched: which PyTorch operators it runs, and the names of the device's kernels."""
    inputs, bring = arguments(self, request)
    yield from outside(self, bring)
    # torch.profiler and TorchDispatchMode import all of torch._dynamo, which takes seconds; this does not
    profiler = self.torch.autograd.profiler.profile(use_device="cuda" if self.on_gpu else None, use_kineto=True)
    with profiler as seen:
        yield from outside(self, step(self, self.function, **inputs, **request["scalars"]))
        if self.on_gpu:
            self.synchronize()
    names = {kind: {e.name[:300] for e in seen.function_events if e.device_type.name == kind} for kind in DEVICES}
    operators, kernels = {n for n in names["CPU"] if n.startswith("aten::")}, names["CUDA"]
    return {"operators": sorted(operators), "kernels": sorted(kernels)}


def profile(self, request: dict):
    """Five calls under PyTorch's profiler: the device's kernels with their times, and trace.json in this folder."""
    from torch.profiler import ProfilerActivity, profile

    inputs, bring = arguments(self, request)
    yield from outside(self, bring)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
    with profile(activities=activities) as profiler:
        yield from outside(self, *[step(self, self.function, **inputs, **request["scalars"])] * 5)
        if self.on_gpu:
            self.synchronize()
    profiler.export_chrome_trace("trace.json")
    events = [e for e in profiler.events() if e.device_type.name == ("CUDA" if self.on_gpu else "CPU")]
    kernels: dict[str, list[float]] = {}
    for event in events:
        kernels.setdefault(event.name, []).append(event.device_time if self.on_gpu else event.self_cpu_time_total)
    rows = [{"kernel": k[:200], "calls": len(v) / 5, "us": sum(v) / len(v)} for k, v in kernels.items()]
    return {"kernels": sorted(rows, key=lambda r: -r["calls"] * r["us"])[:30]}


def count(self, request: dict):
    """One warm and one profiled call, for Nsight Compute around this process."""
    inputs, bring = arguments(self, request)
    job = step(self, self.function, **inputs, **request["scalars"])
    yield from outside(self, bring, job)
    self.synchronize()
    self.torch.cuda.cudart().cudaProfilerStart()
    yield from outside(self, job)
    self.synchronize()
    self.torch.cuda.cudart().cudaProfilerStop()
    return {}


def compile_only(self, request: dict) -> dict:
    """Compile the kernel's CUDA_SRC without calling it: all that can be done where there is no GPU."""
    from autokernel.cuda import compile_cuda

    module = sys.modules["kernel"]
    compile_cuda(module.CUDA_SRC, defines=getattr(module, "CONFIG", {}))
    return {}


def resources(self, request: dict) -> dict:
    """Registers, spills and shared memory of what the latest kernel compiled, the largest of each."""
    found = []
    if cuda := sys.modules.get("autokernel.cuda"):
        latest = cuda.loaded_modules()[self.compiled_before :]
        found += [kernel for module in latest for kernel in module.resources.values()]
    if self.on_gpu and "triton" in sys.modules:
        from autokernel.cuda import triton_resources

        for value in vars(sys.modules["kernel"]).values():
            function = getattr(value, "fn", value) if not hasattr(value, "device_caches") else value
            for caches in getattr(function, "device_caches", {}).values():
                found += [triton_resources(compiled) for compiled in caches[0].values()]
    names = ("registers", "spill_bytes", "smem_bytes")
    return {"resources": {n: max((r[n] for r in found if r.get(n) is not None), default=None) for n in names}}


def error_of(error: BaseException) -> dict:
    """An exception as data: type, message, the line in kernel.py, and the traceback for those who ask."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == "kernel.py"]
    return {
        "type": type(error).__name__,
        "message": str(error)[:4000] or type(error).__name__,
        "line": getattr(error, "lineno", None) or (frames[-1].lineno if frames else None),
        "traceback": "".join(traceback.format_exception(error))[-8000:],
    }
