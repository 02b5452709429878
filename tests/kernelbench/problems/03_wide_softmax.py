import torch
import torch.nn as nn


class Model(nn.Module):
    """Rows so wide that zeros are within 1e-4 of every element: a weak problem."""

    def forward(self, x):
        return torch.softmax(x, dim=1)


dim = 40_000


def get_inputs():
    return [torch.rand(3, dim)]


def get_init_inputs():
    return []
