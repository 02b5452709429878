import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, groups, channels, shape):
        super(Model, self).__init__()
        self.group = nn.GroupNorm(groups, channels)
        self.instance = nn.InstanceNorm2d(channels)
        self.layer = nn.LayerNorm(normalized_shape=shape)

    def forward(self, x):
        return self.layer(self.group(x)) + self.instance(x)


channels, size = 6, 11
shape = (channels, size, size)


def get_inputs():
    return [torch.randn(3, *shape)]


def get_init_inputs():
    return [3, channels, shape]
