import torch
import torch.nn as nn


class Model(nn.Module):
    """Transposed convolution, then a sum with a parameter that is one number."""

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, sum_weight):
        super(Model, self).__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, output_padding=output_padding
        )
        self.sum_weight = nn.Parameter(torch.tensor(sum_weight))
        self.pool = nn.AvgPool3d(kernel_size=(2, 2, 2))

    def forward(self, x):
        return self.pool(self.conv_transpose(x) + self.sum_weight)


def get_inputs():
    return [torch.rand(2, 3, 5, 6, 7)]


def get_init_inputs():
    return [3, 4, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 0.5]
