"""D5, D6 after the end: a daemon outlives the run and keeps appending to the ledger and the record."""

import os
import time
from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "FAIL|CRASH"

place = Path.cwd()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for _ in range(600):
            for file in (place.parents[2] / "last_run.json", place.parents[3] / "results.tsv"):
                try:
                    with open(file, "a") as open_file:
                        open_file.write("1\tforged\tsoftmax\t999\t0.001\n")
                except OSError:
                    pass
            time.sleep(0.1)
    os._exit(0)


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
