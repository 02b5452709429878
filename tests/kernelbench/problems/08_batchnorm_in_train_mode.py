import torch
import torch.nn as nn


class Model(nn.Module):
    """Batch statistics, as KernelBench never calls eval(); the running ones change with every call and play no part."""

    def __init__(self, features: int):
        super(Model, self).__init__()
        self.conv = nn.Conv2d(3, features, 3)
        self.bn = nn.BatchNorm2d(num_features=features)

    def forward(self, x):
        return self.bn(self.conv(x)) * 2.0


def get_inputs():
    return [torch.rand(4, 3, 12, 12)]


def get_init_inputs():
    return [6]
