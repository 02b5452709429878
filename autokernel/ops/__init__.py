"""The operators: one spec file each. A tenth operator is one more file here that defines SPEC."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch.fx as fx

from autokernel.graph import CASTS, View, name, number, only_user, operand, pairs, shape, strip
from autokernel.spec import OpSpec, Size, SpecError


def names() -> list[str]:
    """The operators there are, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> OpSpec:
    """The spec of an operator; SpecError with the known names if there is none."""
    if name not in names():
        raise SpecError(f"unknown operator {name!r}; known: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").SPEC


# ---- what several operators share: sizes and contents -----------------------------------------------------------

# (rows, width) that no block size divides, and real vocabularies; the second is for Triton's interpreter
ROW_EDGES = {
    "one": ((1, 1), (1, 1)),
    "narrow": ((1023, 3), (33, 3)),
    "off_grid": ((7, 1023), (5, 1023)),
    "4097": ((5, 4097), (1, 4097)),
    "50257": ((3, 50257), (1, 50257)),
    "151936": ((2, 151936), (1, 151936)),
}


def row_edges(
    size: Callable[[int, int], Size], on_gpu: bool, names: str = " ".join(ROW_EDGES), **more: Size
) -> dict[str, Size]:
    """Odd sizes of an operator that works along rows, and more of its own; size: (rows, width) -> its size."""
    return {name: size(*ROW_EDGES[name][0 if on_gpu else 1]) for name in names.split()} | more


Hidden = dict[str, Callable[[Random, bool], Size]]


def odd_or_even(rng: Random, top: int) -> int:
    """1 ... top; every second time a multiple of 16, for which kernels have paths of their own."""
    return rng.randint(1, top) if top < 32 or rng.random() < 0.5 else 16 * rng.randint(1, top // 16)


def row_hidden(size: Callable[[Any, int], Size], axes: str = "three four two") -> Hidden:
    """Hidden sizes of an operator that works along rows, with one to four axes before them, and with no rows at all."""

    def rows(count: int) -> Callable[[Random, bool], Size]:
        top = {1: (600, 9), 2: (24, 4), 3: (8, 3), 4: (5, 2)}[count]
        return lambda rng, on_gpu: size(
            tuple(rng.randint(1 + (count > 1), top[not on_gpu]) for _ in range(count)),
            odd_or_even(rng, 9000 if on_gpu else 700 // count),
        )

    kinds = {"two": rows(1), "three": rows(2), "four": rows(3), "five": rows(4)}
    return {f"{k}_axes": kinds[k] for k in axes.split() if k in kinds} | {
        "no_rows": lambda rng, on_gpu: size((0,), rng.randint(1, 99))
    }


def product_hidden(size: Callable[..., Size], axes: int, most: tuple[int, int], tops: tuple[int, int], dims: int):
    """A hidden size: rows of so many axes, each up to `most`, and as many other dimensions as `dims`, up to `tops`.

    most, tops: (on a GPU, elsewhere).
    """

    def drawn(rng: Random, on_gpu: bool) -> Size:
        rows = tuple(rng.randint(2, most[not on_gpu]) for _ in range(axes))
        return size(rows, *(odd_or_even(rng, tops[not on_gpu]) for _ in range(dims)))

    return drawn


def by_shape(*shape: Any) -> Size:
    """by_shape(2, 3), by_shape((2,), 3) -> {"shape": (2, 3)}"""
    return {"shape": tuple(n for part in shape for n in (part if isinstance(part, tuple) else (part,)))}


def rows_dim(rows: int | tuple[int, ...], dim: int) -> Size:
    return {"rows": rows if isinstance(rows, tuple) else (rows,), "dim": dim}


def contents(argument: str, kinds: str) -> dict[str, dict[str, str]]:
    """Stability cases that draw one argument in each of these kinds of content, and the others as usual."""
    return {kind: {argument: kind} for kind in kinds.split()}


def norm_edges(on_gpu: bool) -> dict[str, Size]:
    return row_edges(rows_dim, on_gpu, "one narrow off_grid 4097 50257", three_axes=rows_dim((2, 3, 5), 77))


NORM_CONTENTS = contents(
    "x", "large uneven_rows near_max offset wide spike needle swamp constant_rows zeros infinite"
)
NORM_LAYOUTS = ("padded", "odd", "transposed", "swapped", "stepped", "expanded")
VECTOR_LAYOUTS = ("stepped", "odd", "expanded")


# ---- ... and matchers -------------------------------------------------------------------------------------------


def scaled_by_norm(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, float]]:
    """Where `node` is 1/sqrt(variance + eps) in any spelling: yields (scaled tensor, the product, eps)."""
    if name(node) == "pow" and operand(node, "exponent") != -0.5:
        return
    inner, eps = strip(operand(node, 0)), 0.0
    if name(inner) == "add":
        found = [c for _, b in pairs(inner) if (c := number(b)) is not None]
        if not found:
            return
        eps = found[0]
    for user in _users(node):
        if name(user) == "reciprocal":
            yield from ((x, product, eps) for other in _users(user) for x, product in _scaled(other, user, "mul"))
        else:
            yield from ((x, out, eps) for x, out in _scaled(user, node, "div" if name(node) == "sqrt" else "mul"))


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Users of a node, casts skipped."""
    for user in node.users:
        if name(user) in CASTS:
            yield from _users(user)
        else:
            yield user


def _scaled(user: fx.Node, factor: fx.Node, kind: str) -> Iterator[tuple[fx.Node, fx.Node]]:
    if name(user) == kind:
        orders = [(operand(user, 0), operand(user, 1))] if kind == "div" else pairs(user)
        yield from ((a, user) for a, b in orders if strip(b) is factor)


def affine_outputs(node: fx.Node) -> Iterator[tuple[fx.Node, View | None, View | None]]:
    """A normalised tensor and what follows it, the longest first: (output, weight, bias), a View or None each."""
    dim = shape(node)[-1:]
    weight: View | None = None
    bias: View | None = None
    found = [(node, weight, bias)]
    while (user := only_user(node)) is not None:
        other: Any = next((b for a, b in pairs(user) if a is node), None) if name(user) in ("mul", "add") else None
        vector = other is not None and number(other) is None and shape(other)[-1:] == dim
        if vector and math.prod(shape(other)) != dim[0]:
            break
        if name(user) == "mul" and vector and weight is None and bias is None:
            weight = _flat(other)
        elif name(user) == "add" and vector and bias is None:
            bias = _flat(other)
        elif name(user) not in CASTS:
            break
        node = user
        found.append((node, weight, bias))
    return reversed(found)


def _flat(vector: fx.Node) -> View:
    return View(vector) if len(shape(vector)) == 1 else View(vector).then("view", list(shape(vector)[-1:]))


def last(dim: int, node: fx.Node) -> int:
    """A dimension of a node's tensor, -1 for the last one."""
    rank = len(shape(node))
    return -1 if dim in (-1, rank - 1) else dim % rank
