"""The operator spec: one frozen value per operator, from which everything else about the operator is derived.

A spec names the tensors by symbolic axes ("*rows", "dim", "head_dim/2"), the scalars with their defaults, the shapes a
user meets, and two callables: `reference` (the oracle's formula, run in float64) and `baseline` (the fused PyTorch
operator a user would pick). Inputs, bytes moved, cases, shape recovery and the exported schema follow from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
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
    layout: str = "contiguous"
    content: Mapping[str, str] | str = "normal"
    strides: Mapping[str, tuple[int, ...]] | None = None  # observed strides of a model's tensors
    dtypes: Mapping[str, str] | None = None  # observed dtypes of a model's tensors where they differ from `dtype`
    omit: tuple[str, ...] = ()  # optional tensors left out
    exact: bool = False  # every sum is exactly representable: demand bit equality

    @property
    def label(self) -> str:
        kind = self.content if isinstance(self.content, str) else "/".join(dict.fromkeys(self.content.values()))
        notes = [kind] * (kind != "normal") + [self.layout] * (self.layout != "contiguous")
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
    hidden: Callable[[Any, bool], Size]  # (random.Random, on_gpu) -> a size nobody announced
    depth: Callable[[Size], float]  # terms in the longest sum: how fast float32 rounding may grow
    scalars: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Mapping[str, Any], ...] = ()  # other scalar values that the operator's callers use
    stability: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, str] | str | None = None  # content with exactly representable sums, if there is one
    out_dtype: str = "float"
    tolerance: float = 1.0  # factor on TOLERANCES
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
                layout = case.layout if case.layout in spec.layouts else "contiguous"
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
        variants = [v for v in self.variants if set(v) <= accepts]
        first = next(iter(shapes))

        def case(name: str, stage: str, size: Size, kind: str, **options: Any) -> Case:
            return Case(name, stage, size, kind, omit=omit, **options)

        found = [case(first, "smoke_test", shapes[first], dtype)]
        swept = shapes.items() if on_gpu else list(shapes.items())[:2]
        for name, size in swept:
            # a large shape is checked in the primary dtype here and, in every dtype, at the smaller ones
            heavy = self.flops(size, self.scalars) > 3e11 or _elements(self, size) > 1.5e8
            found += [case(name, "shape_sweep", size, kind) for kind in ([dtype] if heavy else self.dtypes)]
        for index in range(2):
            size = self.hidden(rng, on_gpu)
            found += [case(f"hidden{index + 1}", "shape_sweep", size, kind) for kind in self._some(index, on_gpu)]
        base = shapes["stability"] if "stability" in shapes else shapes[first]
        for index, (name, content) in enumerate(self.stability.items()):
            kinds = self._some(index, on_gpu)
            found += [case(name, "numerical_stability", base, kind, content=content) for kind in kinds]
        if self.exact is not None:
            kinds = self._some(0, on_gpu)
            found += [case("exact", "numerical_stability", base, k, content=self.exact, exact=True) for k in kinds]
        found += [case(first, "determinism", shapes[first], kind) for kind in self._some(1, on_gpu)]
        layouts = dict.fromkeys(layout for a in self.args.values() for layout in a.layouts)
        found += [
            case(name, "edge_cases", size, kind)
            for index, (name, size) in enumerate(edges.items())
            for kind in self._some(index, on_gpu)
        ]
        found += [case("views", "edge_cases", base, self._turn(i), layout=w) for i, w in enumerate(layouts)]
        # in every dtype: an approximation that hides in the half formats does not in float32
        kinds = self.dtypes if on_gpu else ("fp32",)
        found += [case("option", "edge_cases", base, kind, scalars=v) for v in variants for kind in kinds]
        for index, name in enumerate(n for n, a in self.args.items() if a.optional and n in accepts):
            found.append(replace(case("option", "edge_cases", base, self._turn(index)), omit=(*omit, name)))
        return found

    def _some(self, index: int, on_gpu: bool) -> tuple[str, ...]:
        """Every dtype on a GPU; one in turn in the interpreter, whose time is what runs out."""
        return self.dtypes if on_gpu else (self._turn(index),)

    def _turn(self, index: int) -> str:
        return self.dtypes[index % len(self.dtypes)]


def _elements(spec: OpSpec, size: Size) -> int:
    return sum(math.prod(axes_shape(a.axes, size)) for a in spec.args.values())


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

    contiguous: as torch.empty makes it. transposed: the last two axes stored swapped, a Linear's weight.t(). heads:
    (batch, heads, seq, dim) stored as (batch, seq, heads, dim). padded: rows cut out of a wider tensor, 16-byte
    aligned. odd: the same at an odd element, aligned to one element only.
    """
    order = list(range(len(shape)))
    if layout == "transposed" and len(shape) >= 2:
        order[-2:] = order[-1], order[-2]
    elif layout == "heads" and len(shape) == 4:
        order = [0, 2, 1, 3]
    pad, offset = {"padded": (16, 8), "odd": (3, 1)}.get(layout, (0, 0))
    strides, step = [0] * len(shape), 1
    for position, axis in enumerate(reversed(order)):
        strides[axis] = step
        step *= max(shape[axis], 1) + (pad if position == 0 else 0)
    return tuple(strides), offset
