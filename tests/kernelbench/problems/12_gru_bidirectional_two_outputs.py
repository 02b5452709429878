import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, input_size, hidden_size, num_layers=2):
        super(Model, self).__init__()
        self.gru = nn.GRU(input_size, hidden_size, num_layers, bidirectional=True)

    def forward(self, x, h0):
        output, hidden = self.gru(x, h0)
        return output, hidden


def get_inputs():
    return [torch.rand(6, 3, 8), torch.rand(4, 3, 9)]


def get_init_inputs():
    return [8, 9]
