"""D7 the harness: loosen the tolerances in the file that the next run reads."""

import sys
from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"

package = Path(next(iter(sys.modules["autokernel"].__path__)))
with open(package / "adversarial_canary.py", "w") as file:
    file.write("TOLERANCE = 1e9\n")


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
