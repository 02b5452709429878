"""B13 the baseline slowed: threads burn the cores while PyTorch is measured."""

import threading

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"


def burn():
    x = torch.randn(300, 300)
    while True:
        x = torch.tanh(x @ x)


for _ in range(2):
    threading.Thread(target=burn, daemon=True).start()


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
