import torch
import torch.nn as nn


class Model(nn.Module):
    """The second output is None."""

    def __init__(self, embed_dim, num_heads):
        super(Model, self).__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x):
        out, weights = self.attn(x, x, x, need_weights=False)
        return self.norm(out + x), weights


def get_inputs():
    return [torch.rand(9, 2, 16)]


def get_init_inputs():
    return [16, 4]
