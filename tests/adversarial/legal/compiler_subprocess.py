"""Starts a compiler as a process in the first call, and waits for it; keeps what it made in the cache folder."""

import os
import subprocess
import sys
from pathlib import Path

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
place = Path(os.environ.get("TRITON_CACHE_DIR", "."))


def kernel_fn(x, dim=-1):
    made = place / "made.txt"
    if not made.exists():
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", "print('compiled')"], check=True, stdout=open(made, "w"))
    return torch.softmax(x, dim)
