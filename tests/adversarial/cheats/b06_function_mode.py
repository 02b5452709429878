"""B5, B11 a hook: a torch function mode stays entered and sees every operation of the runner."""

import torch
from torch.overrides import TorchFunctionMode

KERNEL_TYPE = "softmax"
BACKEND = "triton"


class Listen(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


listener = Listen()
listener.__enter__()


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
