"""Mean cross-entropy of logits against class indices; -100 is ignored, as in PyTorch."""

from math import prod

import torch.nn.functional as F

import reference
from autokernel.graph import Match, View, name, operand, strip, value
from autokernel.ops import contents, row_edges, row_hidden
from autokernel.spec import OpSpec, arg


def _sizes(rows, vocab):
    return {"rows": rows, "vocab": vocab}


def _loss(node):
    """F.cross_entropy, or nll_loss of log_softmax, with the mean over targets that are not -100."""
    logits, targets = node.args[:2]
    plain = operand(node, "weight") is None and operand(node, "reduction") == 1
    if not plain or operand(node, "ignore_index") != -100 or operand(node, "label_smoothing", 0.0):
        yield "a cross-entropy with weights, label smoothing, another reduction or another ignored index"
        return
    if name(node) != "cross_entropy_loss":
        logits = strip(logits)
        if name(logits) not in ("log_softmax", "_log_softmax"):
            return
        logits = logits.args[0]
    out = () if value(node).dtype.itemsize == 4 else (("to.dtype", value(node).dtype),)
    for x in dict.fromkeys((strip(logits), logits)):
        yield Match(node, {"logits": View(x), "targets": View(targets)}, {}, out)


SPEC = OpSpec(
    name="cross_entropy",
    args={
        "logits": arg("rows", "vocab", layouts=("padded", "odd", "transposed", "stepped", "expanded")),
        "targets": arg("rows", dtype="int64", draw="index", below="vocab", layouts=("stepped", "odd", "expanded")),
    },
    reference=reference.cross_entropy,
    baseline=lambda logits, targets: F.cross_entropy(logits, targets),
    baseline_name="F.cross_entropy",
    shapes={
        "small": _sizes(256, 1000),
        "medium": _sizes(4096, 32000),
        "large": _sizes(2048, 151936),
        "vocab_50257": _sizes(4096, 50257),
        "few_rows": _sizes(8, 151936),
        "classes": _sizes(65536, 10),
    },
    edges=row_edges(_sizes, True),
    cpu_shapes={
        "small": _sizes(8, 128),
        "medium": _sizes(16, 1000),
        "large": _sizes(16, 2048),
        "vocab_50257": _sizes(2, 50257),
    },
    cpu_edges=row_edges(_sizes, False, "one narrow off_grid 151936"),
    flops=lambda s, _: 4 * s["rows"] * s["vocab"],  # maximum, subtract, exp, sum
    out=(),
    out_dtype="float32",
    tolerance=0.4,  # a mean of logarithms: float32 gives 1e-7, one missing block of a row already 1e-5
    hidden=row_hidden(lambda rows, vocab: _sizes(prod(rows), vocab), "two"),
    drawn_contents=("normal", {"targets": "some_ignored"}),
    depth=lambda s: 1,  # a logarithm forgets the rounding of a long sum
    yardstick=lambda logits, targets: F.cross_entropy(logits.float(), targets),
    stability={
        **contents("logits", "huge near_max offset constant_rows spike swamp_exp"),
        **contents("targets", "some_ignored all_ignored"),
        "needle": {"logits": "needle", "targets": "one_ignored"},
    },
    sites={"cross_entropy_loss": _loss, "nll_loss_nd": _loss, "nll_loss": _loss},
    scaled=("rows",),
)
