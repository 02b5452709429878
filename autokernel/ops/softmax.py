"""Softmax along any dimension: attention weights, routers, and the probabilities of a whole vocabulary."""

import math

import torch

import reference
from autokernel.graph import CASTS, Match, View, name, only_user, operand, strip
from autokernel.ops import last
from autokernel.spec import OpSpec, arg


def _hidden(rng, on_gpu):
    rows, width = (600, 9000) if on_gpu else (9, 700)
    return {"shape": (rng.randint(1, rows), rng.randint(2, width))}



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
    args={"x": arg("*shape", layouts=("transposed", "padded", "odd"))},
    scalars={"dim": -1},
    variants=({"dim": 0}, {"dim": 1}, {"dim": -2}),
    reference=reference.softmax,
    baseline=lambda x, dim=-1: torch.softmax(x, dim),
    baseline_name="torch.softmax",
    shapes={
        "small": {"shape": (256, 512)},
        "medium": {"shape": (4096, 1024)},
        "large": {"shape": (4096, 4096)},
        "vocab_32000": {"shape": (4096, 32000)},
        "vocab_50257": {"shape": (4096, 50257)},
        "vocab_151936": {"shape": (2048, 151936)},
        "gpt2_scores": {"shape": (1, 12, 1024, 1024)},
        "few_rows": {"shape": (4, 131072)},
    },
    edges={
        "one": {"shape": (1, 1)},
        "narrow": {"shape": (1023, 3)},
        "off_grid": {"shape": (7, 1023)},
        "4097": {"shape": (5, 4097)},
        "vocab_50257": {"shape": (3, 50257)},
        "vocab_151936": {"shape": (2, 151936)},
        "vector": {"shape": (129,)},
        "four_axes": {"shape": (2, 3, 5, 77)},
    },
    cpu_shapes={
        "small": {"shape": (8, 128)},
        "medium": {"shape": (16, 1000)},
        "large": {"shape": (16, 2048)},
        "vocab_50257": {"shape": (2, 50257)},
    },
    cpu_edges={
        "one": {"shape": (1, 1)},
        "narrow": {"shape": (33, 3)},
        "off_grid": {"shape": (5, 1023)},
        "vocab_151936": {"shape": (1, 151936)},
        "vector": {"shape": (129,)},
        "four_axes": {"shape": (2, 3, 4, 37)},
    },
    flops=lambda s, _: 5 * math.prod(s["shape"]),  # maximum, subtract, exp, sum, divide: one each
    out=("*shape",),
    hidden=_hidden,
    depth=lambda s: max(s["shape"]),
    stability={
        "large": "large",
        "near_max": "near_max",
        "offset": "offset",
        "constant": "constant_rows",
        "masked": "masked",
        "spike": "spike",
        "needle": "needle",
        "outliers": "outliers",
        "swamp": "swamp_exp",
        "flat": "tiny",
    },
    sites={"softmax": _fused, "_softmax": _fused, "exp": _written_out},
    scaled=("shape",),
)
