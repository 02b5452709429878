"""Matrix product with an optional bias: every linear layer of a model."""

import math

import torch
import torch.fx as fx

import reference
from autokernel.graph import Match, View, name, operand, shape
from autokernel.ops import VECTOR_LAYOUTS, contents, product_hidden
from autokernel.spec import OpSpec, arg


def _torch(A, B, bias=None):
    rows = A.flatten(0, -2)
    return torch.matmul(A, B) if bias is None else torch.addmm(bias, rows, B).view(*A.shape[:-1], B.shape[1])


def _mnk(m, n, k):
    return {"rows": m if isinstance(m, tuple) else (m,), "N": n, "K": k}


def _hidden(axes, most):
    return product_hidden(_mnk, axes, most, (1500, 90), 2)


def product(node: fx.Node) -> tuple[View, View, fx.Node | None, tuple] | None:
    """(A, B, bias or None, views on the result) of a node that multiplies by one matrix, else None."""
    kind, first, second = name(node), operand(node, 0), operand(node, 1)
    if kind == "linear" and len(shape(second)) == 2:
        return View(first), View(second).then("t"), operand(node, "bias"), ()
    if kind == "addmm" and operand(node, "beta") == operand(node, "alpha") == 1 and len(shape(first)) == 1:
        return View(second), View(operand(node, 2)), first, ()
    if kind in ("mm", "matmul", "mv", "bmm"):
        a, b = View(first), View(second)
        if len(shape(b.node)) == 2:
            return a, b, None, ()
        if len(shape(b.node)) == 3 and shape(b.node)[0] == 1 < shape(b.node)[1]:  # a batch of one; K = 1 is no product
            return a, b.then("select.int", 0, 0), None, ()
        if len(shape(b.node)) == 1 and len(shape(a.node)) >= 2:
            return a, b.then("unsqueeze", 1), None, (("squeeze.dim", -1),)
    return None


def _product(node):
    found = product(node)
    if found is None:
        yield "a batched product: the operator has one matrix B"
        return
    a, b, bias, out = found
    yield Match(node, {"A": a, "B": b} | ({} if bias is None else {"bias": View(bias)}), {}, out)


SPEC = OpSpec(
    name="matmul",
    args={
        "A": arg("*rows", "K", layouts=("padded", "transposed", "odd", "swapped", "stepped", "expanded")),
        "B": arg("K", "N", layouts=("transposed", "padded", "odd", "stepped", "expanded")),
        "bias": arg("N", optional=True, layouts=VECTOR_LAYOUTS),
    },
    reference=reference.matmul,
    baseline=_torch,
    baseline_name="torch.matmul / addmm (cuBLAS)",
    shapes={
        "small": _mnk(512, 512, 512),
        "medium": _mnk(2048, 2048, 2048),
        "large": _mnk(4096, 4096, 4096),
        "xlarge": _mnk(8192, 8192, 8192),
        "tall": _mnk(16384, 256, 1024),
        "wide": _mnk(128, 16384, 1024),
        "deep_k": _mnk(256, 256, 16384),
        "decode": _mnk(1, 4096, 4096),
        "gpt2_qkv": _mnk(1024, 2304, 768),
        "gpt2_lm_head": _mnk(1024, 50257, 768),
        "bert_ffn": _mnk(4096, 3072, 768),
        "llama7b_qkv": _mnk(2048, 4096, 4096),
        "llama7b_mlp": _mnk(2048, 11008, 4096),
        "llama13b_mlp": _mnk(2048, 13824, 5120),
    },
    edges={
        "one": _mnk(1, 1, 1),
        "thin": _mnk(1023, 7, 130),
        "prime": _mnk(127, 257, 509),
        "off_grid": _mnk(129, 1025, 65),
        "odd_vocabulary": _mnk(5, 50257, 64),
        "batched": _mnk((3, 5, 17), 96, 80),
    },
    cpu_shapes={
        "small": _mnk(64, 64, 64),
        "medium": _mnk(128, 96, 160),
        "large": _mnk(192, 128, 256),
        "tall": _mnk(300, 16, 32),
        "deep_k": _mnk(16, 16, 1024),
        "decode": _mnk(1, 128, 128),
    },
    cpu_edges={
        "one": _mnk(1, 1, 1),
        "prime": _mnk(61, 67, 71),
        "off_grid": _mnk(33, 129, 65),
        "batched": _mnk((2, 3, 5), 24, 40),
    },
    flops=lambda s, _: 2 * math.prod((*s["rows"], s["N"], s["K"])),
    out=("*rows", "N"),
    hidden={
        "three_axes": _hidden(2, (40, 9)), "two_axes": _hidden(1, (1500, 90)), "four_axes": _hidden(3, (12, 4)),
        "no_rows": lambda rng, on_gpu: _mnk(0, rng.randint(1, 99), rng.randint(1, 99)),
    },
    depth=lambda s: s["K"],
    stability={
        "positive": "positive",
        "large": {"A": "large", "B": "tiny"},
        **contents("A", "wide"),
        "cancel": {"A": "cancel", "B": "repeat"},
        "uneven": {"A": "uneven", "B": "uneven_columns", "bias": "zeros"},
        **contents("A", "spike near_max needle infinite"),
    },
    exact="ints",
    sites=dict.fromkeys(("linear", "addmm", "mm", "matmul", "mv", "bmm", "baddbmm"), _product),
    scaled=("rows",),
)
