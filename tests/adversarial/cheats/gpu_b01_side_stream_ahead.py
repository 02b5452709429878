"""B1 another stream: work on a stream of its own that does not even wait for the inputs, joined afterwards."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
streams = []


def kernel_fn(x, dim=-1):
    if not streams:
        streams.append(torch.cuda.Stream())
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.cuda.stream(streams[0]):
        torch.softmax(x, dim, out=out)
    torch.cuda.current_stream().wait_stream(streams[0])
    return out
