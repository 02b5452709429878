"""Layer normalisation over the last axis, with weight and bias."""

import math

import torch.nn.functional as F

import reference
from autokernel.graph import Match, View, name, operand, strip
from autokernel.ops import (
    NORM_CONTENTS,
    NORM_LAYOUTS,
    VECTOR_LAYOUTS,
    affine_outputs,
    norm_edges,
    row_hidden,
    rows_dim,
    scaled_by_norm,
)
from autokernel.spec import OpSpec, arg


def _fused(node):
    weight, bias = operand(node, "weight"), operand(node, "bias")
    if len(operand(node, "normalized_shape")) == 1:
        affine = {"weight": 1.0 if weight is None else View(weight), "bias": 0.0 if bias is None else View(bias)}
        yield Match(node, {"x": View(node.args[0]), **affine}, {"eps": operand(node, "eps")})


def _written_out(node):
    """(x - mean) * rsqrt(variance + eps) * weight + bias, with casts anywhere."""
    for centred, product, eps in scaled_by_norm(node):
        centred = strip(centred)
        if name(centred) == "sub":
            for output, weight, bias in affine_outputs(product):
                args = {"x": View(strip(centred.args[0])), "weight": weight or 1.0, "bias": bias or 0.0}
                yield Match(output, args, {"eps": eps})


SPEC = OpSpec(
    name="layernorm",
    args={
        "x": arg("*rows", "dim", layouts=NORM_LAYOUTS),
        "weight": arg("dim", draw="gain", layouts=VECTOR_LAYOUTS),
        "bias": arg("dim", layouts=VECTOR_LAYOUTS),
    },
    scalars={"eps": 1e-5},
    options={"eps": (1e-12, 0.1)},
    drawn_contents=({"x": "near_eps"}, {"x": "near_eps"}, "normal"),
    reference=reference.layernorm,
    baseline=lambda x, weight, bias, eps=1e-5: F.layer_norm(x, weight.shape, weight, bias, eps),
    baseline_name="F.layer_norm",
    shapes={
        "small": rows_dim(256, 512),
        "medium": rows_dim(4096, 2048),
        "large": rows_dim(16384, 8192),
        "gpt2": rows_dim((1, 1024), 768),
        "bert": rows_dim((8, 512), 768),
        "opt_6b": rows_dim(8192, 4096),
        "wide": rows_dim(64, 65536),
        "decode": rows_dim((1, 1), 4096),
    },
    edges=norm_edges(on_gpu=True),
    cpu_shapes={
        "small": rows_dim(8, 128),
        "medium": rows_dim(16, 768),
        "large": rows_dim(16, 2048),
        "gpt2": rows_dim((1, 16), 768),
    },
    cpu_edges=norm_edges(on_gpu=False),
    flops=lambda s, _: 8 * math.prod((*s["rows"], s["dim"])),  # two sums, mean, centre, square, scale, weight, bias
    out=("*rows", "dim"),
    hidden=row_hidden(rows_dim),
    depth=lambda s: s["dim"],
    stability=NORM_CONTENTS,
    sites={"layer_norm": _fused, "rsqrt": _written_out, "sqrt": _written_out, "pow": _written_out},
    scaled=("rows",),
)
