import torch
import torch.nn as nn


class Base(nn.Module):
    scale = 0.5

    def __init__(self, n):
        super(Base, self).__init__()
        self.lin = nn.Linear(n, n)

    def forward(self, x):
        return self.lin(x) * self.scale


class Model(Base):
    """Named in its own methods: by super, by isinstance, by a static method."""

    depth = 3

    def __init__(self, n):
        super(Model, self).__init__(n)
        assert isinstance(self, Model)

    @staticmethod
    def squash(x):
        return x / (1 + x.abs())

    def forward(self, x):
        for _ in range(Model.depth):
            x = Model.squash(super(Model, self).forward(x))
        return x


def get_inputs():
    return [torch.randn(7, 18)]


def get_init_inputs():
    return [18]
