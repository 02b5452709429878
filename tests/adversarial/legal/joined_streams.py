"""Two streams share the rows: they wait for the caller's stream, and it waits for them."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"
NEEDS = "gpu"
streams = []


def kernel_fn(x, weight, eps=1e-6):
    if not streams:
        streams.extend(torch.cuda.Stream() for _ in range(2))
    here = torch.cuda.current_stream()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    source, target = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    for i, stream in enumerate(streams):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            part = torch.nn.functional.rms_norm(source[i::2].contiguous(), weight.shape, weight, eps)
            target[i::2] = part
            part.record_stream(stream)
        here.wait_stream(stream)
    return out
