"""A model as a graph: captured once by torch.compile, lowered to ATen operators, and the words to walk through it.

Capture: torch.compile with our own backend hands over each graph of the model (one, or several where it breaks), with
parameters lifted to inputs and modules inlined. Each is then traced before dispatch to ATen, where `x + y`,
`torch.add(x, y)` and `x.add(y)` are one operator while linear, SDPA, layer_norm and softmax stay whole. What is left of
spelling (casts that cast nothing, in-place writes to fresh tensors) is made uniform by `canonical`.
"""

from __future__ import annotations

import math
from collections import Counter
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
    """An operand by its name in the ATen schema, or by position; the schema's default where it was not given."""
    arguments = node.target._schema.arguments
    for index, argument in enumerate(arguments):
        if argument.name == key or index == key:
            if index < len(node.args):
                return node.args[index]
            if argument.name in node.kwargs:
                return node.kwargs[argument.name]
            return argument.default_value if argument.has_default_value() else default
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
    """The fake tensor that stands for a node's value: shape, strides, dtype."""
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else None


def shape(node: fx.Node) -> tuple[int, ...]:
    found = value(node)
    return tuple(found.shape) if found is not None else ()


def number(operand: Any) -> float | None:
    """A Python number, or None for a tensor."""
    return float(operand) if isinstance(operand, (int, float)) and not isinstance(operand, bool) else None


def part(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """(base, axis, start, length) when a node is a contiguous part of another one along one axis."""
    if name(node) == "getitem" and isinstance(node.args[1], int):
        pieces, index = node.args[0], node.args[1]
        if name(pieces) not in ("chunk", "split", "split_with_sizes"):
            return None
        base, axis = pieces.args[0], operand(pieces, "dim", 0)
        sizes = [v.shape[axis] for v in pieces.meta["val"]]
        return base, axis % len(shape(base)), sum(sizes[:index]), sizes[index]
    if name(node) == "slice" and operand(node, "step", 1) == 1:
        base, axis, start = node.args[0], operand(node, "dim", 0), operand(node, "start") or 0
    elif name(node) == "narrow":
        base, axis, start = node.args[:3]
    else:
        return None
    axis, size = axis % len(shape(base)), shape(base)[axis]
    return base, axis, start % size if start < 0 else start, shape(node)[axis]


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
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0].replace("L['self']", "", 1)
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

    module: the ATen graph, from the first call on. origin: what each input is ("parameter", "buffer", "input") and its
    name. calls: how often it ran. run: set it to run something else with the same signature.
    """

    def __init__(self, index: int, source: fx.GraphModule, owner: Capture):
        self.index, self.source, self.owner = index, source, owner
        self.module: fx.GraphModule | None = None
        self.origin: dict[fx.Node, tuple[str, str]] = {}
        self.inputs: tuple = ()
        self.run: Callable | None = None
        self.calls = 0
        self.problem = ""

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        if self.module is None:
            self._lower(inputs)
            self.owner.prepare(self, inputs)
        if self.owner.keep_inputs:
            self.inputs = inputs
        return (self.run or self.module)(*inputs)

    def _lower(self, inputs: tuple) -> None:
        try:
            with torch.no_grad():
                self.module = lower(self.source, inputs)
        except Exception as error:  # an operator that cannot be traced: the graph still runs, without sites
            self.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self.module = self.source
        names = self.owner.tensor_names()
        placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        for node, given in zip(placeholders, inputs, strict=True):
            self.origin[node] = names.get(id(given), ("input", node.name))


class Capture:
    """A model whose forward pass runs through captured graphs; call it like the model, under torch.no_grad().

    Raises nothing of its own: what torch.compile cannot trace runs as it did, outside of the graphs, and `breaks` says
    why. Where it captures nothing at all (a break inside of the loop over the layers), each child module is compiled by
    itself; `release` undoes that. forward: what to call instead of the model, whose own may be replaced meanwhile.
    prepare: called with each graph, and its inputs, before it runs for the first time.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable | None = None,
        prepare: Callable[[Graph, tuple], None] = lambda graph, inputs: None,
    ):
        self.model, self.graphs, self.keep_inputs, self.prepare = model, [], False, prepare
        self._forward = forward or model
        self._parts: list[torch.nn.Module] = []
        self.problem = ""  # what torch.compile itself failed at: those parts run outside of the graphs
        self._compiled = torch.compile(self._forward, backend=self._backend, dynamic=False)
        self._breaks_before = _break_counts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a loop over layers that breaks in each of them gives a graph per layer
        with torch._dynamo.config.patch(
            recompile_limit=256, accumulated_recompile_limit=1024, suppress_errors=bool(self.problem)
        ):
            try:
                out = self._compiled(*args, **kwargs)
                if not self.graphs and not self._parts:
                    self._parts = list(_parts(self.model))
                    for part in self._parts:
                        part.forward = torch.compile(part.forward, backend=self._backend, dynamic=False)
                    self._compiled = self._forward
                    out = self._compiled(*args, **kwargs)
                return out
            except torch._dynamo.exc.TorchDynamoException as error:
                if self.problem:
                    raise
                self.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
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
        return [" ".join(reason.split())[:160] for reason in found]

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

    def run(*values):
        return fx.Interpreter(source).run(*values)

    whole = {aten.einsum.default: _einsum}
    with torch.fx.traceback.preserve_node_meta():
        traced = make_fx(run, whole, "fake", _allow_non_fake_inputs=True, pre_dispatch=True)(*inputs)
    canonical(traced.graph)
    traced.recompile()
    return traced


def canonical(graph: fx.Graph) -> None:
    """Remove what does nothing and turn in-place writes to fresh tensors into ordinary operators."""
    for node in list(graph.nodes):
        if name(node) and _does_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        if name(node).endswith("_") and not name(node).startswith("_"):
            _functional(node)
        if name(node) == "rms_norm" and operand(node, "eps") is None:
            node.args = (*node.args[:2], operand(node, "weight"), default_eps(value(node.args[0])))
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
    summed = [c for c in left if c in right and c not in out]
    sizes = dict(zip(left + right, (*a.shape, *b.shape), strict=True))
    a, b = _order(a, left, batch + rows + summed), _order(b, right, batch + summed + columns)
    n, rank = len(batch), len(rows)
    if batch and rank != 1:
        a = a.flatten(n, n + rank - 1) if rank else a.unsqueeze(n)
    a = a.flatten(-len(summed)) if len(summed) > 1 else a if summed else a.unsqueeze(-1)
    b = b.flatten(n, n + len(summed) - 1) if len(summed) > 1 else b if summed else b.unsqueeze(n)
    b = b.flatten(n + 1) if len(columns) > 1 else b if columns else b.unsqueeze(-1)
    made = torch.matmul(a, b)
    made = made.reshape([sizes[c] for c in batch + rows + columns])
    return _order(made, batch + rows + columns, out)


def _order(tensor: torch.Tensor, now: Any, wanted: Any) -> torch.Tensor:
    axes = [list(now).index(c) for c in wanted]
    return tensor if axes == sorted(axes) else tensor.permute(axes)


def _does_nothing(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or value(source) is None or value(node) is None:
        return False
    before, after = value(source), value(node)
    if name(node) in ("dropout", "feature_dropout", "alpha_dropout"):
        return not operand(node, "train") or operand(node, "p") == 0
    same = before.dtype == after.dtype and before.device == after.device and before.shape == after.shape
    if name(node) in ("to", "type_as", "contiguous", "expand", "slice", "alias", "detach", "view", "reshape"):
        return same and before.stride() == after.stride() and not operand(node, "copy", False)
    return False


def _functional(node: fx.Node) -> None:
    """mul_(x, y) -> mul(x, y), where x is a fresh tensor that nothing else can see."""
    target = node.args[0]
    fresh = isinstance(target, fx.Node) and target.op == "call_function" and name(target) not in VIEWS | CASTS
    fresh = fresh and not name(target).endswith("_")  # what another in-place operator returned is what that wrote to
    if not fresh or any(name(user) in VIEWS | CASTS and user < node for user in target.users):
        return
    if any(node < user for user in target.users):  # someone reads the old name and means the new value
        return
    tensors = [value(a) for a in node.args[1:] if isinstance(a, fx.Node)]
    if any(t is not None and t.ndim and t.dtype.is_floating_point and t.dtype != value(target).dtype for t in tensors):
        return  # in place keeps the dtype that promotion would change
    packet = getattr(aten, name(node)[:-1], None)
    if packet is not None and node.target._overloadname in packet.overloads():
        node.target = getattr(packet, node.target._overloadname)


# ---- running --------------------------------------------------------------------------------------------------------


def execute(node: fx.Node, env: dict[fx.Node, Any], root: torch.nn.Module | None = None) -> Any:
    """Run one node on the values of its inputs."""
    if node.op == "get_attr":
        found = root
        for attribute in node.target.split("."):
            found = getattr(found, attribute)
        return found
    args = fx.map_arg(node.args, lambda n: env[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
    if node.op == "call_function":
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return root.get_submodule(node.target)(*args, **kwargs)


def interpret(
    module: fx.GraphModule,
    inputs: tuple,
    call: Callable[[fx.Node, dict], Any] | None = None,
    after: Callable[[fx.Node, dict], None] = lambda node, env: None,
    keep: dict[fx.Node, fx.Node] | None = None,
) -> Any:
    """Run a graph node by node; a value lives until its last reader has run.

    call: runs one node on the values so far (default: `execute`). after: called behind each node. keep: node -> a node
    behind which its value must still exist.
    """
    nodes = list(module.graph.nodes)
    last = {n: user for user in nodes for n in user.all_input_nodes}
    for node, until in (keep or {}).items():
        last[node] = max(last.get(node, until), until)
    dies: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        dies.setdefault(user, []).append(node)
    given, env = iter(inputs), {}
    for node in nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: env[n])
        if node.op == "placeholder":
            env[node] = next(given)
        else:
            env[node] = call(node, env) if call and node.op != "get_attr" else execute(node, env, module)
        after(node, env)
        for dead in dies.get(node, ()):
            del env[dead]
    return None


def is_random(node: fx.Node) -> bool:
    """Whether two calls on the same inputs may differ: dropout, sampling."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return name(node) != "scaled_dot_product_attention" or bool(operand(node, "dropout_p"))


def origins(graph: Graph) -> dict[fx.Node, frozenset[str]]:
    """What each node's value depends on: "parameter", "buffer", "float input", "other input", "random"."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            kind = graph.origin.get(node, ("input", ""))[0]
            floating = value(node) is not None and value(node).dtype.is_floating_point
            found[node] = frozenset([("float input" if floating else "other input") if kind == "input" else kind])
        else:
            found[node] = frozenset().union(*(found[n] for n in node.all_input_nodes))
            if is_random(node) or name(node) == "empty":
                found[node] |= {"random"}
    return found


_PRODUCTS = frozenset("linear matmul mm bmm addmm baddbmm".split())


def flops(node: fx.Node) -> float:
    """Floating-point operations of a product, convolution or attention node (a multiply-add is two); 0 for others."""
    kind, out = name(node), shape(node)
    if kind in _PRODUCTS and out is not None:
        left = node.args[1] if kind in ("addmm", "baddbmm") else node.args[0]
        return 2.0 * math.prod(out) * shape(left)[-1]
    if kind == "scaled_dot_product_attention":
        q, k, v = (shape(n) for n in node.args[:3])
        half = 0.5 if operand(node, "is_causal") else 1.0
        return half * 2.0 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    if kind in ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d"):
        weight = shape(node.args[1])
        upwards = "transpose" in kind or operand(node, "transposed", False)
        batch, _, *places = shape(node.args[0]) if upwards else out
        return 2.0 * math.prod(weight) * batch * math.prod(places)
    return 0.0


