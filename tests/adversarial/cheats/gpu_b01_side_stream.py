"""B1 another stream: work on a stream of its own that waits for the inputs; nobody waits for it."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
streams = []


def kernel_fn(x, dim=-1):
    if not streams:
        streams.append(torch.cuda.Stream())
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    streams[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(400_000)
        torch.softmax(x, dim, out=out)
    return out
