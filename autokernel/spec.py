"""The operator spec: one frozen value per operator, from which everything else about the operator is derived.

A spec names the tensors by symbolic axes ("*rows", "dim", "head_dim/2"), the scalars with their defaults, the shapes a
user meets, and two callables: `reference` (the oracle's formula, run in float64) and `baseline` (the fused PyTorch
operator a user would pick). Inputs, bytes moved, cases, shape recovery and the exported schema follow from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WIDE = ("bf16", "fp32")
# contents that are asked in some dtypes only: most of them would be infinite or zero in float16
CONTENT_DTYPES: dict[str, tuple[str, ...]] = {"large": ("fp16",)} | {
    kind: WIDE for kind in ("huge", "minute", "uneven", "uneven_columns", "uneven_rows", "spread")
}
SWAPS = 300  # tries to place drawn values better: all that matters is found within a hundred
STAGES = ("smoke_test", "shape_sweep", "numerical_stability", "determinism", "edge_cases")


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float16 -> "float16"."""
    return str(dtype).removeprefix("torch.")


Size = Mapping[str, Any]  # axis name -> int, or a tuple for a "*axis"


class SpecError(ValueError):
    """Tensors or sizes that do not fit an operator's spec; the message names the axis."""


@dataclass(frozen=True)
class Arg:
    """One tensor argument.

    axes: symbolic axes; "*rows" binds any number of leading axes, "head_dim/2" is half of another axis.
    dtype: "float" is the case's dtype; otherwise a torch dtype name ("int64").
    draw: content of an ordinary call: "normal", "gain" (1 + normal/4), "unit" (cosines), "index" (0 .. `below` - 1).
    scale: multiplies a "normal" draw; a callable of the size, e.g. 1/sqrt(fan_in).
    layouts: storage layouts that the operator's callers use besides contiguous (see `strides_of`).

    All "float" tensors of a call are of one dtype. Others (a float32 weight beside half inputs) are no part of the
    contract, as PyTorch's own operators disagree about the result's dtype; a model's are judged with its target.
    """

    axes: tuple[str, ...]
    dtype: str = "float"
    draw: str = "normal"
    scale: float | Callable[[Size], float] = 1.0
    below: str = ""
    optional: bool = False
    layouts: tuple[str, ...] = ()


def arg(*axes: str, **options: Any) -> Arg:
    return Arg(axes=axes, **options)


@dataclass(frozen=True)
class TensorSpec:
    """One concrete tensor of a case: shape and strides in elements; `offset` elements before the first one."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def plain(self) -> bool:
        """Whether it lies in memory as torch.empty would lay it."""
        return self.offset == 0 and self.strides == strides_of(self.shape, "contiguous")[0]

    @property
    def span(self) -> int:
        """Elements from the start of the storage to the last element addressed, `offset` included."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel must move to read or write each element once."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Case:
    """One question to a kernel: which size, dtype, scalars, storage layout and kind of content."""

    name: str
    stage: str
    size: Size
    dtype: str
    scalars: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, str] | str = "contiguous"  # of every argument that has it, or by argument
    content: Mapping[str, str] | str = "normal"
    strides: Mapping[str, tuple[int, ...]] | None = None  # observed strides of a model's tensors
    dtypes: Mapping[str, str] | None = None  # observed dtypes of a model's tensors where they differ from `dtype`
    omit: tuple[str, ...] = ()  # optional tensors left out
    exact: bool = False  # every sum is exactly representable: demand bit equality

    @property
    def label(self) -> str:
        kind = "/".join(dict.fromkeys(content_kinds(self.content)))
        layouts = {"": self.layout} if isinstance(self.layout, str) else self.layout
        notes = [kind] * (kind != "normal")
        notes += [f"{name} {layout}".strip() for name, layout in layouts.items() if layout != "contiguous"]
        notes += [f"{k}={v}" for k, v in self.scalars.items()] + [f"no {name}" for name in self.omit]
        return " ".join([self.name, self.dtype, *notes])


@dataclass(frozen=True)
class OpSpec:
    """Everything the harness knows about one operator. See the module's docstring."""

    name: str
    args: Mapping[str, Arg]
    reference: Callable[..., torch.Tensor]
    baseline: Callable[..., torch.Tensor]
    baseline_name: str
    shapes: Mapping[str, Size]  # what a GPU is timed and checked on; "small", "medium", "large" exist
    edges: Mapping[str, Size]
    cpu_shapes: Mapping[str, Size]  # the same regimes at sizes that Triton's interpreter finishes in a second
    cpu_edges: Mapping[str, Size]
    flops: Callable[[Size, Mapping[str, Any]], float]
    out: tuple[str, ...] | Callable[[Size, Mapping[str, Any]], tuple[int, ...]]
    # kind ("three_axes") -> (random.Random, on_gpu) -> a size nobody announced; each kind comes up in every run
    hidden: Mapping[str, Callable[[Any, bool], Size]]
    depth: Callable[[Size], float]  # terms in the longest sum: how fast float32 rounding may grow
    scalars: Mapping[str, Any] = field(default_factory=dict)
    # other scalar values that the operator's callers use; legal at each size that `hidden` gives
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    drawn_contents: tuple[Mapping[str, str] | str, ...] = ("normal",)  # of the calls that draw sizes and options
    stability: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, str] | str | None = None  # content with exactly representable sums, if there is one
    out_dtype: str = "float"
    tolerance: float = 1.0  # factor on TOLERANCES
    by_element: float = 0.0  # where nothing cancels: an element's error over the element itself, at most
    rms_factor: float = 2.0  # the kernel's rms error over the yardstick's, at most
    yardstick: Callable[..., torch.Tensor] | None = None  # whose error bounds the kernel's; the baseline's by default
    timed: tuple[str, ...] = ("medium", "large")
    primary: str = "large"
    dtypes: tuple[str, ...] = ("fp16", "bf16", "fp32")
    # what a site of the operator looks like in a model's graph: anchor (an ATen operator's name) -> matcher, which
    # yields autokernel.graph.Match claims from the anchor's node, the preferred one first; sites.py proves them
    sites: Mapping[str, Callable[[Any], Iterator[Any]]] = field(default_factory=dict)
    # axes that a model's batch or length changes; several scale together ("q_len+kv_len")
    scaled: tuple[str, ...] = ()
    least_flops: bool = True  # whether no right answer takes fewer: a model's may be rewritten

    # ---- tensors -----------------------------------------------------------------------------------------------

    def tensors(self, case: Case) -> dict[str, TensorSpec]:
        """The case's input tensors by argument name, with their storage layout."""
        specs = {}
        for name, spec in self.args.items():
            if name in case.omit:
                continue
            shape = axes_shape(spec.axes, case.size)
            dtype = DTYPES[case.dtype] if spec.dtype == "float" else getattr(torch, spec.dtype)
            dtype = DTYPES[case.dtypes[name]] if case.dtypes and name in case.dtypes else dtype
            if case.strides and name in case.strides:
                specs[name] = TensorSpec(name, shape, tuple(case.strides[name]), dtype)
            else:
                layout = case.layout if isinstance(case.layout, str) else case.layout.get(name, "contiguous")
                layout = layout if layout in spec.layouts else "contiguous"
                strides, offset = strides_of(shape, layout)
                specs[name] = TensorSpec(name, shape, strides, dtype, offset)
        return specs

    def output(self, case: Case) -> TensorSpec:
        """The contiguous output of a case."""
        scalars = {**self.scalars, **case.scalars}
        shape = self.out(case.size, scalars) if callable(self.out) else axes_shape(self.out, case.size)
        dtype = DTYPES[case.dtype] if self.out_dtype == "float" else getattr(torch, self.out_dtype)
        return TensorSpec("out", shape, strides_of(shape, "contiguous")[0], dtype)

    def outputs(self, case: Case) -> tuple[TensorSpec, ...]:
        """All outputs of a case: an operator has one, a model may have several."""
        return (self.output(case),)

    def bytes_moved(self, case: Case) -> int:
        """Bytes of each input once and of each output once: what any kernel must move through memory."""
        return self.bytes_read(case) + self.bytes_written(case)

    def bytes_written(self, case: Case) -> int:
        return sum(t.nbytes for t in self.outputs(case))

    def bytes_read(self, case: Case) -> int:
        return sum(t.nbytes for t in self.tensors(case).values())

    def bind(self, observed: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Recover the size from observed tensor shapes.

        Raises SpecError naming the argument and the axis when shapes disagree or a required tensor is missing.
        """
        size: dict[str, Any] = {}
        for name, spec in self.args.items():
            if name in observed:
                bind_axes(f"{self.name}: {name}", spec.axes, tuple(observed[name]), size)
            elif not spec.optional:
                raise SpecError(f"{self.name}: no shape for {name}; required: {', '.join(self.required)}")
        return size

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.args.items() if not spec.optional)

    @property
    def parameters(self) -> dict[str, Any]:
        """kernel_fn's parameters in order, name -> default (`...` where there is none)."""
        tensors = {name: None if spec.optional else ... for name, spec in self.args.items()}
        return {**tensors, **self.scalars}

    def schema(self) -> str:
        """The operator as a torch.library schema, without its name."""
        kinds = {bool: "bool", int: "int", float: "float", str: "str", type(None): "float?"}
        words = [f"Tensor{'? ' if a.optional else ' '}{n}" + "=None" * a.optional for n, a in self.args.items()]
        for name, default in self.scalars.items():
            shown = f'"{default}"' if isinstance(default, str) else default
            words.append(f"{kinds[type(default)]} {name}={shown}")
        return f"({', '.join(words)}) -> Tensor"

    def element_limit(self, case: Case) -> float:
        """Largest error of an element over that element, at least what `compare` needs; 0 where terms may cancel.

        Content "uneven" makes each sum one of positive terms, whatever the size of its row.
        """
        return 1e-9 if "uneven" in content_kinds(case.content) else self.by_element

    # ---- cases -------------------------------------------------------------------------------------------------

    def optional_names(self) -> tuple[str, ...]:
        return tuple(n for n, a in self.args.items() if a.optional) + tuple(self.scalars)

    def cases(self, on_gpu: bool, accepts: set[str], rng: Any, dtype: str = "fp16") -> list[Case]:
        """All correctness cases, stage by stage.

        accepts: the optional parameters that the kernel takes; the others are checked at their default only.
        rng: random.Random for the hidden shapes; dtype: the dtype of the smoke test.
        """
        shapes, edges = (self.shapes, self.edges) if on_gpu else (self.cpu_shapes, self.cpu_edges)
        omit = tuple(n for n, a in self.args.items() if a.optional and n not in accepts)
        first = next(iter(shapes))

        def case(name: str, stage: str, size: Size, kind: str, **options: Any) -> Case:
            return Case(name, stage, size, kind, omit=omit, **options)

        found = [case(first, "smoke_test", shapes[first], dtype)]
        swept = shapes.items() if on_gpu else list(shapes.items())[:2]
        for name, size in swept:
            # a large shape is checked in the primary dtype here and, in every dtype, at the smaller ones
            heavy = self.flops(size, self.scalars) > 3e11 or _elements(self, size) > 1.5e8
            found += [case(name, "shape_sweep", size, kind) for kind in ([dtype] if heavy else self.dtypes)]
        base = shapes["stability"] if "stability" in shapes else shapes[first]
        for index, (name, content) in enumerate(self.stability.items()):
            kinds = content_dtypes(content)
            kinds = kinds if kinds != tuple(DTYPES) else self._some(index, on_gpu)
            found += [case(name, "numerical_stability", base, kind, content=content) for kind in kinds]
        if self.exact is not None:
            kinds = self._some(0, on_gpu)
            found += [case("exact", "numerical_stability", base, k, content=self.exact, exact=True) for k in kinds]
        found += [case(first, "determinism", shapes[first], kind) for kind in self._some(1, on_gpu)]
        found += [
            case(name, "edge_cases", size, kind)
            for index, (name, size) in enumerate(edges.items())
            for kind in self._some(index, on_gpu)
        ]
        sizes = {**self.hidden, first: lambda *_: base}
        return found + self.drawn(sizes, self.dtypes, accepts, rng, on_gpu, 14 if on_gpu else 8)

    def drawn(
        self, sizes: Mapping[str, Callable[[Any, bool], Size]], dtypes: tuple[str, ...], accepts: set[str], rng: Any,
        on_gpu: bool, least: int = 1, most: int = 99,
    ) -> list[Case]:  # fmt: skip
        """Calls that draw everything at once: size, dtype, options, content, and a layout for each argument.

        Every value of each of these comes up, options in every dtype and at each kind of size if they can, and of all
        pairs of values as many as so few calls can hold. (In Triton's interpreter, whose time is what runs out, options
        in float32, where no approximation hides.) least, most: how many calls, but for the values that must come up.
        """
        strict = tuple(d for d in dtypes if on_gpu or d == "fp32") or dtypes
        # defaults and contiguous tensors come last, where they may be left out: all other calls have them
        axes: dict[str, list[Any]] = {}
        for name, values in self.options.items():
            if name in accepts:
                axes[name] = [*rng.sample(values, len(values)) * 2, self.scalars[name]]
        for name, a in self.args.items():
            if a.layouts:
                axes[f"{name} "] = [*rng.sample(a.layouts, len(a.layouts)), "contiguous"]
        count = min(most, max(least, len(sizes), *(len(set(v)) - 1 for v in axes.values())))
        kinds = [name for _ in range(count) for name in sizes][:count]
        axes["size"] = [(kind, sizes[kind](rng, on_gpu)) for kind in kinds]
        axes["dtype"] = [*dtypes, *strict] if not on_gpu else list(dtypes)
        axes["content"] = list(self.drawn_contents)
        axes["omit"] = [(n,) for n, a in self.args.items() if a.optional and n in accepts] + [()]
        absent = tuple(n for n, a in self.args.items() if a.optional and n not in accepts)
        rows = covering(axes, count, rng, lambda row: self._shown(self._drawn_case(row, absent), strict))
        return [self._drawn_case(row, absent) for row in rows]

    def _drawn_case(self, row: Mapping[str, Any], absent: tuple[str, ...]) -> Case:
        """A row of `covering` as a case; `absent`: optional tensors that the kernel does not take."""
        (kind, size), omit = row["size"], row["omit"] + absent
        layouts = {n: row[f"{n} "] for n, a in self.args.items() if a.layouts and n not in omit}
        scalars = {n: row[n] for n, default in self.scalars.items() if row.get(n, default) != default}
        name = f"{kind} {', '.join(f'{axis}={n}' for axis, n in size.items())}"
        return Case(name, "edge_cases", size, row["dtype"], scalars, layouts, row["content"], omit=omit)

    def _shown(self, case: Case, strict: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
        """For `covering`: what a drawn case shows. An option beside a dtype, a kind of size or of content comes first,
        as faults hide there; a layout that changes nothing at this size does not count.
        """
        assert not isinstance(case.layout, str)
        tensors = {name: tensor for name, tensor in self.tensors(case).items() if tensor.span > tensor.offset}
        options, kind, content = list(case.scalars.items()), case.name.split()[0], str(case.content)
        values: list[Any] = [(n, case.layout[n]) for n, tensor in tensors.items() if not tensor.plain]
        values += [*options, kind, content, case.omit]
        others = [kind, content] + [case.dtype] * (case.dtype in strict)
        crossed = [(option, other) for option in options for other in others]
        return (values + crossed if tensors else values), values

    def _some(self, index: int, on_gpu: bool) -> tuple[str, ...]:
        """Every dtype on a GPU; one in turn in the interpreter, whose time is what runs out."""
        return self.dtypes if on_gpu else (self._turn(index),)

    def _turn(self, index: int) -> str:
        return self.dtypes[index % len(self.dtypes)]


def _elements(spec: OpSpec, size: Size) -> int:
    return sum(math.prod(axes_shape(a.axes, size)) for a in spec.args.values())


def content_kinds(content: Mapping[str, str] | str) -> list[str]:
    return [content] if isinstance(content, str) else list(content.values())


def content_dtypes(content: Mapping[str, str] | str) -> tuple[str, ...]:
    """The dtypes that a kind of content is asked in."""
    return tuple(d for d in DTYPES if all(d in CONTENT_DTYPES.get(k, DTYPES) for k in content_kinds(content)))


def covering(
    axes: Mapping[str, list[Any]], count: int, rng: Any, facts: Callable[[Mapping[str, Any]], tuple[list, list]]
) -> list[dict[str, Any]]:
    """`count` rows with a value of each axis: every value comes up where `count` allows, and many pairs of values do.

    facts: what a row shows: (what should come up first of all, what in pairs). Each axis is dealt as often as it goes;
    then random swaps along an axis are kept as long as they lose nothing.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, values in axes.items():
        dealt = (values * count)[:count]
        rng.shuffle(dealt)
        for row, value in zip(rows, dealt, strict=True):
            row[name] = value
    shown = [facts(row) for row in rows]

    def score() -> int:
        pairs = {pair for _, values in shown for pair in combinations(values, 2)}
        return 1000 * len({must for musts, _ in shown for must in musts}) + len(pairs)

    best, names = score(), [name for name, values in axes.items() if len(values) > 1]
    for _ in range(SWAPS if count > 1 else 0):
        name, (i, j) = rng.choice(names), rng.sample(range(count), 2)
        kept = shown[i], shown[j]
        rows[i][name], rows[j][name] = rows[j][name], rows[i][name]
        shown[i], shown[j] = facts(rows[i]), facts(rows[j])
        if (now := score()) >= best:
            best = now
        else:
            rows[i][name], rows[j][name] = rows[j][name], rows[i][name]
            shown[i], shown[j] = kept
    return rows


# ---- axes ------------------------------------------------------------------------------------------------------


def axes_shape(axes: tuple[str, ...], size: Size) -> tuple[int, ...]:
    """Symbolic axes -> a concrete shape."""
    shape: list[int] = []
    for axis in axes:
        name, divisor = _axis(axis)
        value = size[name]
        if axis.startswith("*"):
            shape += value if isinstance(value, (tuple, list)) else [value]
        else:
            shape.append(value // divisor)
    return tuple(shape)


def bind_axes(who: str, axes: tuple[str, ...], shape: tuple[int, ...], size: dict[str, Any]) -> None:
    """Unify one tensor's symbolic axes with its shape into `size`."""
    stars = [i for i, axis in enumerate(axes) if axis.startswith("*")]
    if len(shape) < len(axes) - len(stars) or (not stars and len(shape) != len(axes)):
        raise SpecError(f"{who} has shape {shape}, expected axes ({', '.join(axes)})")
    extra = len(shape) - len(axes) + 1
    values: list[Any] = list(shape)
    if stars:
        at = stars[0]
        values[at : at + extra] = [tuple(shape[at : at + extra])]
    for axis, value in zip(axes, values, strict=True):
        name, divisor = _axis(axis)
        value = value if axis.startswith("*") else value * divisor
        if size.setdefault(name, value) != value:
            raise SpecError(f"{who}: axis {name} is {value} here and {size[name]} elsewhere (shape {shape})")


def _axis(axis: str) -> tuple[str, int]:
    match = re.fullmatch(r"\*?([A-Za-z_]\w*)(?:/(\d+))?", axis)
    if not match:
        raise SpecError(f"axis {axis!r} is not a name, '*name' or 'name/number'")
    return match[1], int(match[2] or 1)


def strides_of(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int]:
    """Strides and storage offset, in elements, of a shape in a storage layout.

    contiguous: as torch.empty makes it. transposed: the last two axes stored swapped, a Linear's weight.t(). swapped:
    the first two of several, x.transpose(0, 1). heads: (batch, heads, seq, dim) stored as (batch, seq, heads, dim).
    padded: rows cut out of a wider tensor, 16-byte aligned. odd: the same at an odd element, aligned to one element
    only. stepped: every second element of a row, x[..., ::2]. expanded: the first axis repeats, x[:1].expand(n, ...).
    """
    order = list(range(len(shape)))
    if layout == "transposed" and len(shape) >= 2:
        order[-2:] = order[-1], order[-2]
    elif layout == "heads" and len(shape) == 4:
        order = [0, 2, 1, 3]
    elif layout == "swapped" and len(shape) >= 3:
        order[:2] = 1, 0
    pad, offset = {"padded": (16, 8), "odd": (3, 1)}.get(layout, (0, 0))
    strides, step = [0] * len(shape), 2 if layout == "stepped" else 1
    for position, axis in enumerate(reversed(order)):
        strides[axis] = step
        step *= max(shape[axis], 1) + (pad if position == 0 else 0)
    if layout == "expanded" and shape:
        strides[0] = 0
    return tuple(strides), offset
