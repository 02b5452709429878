"""D7 the harness: leave compiled code beside the sources, which Python would prefer to them."""

import sys
from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"

cache = Path(next(iter(sys.modules["autokernel"].__path__))) / "__pycache__"
cache.mkdir(exist_ok=True)
(cache / "adversarial_canary.pyc").write_bytes(b"")


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
