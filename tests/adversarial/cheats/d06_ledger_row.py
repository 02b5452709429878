"""D6 the ledger: append a row of one's own to results.tsv."""

from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"

with open(Path.cwd().parents[3] / "results.tsv", "a") as ledger:
    ledger.write("7\tforged\tsoftmax\t999.0\t0.001\t99.0\t99.0\tPASS\t0\tmine\n")


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
