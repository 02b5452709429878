"""LLaMA (Touvron et al. 2023), random weights: RMSNorm, interleaved rotary embedding, SwiGLU, grouped-query attention.

    uv run profile.py --model models/llama_7b.py --class-name LlamaModel --input-shape 1,512 --dtype float16
    uv run profile.py --model models/llama_7b.py --class-name LlamaModel7B --input-shape 1,2048 --dtype float16
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


def rotate(x, cos, sin):
    """Turn each pair (x[2i], x[2i+1]) of x (batch, heads, seq, head_dim) by the angle of its position."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.head_dim = dim // heads
        self.grouped = heads != kv_heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.wo(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = MLP(dim, hidden)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class LlamaModel(nn.Module):
    """Token ids (batch, seq) -> logits (batch, seq, vocab). The default is 134M parameters."""

    def __init__(self, vocab=32000, length=2048, dim=768, layers=12, heads=12, kv_heads=None, hidden=2048):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads or heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        steps = torch.arange(0, dim // heads, 2) / (dim // heads)
        angles = torch.outer(torch.arange(length), 10000.0**-steps)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids):
        x, seq = self.tokens(ids), ids.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class LlamaModel7B(LlamaModel):
    """6.7B parameters: 13.5 GB in half precision, about 17 GB to run at [1, 2048]."""

    def __init__(self, vocab=32000, length=4096, dim=4096, layers=32, heads=32, kv_heads=None, hidden=11008):
        super().__init__(vocab, length, dim, layers, heads, kv_heads, hidden)
