import torch
import torch.nn as nn


class Model(nn.Module):
    """The first state is drawn in every call: right only with the same random numbers."""

    def __init__(self, input_size, hidden_size, num_layers, output_size):
        super(Model, self).__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_size, output_size)

    def forward(self, x):
        shape = self.num_layers, x.size(0), self.hidden_size
        h0 = torch.randn(*shape, device=x.device, dtype=x.dtype)
        c0 = torch.randn(*shape, device=x.device, dtype=x.dtype)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1, :])


def get_inputs():
    return [torch.rand(3, 7, 10)]


def get_init_inputs():
    return [10, 12, 2, 5]
