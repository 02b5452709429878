"""Sum along one dimension."""

import math

import torch

import reference
from autokernel.graph import Match, View, operand, shape
from autokernel.ops import last
from autokernel.spec import OpSpec, arg


def _out(size, scalars):
    shape = list(size["shape"])
    del shape[scalars["dim"]]
    return tuple(shape)


def _hidden(rng, on_gpu):
    rows, width = (600, 9000) if on_gpu else (9, 700)
    return {"shape": (rng.randint(1, rows), rng.randint(2, width))}



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
    args={"x": arg("*shape", layouts=("transposed", "padded", "odd"))},
    scalars={"dim": -1},
    variants=({"dim": 0}, {"dim": 1}, {"dim": -2}),
    reference=reference.reduce,
    baseline=lambda x, dim=-1: torch.sum(x, dim),
    baseline_name="torch.sum",
    shapes={
        "small": {"shape": (256, 512)},
        "medium": {"shape": (4096, 4096)},
        "large": {"shape": (8192, 8192)},
        "tall": {"shape": (262144, 64)},
        "wide": {"shape": (4, 4194304)},
        "vocab_50257": {"shape": (1024, 50257)},
        "tokens": {"shape": (8, 512, 768)},
    },
    edges={
        "one": {"shape": (1, 1)},
        "narrow": {"shape": (1023, 3)},
        "off_grid": {"shape": (7, 1023)},
        "4097": {"shape": (5, 4097)},
        "vocab_151936": {"shape": (2, 151936)},
        "vector": {"shape": (129,)},
        "four_axes": {"shape": (2, 3, 5, 77)},
    },
    cpu_shapes={
        "small": {"shape": (16, 128)},
        "medium": {"shape": (16, 1000)},
        "large": {"shape": (16, 2048)},
        "vocab_50257": {"shape": (2, 50257)},
    },
    cpu_edges={
        "one": {"shape": (1, 1)},
        "narrow": {"shape": (33, 3)},
        "off_grid": {"shape": (5, 1023)},
        "vector": {"shape": (129,)},
        "four_axes": {"shape": (2, 3, 4, 37)},
    },
    flops=lambda s, _: math.prod(s["shape"]),
    out=_out,
    hidden=_hidden,
    depth=lambda s: max(s["shape"]),
    stability={
        "positive": "positive",
        "large": "mild",
        "mixed_scale": "wide",
        "cancel": "cancel",
        "spike": "spike",
        "needle": "needle",
        "overflow": "near_max",
        "swamp": "swamp",
    },
    exact="ints",
    sites={"sum": _sum},
    scaled=("shape",),
)
