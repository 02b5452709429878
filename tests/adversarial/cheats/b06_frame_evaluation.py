"""B5, B6 hooks: leave a callback behind that PyTorch asks before every function, with its variables."""

import torch
from torch._C._dynamo.eval_frame import set_eval_frame

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "FAIL|CRASH"


def before(frame, *_):
    runner = frame.f_locals.get("self")
    if hasattr(runner, "clock") and not hasattr(runner, "slow"):
        real, runner.slow = runner.clock, True
        runner.clock = lambda: real() / 10


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    set_eval_frame(before)
    return out
