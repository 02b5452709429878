import torch
import torch.nn as nn


class Model(nn.Module):
    """A list and a dict of tensors as inputs; a list as output."""

    def forward(self, parts, named):
        joined = torch.cat(parts, dim=1)
        return [joined * named["gain"], (joined + named["offset"]).sum(0)]


def get_inputs():
    return [[torch.rand(4, 3), torch.rand(4, 5)], {"gain": torch.rand(8), "offset": torch.rand(8)}]


def get_init_inputs():
    return []
