"""Gated MLP: two products, an activation between them, and the product back. SwiGLU and GeGLU."""

import math

import reference
from autokernel.graph import CASTS, RESHAPES, Match, name, number, operand, part, shape, strip
from autokernel.ops import contents, product_hidden
from autokernel.ops.matmul import product
from autokernel.spec import OpSpec, arg


def _sizes(rows, dim, hidden, out=None):
    return {"rows": rows if isinstance(rows, tuple) else (rows,), "dim": dim, "hidden": hidden, "out": out or dim}


def _hidden(axes, most):
    return product_hidden(_sizes, axes, most, (700, 60), 3)


_ELEMENTWISE = CASTS | RESHAPES | frozenset(
    "silu gelu relu sigmoid tanh erf mul add sub div pow exp neg reciprocal square".split()
)
_ACTIVATIONS = {
    "silu": "silu", "sigmoid": "silu", "exp": "silu", "gelu": "gelu", "erf": "gelu",
    "gelu_tanh": "gelu_tanh", "tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip


def _factor(node):
    """(A, B) where a node is a product without bias, or a slice of the columns of one."""
    node = strip(node, CASTS | RESHAPES)
    base, columns = node, None
    if cut := part(node):
        base, axis, start, length = cut
        columns = (start, start + length)
        if axis != len(shape(node)) - 1:
            return None
        base = strip(base, CASTS | RESHAPES)
    found = product(base)
    if found is None or found[2] is not None or found[3]:
        return None
    a, b = found[:2]
    return a, b.then("slice.Tensor", 1, *columns) if columns else b


def _activation(node):
    """(the gate's product, which activation) below an elementwise expression in any spelling, else None."""
    seen, gates, stack, visited = set(), set(), [node], set()
    while stack:
        at = stack.pop()
        if at in visited:
            continue
        visited.add(at)
        if found := _factor(at):
            gates.add(found)
        elif name(at) in _ELEMENTWISE:
            seen.add("gelu_tanh" if name(at) == "gelu" and operand(at, "approximate") == "tanh" else name(at))
            stack += at.all_input_nodes
        else:
            return None
    kinds = {_ACTIVATIONS[k] for k in seen if k in _ACTIVATIONS}
    return (gates.pop(), kinds.pop()) if len(kinds) == len(gates) == 1 else None


def _gated(node):
    """act(x @ w_gate) * (x @ w_up) on its way into another product; gate and up may be halves of one."""
    down = product(node)
    hidden = strip(node.args[0], CASTS | RESHAPES)
    if down is None or down[2] is not None or name(hidden) != "mul":
        return
    for gate, up in (hidden.args[:2], hidden.args[1::-1]):
        if number(gate) is not None or number(up) is not None:
            return
        second, first = _factor(up), _activation(gate)
        if second and first and first[0][0] == second[0]:
            (x, w_gate), activation = first
            args = {"x": x, "w_gate": w_gate, "w_up": second[1], "w_down": down[1]}
            yield Match(node, args, {"activation": activation})


def _weight(fan_in, fan_out):
    layouts = ("transposed", "padded", "odd", "stepped", "expanded")
    return arg(fan_in, fan_out, scale=lambda s: s[fan_in] ** -0.5, layouts=layouts)


SPEC = OpSpec(
    name="fused_mlp",
    args={
        "x": arg("*rows", "dim", layouts=("padded", "odd", "swapped", "stepped", "expanded")),
        "w_gate": _weight("dim", "hidden"),
        "w_up": _weight("dim", "hidden"),
        "w_down": _weight("hidden", "out"),
    },
    scalars={"activation": "silu"},
    options={"activation": ("gelu", "gelu_tanh", "relu")},
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
    flops=lambda s, _: 2 * math.prod((*s["rows"], s["hidden"], 2 * s["dim"] + s["out"])),
    out=("*rows", "out"),
    hidden={
        "two_axes": _hidden(1, (700, 60)), "three_axes": _hidden(2, (25, 7)),
    },  # not without rows: view(*x.shape[:-1], -1), as PyTorch code often ends, means nothing there
    depth=lambda s: s["dim"] + s["hidden"],
    stability={
        **contents("x", "x8 positive mild spike needle"),
        "uneven": {"x": "uneven", "w_gate": "positive", "w_up": "positive", "w_down": "positive"},
    },
    sites=dict.fromkeys(("linear", "mm", "matmul"), _gated),
    scaled=("rows",),
)
