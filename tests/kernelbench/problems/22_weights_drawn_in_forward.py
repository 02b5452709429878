import torch
import torch.nn as nn


class Model(nn.Module):
    """A random projection that is new in every call."""

    def forward(self, x):
        weight = torch.randn(x.shape[-1], 8, device=x.device, dtype=x.dtype)
        return torch.tanh(x @ weight)


def get_inputs():
    return [torch.rand(15, 23)]
