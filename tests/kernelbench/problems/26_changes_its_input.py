import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """In place on what it was given, as the problem would have it."""

    def forward(self, x):
        x = F.relu(x, inplace=True)
        return x * 2


def get_inputs():
    return [torch.randn(31, 33)]
