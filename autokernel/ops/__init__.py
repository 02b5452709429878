"""The operators: one spec file each. A tenth operator is one more file here that defines SPEC."""

from __future__ import annotations

import importlib
import math
import pkgutil

from autokernel.graph import CASTS, View, name, number, only_user, operand, pairs, shape, strip
from autokernel.spec import OpSpec, SpecError


def names() -> list[str]:
    """The operators there are, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> OpSpec:
    """The spec of an operator; SpecError with the known names if there is none."""
    if name not in names():
        raise SpecError(f"unknown operator {name!r}; known: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").SPEC


# ---- what the two norms share -----------------------------------------------------------------------------------

NORM_CONTENTS = {
    name: {"x": kind}
    for name, kind in {
        "large": "large",
        "near_max": "near_max",
        "offset": "offset",
        "mixed_scale": "wide",
        "spike": "spike",
        "needle": "needle",
        "swamp": "swamp",
        "constant": "constant_rows",
        "tiny": "tiny",
        "zeros": "zeros",
    }.items()
}


def elements(size) -> int:
    """Elements of a (*rows, dim) tensor."""
    return math.prod(size["rows"]) * size["dim"]


def norm_hidden(rng, on_gpu):
    return {"rows": (rng.randint(1, 700 if on_gpu else 9),), "dim": rng.randint(2, 9000 if on_gpu else 700)}


def norm_edges(on_gpu):
    wide = 1 if not on_gpu else 3
    return {
        "one": {"rows": (1,), "dim": 1},
        "narrow": {"rows": (1023 if on_gpu else 33,), "dim": 3},
        "off_grid": {"rows": (5,), "dim": 1023},
        "4097": {"rows": (wide,), "dim": 4097},
        "50257": {"rows": (wide,), "dim": 50257},
        "three_axes": {"rows": (2, 3, 5), "dim": 77},
    }


def scaled_by_norm(node):
    """Where `node` is 1/sqrt(variance + eps) in any spelling: yields (scaled tensor, the product, eps)."""
    if name(node) == "pow" and operand(node, "exponent") != -0.5:
        return
    inner, eps = strip(node.args[0]), 0.0
    if name(inner) == "add":
        eps = next((number(b) for _, b in pairs(inner) if number(b) is not None), None)
        if eps is None:
            return
    for user in _users(node):
        if name(user) == "reciprocal":
            yield from ((x, product, eps) for other in _users(user) for x, product in _scaled(other, user, "mul"))
        else:
            yield from ((x, out, eps) for x, out in _scaled(user, node, "div" if name(node) == "sqrt" else "mul"))


def _users(node):
    """Users of a node, casts skipped."""
    for user in node.users:
        if name(user) in CASTS:
            yield from _users(user)
        else:
            yield user


def _scaled(user, factor, kind):
    if name(user) == kind:
        orders = [user.args[:2]] if kind == "div" else pairs(user)
        yield from ((a, user) for a, b in orders if strip(b) is factor)


def affine_outputs(node):
    """A normalised tensor and what follows it, the longest first: (output, weight, bias), a View or None each."""
    dim, weight, bias = shape(node)[-1:], None, None
    found = [(node, weight, bias)]
    while (user := only_user(node)) is not None:
        other = next((b for a, b in pairs(user) if a is node), None) if name(user) in ("mul", "add") else None
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


def _flat(vector):
    return View(vector) if len(shape(vector)) == 1 else View(vector).then("view", list(shape(vector)[-1:]))


def last(dim, node):
    """A dimension of a node's tensor, -1 for the last one."""
    rank = len(shape(node))
    return -1 if dim in (-1, rank - 1) else dim % rank
