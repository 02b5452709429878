"""Sum along one dimension."""

import math

import torch

import reference
from autokernel.graph import Match, View, operand, shape
from autokernel.ops import NORM_LAYOUTS, by_shape, contents, last, row_edges, row_hidden
from autokernel.spec import OpSpec, arg


def _out(size, scalars):
    shape = list(size["shape"])
    del shape[scalars["dim"]]
    return tuple(shape)


def _sum(node):
    x, dims = node.args[0], operand(node, "dim")
    dims = list(range(len(shape(x)))) if dims is None or dims == [] else dims
    if len(dims) == 1:
        out = (("unsqueeze", dims[0]),) if operand(node, "keepdim") else ()
        yield Match(node, {"x": View(x)}, {"dim": last(dims[0], x)}, out)
    else:
        yield f"a sum over {len(dims)} axes: the operator sums one"


SPEC = OpSpec(
    name="reduce",
    args={"x": arg("*shape", layouts=NORM_LAYOUTS)},
    scalars={"dim": -1},
    options={"dim": (0, 1, -2)},
    reference=reference.reduce,
    baseline=lambda x, dim=-1: torch.sum(x, dim),
    baseline_name="torch.sum",
    shapes={
        "small": by_shape(256, 512),
        "medium": by_shape(4096, 4096),
        "large": by_shape(8192, 8192),
        "tall": by_shape(262144, 64),
        "wide": by_shape(4, 4194304),
        "vocab_50257": by_shape(1024, 50257),
        "tokens": by_shape(8, 512, 768),
    },
    edges=row_edges(
        by_shape, True, vector=by_shape(129), four_axes=by_shape(2, 3, 5, 77), million=by_shape(32, 1 << 20)
    ),
    cpu_shapes={
        "small": by_shape(16, 128),
        "medium": by_shape(16, 1000),
        "large": by_shape(16, 2048),
        "vocab_50257": by_shape(2, 50257),
    },
    cpu_edges=row_edges(
        by_shape, False, "one narrow off_grid", vector=by_shape(129), four_axes=by_shape(2, 3, 4, 37)
    ),
    flops=lambda s, _: math.prod(s["shape"]),
    out=_out,
    hidden=row_hidden(by_shape, "three four five two"),
    depth=lambda s: max(s["shape"]),
    stability=contents("x", "positive mild wide cancel spike needle near_max swamp uneven infinite"),
    exact="ints",
    sites={"sum": _sum},
    scaled=("shape",),
)
