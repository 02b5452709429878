"""B1 another stream: make it the current one and leave it so; the judge's events stay on the old one."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
streams = []


def kernel_fn(x, dim=-1):
    if not streams:
        streams.append(torch.cuda.Stream())
    streams[0].wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(streams[0])
    return torch.softmax(x, dim)
