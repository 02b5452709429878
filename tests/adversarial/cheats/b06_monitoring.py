"""B5, B11 a hook: sys.monitoring calls back for every function that starts, the runner's among them."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "FAIL|CRASH"

sys.monitoring.use_tool_id(3, "listener")
sys.monitoring.register_callback(3, sys.monitoring.events.PY_START, lambda code, offset: None)
sys.monitoring.set_events(3, sys.monitoring.events.PY_START)


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
