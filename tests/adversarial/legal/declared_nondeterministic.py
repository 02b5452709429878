"""Split sums added by atomics, in an order that differs from call to call; declared so."""

import torch

KERNEL_TYPE = "reduce"
BACKEND = "triton"
DETERMINISTIC = False


def kernel_fn(x, dim=-1):
    parts = x.double().split(max(1, x.shape[dim] // 7), dim)
    total = torch.zeros_like(parts[0].sum(dim), dtype=torch.float32)
    for i in torch.randperm(len(parts)).tolist():
        total += parts[i].sum(dim).float()
    return total.to(x.dtype)
