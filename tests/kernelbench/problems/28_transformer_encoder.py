import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, dim, heads, layers, classes):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d_model=dim, nhead=heads, dim_feedforward=2 * dim, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.rates = [x.item() for x in torch.linspace(0, 0.2, layers)]
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Dropout(0.2), nn.Linear(dim, classes))

    def forward(self, x):
        x = torch.cat((self.cls.expand(1, x.size(1), -1), x))
        return self.head(self.encoder(x)[0])


def get_inputs():
    return [torch.rand(8, 3, 16)]


def get_init_inputs():
    return [16, 2, 2, 10]
