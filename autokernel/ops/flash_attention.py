"""Scaled dot-product attention per head: causal or full, grouped key/value heads, any key length.

sm_scale is positive. A scale of 0 or below is left out of the contract: PyTorch's flash kernels mask and take the
maximum before they scale, so that there, too, it gives NaN.
"""

import torch
import torch.nn.functional as F

import reference
from autokernel.graph import CASTS, RESHAPES, Match, View, name, number, only_user, operand, shape, strip
from autokernel.ops import contents, odd_or_even
from autokernel.spec import OpSpec, arg


def _attended(Q, K, V, causal, sm_scale, mask):
    """SDPA; its own is_causal counts from the top left, so unequal lengths need a mask."""
    q_len, kv_len = Q.shape[-2], K.shape[-2]
    out = F.scaled_dot_product_attention(
        Q, K, V, attn_mask=mask, is_causal=causal and q_len == kv_len, scale=sm_scale,
        enable_gqa=Q.shape[1] != K.shape[1],
    )  # fmt: skip
    # a query that sees no key: PyTorch's backends disagree (NaN or zero); the contract says zero
    return out.nan_to_num(0.0) if causal and q_len > kv_len else out


def _masked(Q, K, V, causal=True, sm_scale=None):
    """The yardstick: any lengths, through a mask of booleans."""
    q_len, kv_len = Q.shape[-2], K.shape[-2]
    mask = None
    if causal and q_len != kv_len and q_len > 1:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=Q.device).tril(kv_len - q_len)
    return _attended(Q, K, V, causal, sm_scale, mask)


def _fastest(Q, K, V, causal=True, sm_scale=None):
    """What a user would pick: the lower-right bias keeps the flash kernels for unequal lengths."""
    q_len, kv_len = Q.shape[-2], K.shape[-2]
    if not causal or not 1 < q_len < kv_len:
        return _masked(Q, K, V, causal, sm_scale)
    from torch.nn.attention.bias import causal_lower_right  # seconds to import: only where it is used

    return _attended(Q, K, V, causal, sm_scale, causal_lower_right(q_len, kv_len))


def _heads(batch, heads, q_len, head_dim, kv_heads=None, kv_len=None):
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads or heads,
        "q_len": q_len, "kv_len": kv_len or q_len, "head_dim": head_dim,
    }  # fmt: skip


def _hidden(groups=1, q=None, kv=None):
    """Heads in groups of so many; q, kv: lengths as shares of the longest that there is, or any, both alike."""

    def size(rng, on_gpu):
        top, kv_heads = (700, rng.randint(2, 3)) if on_gpu else (50, 2 if groups > 1 else 1)
        lengths = [odd_or_even(rng, top) if share is None else max(1, int(share * top)) for share in (q, kv)]
        kv_len = lengths[0] if kv is None else lengths[1]
        head_dim = rng.choice((64, 80, 128) if on_gpu else (16, 64, 80))
        return _heads(rng.randint(1, 2), kv_heads * groups, lengths[0], head_dim, kv_heads, kv_len)

    return size


def _flops(s, scalars):
    """Two products of 2 FLOPs per score; a causal mask leaves the scores on and below the diagonal."""
    q, kv = s["q_len"], s["kv_len"]
    scores = q * kv
    if scalars.get("causal", True):
        first = max(q - kv, 0)  # rows that see no key
        n = q - first
        scores = n * (kv - (n - 1) / 2) if n else 0
    return 4 * s["batch"] * s["heads"] * scores * s["head_dim"]


_LAYOUTS = ("heads", "padded", "odd", "transposed", "stepped", "expanded")
_KV = ("batch", "kv_heads", "kv_len", "head_dim")
_REPEAT = CASTS | RESHAPES | frozenset("expand unsqueeze repeat_interleave slice".split())
_PRODUCTS = ("matmul", "bmm")


def _grouped(view, heads):
    """The keys or values before their heads were repeated for grouped queries, where they were; then as they are."""
    node, size = view.node, shape(view.node)
    while not view.steps and len(size) == 4 and size[1] == heads and name(node) in _REPEAT:
        node = node.args[0]
        few = shape(node)
        if len(few) == 4 and few[1] < heads and (few[0], *few[2:]) == (size[0], *size[2:]) and heads % few[1] == 0:
            yield View(node)
            break
    yield view


def _claims(output, q, k, v, scale, masks):
    """Claims with and without grouped heads, for every mask that it may be; 3-D operands get an axis of batches."""
    out = ()
    if len(shape(q.node)) == 3:
        q, k, v, out = q.then("unsqueeze", 0), k.then("unsqueeze", 0), v.then("unsqueeze", 0), (("squeeze.dim", 0),)
    usual = scale is None or abs(scale * shape(q.node)[-1] ** 0.5 - 1) < 1e-9
    grouped_keys, grouped_values = list(_grouped(k, shape(q.node)[1])), list(_grouped(v, shape(q.node)[1]))
    both = len(grouped_keys) == len(grouped_values)
    for keys, values in zip(grouped_keys, grouped_values, strict=True) if both else [(k, v)]:
        for causal in masks:
            scalars = {"causal": causal, "sm_scale": None if usual else scale}
            yield Match(output, {"Q": q, "K": keys, "V": values}, scalars, out)


def _sdpa(node):
    if operand(node, "dropout_p"):
        yield "attention with active dropout"
        return
    q, k, v = map(View, node.args[:3])
    masks = (True, False) if operand(node, "attn_mask") is not None else (bool(operand(node, "is_causal")),)
    yield from _claims(node, q, k, v, operand(node, "scale"), masks)


def _written_out(node):
    """softmax(Q K^T * scale, masked) V: from the softmax down to both products."""
    weights, after = node, only_user(node)
    while name(after) in CASTS | RESHAPES:
        weights, after = after, only_user(after)
    if name(after) not in _PRODUCTS or after.args[0] is not weights:
        return
    found = _scores(node.args[0], 1.0, False)
    if found:
        product, scale, masked = found
        q, scale = _unscaled(product.args[0], scale)
        keys, scale = _unscaled(product.args[1], scale)
        axes = [d % len(shape(keys)) for d in keys.args[1:3]] if name(keys) in ("transpose", "swapaxes") else []
        swapped = sum(axes) == 2 * len(shape(keys)) - 3 and abs(axes[0] - axes[1]) == 1  # the last two axes
        k = View(keys.args[0]) if swapped else View(keys).then("transpose.int", -2, -1)
        yield from _claims(after, View(q), k, View(after.args[1]), scale, (True, False) if masked else (False,))


def _scores(node, scale, masked):
    """(the product Q K^T, scale, is there a mask?) of an expression that gives attention scores, else None."""
    node = strip(node, CASTS | RESHAPES)
    kind = name(node)
    if kind in _PRODUCTS:
        return node, scale, masked
    inner, factor = _unscaled(node, 1.0)
    if inner is not node:
        return _scores(inner, scale * factor, masked)
    if kind in ("add", "sub", "where", "masked_fill"):
        found = [f for n in node.all_input_nodes if (f := _scores(n, scale, True))]
        return found[0] if len(found) == 1 else None
    return None


def _unscaled(node, scale):
    """(x, scale * c) for x * c, c * x and x / c with a number c; (node, scale) for anything else."""
    base = strip(node)
    a, b = base.args[:2] if name(base) in ("mul", "div") else (None, None)
    if number(b) is not None:
        return a, scale * number(b) if name(base) == "mul" else scale / number(b)
    if number(a) is not None and name(base) == "mul":
        return b, scale * number(a)
    return node, scale


SPEC = OpSpec(
    name="flash_attention",
    args={
        "Q": arg("batch", "heads", "q_len", "head_dim", layouts=_LAYOUTS),
        "K": arg(*_KV, layouts=_LAYOUTS),
        "V": arg(*_KV, layouts=_LAYOUTS),
    },
    scalars={"causal": True, "sm_scale": None},
    options={"causal": (False,), "sm_scale": (0.05, 0.3)},
    reference=reference.flash_attention,
    baseline=_fastest,
    yardstick=_masked,
    baseline_name="F.scaled_dot_product_attention",
    shapes={
        "small": _heads(1, 4, 256, 64),
        "medium": _heads(2, 32, 1024, 64),
        "large": _heads(1, 32, 2048, 128),
        "xlarge": _heads(1, 32, 8192, 128),
        "gpt2": _heads(1, 12, 1024, 64),
        "bert": _heads(8, 12, 512, 64),
        "llama_gqa": _heads(1, 32, 2048, 128, kv_heads=8),
        "cross": _heads(2, 16, 300, 64, kv_len=1500),
        "decode": _heads(1, 32, 1, 128, kv_len=4096),
        "decode_gqa": _heads(8, 32, 1, 128, kv_heads=8, kv_len=2048),
    },
    edges={
        "one": _heads(1, 1, 1, 64),
        "prime": _heads(1, 3, 127, 64),
        "off_grid": _heads(1, 2, 1025, 64),
        "odd_head": _heads(1, 2, 100, 80),
        "wide_head": _heads(1, 2, 130, 256),
        "cross": _heads(2, 4, 33, 64, kv_len=257),
        "longer_queries": _heads(1, 2, 150, 64, kv_len=70),
        "gqa": _heads(1, 6, 77, 64, kv_heads=2),
        "mqa": _heads(2, 4, 64, 64, kv_heads=1),
        "decode": _heads(2, 4, 1, 64, kv_heads=2, kv_len=1023),
    },
    cpu_shapes={
        "small": _heads(1, 2, 32, 32),
        "medium": _heads(1, 1, 64, 64),
        "large": _heads(1, 2, 96, 64),
        "decode": _heads(1, 2, 1, 32, kv_heads=1, kv_len=130),
    },
    cpu_edges={
        "one": _heads(1, 1, 1, 16),
        "odd_head": _heads(1, 1, 40, 80),
        "longer_queries": _heads(1, 1, 70, 32, kv_len=40),
        "gqa": _heads(1, 4, 37, 32, kv_heads=2),
        "cross": _heads(1, 1, 17, 32, kv_len=67),
    },
    flops=_flops,
    out=("batch", "heads", "q_len", "head_dim"),
    hidden={
        "more_keys": _hidden(3, 0.4, 1.0), "alike": _hidden(), "grouped": _hidden(2),
        "fewer_keys": _hidden(1, 1.0, 0.4), "no_batch": lambda rng, on_gpu: _heads(0, 2, 7, 64),
    },
    depth=lambda s: s["kv_len"] + s["head_dim"],
    stability={
        **contents("Q", "x8"), **contents("V", "wide offset"), **contents("Q", "tiny spike"),
        **contents("K", "loud_rows repeat_rows"), "range": {"Q": "huge", "K": "minute", "V": "huge"},
    },  # fmt: skip
    sites={"scaled_dot_product_attention": _sdpa, "softmax": _written_out, "_softmax": _written_out},
    scaled=("batch", "q_len+kv_len"),
)
