"""A16 process-wide setting: the number of threads between operators, which can be set once."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
torch.set_num_interop_threads(torch.get_num_interop_threads() + 6)


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
