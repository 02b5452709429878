"""What a kernel can see of the judge's code in its own process: nothing here leads to anything else.

Whatever runs the kernel's code runs from here: its calls, the texts of its exceptions, what the profiler and the
compilers know of it.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

Failure = type("Failure", (list,), {})  # [the exception]; a class without functions


def outcome(function, args, kwargs):
    """What a function returns, or the exception that it raises as a value."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - SystemExit from a kernel is an answer too
        return Failure([error])


def idle(disable) -> None:
    """Python 3.12 collects garbage as the next function begins, not as objects are made: here, where nothing is."""
    disable()


def imported(path: str):
    """A kernel file as the module `kernel`."""
    if "autokernel" not in sys.modules:
        # `autokernel.cuda` is there for CUDA kernels; reference.py, the oracle, is not importable
        package = ModuleType("autokernel")
        package.__path__ = [str(Path(__file__).parent)]
        sys.modules["autokernel"] = package
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    spec.loader.exec_module(module)
    return module


def views(torch, arena, specs: list) -> list:
    """Tensors in the arena; specs: dtype, shape, strides, first byte, elements before the first one, is it the judge's.

    The judge's own write content that leaves no trace in the inputs' version counters, as a Triton kernel's writes
    leave none.
    """
    found = []
    for dtype, shape, strides, start, offset, own in specs:
        usable = (arena.numel() - start) // dtype.itemsize * dtype.itemsize
        flat = arena[start : start + usable].view(dtype)
        tensor = torch.as_strided(flat, shape, strides, flat.storage_offset() + offset)
        found.append(tensor.data if own else tensor)
    return found


def causes(error) -> list:
    """An exception, what it was raised from, what that was raised from ..."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and len(found) < 20:  # a kernel's own may go round in a circle
        found.append(cause)
    return found


def refused_line(error):
    """The line in kernel.py of what Triton's compiler refuses: it counts from the function's `def`."""
    src, row = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", None)
    for value in vars(sys.modules.get("kernel", sys)).values() if type(src) is str and type(row) is int else ():
        function = value if hasattr(value, "raw_src") else getattr(value, "fn", None)
        if getattr(function, "src", None) == src:
            above = [line.lstrip().startswith("def ") for line in function.raw_src].index(True)
            return function.starting_line_number + above + row - 1
    return None


def error_of(failure) -> dict:
    """An exception as data: type, message, the deepest line in kernel.py, and the traceback for those who ask."""
    error = list.__getitem__(failure, 0)
    name = type.__dict__["__name__"].__get__(type(error))
    line, said = None, error
    for cause in causes(error):  # Triton raises anew at each of its functions, up to the launch
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if Path(f.filename).name == "kernel.py"]
        refused = refused_line(cause)
        line = refused or getattr(cause, "lineno", None) or (frames[-1].lineno if frames else line)
        said = cause if refused else said  # the innermost has the words
    try:
        text, trace = str(said)[:4000], "".join(traceback.format_exception(error))[-8000:]
    except Exception:  # noqa: BLE001 - an exception that cannot be shown is none of ours
        text = trace = ""
    return {
        "type": "".join((name, "")),
        "message": "".join((text or name, "")),
        "line": line if type(line) is int else None,
        "traceback": "".join((trace, "")),
    }


def audited(profiler, kinds, function, inputs, synchronize) -> dict:
    """One call, watched: which PyTorch operators it runs, and the names of the device's kernels."""
    with profiler as seen:
        function(**inputs)
        synchronize()
    names = {kind: {e.name[:300] for e in seen.function_events if e.device_type.name == kind} for kind in kinds}
    operators, kernels = {n for n in names["CPU"] if n.startswith("aten::")}, names["CUDA"]
    return {"operators": sorted(operators), "kernels": sorted(kernels)}


def profiled(function, inputs, on_gpu: bool, synchronize) -> dict:
    """Five calls under PyTorch's profiler: the device's kernels with their times, and trace.json in this folder."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        for _ in range(5):
            function(**inputs)
        synchronize()
    profiler.export_chrome_trace("trace.json")
    events = [e for e in profiler.events() if e.device_type.name == ("CUDA" if on_gpu else "CPU")]
    kernels: dict[str, list[float]] = {}
    for event in events:
        kernels.setdefault(event.name, []).append(event.device_time if on_gpu else event.self_cpu_time_total)
    rows = [(len(v) / 5, sum(v) / len(v), k[:200]) for k, v in kernels.items()]
    rows.sort(key=lambda row: -row[0] * row[1])
    return {"kernels": [{"kernel": kernel, "calls": calls, "us": us} for calls, us, kernel in rows[:30]]}


def compiled_only() -> dict:
    """Compile the kernel's CUDA_SRC without calling it: all that can be done where there is no GPU."""
    from autokernel.cuda import compile_cuda

    module = sys.modules["kernel"]
    compile_cuda(module.CUDA_SRC, defines=getattr(module, "CONFIG", {}))
    return {}


def compiled() -> dict:
    """How many modules of CUDA_SRC are loaded."""
    cuda = sys.modules.get("autokernel.cuda")
    return {"modules": len(cuda.loaded_modules()) if cuda else 0}


def resources(on_gpu: bool, before: int) -> dict:
    """Registers, spills and shared memory of what the latest kernel compiled, the largest of each.

    before: modules of CUDA_SRC that earlier ones had loaded.
    """
    found = []
    if cuda := sys.modules.get("autokernel.cuda"):
        found += [kernel for module in cuda.loaded_modules()[before:] for kernel in module.resources.values()]
    if on_gpu and "triton" in sys.modules:
        from autokernel.cuda import triton_resources

        for value in vars(sys.modules["kernel"]).values():
            function = getattr(value, "fn", value) if not hasattr(value, "device_caches") else value
            for caches in getattr(function, "device_caches", {}).values():
                found += [triton_resources(compiled) for compiled in caches[0].values()]
    names = ("registers", "spill_bytes", "smem_bytes")
    return {"resources": {n: max((r[n] for r in found if r.get(n) is not None), default=None) for n in names}}


def prepare_interpreter() -> None:
    """Make Triton's interpreter do what hardware does, and autotuned kernels run in it.

    It truncates float32 to bfloat16, hardware rounds to nearest. Its scalars are arrays of one element, which newer
    numpy does not take for an integer. Autotuning finds nothing to time: the first configuration is taken.
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

    make_tensor = interpreter._patch_lang_tensor

    def make_tensor_with_index(tensor, scope):
        make_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = make_tensor_with_index
    autotuner.Autotuner._bench = lambda self, *args, config, **options: [0.0, 0.0, 0.0]
