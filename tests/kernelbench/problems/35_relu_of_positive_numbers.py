import torch
import torch.nn as nn


class Model(nn.Module):
    """Its inputs are never negative, so that KernelBench's own check takes a copy of them for the answer: weak."""

    def __init__(self):
        super(Model, self).__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def get_inputs():
    return [torch.rand(16, 301)]


def get_init_inputs():
    return []
