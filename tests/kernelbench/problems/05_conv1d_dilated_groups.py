import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, channels: int, dilation: int, groups: int, bias: bool = False):
        super(Model, self).__init__()
        self.conv1d = nn.Conv1d(channels, 2 * channels, 3, stride=2, dilation=dilation, groups=groups, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv1d(x)


def get_inputs():
    return [torch.rand(2, 6, 301)]


def get_init_inputs():
    return [6, 4, 3, True]
