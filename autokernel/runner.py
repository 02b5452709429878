"""What a kernel's process does: call the kernel on the judge's inputs, answer with raw tensors and times, no verdict.

Every call, checked or timed or warm-up, takes the same path, so a kernel cannot tell them apart:

    wait kernel -> inputs unmasked from the stage -> L2 flushed -> event -> kernel_fn -> event -> output copied

The wait hides the launch gap. The stage holds the inputs masked by a key that comes with the request, so that nothing
can be computed from them while the wait runs. The output leaves on the stream right behind the end event, so work that
was not joined is missing in it.

The kernel's Python code shall reach none of this. So while code of the kernel could run, nothing of ours is on the
stack below it: the functions here yield steps, which child.py runs in C. Code of the kernel runs in a call, in a
finaliser, in a hook or a thread that it left, and whenever an object that it made is looked at. Hence:

- what the kernel made is named by its place in a list; its exceptions, its result and its module are looked at in steps
  by exposed.py and facts.py, and what they say arrives here as plain data, by way of `marshal`;
- the last reference to such an object is dropped in C, after a later call and before the next is prepared (`freed`);
- hooks, handlers and callbacks are taken away, the garbage collector is stopped and threads are looked for in C, before
  any code here goes on; as this process waits for the judge, too, in C;
- nothing here leads to this from elsewhere: there are no classes to be found by name, the garbage collector shows no
  object of ours, builtins are a private copy.

None of this is proof against native code in this process: the judge's own clock bounds that (docs/trust.md).

Messages are length-prefixed JSON over one socket; neither side ever unpickles.
"""

import builtins

__builtins__ = dict(vars(builtins))  # the functions below look names up here, whatever a kernel puts into `builtins`

# ruff: noqa: E402
import ctypes
import gc
import importlib.util
import json
import marshal
import mmap
import operator
import os
import socket
import struct
import sys
import time
from collections import deque
from functools import partial
from itertools import chain, compress, islice, pairwise, repeat
from operator import gt
from pathlib import Path
from types import GeneratorType, SimpleNamespace

DEVICES = ("CPU", "CUDA")
ROOT = Path(__file__).resolve().parent.parent
LONGEST_REQUEST = 1 << 24
# without functions: nothing leads from them to this module
LeftBehind, Told = (type(name, (RuntimeError,), {}) for name in ("LeftBehind", "Told"))


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


def sibling(name: str) -> SimpleNamespace:
    """What another file of this package defines, looked up now: the kernel's code may find the module's own names."""
    return SimpleNamespace(**vars(by_path(name, Path(__file__).with_name(f"{name}.py"))))


def serve(sock: socket.socket, memory: int, box: list):
    """Answer requests until the socket closes."""
    os.set_inheritable(sock.fileno(), False)
    import torch

    if importlib.util.find_spec("tqdm"):  # torch.compile shows its progress with it, and leaves its thread behind
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context costs a second: now, while the judge is starting too
    handlers = {
        "setup": set_up, "load": load, "call": call, "launch": launch, "audit": audit, "resources": resources,
        "replaced": replaced, "compile": compile_only, "profile": profile, "count": count, "use": use,
    }  # fmt: skip
    self = SimpleNamespace(torch=torch, box=box, memory=memory, kept=[], made={}, seen=[], alone=tuple)
    receive, send = channel(self, sock)
    while (request := (yield from receive())) is not None:
        try:
            answer = handlers[request["do"]](self, request)
            if isinstance(answer, GeneratorType):
                answer = yield from answer
        except GeneratorExit:  # a step between the calls failed: the process ends, and says of what
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the judge hears of it
            self.kept.append(error)
            answer = {"error": said_by(error)}
        yield from send({"id": request["id"], **answer})


def said_by(error: BaseException) -> dict:
    """An error of ours as data. It may have come out of a function in C that met the kernel's: only plain parts."""
    if type(error) is Told:
        return error.args[0]
    text = " ".join(part for part in error.args if type(part) is str)
    return {"type": "".join((type.__dict__["__name__"].__get__(type(error)), "")), "message": text, "traceback": ""}


def channel(self, sock: socket.socket) -> tuple:
    """Functions that receive and send one message, made of functions in C that were looked up now."""
    read, write = sock.recv, sock.sendall
    scan = json.JSONDecoder().scan_once
    encode = json.encoder.c_make_encoder(
        None, None, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, True
    )
    length, invoke = struct.Struct("<I"), operator.methodcaller("__call__")

    def waited(step):
        """A step during which other threads may run, and its result."""
        yield map(invoke, (step, *self.alone()))
        result = self.box[0]
        del self.box[:]
        return result

    def exactly(count: int):
        data = yield from waited(partial(read, count, socket.MSG_WAITALL))
        return data if len(data) == count else None

    def receive():
        head = yield from exactly(4)
        if head is None or length.unpack(head)[0] > LONGEST_REQUEST:
            return None
        data = yield from exactly(length.unpack(head)[0])
        return None if data is None else scan(data.decode(), 0)[0]

    def send(message: dict):
        data = "".join(encode(message, 0)).encode()
        yield from waited(partial(write, length.pack(len(data)) + data))

    return receive, send


# ---- setting up ------------------------------------------------------------------------------------------------------


def set_up(self, request: dict):
    """Open the arena and look up, before a kernel is here, every function that is used while one is."""
    torch, c = self.torch, self.torch._C
    os.environ.update(request["environment"])  # before Triton is imported, which reads it once
    torch.set_grad_enabled(False)
    self.device = torch.device(request["device"])
    self.on_gpu = self.device.type == "cuda"
    self.arena = open_arena(self, request["arena"])
    os.close(self.memory)
    exposed, facts, watch = sibling("exposed"), sibling("facts"), sibling("watch")
    self.exposed, self.outcome, self.Failure, self.error_of = (
        exposed, exposed.outcome, exposed.Failure, exposed.error_of
    )  # fmt: skip
    self.modules, self.loaded, self.hidden, self.compiled_before = sys.modules, {}, False, 0
    # of a model (modelcall.py): its results come in a tuple; may they lie in inputs or be kept; does it write to its
    # inputs; does a call change what the next one reads
    self.several = self.aliasing = self.mutating = self.stateful = False
    self.generators, self.reset = [torch.default_generator], operator.methodcaller("reset")
    if not self.on_gpu and importlib.util.find_spec("triton"):
        exposed.prepare_interpreter()
    self.clock, self.between = clocks()
    self.invoke = operator.methodcaller("__call__")
    self.dumps, self.loads, self.collect, self.resume = marshal.dumps, marshal.loads, gc.collect, gc.enable
    # what runs the kernel's code begins with these and ends with `ending`; see `watch` for what follows
    self.switch = partial(sys.setswitchinterval, sys.getswitchinterval())
    self.begin = self.switch, gc.enable
    self.end = gc.isenabled, gc.disable, partial(exposed.idle, gc.disable)
    self.copy_, self.fill_, self.tensor_type = c.TensorBase.copy_, c.TensorBase.fill_, torch.Tensor
    self.equal, self.mul, self.xor, self.finite = torch.equal, torch.mul, torch.bitwise_xor, torch.nan_to_num
    self.known = {name: vars(c.TensorBase)[name].__get__ for name in ("shape", "device", "layout")}
    self.dtypes = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    settings = watch.settings_of(torch)
    self.synchronize = c._cuda_synchronize if self.on_gpu else tuple
    if self.on_gpu:
        set_up_gpu(self, request["flush_bytes"])
        settings |= {"another current stream": self.current_stream, **watch.settings_of_gpu()}
        settings["torch.cuda.manual_seed"] = self.generators[1].initial_seed
    self.reseed = [partial(g.manual_seed, g.initial_seed()) for g in self.generators]
    self.alone, self.after, self.at_once, self.left_behind = watch.watch(torch, settings)
    low = self.arena.data_ptr()
    patched = watch.changed_in({"torch.Tensor": torch.Tensor, "torch.UntypedStorage": torch.UntypedStorage})
    self.patched = patched
    span = low, low + self.arena.numel()
    self.meet, self.look, self.holders, self.old = facts.observer(torch, self.device, span, self.kept, patched)
    self.count = sys.getrefcount
    self.unheld = yield from unheld(self)
    return {"confinement": confine(request["writable"]) if request["writable"] else "off"}


def unheld(self):
    """What `weigh` says at most of the holders of a result that nobody but the caller holds."""
    empty, device, several, seen = self.torch.empty, self.device, self.several, []
    for make in (lambda: empty(2, device=device), lambda: empty(2, device=device)[:1]):
        found = yield from run(self, step(self, lambda make=make: (make(),) if several else make()))
        seen.append((yield from weigh(self, found, len(self.begin), {}, []))[1])
    return [max(counts) for counts in zip(*(row for rows in seen for row in rows), strict=True)]


def set_up_gpu(self, flush_bytes: int) -> None:
    torch, c = self.torch, self.torch._C
    self.events = [c._CudaEventBase(enable_timing=True) for _ in range(5)]
    self.record, self.elapsed = c._CudaEventBase.record, c._CudaEventBase.elapsed_time
    self.sleep, self.sum = c._cuda_sleep, torch.sum
    self.stream, index = torch.cuda.current_stream(), torch.cuda.current_device()
    self.current_stream = partial(c._cuda_getCurrentStream, index)
    # read, not written: a written flush leaves dirty lines whose write-back is then charged to the kernel
    self.flush = torch.randint(1, 9, (flush_bytes // 4,), dtype=torch.int32, device=self.device)
    self.flush_bytes = self.flush.numel() * 4
    self.flushed = torch.empty((), dtype=torch.int64, device=self.device)
    driver, persisting = ctypes.CDLL("libcuda.so.1"), 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE: for what outlives a flush
    self.set_aside = ctypes.c_size_t(0)
    self.read_set_aside = partial(driver.cuCtxGetLimit, ctypes.byref(self.set_aside), persisting)
    driver.cuCtxSetLimit(persisting, ctypes.c_size_t(0))
    self.generators.append(torch.cuda.default_generators[index])
    self.reset_peak = partial(c._cuda_resetPeakMemoryStats, index)
    self.memory_stats = partial(c._cuda_memoryStats, index)


def clocks() -> tuple:
    """A function that makes the step which takes time n, and one that says the seconds between two of them.

    They are written into memory of the system's: a float of Python's lies beside those that the kernel makes.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE)
    begin, take = ctypes.addressof(ctypes.c_char.from_buffer(page)), ctypes.PyDLL(None).clock_gettime
    places = [ctypes.c_void_p(begin + at) for at in range(0, mmap.PAGESIZE, 16)]
    steps, read = [partial(take, time.CLOCK_MONOTONIC, place) for place in places], struct.Struct("qq").unpack_from

    def between(first: int, last: int) -> float:
        (seconds, rest), (later, more) = read(page, 16 * first), read(page, 16 * last)
        return later - seconds + (more - rest) / 1e9

    return steps.__getitem__, between


def open_arena(self, arena: dict):
    torch = self.torch
    if arena["kind"] == "memory":
        return torch.from_file(f"/proc/self/fd/{self.memory}", shared=True, size=arena["bytes"], dtype=torch.uint8)
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


# ---- running the kernel's code ---------------------------------------------------------------------------------------


def outside(self, *steps, ended: int | None = None):
    """Results of steps (functions in C, or `step`s) run where none of our variables are on the stack.

    Steps that run the kernel's code come between `begin` and `ending`, which begins at `ended`. What the kernel made
    may be among the results: hand it on by its place only. Raises LeftBehind, or Told: what the first step that failed
    has raised.
    """
    yield map(self.invoke, (*steps, *self.after()))
    found = self.box[:]
    self.kept.append(found)
    del self.box[:]
    states = () if ended is None else (found[ended], *found[ended + 5 : ended + 7])
    if left := self.left_behind(found[len(steps) :], *states) + self.seen:
        raise LeftBehind(", ".join(left)[:300])
    failed = [at for at in range(len(steps)) if type(found[at]) is self.Failure]
    if failed:
        raise Told((yield from plain(self, self.error_of, nth(found, failed[0]))))
    return found


def ending(self, *clock) -> list:
    """Steps directly after the kernel's code. clock: two steps that end the timed window.

    Garbage that is due is collected within it; then nothing runs until the modes that could put work off are known.
    """
    return [*self.end, *(clock or (tuple, tuple)), *self.at_once()]


def run(self, *jobs, after=()):
    """`outside` for steps that run the kernel's code but are no timed call of it."""
    yield from drop(self)
    steps = *self.begin, *jobs
    found = yield from outside(self, *steps, *ending(self), *after, ended=len(steps))
    return found


def drop(self):
    """Let go of what the kernel made earlier."""
    steps = freed(self, len(self.kept))
    yield from outside(self, *steps, *ending(self), ended=len(steps))


def freed(self, count: int) -> list:
    """Steps that let go of the oldest results that are kept, and of garbage, between times 3 and 4.

    Finalisers are code of the kernel's. So no inputs are on their way, and the steps after a run follow.
    """
    release = partial(operator.delitem, self.kept, slice(count))
    return [*self.begin, self.synchronize, self.clock(3), release, list]


def step(self, function, *args, **kwargs):
    """A step that runs Python code, whose exception `outside` raises."""
    return partial(self.outcome, function, args, kwargs)


def nth(found: list, at: int) -> map:
    """A result by its place, fetched in C."""
    return map(found.__getitem__, (at,))


def each(self, found: list, at: int):
    """The results of a call by its place, one by one, fetched in C: those of a model come in a tuple."""
    if not self.several:
        return nth(found, at)
    exact = map(operator.is_, map(type, nth(found, at)), (tuple,))
    return chain.from_iterable(compress(nth(found, at), exact))


def plain(self, function, *arguments):
    """What a function says of things of the kernel, as plain data; arguments: iterators with one item each."""
    (said,) = yield from plain_all(self, map(function, *arguments))
    return said


def plain_all(self, *said):
    """What iterators with one item each say, as plain data: marshal takes exact types of Python's only."""
    found = yield from outside(self, *[partial(list, map(self.dumps, one)) for one in said])
    return [self.loads(found[i][0]) for i in range(len(said))]


def told(self, function, *args, **kwargs):
    """`plain` for a function of exposed.py that runs the kernel's code; raises Told with what it raised."""
    found = yield from run(self, step(self, function, *args, **kwargs))
    return (yield from plain(self, dict, nth(found, len(self.begin))))


def load(self, request: dict):
    """Import the candidate, or build a trusted baseline."""
    if "model" in request:
        yield from prepare_model(self, request)
    if "compile" in request:
        self.function, self.changed = baseline(self, request), list
        return {}
    if not self.hidden:
        watch, self.hidden = sibling("watch"), True
        self.changed = watch.changed_in(watch.watched(self.torch), new_too=False)
        self.operators = watch.operators_of(self.torch._C._dispatch_dump)
        self.operators_before = self.operators()
        self.seen = watch.hide()
    elif self.loaded:  # the variants of a sweep live side by side; another kernel's code has run here
        self.compiled_before = (yield from told(self, self.exposed.compiled))["modules"]
    yield from import_kernel(self, request["path"])
    return {}


def prepare_model(self, request: dict):
    """What modelcall.py builds a model of: plain data and tensors, made by the judge."""
    package = self.torch.load(request["model"], map_location="cpu", weights_only=True)
    if package["init"] is None:  # the problem's constructor takes more than plain data
        package["init"] = by_path("problem", Path(request["problem"])).get_init_inputs()
    self.several, self.stateful = True, package["stateful"]
    self.aliasing, self.mutating = request["aliasing"], request["mutating"]
    self.build = partial(sibling("modelcall").build, package=package, device=self.device)
    self.unheld = yield from unheld(self)


def import_kernel(self, path: str):
    found = yield from run(self, step(self, self.exposed.imported, path), after=self.reseed)
    module = found[len(self.begin)]
    if left := (yield from plain(self, self.invoke, (self.patched,))):
        raise LeftBehind(", ".join(f"another {name}" for name in left)[:300])
    name = "ModelNew" if self.several else "kernel_fn"
    found = yield from run(self, step(self, getattr, module, name, None))
    function = found[len(self.begin)]
    if not callable(function):
        raise AttributeError(f"kernel.py defines no {name}")
    if self.several:
        found = yield from run(self, step(self, self.build, function), after=self.reseed)
        function = found[len(self.begin)]
    self.function, _ = self.loaded[path] = function, module


def use(self, request: dict):
    """Go back to a kernel loaded earlier."""
    self.function, module = self.loaded[request["path"]]
    yield from outside(self, partial(self.modules.__setitem__, "kernel", module))
    return {}


def baseline(self, request: dict):
    sys.path.append(str(ROOT))  # last: nothing in the repository stands in for a library
    if self.several:
        model = by_path("problem", Path(request["problem"])).Model
        built = self.build(model, compiled="default" if request["compile"] else "")
        deque(map(self.invoke, self.reseed), 0)
        return built
    from autokernel import ops

    function = ops.get(request["op"]).baseline
    if request["compile"]:
        function = self.torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
    return function


def replaced(self, request: dict):
    """Names of well-known functions and operators that the kernel replaced for the whole process."""
    now = self.operators()
    changed = [f"aten::{name}" for name, before in self.operators_before.items() if now[name] != before]
    changed += yield from plain(self, self.invoke, (self.changed,))
    return {"changed": changed[:20]}


# ---- one call --------------------------------------------------------------------------------------------------------


def views(self, specs: list):
    """Tensors in the arena, each the same object whenever it lies in the same place, as a model's weights are."""
    if new := [spec for spec in dict.fromkeys(specs) if spec not in self.made]:
        (made, *_) = yield from outside(self, step(self, self.exposed.views, self.torch, self.arena, new))
        if type(made) is not list or list(map(type, made)) != [self.tensor_type] * len(new):
            raise LeftBehind("another torch.as_strided")
        self.made.update(zip(new, made, strict=True))
        yield from outside(self, partial(list, map(self.meet, made)))
    return [self.made[spec] for spec in specs]


def place(self, spec: dict, region: str, own: bool) -> tuple:
    """What `views` takes; spec: shape, strides, dtype, start (byte offset of the region), offset (elements)."""
    shape, strides = tuple(spec["shape"]), tuple(spec["strides"])
    return self.dtypes[spec["dtype"]], shape, strides, spec[region], spec.get("offset", 0), own


def arguments(self, request: dict):
    """(the call's inputs by name, the outputs' tensors, a step that brings the inputs' content)."""
    specs = [place(self, spec, "work", False) for spec in request["inputs"].values()]
    whole = {"dtype": "int64", "shape": [request["bytes"] // 8], "strides": [1], **request}
    specs += [place(self, whole, region, True) for region in ("stage", "work")]
    specs += [place(self, spec, "start", True) for spec in request["outputs"]]
    tensors, count = (yield from views(self, specs)), len(request["inputs"])
    source, target, *outputs = tensors[count:]
    plain = partial(self.mul, source, request["inverse"], out=target)
    unmask = partial(self.xor, target, request["mask"], out=target)
    named = dict(zip(request["inputs"], tensors[:count], strict=True))
    return named, outputs, partial(list, map(self.invoke, (plain, unmask)))


def before(self, request: dict) -> tuple[list, list]:
    """Steps that give a model the random numbers and the state that the judge's own copy has in this call.

    (Steps of ours, steps that run the kernel's code.)
    """
    seeds = [partial(g.manual_seed, request["seed"]) for g in self.generators if request["seed"] is not None]
    return seeds, [step(self, self.reset, self.function)] * self.stateful


def call(self, request: dict):
    inputs, outputs, bring = yield from arguments(self, request)
    job = step(self, self.function, **inputs, **request["scalars"])
    seeds, resets = before(self, request)
    if resets:  # in a run of its own: nothing that it left is there when the inputs come
        yield from run(self, *resets, self.synchronize)
    timed, earlier = timed_gpu if self.on_gpu else timed_cpu, len(self.kept)
    found, at, reply = yield from timed(self, seeds, bring, outputs, job, request)
    return reply | (yield from facts_of(self, found, at, inputs, outputs, request, earlier))


def facts_of(self, found: list, at: int, inputs: dict, outputs: list, request: dict, earlier: int):
    """What is to be said of the results besides their values. earlier: how much was kept before the call."""
    wants = [[spec["dtype"], spec["shape"], self.device.type] for spec in request["outputs"]]
    said, holders = yield from weigh(self, found, at, inputs, wants)
    if said["fits"] and not self.aliasing and held(self, holders):
        yield from outside(self, self.collect)  # perhaps only a cycle of the kernel's own variables
        (holders,) = yield from plain_all(self, holding(self, found, at))
        if held(self, holders):
            said["left"].append("a reference to its output, a buffer that the next calls overwrite")
    late = yield from changed_since(self, found, at, outputs, said, request["poison"], earlier)
    return {"outs": said["outs"], "left": said["left"], "late": late, "drop_s": self.between(3, 4)}


def weigh(self, found: list, at: int, inputs: dict, wants: list):
    """Facts about the results of a call, and how many hold them; remembers them."""
    look = map(partial(self.look, inputs, wants), map(list, (each(self, found, at),)))
    return (yield from plain_all(self, look, holding(self, found, at)))


def holding(self, found: list, at: int) -> map:
    return map(self.holders, map(list, (each(self, found, at),)), map(self.count, nth(found, at)))


def held(self, holders: list) -> bool:
    """Whether more hold the results than the runner."""
    return any(any(map(gt, counts, self.unheld)) for counts in holders)


def timed_gpu(self, seeds, bring, outputs, job, request):
    first, flushing, start, end, done = (partial(self.record, event, self.stream) for event in self.events)
    wait, flush = partial(self.sleep, request["wait_cycles"]), partial(self.sum, self.flush, 0, out=self.flushed)
    steps = [self.switch, *seeds, self.reset_peak, first, wait, bring, flushing, flush, start]
    steps += [self.clock(0), self.resume, job, *ending(self, self.clock(1), end)]
    at = steps.index(job)
    steps += [hand_over(self, outputs, at), self.synchronize, done, self.synchronize, *unseed(self, seeds)]
    spans = [partial(self.elapsed, *pair) for pair in pairwise(self.events)]
    found = yield from outside(self, *steps, self.read_set_aside, self.memory_stats, *spans, ended=at + 1)
    if self.set_aside.value:
        raise LeftBehind("a part of L2 set aside, which no flush reaches")
    stats, *times = found[len(steps) + 1 : len(steps) + 2 + len(spans)]
    times = {name: t / 1e3 for name, t in zip(("before_s", "flush_s", "device_s", "after_s"), times, strict=True)}
    peak = stats["allocated_bytes"]["all"]["peak"] - self.flush_bytes
    return found, at, times | {"host_s": self.between(0, 1), "peak_bytes": peak}


def timed_cpu(self, seeds, bring, outputs, job, request):
    steps = [self.switch, *seeds, bring, self.clock(0), self.resume, job, *ending(self, self.clock(1), tuple)]
    at = steps.index(job)
    steps += [hand_over(self, outputs, at), self.clock(2), *unseed(self, seeds)]
    found = yield from outside(self, *steps, ended=at + 1)
    took = self.between(0, 1)
    times = {"before_s": 0.0, "flush_s": 0.0, "device_s": took, "after_s": self.between(1, 2), "host_s": took}
    return found, at, times | {"peak_bytes": 0}


def unseed(self, seeds: list) -> list:
    """Steps that take the judge's own seeds back: then another one is the kernel's."""
    return self.reseed if seeds else []


def hand_over(self, outputs: list, at: int):
    """A step that copies the results of another one, `at`, where the judge reads them, on the stream, at once.

    In C throughout, so there is no code of Python's here that a kernel could have changed. A result that does not fit
    is left to the judge.
    """
    copies = []
    for number, output in enumerate(outputs):
        fitting, exact = (islice(each(self, self.box, at), number, number + 1) for _ in range(2))
        for look in self.known.values():
            other = islice(each(self, self.box, at), number, number + 1)
            fitting = compress(fitting, map(operator.eq, map(look, other), (look(output),)))
        copied = partial(list, map(self.copy_, (output,), fitting))
        copies.append(compress((copied,), map(operator.is_, map(type, exact), (self.tensor_type,))))
    return partial(list, map(self.invoke, chain(*copies)))


def changed_since(self, found: list, at: int, outputs: list, said: dict, poison: int, earlier: int):
    """Whether a result changed after it was handed over.

    Fills the outputs before with noise, and frees those that are kept no longer: so what torch.empty hands to the
    kernel next never holds an earlier answer.
    """
    steps = [partial(list, map(self.equal, each(self, found, at), outputs))] * said["fits"]
    if said["old"] and not self.aliasing:
        steps.append(partial(list, map(self.fill_, self.old, repeat(poison))))
    steps += freed(self, earlier)
    results = yield from outside(self, *steps, *ending(self, self.synchronize, self.clock(4)), ended=len(steps))
    same = [True] * len(outputs)
    if not said["fits"] or results[0] == same:
        return False
    # NaNs are unequal to themselves: look again without
    finite = partial(list, map(self.equal, map(self.finite, each(self, found, at)), map(self.finite, outputs)))
    (equal, *_) = yield from outside(self, finite)
    return equal != same


# ---- measurements without a verdict ----------------------------------------------------------------------------------


def launch(self, request: dict):
    """Host seconds of one call among many back to back, what launching costs a model that never waits.

    The result of one of them, request["judged"], is handed over to be judged.
    """
    inputs, outputs, bring = yield from arguments(self, request)
    job, (seeds, resets) = step(self, self.function, **inputs, **request["scalars"]), before(self, request)
    yield from drop(self)
    ready = [*seeds, *resets, *[bring] * self.mutating]
    steps, places = [bring, *self.begin], []
    for number in range(request["launches"]):
        steps += [*ready, self.clock(2 * number), job, self.clock(2 * number + 1)]
        places.append(len(steps) - 2)
    at, ended = places[request["judged"]], len(steps)
    steps += [*ending(self), hand_over(self, outputs, at), self.synchronize, *unseed(self, seeds)]
    yield from outside(self, *steps, ended=ended)
    taken = [self.between(2 * number, 2 * number + 1) for number in range(4, request["launches"])]
    return {"host_s": sum(taken) / len(taken)}


def audit(self, request: dict):
    """One more call, watched: which PyTorch operators it runs, and the names of the device's kernels."""
    inputs, _, bring = yield from arguments(self, request)
    yield from outside(self, bring)
    # torch.profiler and TorchDispatchMode import all of torch._dynamo, which takes seconds; this does not
    profiler = self.torch.autograd.profiler.profile(use_device="cuda" if self.on_gpu else None, use_kineto=True)
    call = self.function, inputs | request["scalars"]
    return (yield from told(self, self.exposed.audited, profiler, DEVICES, *call, self.synchronize))


def profile(self, request: dict):
    """Five calls under PyTorch's profiler: the device's kernels with their times, and trace.json in this folder."""
    inputs, _, bring = yield from arguments(self, request)
    yield from outside(self, bring)
    call = self.function, inputs | request["scalars"]
    return (yield from told(self, self.exposed.profiled, *call, self.on_gpu, self.synchronize))


def count(self, request: dict):
    """One warm and one profiled call, for Nsight Compute around this process."""
    inputs, _, bring = yield from arguments(self, request)
    job = step(self, self.function, **inputs, **request["scalars"])
    runtime = self.torch.cuda.cudart()
    between = self.synchronize, runtime.cudaProfilerStart
    yield from run(self, bring, job, *between, job, self.synchronize, runtime.cudaProfilerStop)
    return {}


def compile_only(self, request: dict):
    return (yield from told(self, self.exposed.compiled_only))


def resources(self, request: dict):
    return (yield from told(self, self.exposed.resources, self.on_gpu, self.compiled_before))
