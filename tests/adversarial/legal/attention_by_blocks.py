"""Attention over blocks of keys with a running maximum, grouped heads by a view, the last block first."""

import torch

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    batch, heads, q_len, width = Q.shape
    kv_heads, kv_len = K.shape[1:3]
    scale = width**-0.5 if sm_scale is None else sm_scale
    q = (Q.float() * scale).unflatten(1, (kv_heads, heads // kv_heads))
    top = torch.full((*q.shape[:-1], 1), -1e30, device=Q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    row = torch.arange(q_len, device=Q.device)[:, None] + kv_len - q_len
    for start in reversed(range(0, kv_len, 32)):
        k, v = (t[:, :, None, start : start + 32].float() for t in (K, V))
        scores = q @ k.transpose(-1, -2)
        if causal:
            hidden = torch.arange(start, start + k.shape[-2], device=Q.device) > row
            scores = scores.masked_fill(hidden, -torch.inf)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = (scores - new).exp()
        shrink = (top - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v
        top = new
    return (out / total.clamp_min(1e-30)).flatten(1, 2).to(Q.dtype)
