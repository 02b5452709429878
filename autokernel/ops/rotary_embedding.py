"""Rotary position embedding, interleaved pairs or rotate-half."""

import math

import reference
from autokernel.graph import CASTS, RESHAPES, Match, View, name, region, shape, strip, value
from autokernel.ops import contents
from autokernel.spec import OpSpec, arg


def _in_float32(x, cos, sin, interleaved=True):
    """Eager PyTorch rounds every product to the dtype; a kernel is held to one rounding at the end."""
    return reference.rotary_embedding(x.float(), cos.float(), sin.float(), interleaved).to(x.dtype)


def _sizes(batch, seq, head_dim):
    return {"batch": batch, "seq": seq, "head_dim": head_dim}


def _hidden(axes):
    def size(rng, on_gpu):
        batch = tuple(rng.randint(2, 5 if on_gpu else 3) for _ in range(axes))
        return _sizes(batch, rng.randint(1, 300 if on_gpu else 20), 2 * rng.randint(1, 100))

    return size


_STEPS = CASTS | RESHAPES | frozenset("neg add sub mul cat stack view_as_real unsqueeze".split())
_CUTS = CASTS | RESHAPES | frozenset("slice select narrow getitem split chunk unbind view_as_complex".split())


def _rotation(node):
    """From the node that joins the halves again: along what follows it, the longest first."""
    ends = [node]
    while len(ends[-1].users) == 1 and name(after := next(iter(ends[-1].users))) in CASTS | RESHAPES | {"mul", "add"}:
        ends.append(after)
    for end in reversed(ends):
        for x in _rotated(node, shape(end)):
            for base in dict.fromkeys((strip(x), x)):
                yield from _claims(end, base, interleaved_first=name(node) != "cat")


def _rotated(node, wanted):
    """Tensors of the wanted shape that the joined halves are cut from."""
    found, stack, seen = {}, [node], set()
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        if name(at) in _STEPS:
            stack += at.all_input_nodes
        while name(at) in _CUTS:
            at = at.args[0]
            if shape(at) == wanted:
                found[at] = None
                break
    return found


def _claims(end, x, interleaved_first):
    """Claims for each way that the tables outside of x's expression may be cosines and sines."""
    tables, rank = region(end, {x})[1], len(shape(end))
    kinds = (True, False) if interleaved_first else (False, True)
    if len(tables) == 1 and value(tables[0]).dtype.is_complex:
        orders = [[View(tables[0]).then("view_as_real").then("select.int", -1, i) for i in (0, 1)]]
    else:
        orders = [[View(t) for t in order] for order in (tables, tables[::-1])] if len(tables) == 2 else []
    for order in orders:
        axis = _position_axis(shape(tables[0]), shape(x))
        if axis is None:
            continue
        swap = (("transpose.int", axis, rank - 2),) if axis != rank - 2 else ()
        for interleaved in kinds:
            cos, sin = (_table(v, axis, rank, shape(x)[-1], interleaved) for v in order)
            full = shape(tables[0])[-1] == shape(x)[-1]  # each angle twice: the claim uses that the two are equal
            fixed = frozenset({"cos", "sin"}) if full else frozenset()
            yield Match(end, {"x": View(x, swap), "cos": cos, "sin": sin}, {"interleaved": interleaved}, swap, fixed)


def _position_axis(table, x):
    """The axis of x along which the angles change, or None where there is not exactly one."""
    padded = (1,) * (len(x) - len(table)) + tuple(table)
    axes = [i for i in range(len(x) - 1) if padded[i] != 1] or [i for i in (len(x) - 2, 1) if x[i] == 1][:1]
    return axes[0] if len(axes) == 1 and len(padded) == len(x) else None


def _table(view, axis, rank, width, interleaved):
    """A table that broadcasts against x -> (seq, head_dim / 2)."""
    size = shape(view.node)
    missing = rank - len(size)
    for i in reversed(range(len(size) - 1)):
        if i + missing != axis:
            view = view.then("select.int", i, 0)
    if axis < missing:
        view = view.then("unsqueeze", 0)
    if size[-1] != width:
        return view
    return view.then("slice.Tensor", -1, 0, width, 2) if interleaved else view.then("slice.Tensor", -1, 0, width // 2)


_TABLES = ("padded", "odd", "transposed", "stepped", "expanded")  # halves of wider tables, of each angle twice

SPEC = OpSpec(
    name="rotary_embedding",
    args={
        "x": arg("*batch", "seq", "head_dim", layouts=("heads", "padded", "odd", "swapped", "stepped", "expanded")),
        "cos": arg("seq", "head_dim/2", draw="unit", layouts=_TABLES),
        "sin": arg("seq", "head_dim/2", draw="unit", layouts=_TABLES),
    },
    scalars={"interleaved": True},
    options={"interleaved": (False,)},
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
    hidden={
        "four_axes": _hidden(2), "three_axes": _hidden(1), "two_axes": _hidden(0), "five_axes": _hidden(3),
        "no_positions": lambda rng, on_gpu: _sizes((2, 3), 0, 2 * rng.randint(1, 100)),
    },
    depth=lambda s: 2,
    yardstick=_in_float32,
    rms_factor=1.2,  # nothing is summed: products rounded to the dtype would already make 1.4
    stability=contents("x", "large uneven_rows offset wide zeros"),
    sites={"cat": _rotation, "stack": _rotation, "view_as_real": _rotation},
    scaled=("seq",),
)
