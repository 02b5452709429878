"""Scaled dot-product attention per head: causal or full, grouped key/value heads, any key length."""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import reference
from autokernel.spec import OpSpec, arg


def _torch(Q, K, V, causal=True, sm_scale=None):
    """SDPA. Its own is_causal counts from the top left, so unequal lengths use the lower-right bias or a mask."""
    q_len, kv_len = Q.shape[-2], K.shape[-2]
    mask = None
    if causal and 1 < q_len < kv_len:
        mask = causal_lower_right(q_len, kv_len)
    elif causal and q_len > kv_len:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=Q.device).tril(kv_len - q_len)
    grouped = Q.shape[1] != K.shape[1]
    is_causal = causal and q_len == kv_len
    out = F.scaled_dot_product_attention(
        Q, K, V, attn_mask=mask, is_causal=is_causal, scale=sm_scale, enable_gqa=grouped
    )
    # a query that sees no key: PyTorch's backends disagree (NaN or zero); the contract says zero
    return out.nan_to_num(0.0) if causal and q_len > kv_len else out


def _heads(batch, heads, q_len, head_dim, kv_heads=None, kv_len=None):
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads or heads,
        "q_len": q_len, "kv_len": kv_len or q_len, "head_dim": head_dim,
    }  # fmt: skip


def _hidden(rng, on_gpu):
    top, kv = (700, rng.randint(1, 3)) if on_gpu else (50, 1)
    lengths = sorted((rng.randint(1, top), rng.randint(1, top)))
    return _heads(rng.randint(1, 2), kv * rng.randint(1, 3), lengths[0], rng.choice((64, 80, 128)), kv, lengths[1])


def _flops(s, scalars):
    """Two products of 2 FLOPs per score; a causal mask leaves the scores on and below the diagonal."""
    q, kv = s["q_len"], s["kv_len"]
    scores = q * kv
    if scalars.get("causal", True):
        first = max(q - kv, 0)  # rows that see no key
        n = q - first
        scores = n * (kv - (n - 1) / 2) if n else 0
    return 4 * s["batch"] * s["heads"] * scores * s["head_dim"]


_KV = ("batch", "kv_heads", "kv_len", "head_dim")

SPEC = OpSpec(
    name="flash_attention",
    args={
        "Q": arg("batch", "heads", "q_len", "head_dim", layouts=("heads", "padded")),
        "K": arg(*_KV, layouts=("heads", "padded")),
        "V": arg(*_KV, layouts=("heads", "padded")),
    },
    scalars={"causal": True, "sm_scale": None},
    variants=({"causal": False}, {"sm_scale": 0.05}, {"causal": False, "sm_scale": 0.3}),
    reference=reference.flash_attention,
    baseline=_torch,
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
    hidden=_hidden,
    depth=lambda s: s["kv_len"] + s["head_dim"],
    stability={
        "large_scores": {"Q": "x8", "K": "normal", "V": "normal"},
        "mixed_scale": {"Q": "normal", "K": "normal", "V": "wide"},
        "offset_values": {"Q": "normal", "K": "normal", "V": "offset"},
        "flat": {"Q": "tiny", "K": "normal", "V": "normal"},
        "sharp": {"Q": "spike", "K": "normal", "V": "normal"},
        "same_keys": {"Q": "normal", "K": "repeat_rows", "V": "normal"},
    },
)
