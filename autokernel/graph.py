"""A model as a graph: captured once by torch.compile, lowered to ATen operators, and the words to walk through it.

Capture: torch.compile with our own backend hands over each graph of the model (one, or several where it breaks), with
parameters lifted to inputs and modules inlined. Each is then traced before dispatch to ATen, where `x + y`,
`torch.add(x, y)` and `x.add(y)` are one operator while linear, SDPA, layer_norm and softmax stay whole. What is left of
spelling (casts that cast nothing, in-place writes to fresh tensors) is made uniform by `canonical`.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten

# operators that move no value: the same elements in another shape, order or dtype
CASTS = frozenset("to _to_copy type_as contiguous clone detach alias lift_fresh".split())
VIEWS = frozenset(
    "view reshape _unsafe_view flatten unflatten transpose t permute numpy_T mT swapaxes swapdims movedim expand "
    "expand_as unsqueeze squeeze slice select narrow split split_with_sizes chunk unbind getitem view_as real imag "
    "view_as_real view_as_complex".split()
)
RESHAPES = frozenset("view reshape _unsafe_view flatten unflatten".split())


# ---- walking --------------------------------------------------------------------------------------------------------


def name(node: Any) -> str:
    """`mul` for aten.mul.Tensor, `getitem`; "" for anything that is not an operator call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return getattr(node.target, "__name__", "")


def operand(node: fx.Node, key: str | int, default: Any = None) -> Any:
    """An operand by position, or by its name in the ATen schema; the schema's default where it was not given."""
    if isinstance(key, int):
        return node.args[key] if key < len(node.args) else default
    if key in node.kwargs:
        return node.kwargs[key]
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == key:
            given = argument.default_value if argument.has_default_value() else default
            return node.args[index] if index < len(node.args) else given
    return default


def pairs(node: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
    """Both orders of a commutative operator's operands, the first one a node."""
    a, b = node.args[:2]
    if node.kwargs.get("alpha", 1) == 1:
        for first, second in ((a, b), (b, a)):
            if isinstance(first, fx.Node):
                yield first, second


def strip(node: Any, names: frozenset[str] = CASTS) -> Any:
    """The node below a chain of such operators."""
    while name(node) in names:
        node = node.args[0]
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def value(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that stands for a node's value: shape, strides, dtype. None for what is no tensor."""
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else None


def tensor(node: fx.Node) -> torch.Tensor:
    """`value` of a node that gives a tensor."""
    return node.meta["val"]


def storage(node: fx.Node) -> int | None:
    """What tells whether two nodes share memory: views have the storage of what they look at."""
    held = value(node)
    return held.untyped_storage()._cdata if held is not None else None


def written(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors an operator writes to in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = enumerate(node.target._schema.arguments)
    marked = [(i, a.name) for i, a in schema if a.alias_info and a.alias_info.is_write]
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(n) for i, n in marked]
    flat = [n for g in given for n in (g if isinstance(g, (list, tuple)) else (g,))]
    return [n for n in flat if isinstance(n, fx.Node)]


def writers(graph: fx.Graph) -> dict[int | None, list[fx.Node]]:
    """Storage -> the operators that write to it, in order."""
    found: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for place in written(node):
            found[storage(place)].append(node)
    found.pop(None, None)
    return found


def shape(node: fx.Node) -> tuple[int, ...]:
    found = value(node)
    return tuple(found.shape) if found is not None else ()


def number(operand: Any) -> float | None:
    """A Python number, or None for a tensor."""
    return float(operand) if isinstance(operand, (int, float)) and not isinstance(operand, bool) else None


def part(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """(base, axis, start, length) when a node is a contiguous part of another one along one axis."""
    kind, base = name(node), operand(node, 0)
    if kind == "getitem" and name(base) in ("chunk", "split", "split_with_sizes"):
        axis, index = operand(base, "dim", 0), operand(node, 1)
        start = sum(piece.shape[axis] for piece in base.meta["val"][:index])
        base = operand(base, 0)
    elif kind == "slice" and operand(node, "step") == 1:
        axis, start = operand(node, "dim"), operand(node, "start") or 0
    elif kind == "narrow":
        axis, start = node.args[1:3]
    else:
        return None
    axis %= len(shape(base))
    return base, axis, start % shape(base)[axis] if start < 0 else start, shape(node)[axis]


def region(output: fx.Node, leaves: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """(nodes that compute `output` from the leaves, in order; nodes outside that they read besides)."""
    below, stack = set(), [output]
    while stack:
        node = stack.pop()
        if node not in leaves and node not in below:
            below.add(node)
            stack += node.all_input_nodes
    inside: dict[fx.Node, None] = {}
    for node in sorted(below):
        if any(n in leaves or n in inside for n in node.all_input_nodes):
            inside[node] = None
    outside = {n: None for node in inside for n in node.all_input_nodes if n not in inside and n not in leaves}
    return list(inside), list(outside)


def module_path(node: fx.Node) -> str:
    """Where in the model a node comes from: `blocks.0.attention`; "" for the root."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    inside = [path for path in stack if not path.startswith("G[")]  # a global: a function that became a module
    if not inside:
        return ""
    path = re.sub(r"^L\['\w+'\]", "", inside[-1])  # forward's first parameter, self as a rule
    return path.replace("['", ".").replace("']", "").removeprefix(".").removeprefix("_modules.")


# ---- what a matcher says --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A tensor argument of an operator: a node of the graph, seen through views that move no data.

    steps: ("slice.Tensor", 1, 0, 64) is aten.slice.Tensor(tensor, 1, 0, 64).
    """

    node: fx.Node
    steps: tuple[tuple[Any, ...], ...] = ()

    def then(self, operator: str, *arguments: Any) -> View:
        return View(self.node, (*self.steps, (operator, *arguments)))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return apply(self.steps, tensor)


def apply(steps: tuple[tuple[Any, ...], ...], tensor: torch.Tensor) -> torch.Tensor:
    for which, *arguments in steps:
        tensor = overload(which)(tensor, *arguments)
    return tensor


def overload(which: str) -> Callable:
    """torch.ops.aten.<name>.<overload> from "name.overload" or "name"."""
    packet, _, variant = which.partition(".")
    return getattr(getattr(aten, packet), variant or "default")


@dataclass(frozen=True)
class Match:
    """A claim to be proven: `output` is what the operator gives for these arguments.

    args: a View, or a number for a tensor filled with it (a norm without weight has ones). scalars: as the operator's.
    out: views (or a cast) from the operator's result to the output's value. fixed: arguments whose own structure the
    claim uses (a table of cosines that repeats its halves): the proof keeps their captured values.
    """

    output: fx.Node
    args: dict[str, View | float]
    scalars: dict[str, Any] = field(default_factory=dict)
    out: tuple[tuple[Any, ...], ...] = ()
    fixed: frozenset[str] = frozenset()


# ---- capture --------------------------------------------------------------------------------------------------------


class Graph:
    """One captured graph, called by torch.compile in place of the model's code.

    module: the graph, of ATen operators once it is lowered, by the first call. origin: what each input is ("parameter",
    "buffer", "input") and its name. calls: how often it ran. problem: why it could not be lowered; it runs all the
    same. run: set it to run something else with the same signature.
    """

    def __init__(self, index: int, source: fx.GraphModule, owner: Capture):
        self.index, self.source, self.module, self.owner = index, source, source, owner
        self.lowered = self._ready = False
        self.origin: dict[fx.Node, tuple[str, str]] = {}
        self.inputs: tuple = ()
        self.run: Callable | None = None
        self.calls = 0
        self.problem = ""

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        if not self._ready:
            self._lower(inputs)
            self.owner.prepare(self, inputs)
            self._ready = True  # where preparing failed, the next call tries again
        if self.owner.keep_inputs:
            self.inputs = inputs
        return (self.run or self.module)(*inputs)

    def _lower(self, inputs: tuple) -> None:
        try:
            if any("autocast" in str(n.target) for n in self.source.graph.nodes):
                raise ValueError("autocast inside, which decides on dtypes as it runs")
            with torch.no_grad():
                self.module = lower(self.source, inputs)
            self.lowered = True
        except Exception as error:  # an operator that cannot be traced: no sites here
            self.problem = one_line(error)
        names = self.owner.tensor_names()
        pairs = zip(self.module.graph.find_nodes(op="placeholder"), inputs, strict=True)
        self.origin = {node: names.get(id(given), ("input", node.name)) for node, given in pairs}


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder=' ...')}"


class Capture:
    """A model whose forward pass runs through captured graphs; call it like the model, under torch.no_grad().

    Raises nothing of its own: what torch.compile cannot trace runs as it did, outside of the graphs, and `breaks` says
    why. Where it captures nothing at all (a break inside of the loop over the layers), each child module is compiled by
    itself; `release` undoes that. forward: what to call instead of the model, whose own may be replaced meanwhile.
    prepare: called with each graph, and its inputs, before it runs for the first time. once: a call runs the model
    once, also the one that finds that only child modules can be compiled; `parted` tells so. Else that runs it twice.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable | None = None,
        prepare: Callable[[Graph, tuple], None] = lambda graph, inputs: None,
        once: bool = False,
    ):
        self.model, self.keep_inputs, self.prepare, self.once = model, False, prepare, once
        self.parted = False
        self.graphs: list[Graph] = []
        self._forward = forward or model
        self._parts: list[torch.nn.Module] = []
        self.problem = ""  # what torch.compile itself failed at: those parts run outside of the graphs
        self._compiled = torch.compile(self._forward, backend=self._backend, dynamic=False)
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # for good: a hook may come before any later call
        self._breaks_before = _break_counts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.parted = False
        # a loop over layers that breaks in each of them gives a graph per layer
        with torch._dynamo.config.patch(
            recompile_limit=256, accumulated_recompile_limit=1024, suppress_errors=bool(self.problem), allow_rnn=True
        ):
            try:
                out = self._compiled(*args, **kwargs)
                if not self.graphs and not self._parts:
                    self._parts = list(_parts(self.model))
                    for part in self._parts:
                        part.forward = torch.compile(part.forward, backend=self._backend, dynamic=False)
                    self._compiled, self.parted = self._forward, True
                    out = out if self.once else self._compiled(*args, **kwargs)
                return out
            except torch._dynamo.exc.TorchDynamoException as error:
                if self.problem:
                    raise
                self.problem = one_line(error)
        return self(*args, **kwargs)

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """A call like an earlier one, without what only a first one needs: setting limits takes as long as a kernel."""
        return self._compiled(*args, **kwargs)

    def release(self) -> None:
        """Leave the model as it was found."""
        for part in self._parts:
            part.__dict__.pop("forward", None)

    @property
    def breaks(self) -> list[str]:
        """Why torch.compile broke the graph, one line a reason."""
        found = _break_counts() - self._breaks_before
        return [textwrap.shorten(reason, 160, placeholder=" ...") for reason in found]

    def _backend(self, source: fx.GraphModule, _inputs: list) -> Graph:
        self.graphs.append(Graph(len(self.graphs), source, self))
        return self.graphs[-1]

    def tensor_names(self) -> dict[int, tuple[str, str]]:
        names = {id(t): ("buffer", n) for n, t in self.model.named_buffers(remove_duplicate=False)}
        return names | {id(t): ("parameter", n) for n, t in self.model.named_parameters(remove_duplicate=False)}


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _parts(child)
        elif "forward" not in child.__dict__:
            yield child


def _break_counts() -> Counter:
    return Counter(torch._dynamo.utils.counters["graph_break"])


def lower(source: fx.GraphModule, inputs: tuple) -> fx.GraphModule:
    """A graph of torch calls -> the same graph of ATen operators, canonical; nodes know their shape and module."""
    with torch.fx.traceback.preserve_node_meta():
        traced = make_fx(
            lambda *values: fx.Interpreter(source).run(*values), {aten.einsum.default: _einsum}, "fake",
            _allow_non_fake_inputs=True, pre_dispatch=True,
        )(*inputs)  # fmt: skip
    canonical(traced.graph)
    traced.recompile()
    return traced


def canonical(graph: fx.Graph) -> None:
    """Remove what does nothing and turn in-place writes to fresh tensors into ordinary operators."""
    for node in list(graph.nodes):
        if name(node) and _does_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    holders: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        holders[storage(node)].append(node)
    for node in list(graph.nodes):
        if name(node).endswith("_") and not name(node).startswith("_"):
            _functional(node, holders)
        if name(node) == "rms_norm" and operand(node, "eps") is None:
            node.args = (*node.args[:2], operand(node, "weight"), default_eps(tensor(operand(node, 0))))
            node.kwargs = {}


def default_eps(like: torch.Tensor) -> float:
    """The eps that F.rms_norm takes where none is given: of the input's dtype or of float32, which PyTorch changed."""
    with unset_fake_temporarily():
        probe = torch.full((1, 2), 0.01, dtype=like.dtype, device=like.device)
        got = torch.rms_norm(probe, (2,))
        kinds = (torch.finfo(like.dtype).eps, torch.finfo(torch.float32).eps)
        return min(kinds, key=lambda eps: (torch.rms_norm(probe, (2,), eps=eps) - got).abs().max().item())


def _einsum(equation: str, tensors: list[torch.Tensor], path: Any = None) -> torch.Tensor:
    """Two tensors contracted as one matmul, so that a product written as an einsum looks like any other."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    labels = inputs.split(",")
    plain = len(labels) == 2 and out and "." not in equation and all(len(set(w)) == len(w) for w in (*labels, out))
    if not plain or not set(labels[0]) ^ set(labels[1]) <= set(out):  # a label of one tensor alone is summed
        return aten.einsum.default.decompose(equation, tensors, path=path)
    (left, right), (a, b) = labels, tensors
    batch = [c for c in out if c in left and c in right]
    rows, columns = [c for c in out if c in left and c not in right], [c for c in out if c in right and c not in left]
    summed = [c for c in left if c not in out]
    sizes = dict(zip(left + right, (*a.shape, *b.shape), strict=True))

    def size(names: list[str]) -> list[int]:
        return [sizes[c] for c in names]

    depth, height = math.prod(size(summed)), [math.prod(size(rows))] if batch else size(rows)
    a = a.permute([left.index(c) for c in batch + rows + summed]).reshape([*size(batch), *height, depth])
    b = b.permute([right.index(c) for c in batch + summed + columns])
    b = b.reshape([*size(batch), depth, math.prod(size(columns))])
    found = batch + rows + columns
    return torch.matmul(a, b).reshape(size(found)).permute([found.index(c) for c in out])


_OFTEN_NOTHING = frozenset("to type_as contiguous expand slice alias detach view reshape permute".split())


def _does_nothing(node: fx.Node) -> bool:
    if name(node) in ("dropout", "feature_dropout", "alpha_dropout"):
        return not operand(node, "train") or operand(node, "p") == 0
    before, after = operand(node, 0), value(node)
    before = value(before) if isinstance(before, fx.Node) else None
    if name(node) not in _OFTEN_NOTHING or before is None or after is None or operand(node, "copy"):
        return False
    same = before.dtype == after.dtype and before.device == after.device and before.shape == after.shape
    return same and before.stride() == after.stride()


def _functional(node: fx.Node, holders: dict[int | None, list[fx.Node]]) -> None:
    """mul_(x, y) -> mul(x, y), where x is a fresh tensor that nothing else can see. holders: nodes by their storage."""
    target = operand(node, 0)
    if not name(target) or storage(target) is None:
        return
    if any(n is not target and n < node for n in holders[storage(target)]):
        return  # not fresh, or a view sees the write
    if any(node < user for user in target.users):
        return  # someone reads the old name and means the new value
    others = [v for n in node.all_input_nodes if (v := value(n)) is not None and v.ndim and v.is_floating_point()]
    if any(other.dtype != tensor(target).dtype for other in others):
        return  # in place keeps the dtype that promotion would change
    overloads, old = getattr(aten, name(node)[:-1], None), node.target
    if isinstance(old, torch._ops.OpOverload) and overloads and old._overloadname in overloads.overloads():
        node.target = getattr(overloads, old._overloadname)
        holders[storage(target)].remove(target)  # what follows looks at the new tensor


# ---- what a node does -----------------------------------------------------------------------------------------------


def is_random(node: fx.Node) -> bool:
    """Whether two calls on the same inputs may differ: dropout, sampling."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return name(node) != "scaled_dot_product_attention" or bool(operand(node, "dropout_p"))


def origins(graph: Graph) -> dict[fx.Node, frozenset[str]]:
    """What each node's value depends on: "parameter", "buffer", "float input", "other input", "random"."""
    found: dict[fx.Node, frozenset[str]] = {}
    wrote: dict[int | None, set[str]] = defaultdict(set)  # kinds of what was written to a storage
    for node in graph.module.graph.nodes:
        kinds = {kind for n in node.all_input_nodes for kind in found[n] | wrote[storage(n)]}
        if node.op == "placeholder":
            kind, given = graph.origin[node][0], value(node)
            floating = given is not None and given.is_floating_point()
            kinds = {kind if kind != "input" else "float input" if floating else "other input"}
        elif is_random(node) or name(node) == "empty":
            kinds.add("random")
        found[node] = frozenset(kinds)
        for place in written(node):
            wrote[storage(place)] |= kinds
    # a node's tensor is what it is once all was written to it
    return {node: kinds | wrote[storage(node)] for node, kinds in found.items()}


_PRODUCTS = frozenset("linear matmul mm bmm mv dot vdot _grouped_mm".split())  # summed over the first one's last axis
_ADDED = frozenset("addmm baddbmm addbmm addmv".split())  # the same with something to add before


def flops(node: fx.Node) -> float:
    """Floating-point operations of a product, convolution, recurrence or attention (a multiply-add is two); else 0.

    torch.utils.flop_counter counts no attention on a CPU (torch 2.11) and takes a causal one for a full one.
    """
    kind, out = name(node), shape(node)
    a, b, c = (shape(n) if isinstance(n, fx.Node) else () for n in (*node.args[:3], None, None, None)[:3])
    if kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") and isinstance(node.args[2], (list, tuple)):
        return 2.0 * math.prod(a[:-1]) * sum(math.prod(w) for w in map(shape, node.args[2]) if len(w) == 2)
    if value(node) is None:
        return 0.0
    if kind in _PRODUCTS:
        return 2.0 * math.prod(out) * a[-1]
    if kind in _ADDED:
        return 2.0 * math.prod(out) * b[-1] * (b[0] if kind == "addbmm" else 1)
    if kind == "tensordot":
        return 2.0 * math.sqrt(math.prod(out) * math.prod(a) * math.prod(b))
    if kind == "bilinear":
        return 2.0 * math.prod(out) * (a[-1] + 1) * b[-1]
    if kind == "scaled_dot_product_attention":
        half = 0.5 if operand(node, "is_causal") else 1.0
        return half * 2.0 * math.prod(a[:-1]) * b[-2] * (a[-1] + c[-1])
    if kind in ("convolution", *(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3))):
        batch, _, *places = a if "transpose" in kind or operand(node, "transposed") else out
        return 2.0 * math.prod(b) * batch * math.prod(places)
    return 0.0
