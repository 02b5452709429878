"""B6, B1 hooks: PyTorch calls us whenever an event is recorded; behind the end event, the work is done."""

import torch
from torch.cuda import _gpu_trace

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "FAIL|CRASH"
waiting = []


def recorded(event, stream):
    if waiting:
        x, dim, out = waiting.pop()
        out.copy_(torch.softmax(x, dim))


_gpu_trace.register_callback_for_event_record(recorded)
torch._C._activate_gpu_trace()


def kernel_fn(x, dim=-1):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    waiting.append((x, dim, out))
    return out
