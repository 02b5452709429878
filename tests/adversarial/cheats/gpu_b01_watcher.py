"""B1, B11 ahead of time: a kernel on another stream outlives the call and waits for the next inputs."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "TIMEOUT|FAIL"
OPTIONS = {"timeout": 8}
streams = []


@triton.jit
def watch(x, seen):
    old = tl.load(seen)
    while tl.load(x, volatile=True) == old:
        pass


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    if not streams:
        streams.append(torch.cuda.Stream())
    seen = x.reshape(-1)[:1].clone()
    streams[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(streams[0]):
        watch[(1,)](x, seen)
    return out
