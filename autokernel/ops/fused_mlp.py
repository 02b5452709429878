"""Gated MLP: two products, an activation between them, and the product back. SwiGLU and GeGLU."""

import reference
from autokernel.spec import OpSpec, arg


def _sizes(rows, dim, hidden, out=None):
    return {"rows": rows if isinstance(rows, tuple) else (rows,), "dim": dim, "hidden": hidden, "out": out or dim}


def _hidden(rng, on_gpu):
    top = 700 if on_gpu else 60
    return _sizes(rng.randint(1, top), rng.randint(1, top), rng.randint(1, top), rng.randint(1, top))


def _flops(s, _):
    rows = 1
    for n in s["rows"]:
        rows *= n
    return 2 * rows * s["hidden"] * (2 * s["dim"] + s["out"])


SPEC = OpSpec(
    name="fused_mlp",
    args={
        "x": arg("*rows", "dim", layouts=("padded", "odd")),
        "w_gate": arg("dim", "hidden", scale=lambda s: s["dim"] ** -0.5, layouts=("transposed", "padded")),
        "w_up": arg("dim", "hidden", scale=lambda s: s["dim"] ** -0.5, layouts=("transposed", "padded")),
        "w_down": arg("hidden", "out", scale=lambda s: s["hidden"] ** -0.5, layouts=("transposed", "padded")),
    },
    scalars={"activation": "silu"},
    variants=({"activation": "gelu"}, {"activation": "gelu_tanh"}, {"activation": "relu"}),
    reference=reference.fused_mlp,
    baseline=reference.fused_mlp,
    baseline_name="three torch.matmul",
    shapes={
        "small": _sizes(256, 512, 768),
        "medium": _sizes(2048, 2048, 5504),
        "large": _sizes(2048, 4096, 11008),
        "llama_125m": _sizes((1, 512), 768, 2048),
        "llama13b": _sizes(1024, 5120, 13824),
        "decode": _sizes(1, 4096, 11008),
    },
    edges={
        "one": _sizes(1, 1, 1),
        "prime": _sizes(127, 61, 257),
        "off_grid": _sizes(129, 65, 1025),
        "other_out": _sizes(64, 128, 96, 32),
        "three_axes": _sizes((2, 3, 5), 64, 128),
    },
    cpu_shapes={
        "small": _sizes(32, 64, 64),
        "medium": _sizes(64, 64, 160),
        "large": _sizes(64, 128, 192),
        "decode": _sizes(1, 64, 128),
    },
    cpu_edges={
        "one": _sizes(1, 1, 1),
        "prime": _sizes(61, 31, 67),
        "other_out": _sizes(16, 48, 40, 24),
        "three_axes": _sizes((2, 3, 5), 32, 48),
    },
    flops=_flops,
    out=("*rows", "out"),
    hidden=_hidden,
    depth=lambda s: s["dim"] + s["hidden"],
    stability={
        "large": {"x": "x8"},
        "positive": {"x": "positive"},
        "mixed_scale": {"x": "mild"},
        "spike": {"x": "spike"},
        "tiny": {"x": "tiny"},
    },
)
