"""Rotary position embedding, interleaved pairs or rotate-half."""

import math

import reference
from autokernel.spec import OpSpec, arg


def _in_float32(x, cos, sin, interleaved=True):
    """Eager PyTorch rounds every product to the dtype; a kernel is held to one rounding at the end."""
    return reference.rotary_embedding(x.float(), cos.float(), sin.float(), interleaved).to(x.dtype)


def _sizes(batch, seq, head_dim):
    return {"batch": batch, "seq": seq, "head_dim": head_dim}


def _hidden(rng, on_gpu):
    top = 300 if on_gpu else 20
    return _sizes((rng.randint(1, 2), rng.randint(1, 5)), rng.randint(1, top), 2 * rng.randint(1, 100))


SPEC = OpSpec(
    name="rotary_embedding",
    args={
        "x": arg("*batch", "seq", "head_dim", layouts=("heads", "padded", "odd")),
        "cos": arg("seq", "head_dim/2", draw="unit"),
        "sin": arg("seq", "head_dim/2", draw="unit"),
    },
    scalars={"interleaved": True},
    variants=({"interleaved": False},),
    reference=reference.rotary_embedding,
    baseline=reference.rotary_embedding,
    baseline_name="PyTorch eager",
    shapes={
        "small": _sizes((1, 4), 256, 64),
        "medium": _sizes((1, 32), 2048, 128),
        "large": _sizes((2, 32), 1024, 128),
        "long": _sizes((1, 32), 16384, 128),
        "llama_gqa_keys": _sizes((1, 8), 2048, 128),
        "decode": _sizes((8, 32), 1, 128),
    },
    edges={
        "one": _sizes((1, 1), 1, 2),
        "prime": _sizes((1, 3), 127, 64),
        "odd_head": _sizes((1, 2), 33, 80),
        "narrow": _sizes((2, 3), 17, 6),
        "two_axes": _sizes((), 50, 64),
        "three_axes": _sizes((3,), 50, 64),
    },
    cpu_shapes={
        "small": _sizes((1, 2), 16, 32),
        "medium": _sizes((1, 4), 32, 64),
        "large": _sizes((2, 4), 32, 128),
        "decode": _sizes((2, 4), 1, 128),
    },
    cpu_edges={
        "one": _sizes((1, 1), 1, 2),
        "prime": _sizes((1, 3), 37, 64),
        "odd_head": _sizes((1, 2), 9, 80),
        "narrow": _sizes((2, 3), 5, 6),
        "two_axes": _sizes((), 7, 64),
    },
    flops=lambda s, _: 3 * math.prod(s["batch"]) * s["seq"] * s["head_dim"],  # 4 products and 2 sums a pair
    out=("*batch", "seq", "head_dim"),
    hidden=_hidden,
    depth=lambda s: 2,
    yardstick=_in_float32,
    rms_factor=1.2,  # nothing is summed: products rounded to the dtype would already make 1.4
    stability={
        "large": {"x": "large"},
        "offset": {"x": "offset"},
        "mixed_scale": {"x": "wide"},
        "tiny": {"x": "tiny"},
        "zeros": {"x": "zeros"},
    },
)
