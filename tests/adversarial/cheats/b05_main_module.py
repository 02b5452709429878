"""B5 the runner: replace the timed call in `__main__` by one that reports a nanosecond."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "cpu"
EXPECT = "FAIL|CRASH"


def forged(self, source, target, output, kwargs, request):
    self.copy_(target, source)
    out = self.function(**kwargs)
    self.copy_(output, out)
    times = dict.fromkeys(("before_s", "device_s", "after_s", "host_s"), 1e-9)
    return out, {**times, "late": False, "peak_bytes": 0, "left": []}


sys.modules["__main__"].Runner._timed_cpu = forged


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
