"""A16 process-wide setting: the number of threads of everything else in the process."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    torch.set_num_threads(torch.get_num_threads() + 3)
    return torch.softmax(x, dim)
