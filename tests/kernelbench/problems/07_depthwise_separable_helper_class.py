import torch
import torch.nn as nn


class DepthwiseSeparable(nn.Module):
    """A helper class with a super call of its own."""

    def __init__(self, channels, out_channels):
        super(DepthwiseSeparable, self).__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.pointwise = nn.Conv2d(channels, out_channels, 1)

    def forward(self, x):
        return self.pointwise(self.depthwise(x))


class Model(nn.Module):
    def __init__(self, widths):
        super(Model, self).__init__()
        self.blocks = nn.Sequential(*[DepthwiseSeparable(a, b) for a, b in zip(widths, widths[1:])])

    def forward(self, x):
        return self.blocks(x)


def get_inputs():
    return [torch.randn(2, 3, 17, 13)]


def get_init_inputs():
    return [[3, 8, 5]]
