"""The operators: one spec file each. A tenth operator is one more file here that defines SPEC."""

from __future__ import annotations

import importlib
import math
import pkgutil

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
