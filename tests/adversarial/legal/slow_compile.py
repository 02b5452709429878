"""The first call compiles for twenty seconds."""

import time

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
OPTIONS = {"timeout": 60}
compiled = {}


def kernel_fn(x, dim=-1):
    if "kernel" not in compiled:
        time.sleep(20)
        compiled["kernel"] = torch.softmax
    return compiled["kernel"](x, dim)
