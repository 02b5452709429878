"""The oracle: one plain PyTorch formula per operator (frozen: the judge stands on it).

Each function computes in the dtype it is given. The judge calls it on float64 copies of the inputs, so its rounding is
about 1e-16 and never a reason for a kernel to fail. Shapes are those of the kernel contract (AGENTS.md).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def matmul(A, B, bias=None):
    """A (*rows, K) @ B (K, N) + bias (N,) -> (*rows, N)."""
    out = A @ B
    return out if bias is None else out + bias


def softmax(x, dim=-1):
    """exp(x) / sum(exp(x)) along dim; same shape as x."""
    e = torch.exp(x - x.amax(dim, keepdim=True)) if x.numel() else x  # the dimension may be the empty one
    return e / e.sum(dim, keepdim=True)


def layernorm(x, weight, bias, eps=1e-5):
    """x (*rows, dim), normalised over dim with the biased variance, times weight (dim,) plus bias (dim,)."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def rmsnorm(x, weight, eps=1e-6):
    """x (*rows, dim) over its root mean square along dim, times weight (dim,)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def flash_attention(Q, K, V, causal=True, sm_scale=None):
    """softmax(Q K^T * sm_scale) V per head.

    Q (batch, heads, q_len, head_dim); K, V (batch, kv_heads, kv_len, head_dim), heads a multiple of kv_heads.
    causal: query i sees keys j <= i + kv_len - q_len (the last query sees every key, as in decoding with a cache);
    a query that sees no key gives zeros. One head at a time: the scores of all heads would not fit in memory.
    """
    batch, heads, q_len, head_dim = Q.shape
    kv_heads, kv_len = K.shape[1], K.shape[2]
    scale = 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    out = torch.empty_like(Q, memory_format=torch.contiguous_format)
    hidden = None
    if causal:
        seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=Q.device).tril(kv_len - q_len)
        hidden = ~seen
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = (Q[b, h] @ K[b, g].T) * scale
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            out[b, h] = (weights @ V[b, g]) / torch.where(total == 0, 1, total)
    return out


def fused_mlp(x, w_gate, w_up, w_down, activation="silu"):
    """(act(x @ w_gate) * (x @ w_up)) @ w_down; x (*rows, dim), weights (dim, hidden), (dim, hidden), (hidden, out)."""
    return (ACTIVATIONS[activation](x @ w_gate) * (x @ w_up)) @ w_down


def cross_entropy(logits, targets):
    """Mean over rows of logsumexp(logits) - logits[target]; logits (rows, vocab), int64 targets, -100 is ignored."""
    kept = targets != -100
    picked = logits.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    losses = torch.logsumexp(logits, -1) - picked
    return torch.where(kept, losses, 0).sum() / kept.sum()


def rotary_embedding(x, cos, sin, interleaved=True):
    """Rotate pairs of x (*batch, seq, head_dim) by angles whose cos and sin are (seq, head_dim / 2).

    interleaved: pairs are (x[2i], x[2i+1]); otherwise (x[i], x[i + head_dim/2]), the rotate-half form.
    """
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def reduce(x, dim=-1):
    """Sum of x along dim."""
    return x.sum(dim)
