"""What a KernelBench problem will take, before anything of its size exists: it is run on PyTorch's meta device.

And the same problem at smaller sizes, for a machine without a GPU: integers in its module, get_inputs and
get_init_inputs are halved, the largest first, as long as the model still runs there.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from autokernel.kernelbench import GIVEN
from autokernel.modelcall import flat, named, rebuilt, tensors_of
from autokernel.paths import atomic_write, cache_dir
from autokernel.spec import DTYPES

CONTEXT_BYTES = 600 << 20  # what a process on the GPU takes before its first tensor, and the buffer that flushes L2
CPU_FLOPS_PER_S, CPU_BYTES_PER_S = 2e10, 4e9  # a few cores; good for "seconds, minutes or hours"
SMALL_FLOPS, SMALL_BYTES = 2e8, 4e7  # where halving stops: well under a second on a CPU


@dataclass(frozen=True)
class Footprint:
    """Bytes of inputs, outputs and parameters, the most that one call holds beside its inputs, and counted FLOPs.

    FLOPs are those of matrix products, convolutions and attention. seen: how much of forward ran on the meta device:
    "all" of it; "some", as a recurrence of thousands of steps takes too long there; "none", as it looks at values. What
    was not seen counts as zero.
    """

    inputs: int
    outputs: int
    parameters: int
    working: int
    flops: float
    seen: str

    def needed(self, workers: int) -> int:
        """Bytes of device memory in a run with so many children: each has an arena (two copies of the inputs and the
        output), the model, a call's working memory and the output before; the judge has the reference, two inputs
        that it drew and one being drawn, one output taken, and what comparing it takes."""
        child = 2 * self.inputs + self.outputs + self.parameters + self.working + self.outputs + CONTEXT_BYTES
        judge = 3 * self.inputs + self.parameters + self.working + self.outputs + CONTEXT_BYTES + (1 << 30)
        return judge + workers * child

    @property
    def cpu_seconds(self) -> float:
        """A rough time of one call on a CPU."""
        return self.flops / CPU_FLOPS_PER_S + (self.inputs + self.parameters + 2 * self.working) / CPU_BYTES_PER_S


def footprint(code: str, precision: str = "fp32", look_s: float = 3.0) -> Footprint:
    """Run a problem on the meta device, for `look_s` seconds at most. Raises whatever loading its module raises."""
    module = ModuleType("kernelbench_problem")
    exec(compile(code, "problem.py", "exec"), vars(module))
    dtype = DTYPES[precision]
    torch.empty(1, device="meta").relu()  # imports for a second what the meta device takes, before the time counts

    def there(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(t, device="meta", dtype=dtype if t.is_floating_point() else t.dtype)

    template, tensors = named(_on_meta(module.get_inputs))
    tensors = {n: there(t) for n, t in tensors.items()}
    init = list(getattr(module, "get_init_inputs", list)())
    model, outs, seen = torch.nn.Module(), (), "none"
    peak, counter = _Peak(), FlopCounterMode(display=False)
    with contextlib.suppress(Exception), torch.no_grad():  # anybody's code, which may look at values
        model = _on_meta(lambda: module.Model(*init)).to(device="meta", dtype=dtype)
        peak = _Peak([*tensors.values(), *tensors_of(model).values()], look_s)
        try:
            with peak, counter:
                outs = flat(model(*rebuilt(template, tensors)))
            seen = "all"
        except _EnoughSeen:
            seen = "some"
    parameters = _nbytes(tensors_of(model).values())
    flops = float(counter.get_total_flops())
    return Footprint(_nbytes(tensors.values()), _nbytes(outs), parameters, peak.most, flops, seen)


def _on_meta(make: Any) -> Any:
    """What `make` makes, on the meta device where it can be made there."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # noqa: BLE001 - anybody's code, which may look at values
        return make()


def _nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def known_footprint(code: str, precision: str) -> Footprint:
    """`footprint`, remembered in the cache: finding it costs more than many a problem."""
    key = hashlib.sha256(f"{torch.__version__} {precision}\n{code}".encode()).hexdigest()
    path = cache_dir() / "kernelbench" / "footprints" / f"{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Footprint(**json.loads(path.read_text()))
    found = footprint(code, precision)
    atomic_write(path, json.dumps(asdict(found)).encode())
    return found


class _EnoughSeen(BaseException):
    """Time is up."""


class _Peak(TorchDispatchMode):
    """The most bytes of storage that lived at once, those of `held` not counted. Raises _EnoughSeen after a while."""

    def __init__(self, held: Any = (), look_s: float = 0.0):
        super().__init__()
        self.living = {t.untyped_storage()._cdata: 1 for t in held}
        self.now = self.most = 0
        self.until = time.monotonic() + look_s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self.until:
            raise _EnoughSeen
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.living:
                    self.now += size
                    self.most = max(self.most, self.now)
                self.living[key] = self.living.get(key, 0) + 1
                weakref.finalize(tensor, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.living[key] -= 1
        if not self.living[key]:
            del self.living[key]
            self.now -= size


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a GPU, or on this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def memory_fault(found: Footprint, workers: int, device: torch.device) -> str:
    """Why a problem does not fit, in one line; "" if it does."""
    needed, free = found.needed(workers), free_bytes(device)
    if needed <= free:
        return ""
    least = "" if found.seen == "all" else "at least "
    where = "this GPU" if device.type == "cuda" else "this machine"
    text = f"the problem needs {least}{needed / 2**30:.1f} GiB for {workers} processes and the judge, {where} has "
    return text + f"{free / 2**30:.1f} GiB free"


# ---- smaller sizes ---------------------------------------------------------------------------------------------------


def shrunk_code(code: str, precision: str = "fp32") -> str:
    """The problem's source at sizes that a CPU runs well under a second, or as near as halving gets."""

    def weight(text: str) -> float:
        found = footprint(text, precision, look_s=0.5)
        size = found.inputs + found.parameters + found.working
        longer = {"all": 0.0, "some": 1e3 * (1 + found.inputs / SMALL_BYTES), "none": float("inf")}
        return found.flops / SMALL_FLOPS + size / SMALL_BYTES + longer[found.seen]

    tree = ast.parse(code)
    now = weight(code)
    while 1 < now < float("inf"):
        nodes = sorted(_sizes(tree), key=lambda n: -n.value)
        together = [[n for n in nodes if n.value == value] for value in dict.fromkeys(n.value for n in nodes)]
        for group in [[n] for n in nodes] + together:  # sizes that must agree are usually equal
            old = group[0].value
            for node in group:
                node.value = old // 2
            try:
                then = weight(ast.unparse(tree))
            except Exception:  # noqa: BLE001 - sizes that the module itself refuses
                then = float("inf")
            if then < 0.95 * now:
                now = then
                break
            for node in group:
                node.value = old
        else:
            break
    return ast.unparse(tree)


def _sizes(tree: ast.Module) -> Iterator[Any]:
    """Integers of four and more in assignments of the module and in the functions that make inputs."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) or getattr(node, "name", "") in GIVEN:
            constants = (n for n in ast.walk(node) if isinstance(n, ast.Constant))
            yield from (n for n in constants if type(n.value) is int and n.value >= 4)
