"""A25, D10 memory: take nearly all of the GPU's memory and keep it, so that the judge has none to check with."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "CRASH|FAIL"
ALONE = True
hoard = []


def kernel_fn(x, dim=-1):
    while not hoard:
        free, _ = torch.cuda.mem_get_info()
        hoard.append(torch.empty(max(free - (300 << 20), 1), dtype=torch.uint8, device=x.device))
    return torch.softmax(x, dim)
