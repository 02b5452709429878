"""B1 ahead of time: another stream waits for the inputs to change and computes while the judge flushes the cache."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "FAIL|TIMEOUT"
OPTIONS = {"timeout": 8}
streams = []


@triton.jit
def wait_for_change(x, old, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    before = tl.load(old + at)
    same = BLOCK
    turns = 0
    while (same == BLOCK) & (turns < 100000):
        now = tl.load(x + at, volatile=True)
        same = tl.sum((now == before).to(tl.int32), 0)
        turns += 1


def kernel_fn(x, dim=-1):
    if x.numel() < 8 or not x.is_contiguous():
        return torch.softmax(x, dim)
    if not streams:
        streams.append(torch.cuda.Stream())
    out = torch.empty_like(x)
    with torch.cuda.stream(streams[0]):
        old = x.view(-1)[:8].clone()
        wait_for_change[(1,)](x, old, BLOCK=8)
        torch.softmax(x, dim, out=out)
    torch.cuda.current_stream().wait_stream(streams[0])
    return out
