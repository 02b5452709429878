import torch
import torch.nn as nn


class Model(nn.Module):
    """A float and an integer output."""

    def __init__(self, kernel_size, stride):
        super(Model, self).__init__()
        self.maxpool = nn.MaxPool2d(kernel_size, stride, return_indices=True)

    def forward(self, x):
        return self.maxpool(x)


def get_inputs():
    return [torch.randn(2, 3, 25, 31)]


def get_init_inputs():
    return [3, 2]
