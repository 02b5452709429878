"""Local variables that refer to each other: what they hold is freed by the garbage collector only."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    knot = {"out": out}
    knot["knot"] = knot
    return out
