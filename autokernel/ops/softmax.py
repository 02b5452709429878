"""Softmax along any dimension: attention weights, routers, and the probabilities of a whole vocabulary."""

import math

import torch

import reference
from autokernel.graph import CASTS, Match, View, name, only_user, operand, strip
from autokernel.ops import NORM_LAYOUTS, by_shape, contents, last, row_edges, row_hidden
from autokernel.spec import OpSpec, arg


def _fused(node):
    """torch.softmax; in float32 with a cast before and after, the casts belong to it."""
    x, dim = node.args[0], {"dim": last(operand(node, "dim"), node)}
    after = only_user(node)
    if after is not None and name(after) in CASTS:
        yield Match(after, {"x": View(strip(x))}, dim)
    yield Match(node, {"x": View(x)}, dim)


def _written_out(node):
    """exp(x - max) / sum(exp)."""
    inner = strip(node.args[0])
    x = strip(inner.args[0]) if name(inner) == "sub" else inner
    for user in node.users:
        total = strip(user.args[1]) if name(user) == "div" and user.args[0] is node else None
        if name(total) == "sum" and strip(total.args[0]) is node and len(operand(total, "dim") or ()) == 1:
            yield Match(user, {"x": View(x)}, {"dim": last(operand(total, "dim")[0], node)})


SPEC = OpSpec(
    name="softmax",
    args={"x": arg("*shape", layouts=NORM_LAYOUTS)},
    scalars={"dim": -1},
    options={"dim": (0, 1, -2)},
    reference=reference.softmax,
    baseline=lambda x, dim=-1: torch.softmax(x, dim),
    baseline_name="torch.softmax",
    shapes={
        "small": by_shape(256, 512),
        "medium": by_shape(4096, 1024),
        "large": by_shape(4096, 4096),
        "vocab_32000": by_shape(4096, 32000),
        "vocab_50257": by_shape(4096, 50257),
        "vocab_151936": by_shape(2048, 151936),
        "gpt2_scores": by_shape(1, 12, 1024, 1024),
        "few_rows": by_shape(4, 131072),
    },
    edges=row_edges(by_shape, True, vector=by_shape(129), four_axes=by_shape(2, 3, 5, 77)),
    cpu_shapes={
        "small": by_shape(8, 128),
        "medium": by_shape(16, 1000),
        "large": by_shape(16, 2048),
        "vocab_50257": by_shape(2, 50257),
    },
    cpu_edges=row_edges(
        by_shape, False, "one narrow off_grid 151936", vector=by_shape(129), four_axes=by_shape(2, 3, 4, 37)
    ),
    flops=lambda s, _: 5 * math.prod(s["shape"]),  # maximum, subtract, exp, sum, divide: one each
    out=("*shape",),
    hidden=row_hidden(by_shape, "three four five two"),
    depth=lambda s: max(s["shape"]),
    by_element=0.02,  # a logarithm may follow: small probabilities count
    stability=contents(
        "x", "large huge near_max offset constant_rows masked spike needle outliers swamp_exp spread infinite"
    ),
    sites={"softmax": _fused, "_softmax": _fused, "exp": _written_out},
    scaled=("shape",),
)
