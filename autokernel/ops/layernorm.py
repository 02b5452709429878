"""Layer normalisation over the last axis, with weight and bias."""

import torch.nn.functional as F

import reference
from autokernel.ops import NORM_CONTENTS, elements, norm_edges, norm_hidden
from autokernel.spec import OpSpec, arg

SPEC = OpSpec(
    name="layernorm",
    args={
        "x": arg("*rows", "dim", layouts=("padded", "odd", "transposed")),
        "weight": arg("dim", draw="gain"),
        "bias": arg("dim"),
    },
    scalars={"eps": 1e-5},
    variants=({"eps": 1e-12}, {"eps": 0.1}),
    reference=reference.layernorm,
    baseline=lambda x, weight, bias, eps=1e-5: F.layer_norm(x, weight.shape, weight, bias, eps),
    baseline_name="F.layer_norm",
    shapes={
        "small": {"rows": (256,), "dim": 512},
        "medium": {"rows": (4096,), "dim": 2048},
        "large": {"rows": (16384,), "dim": 8192},
        "gpt2": {"rows": (1, 1024), "dim": 768},
        "bert": {"rows": (8, 512), "dim": 768},
        "opt_6b": {"rows": (8192,), "dim": 4096},
        "wide": {"rows": (64,), "dim": 65536},
        "decode": {"rows": (1, 1), "dim": 4096},
    },
    edges=norm_edges(on_gpu=True),
    cpu_shapes={
        "small": {"rows": (8,), "dim": 128},
        "medium": {"rows": (16,), "dim": 768},
        "large": {"rows": (16,), "dim": 2048},
        "gpt2": {"rows": (1, 16), "dim": 768},
    },
    cpu_edges=norm_edges(on_gpu=False),
    flops=lambda s, _: 8 * elements(s),  # mean, centre, square, sum, scale, weight, bias and the sum of the mean
    out=("*rows", "dim"),
    hidden=norm_hidden,
    depth=lambda s: s["dim"],
    stability=NORM_CONTENTS,
)
