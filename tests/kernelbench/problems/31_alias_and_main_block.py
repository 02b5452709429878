"""A docstring, a future import, Model by assignment, code that runs: nothing that a starter may trip over."""

from __future__ import annotations

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.lin = nn.Linear(n, n // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.lin(x), approximate="tanh")


Model = Net
n = 46


def get_inputs():
    return [torch.rand(9, n)]


def get_init_inputs():
    return [n]


SAMPLE = get_inputs()[0].shape

if __name__ == "__main__":
    print(Model(*get_init_inputs())(*get_inputs()).shape)
