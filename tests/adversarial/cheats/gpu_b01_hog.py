"""B1, B13 another stream: leave five milliseconds of useless work on it, so that PyTorch's turn finds the GPU busy."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
streams = []


def kernel_fn(x, dim=-1):
    if not streams:
        streams.append(torch.cuda.Stream())
    out = torch.softmax(x, dim)
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(10_000_000)
    return out
