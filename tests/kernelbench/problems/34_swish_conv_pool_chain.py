import torch
import torch.nn as nn


class Model(nn.Module):
    """A chain of small steps, as in level 2."""

    def __init__(self, in_channels, out_channels, kernel_size, divisor):
        super(Model, self).__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.max_pool = nn.MaxPool3d(2)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1, 1))
        self.divisor = divisor

    def forward(self, x):
        x = self.max_pool(self.conv(x) / self.divisor)
        x = torch.sigmoid(x) * x
        x = torch.clamp(torch.amax(x, dim=[2, 3, 4], keepdim=True) + self.bias, min=-1.0)
        return torch.logsumexp(x, dim=1).squeeze()


def get_inputs():
    return [torch.randn(7, 2, 10, 11, 12) * 4]


def get_init_inputs():
    return [2, 5, (3, 3, 3), 2.0]
