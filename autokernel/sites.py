"""Sites: the places of a model that compute one of the operators, found by anchor, proven by value, replaceable.

A spec's matchers claim that a node of a captured graph is the operator of certain arguments (`graph.Match`). A claim
becomes a site when its sub-graph is closed (nothing else reads its intermediates) and when the sub-graph and the
operator's reference agree in float64: on the captured values, and on random ones of sizes at which a soft-cap, a
clamp, an offset or another mask shows. Equal sub-graphs (a layer repeated) are proven once.
"""

from __future__ import annotations

import hashlib
import math
import os.path
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from autokernel import ops
from autokernel.graph import (
    CASTS,
    VIEWS,
    Capture,
    Graph,
    Match,
    View,
    apply,
    is_random,
    module_path,
    name,
    origins,
    overload,
    region,
    storage,
    tensor,
    value,
    writers,
)
from autokernel.spec import DTYPES, OpSpec, SpecError, axes_shape, bind_axes, dtype_name
from autokernel.targets import target_key

TOLERANCE = 1e-7  # of rms + |ref| in float64: eps = 1e-5 read as 1e-6 differs by 2e-6, fp32 constants by 1e-8
RANDOM_SCALE = 2.0  # scores then reach 10 to 20, where a soft-cap at 50 bends by a percent
ROW_SCALES = (0.0, 1e-3, 1.0, 30.0)
_GENERIC = frozenset("cat stack pow sqrt exp".split())  # anchors that mostly mean something else: no reason is noted
KEEPS_STATE = frozenset("batch_norm instance_norm _batch_norm_impl_index native_batch_norm cudnn_batch_norm".split())
_NAMES = {dtype: short for short, dtype in DTYPES.items()}


@dataclass(eq=False)
class Site:
    """One operator call of a model, as a sub-graph that can be replaced.

    nodes: the sub-graph in order, the last one gives the result. conditions: nodes outside of it that it reads besides
    its arguments (a mask): the claim holds for their values. conditional: they depend on the model's inputs.
    tensors: argument -> fake tensor with the shape, strides and dtype that a kernel would see. writers: of the graph.
    inside: the larger site that contains this one, if any.
    """

    spec: OpSpec
    graph: Graph
    match: Match
    nodes: tuple[fx.Node, ...]
    conditions: tuple[fx.Node, ...]
    conditional: bool
    tensors: dict[str, torch.Tensor]
    dtype: str
    size: dict[str, Any]
    writers: dict[int | None, list[fx.Node]]
    inside: Site | None = None

    @property
    def op(self) -> str:
        return self.spec.name

    @property
    def output(self) -> fx.Node:
        return self.match.output

    @cached_property
    def scalars(self) -> dict[str, Any]:
        return {**self.spec.scalars, **self.match.scalars}

    @cached_property
    def module(self) -> str:
        """Where in the model: the path that the sub-graph's modules share."""
        return ".".join(os.path.commonprefix([module_path(n).split(".") for n in self.nodes]))  # of lists, part by part

    @cached_property
    def work(self) -> tuple[fx.Node, ...]:
        """The nodes that compute something."""
        return tuple(n for n in self.nodes if name(n) not in VIEWS | CASTS) or self.nodes[-1:]

    @cached_property
    def leaves(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(a.node for a in self.match.args.values() if isinstance(a, View)))

    @cached_property
    def fixed(self) -> tuple[fx.Node, ...]:
        """The leaves whose captured values the claim uses."""
        views = [self.match.args[n] for n in sorted(self.match.fixed)]
        return tuple(v.node for v in views if isinstance(v, View))

    @cached_property
    def guards(self) -> tuple[fx.Node, ...]:
        """The graph's inputs whose values the claim holds for: those that conditions and fixed leaves are made from."""
        found: dict[fx.Node, None] = dict.fromkeys((*self.conditions, *self.fixed))
        todo = list(found)
        while todo:
            made = todo.pop()
            wrote = [n for w in self.writers.get(storage(made), ()) for n in w.all_input_nodes]
            for node in (*made.all_input_nodes, *wrote):
                if node not in found:
                    found[node] = None
                    todo.append(node)
        return tuple(sorted(n for n in found if n.op == "placeholder"))

    @property
    def result(self) -> torch.Tensor:
        """What the operator gives, before the views that make it the output (on meta)."""
        return _result(self.spec, self.scalars, self.dtype, self.size)

    @property
    def flops(self) -> float:
        return self.spec.flops(self.size, self.scalars)

    @property
    def bytes(self) -> int:
        """Each argument once and the result once."""
        return sum(t.nbytes for t in (*self.tensors.values(), tensor(self.output)))

    @cached_property
    def key(self) -> str:
        """Sites with the same key are one target: operator, dtypes, shapes, strides, scalars."""
        return target_key(self.op, {n: described(t) for n, t in self.tensors.items()}, self.scalars)

    @cached_property
    def reference(self) -> str:
        """The captured sub-graph, one ATen call a line; the same text for each repetition of a layer."""
        labels = {n: f"${i}" for i, n in enumerate(self.leaves)} | {n: f"?{i}" for i, n in enumerate(self.conditions)}
        lines = [f"{label}: {dtype_name(tensor(n).dtype)} {list(tensor(n).shape)} {list(tensor(n).stride())}"
                 for n, label in labels.items()]  # fmt: skip
        for argument, given in self.match.args.items():
            seen = f"{labels[given.node]} {given.steps or ''}" if isinstance(given, View) else f"filled with {given}"
            lines.append(f"{argument} = {seen}".rstrip())
        for i, node in enumerate(self.nodes):
            labels[node] = f"%{i}"
            args, kwargs = _mapped(node, lambda a: labels.get(a, a) if isinstance(a, fx.Node) else a)
            words = [str(a).replace("'", "") for a in args] + [f"{k}={v}" for k, v in kwargs.items()]
            lines.append(f"%{i} = {node.target if isinstance(node.target, torch._ops.OpOverload) else name(node)}"
                         f"({', '.join(words)})")  # fmt: skip
        return "\n".join(lines)

    @property
    def reference_sha256(self) -> str:
        return hashlib.sha256(self.reference.encode()).hexdigest()


def _mapped(node: fx.Node, change: Callable[[Any], Any]) -> tuple[tuple, dict[str, Any]]:
    """A node's arguments, each changed."""
    args: Any = fx.node.map_aggregate(node.args, change)
    kwargs: Any = fx.node.map_aggregate(node.kwargs, change)
    return args, kwargs


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """An argument as target.json has it."""
    return {"shape": list(tensor.shape), "strides": list(tensor.stride()), "dtype": dtype_name(tensor.dtype)}


@dataclass
class Found:
    """sites: disjoint, in the model's order; inner: sites inside of those; refused: node -> why it is no site."""

    sites: list[Site] = field(default_factory=list)
    inner: list[Site] = field(default_factory=list)
    refused: dict[fx.Node, str] = field(default_factory=dict)


def find(
    capture: Capture,
    progress: Callable[[str], None] = lambda text: None,
    graphs: Iterable[Graph] | None = None,
    wanted: Callable[[Site], bool] = lambda site: True,
) -> Found:
    """All sites of a capture whose `keep_inputs` was set when it ran. Takes about one float64 forward pass.

    graphs: of some of its graphs only. wanted: only such sites are proven; others are as if they were not there.
    """
    found = Found()
    proven: dict[tuple, str] = {}
    specs = [ops.get(op) for op in ops.names()]
    for graph in capture.graphs if graphs is None else graphs:
        if graph.lowered:
            groups = _claims(graph, specs, found.refused, wanted)
            progress(f"proving {len(groups)} claims of graph {graph.index}")
            proof = _Proof(graph, groups, proven, found.refused)
            with torch.no_grad():
                proof.run(*graph.inputs)
            top, inner = _disjoint(proof.found)
            found.sites += top
            found.inner += inner
    kept = {n for s in [*found.sites, *found.inner] for n in s.nodes}
    found.refused = {n: why for n, why in found.refused.items() if n not in kept}
    return found


# ---- from claims to candidates --------------------------------------------------------------------------------------


def _claims(
    graph: Graph, specs: list[OpSpec], refused: dict[fx.Node, str], wanted: Callable[[Site], bool]
) -> list[tuple[fx.Node, list[Site]]]:
    """Anchors with their candidates, the preferred one first. What cannot be a site leaves its reason in `refused`."""
    groups, depends, wrote = [], origins(graph), writers(graph.module.graph)
    for node in graph.module.graph.nodes:
        for spec in specs:
            matcher = spec.sites.get(name(node))
            group: list[Site] = []
            for match in matcher(node) if matcher else ():
                built = match if isinstance(match, str) else _candidate(graph, spec, match, depends, wrote)
                if isinstance(built, Site):
                    group += [built] * wanted(built)
                elif name(node) not in _GENERIC:
                    refused.setdefault(node, f"{spec.name}: {built}")
            if group:
                groups.append((node, group))
    return groups


def _candidate(
    graph: Graph, spec: OpSpec, match: Match, depends: dict[fx.Node, frozenset[str]],
    wrote: dict[int | None, list[fx.Node]],
) -> Site | str:  # fmt: skip
    """A closed, well-typed sub-graph for a claim, or why there is none."""
    leaves = {a.node for a in match.args.values() if isinstance(a, View)}
    nodes, conditions = region(match.output, leaves)
    if not nodes or nodes[-1] is not match.output:
        return "the result does not depend on the arguments"
    read = {n for node in nodes for n in node.all_input_nodes}
    if not leaves <= read:
        return "an argument is not read"
    if not match.output.users:
        return "its result is not used"
    if writer := _overwritten(nodes, {*leaves, *conditions}, wrote):
        return f"{name(writer)} writes to what it reads before it has a result"
    memory = storage(match.output)
    strided = graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    looking = [n for n in strided if storage(n) == memory]
    if any(match.output < n for n in (*wrote.get(memory, ()), *looking)):
        return "its result is written to in place, or looked at as memory"  # a kernel's may lie otherwise
    inside = set(nodes)
    for node in nodes:
        if is_random(node) or name(node).endswith("_"):
            return f"{name(node)} inside is random or writes in place"
        others = [u for u in node.users if u not in inside]
        if node is not match.output and others and name(node) not in VIEWS | CASTS:
            return f"its intermediate {name(node)} is also read by {name(others[0]) or 'the result of the graph'}"
    kinds = {kind for n in conditions for kind in depends[n]}
    if unknown := kinds & {"parameter", "float input", "random"}:
        return f"it also reads a tensor made from a {min(unknown)}"
    try:
        tensors, dtype, size = _typed_arguments(spec, match)
        _check_result(spec, match, dtype, size)
    except (SpecError, RuntimeError, IndexError) as error:
        return str(error).splitlines()[0]
    conditional = "other input" in kinds
    return Site(spec, graph, match, tuple(nodes), tuple(conditions), conditional, tensors, dtype, size, wrote)


def _overwritten(
    nodes: list[fx.Node], read: set[fx.Node], wrote: dict[int | None, list[fx.Node]]
) -> fx.Node | None:
    """An operator among the nodes, but not of them, that writes in place to a tensor which they have read or made.

    The operator that takes their place reads everything at the end.
    """
    inside, first, last = set(nodes), min(nodes), nodes[-1]
    for memory in {storage(n) for n in (*read, *nodes)}:
        for writer in wrote.get(memory, ()):
            if first < writer < last and writer not in inside:
                return writer
    return None


def _typed_arguments(spec: OpSpec, match: Match) -> tuple[dict[str, torch.Tensor], str, dict[str, Any]]:
    """The arguments as fake tensors, the site's dtype, and its size. Raises SpecError."""
    tensors: dict[str, torch.Tensor] = {}
    size: dict[str, Any] = {}
    for argument, given in match.args.items():
        if isinstance(given, View):
            tensors[argument] = given.of(tensor(given.node))
            bind_axes(f"{spec.name}: {argument}", spec.args[argument].axes, tuple(tensors[argument].shape), size)
    floats = [tensors[n].dtype for n, a in spec.args.items() if a.dtype == "float" and n in tensors]
    for dtype in floats:
        if _NAMES.get(dtype) not in spec.dtypes:
            raise SpecError(f"dtype {dtype_name(dtype)} is not one of {', '.join(spec.dtypes)}")
    device = next(iter(tensors.values())).device
    for argument, given in match.args.items():
        if not isinstance(given, View):
            filled = axes_shape(spec.args[argument].axes, size)
            tensors[argument] = torch.empty(filled, dtype=floats[0], device="meta")
        elif tensors[argument].device != device:
            raise SpecError(f"{argument} is on {tensors[argument].device}, others on {device}")
    tensors = {n: tensors[n] for n in spec.args if n in tensors}
    bound = spec.bind({n: tuple(t.shape) for n, t in tensors.items()})
    if any(0 in t.shape for t in tensors.values()):
        raise SpecError("an argument is empty")
    return tensors, _NAMES[floats[0]], bound


def _result(spec: OpSpec, scalars: Mapping[str, Any], dtype: str, size: Mapping[str, Any]) -> torch.Tensor:
    out = spec.out(size, scalars) if callable(spec.out) else axes_shape(spec.out, size)
    made = DTYPES[dtype] if spec.out_dtype == "float" else getattr(torch, spec.out_dtype)
    return torch.empty(out, dtype=made, device="meta")


def _check_result(spec: OpSpec, match: Match, dtype: str, size: dict[str, Any]) -> None:
    result = apply(match.out, _result(spec, {**spec.scalars, **match.scalars}, dtype, size))
    want = value(match.output)
    if want is None or result.shape != want.shape or result.dtype != want.dtype:
        expected = f"{want.dtype} {list(want.shape)}" if want is not None else "no tensor"
        raise SpecError(f"the operator gives {result.dtype} {list(result.shape)}, the model {expected}")


def _disjoint(sites: list[Site]) -> tuple[list[Site], list[Site]]:
    """(sites that share no work, the largest first served; sites that lie inside of one of those)."""
    owner: dict[fx.Node, Site] = {}
    top, inner = [], []
    for site in sorted(sites, key=lambda s: -len(s.work)):
        owners = {owner.get(n) for n in site.work}
        largest = owners.pop()
        if not owners and largest is None:
            top.append(site)
            owner |= dict.fromkeys(site.work, site)
        elif not owners and largest is not None and len(site.work) < len(largest.work):
            site.inside = largest
            inner.append(site)
    return sorted(top, key=lambda s: s.output), sorted(inner, key=lambda s: s.output)


# ---- proof ----------------------------------------------------------------------------------------------------------


class _Proof(fx.Interpreter):
    """Runs a graph once on its captured inputs and decides each group of candidates when its last value exists.

    found: one site of each group at most, the first candidate that holds. proven: what earlier graphs have shown.
    """

    def __init__(
        self, graph: Graph, groups: list[tuple[fx.Node, list[Site]]], proven: dict[tuple, str],
        refused: dict[fx.Node, str],
    ):  # fmt: skip
        super().__init__(graph.module)
        self.proven, self.refused = proven, refused
        self.found: list[Site] = []
        self.due: dict[fx.Node, list[tuple[fx.Node, list[Site]]]] = defaultdict(list)
        last = {n: user for user, dying in self.user_to_last_uses.items() for n in dying}
        for anchor, group in groups:
            final = max(site.output for site in group)
            self.due[final].append((anchor, group))
            for leaf in {n for site in group for n in (*site.leaves, *site.conditions)}:
                last[leaf] = max(last.get(leaf, final), final)
        self.user_to_last_uses = defaultdict(list)
        for node, user in last.items():
            self.user_to_last_uses[user].append(node)

    def run_node(self, n: fx.Node) -> Any:
        self.env[n] = super().run_node(n)
        self.found += filter(None, (self._first(*claim, self.env) for claim in self.due.get(n, ())))
        return self.env[n]

    def _first(self, anchor: fx.Node, group: list[Site], env: dict[fx.Node, Any]) -> Site | None:
        results: dict[Any, torch.Tensor] = {}
        why = ""
        for site in group:
            read = tuple(_digest(env[n]) for n in (*site.conditions, *site.fixed))
            key = (site.key, site.reference, site.match.out, read)
            if key not in self.proven:
                self.proven[key] = self._fault(site, env, results)
            if not self.proven[key]:
                return site
            why = why or self.proven[key]
        if name(anchor) not in _GENERIC:
            self.refused.setdefault(anchor, why)
        return None

    def _fault(self, site: Site, env: dict[fx.Node, Any], results: dict[Any, torch.Tensor]) -> str:
        """"" if the sub-graph is the operator, else how far off it is."""
        rounds = ("captured", "random", "mixed") if len(site.nodes) > 1 else ("captured",)
        for which in rounds:
            given = {n: _doubled(env[n]) for n in (*site.leaves, *site.conditions)}
            if which != "captured":
                given |= {n: _random_like(given[n], which == "mixed") for n in site.leaves if n not in site.fixed}
            shared = (which, site.output, site.nodes, site.fixed)  # random values are seeded: the same again
            if shared not in results:
                results[shared] = _run_doubled(site, given)
            ours = reference_result(site, given)
            error = _error(results[shared], ours)
            if not error <= TOLERANCE:
                return f"it looks like {site.op}, but its values differ by {error:.1e} on {which} inputs"
        return ""


def reference_result(site: Site, given: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
    """The operator's reference on the values of a site's leaves, in the layout of the site's output."""
    args = {}
    for argument, claim in site.match.args.items():
        if isinstance(claim, View):
            args[argument] = claim.of(given[claim.node])
        else:
            like = next(iter(given.values()))
            dtype = next(t.dtype for t in given.values() if t.dtype.is_floating_point)
            args[argument] = torch.full(site.tensors[argument].shape, claim, dtype=dtype, device=like.device)
    result = site.spec.reference(**args, **site.scalars)
    return apply(tuple(s for s in site.match.out if not s[0].startswith("to.")), result)


def _doubled(given: Any) -> Any:
    """A tensor, or a dtype, in double precision; anything else as it is."""
    if isinstance(given, torch.Tensor):
        return given.to(_doubled(given.dtype))
    if not isinstance(given, torch.dtype):
        return given
    return torch.complex128 if given.is_complex else torch.float64 if given.is_floating_point else given


def _random_like(given: Any, mixed: bool = False) -> Any:
    """Random values. mixed: rows of zeros, small and large ones, at which a clamp, a cap or a padding mask shows."""
    if not isinstance(given, torch.Tensor) or not (given.is_floating_point() or given.is_complex()):
        return given
    generator = torch.Generator(given.device).manual_seed(0)
    drawn = torch.randn(given.shape, dtype=given.dtype, device=given.device, generator=generator)
    if not mixed or given.dim() < 2:
        return drawn * RANDOM_SCALE
    scales = torch.tensor(ROW_SCALES, dtype=given.dtype, device=given.device)
    which = torch.randint(len(ROW_SCALES), given.shape[:-1], device=given.device, generator=generator)
    return drawn * scales[which].unsqueeze(-1)


def _run_doubled(site: Site, given: Mapping[fx.Node, Any]) -> torch.Tensor:
    """The sub-graph in float64: every floating-point dtype that it names becomes float64."""

    env = dict(given)
    for node in site.nodes:
        args, kwargs = _mapped(node, lambda a: env[a] if isinstance(a, fx.Node) else _doubled(a))
        function: Any = node.target
        env[node] = function(*args, **kwargs)
    return env[site.output]


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over rms + |want|; infinite for another shape or other non-finite values."""
    if got.shape != want.shape:
        return math.inf
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, 0.0, (got - want).abs())
    finite = torch.where(want.isfinite(), want, 0.0)
    scale = finite.square().mean().sqrt() + finite.abs()
    worst = (difference / scale.clamp_min(1e-300)).amax().item() if got.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


def _digest(given: Any) -> str:
    if not isinstance(given, torch.Tensor):
        return str(given)
    data = given.detach().cpu().contiguous()
    data = torch.view_as_real(data) if data.is_complex() else data
    return hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


# ---- replacement ----------------------------------------------------------------------------------------------------


def replace(graph: Graph, kernels: Mapping[Site, Callable] | Iterable[tuple[Site, Callable]]) -> fx.GraphModule:
    """A copy of a captured graph in which each given site calls its kernel; the sites must not overlap.

    A kernel is called as the contract says, with tensors by name and those scalars that differ from the default.
    Weights are passed as the views that they are; constants of a norm without weight become buffers of the module.
    """
    copies: dict[fx.Node, fx.Node] = {}
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.module.graph, copies))
    module = fx.GraphModule(graph.module, copied)
    # from the last one on: a site's arguments may be another's output, whose node exists until that one is replaced
    for site, kernel in sorted(dict(kernels).items(), key=lambda item: item[0].output, reverse=True):
        output = copies[site.output]
        with copied.inserting_before(output.next):
            args = {n: _insert(module, copied, a, site.tensors[n], copies, output) for n, a in site.match.args.items()}
            scalars = {k: v for k, v in site.scalars.items() if v != site.spec.scalars[k]}
            result = copied.call_function(_target(kernel), kwargs={**args, **scalars})
            for which, *arguments in site.match.out:
                result = copied.call_function(overload(which), (result, *arguments))
        output.replace_all_uses_with(result)
    for node in copied.nodes:
        if node.target is torch.ops.aten.view.default:  # a kernel's result may lie otherwise in memory
            node.target = torch.ops.aten.reshape.default
    copied.eliminate_dead_code(lambda node: node.is_impure() or name(node) in KEEPS_STATE)
    module.recompile()
    return module


def _target(kernel: Callable) -> Callable:
    """A kernel as a graph can hold it: custom operators as the overload that compilers know."""
    kernel = getattr(kernel, "_opoverload", kernel)
    if hasattr(kernel, "__name__"):
        return kernel

    def call(**arguments):
        return kernel(**arguments)

    return call


def _insert(
    module: fx.GraphModule, copied: fx.Graph, given: View | float, like: torch.Tensor, copies: dict[fx.Node, fx.Node],
    output: fx.Node,
) -> fx.Node:  # fmt: skip
    """An argument in a copied graph; a number becomes a buffer filled with it."""
    if isinstance(given, View):
        node = copies[given.node]
        for which, *arguments in given.steps:
            node = copied.call_function(overload(which), (node, *arguments))
        return node
    label = f"_filled_{str(given).replace('.', '_')}_{'x'.join(map(str, like.shape))}_{_NAMES[like.dtype]}"
    if not hasattr(module, label):
        module.register_buffer(label, torch.full(like.shape, given, dtype=like.dtype, device=tensor(output).device))
    return copied.get_attr(label)
