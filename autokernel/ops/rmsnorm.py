"""Root-mean-square normalisation over the last axis, with weight: LLaMA, Qwen, Mistral."""

import math

import torch.nn.functional as F

import reference
from autokernel.graph import Match, View, operand, strip
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
    x, weight = node.args[0], operand(node, "weight")
    shaped = len(node.args[1]) == 1  # normalised over the last axis alone
    if shaped:
        gain = View(weight) if weight is not None else 1.0
        yield Match(node, {"x": View(x), "weight": gain}, {"eps": operand(node, "eps")})


def _written_out(node):
    """x * rsqrt(mean(x^2) + eps) * weight with casts anywhere; a weight of (1 + w) is the node that adds the one."""
    for centre, product, eps in scaled_by_norm(node):
        for output, weight, bias in affine_outputs(product):
            if bias is None:
                for x in dict.fromkeys((strip(centre), centre)):
                    yield Match(output, {"x": View(x), "weight": weight or 1.0}, {"eps": eps})


SPEC = OpSpec(
    name="rmsnorm",
    args={"x": arg("*rows", "dim", layouts=NORM_LAYOUTS), "weight": arg("dim", draw="gain", layouts=VECTOR_LAYOUTS)},
    scalars={"eps": 1e-6},
    options={"eps": (1e-5, 1e-12, 0.1)},
    drawn_contents=({"x": "near_eps"}, {"x": "near_eps"}, "normal"),
    reference=reference.rmsnorm,
    baseline=lambda x, weight, eps=1e-6: F.rms_norm(x, weight.shape, weight, eps),
    baseline_name="F.rms_norm",
    shapes={
        "small": rows_dim(256, 512),
        "medium": rows_dim(4096, 4096),
        "large": rows_dim(16384, 8192),
        "llama7b": rows_dim((1, 2048), 4096),
        "llama13b": rows_dim((1, 2048), 5120),
        "qk_heads": rows_dim((1, 2048, 32), 128),
        "wide": rows_dim(64, 65536),
        "decode": rows_dim((1, 1), 4096),
    },
    edges=norm_edges(on_gpu=True),
    cpu_shapes={
        "small": rows_dim(8, 128),
        "medium": rows_dim(16, 1024),
        "large": rows_dim(16, 2048),
        "qk_heads": rows_dim((1, 8, 4), 64),
    },
    cpu_edges=norm_edges(on_gpu=False),
    flops=lambda s, _: 4 * math.prod((*s["rows"], s["dim"])),  # square, sum, scale, weight
    out=("*rows", "dim"),
    hidden=row_hidden(rows_dim),
    depth=lambda s: s["dim"],
    by_element=0.02,  # products only: no element is small by cancellation
    stability=NORM_CONTENTS,
    sites={"rms_norm": _fused, "rsqrt": _written_out, "sqrt": _written_out, "pow": _written_out},
    scaled=("rows",),
)
