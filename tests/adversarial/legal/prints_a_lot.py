"""Prints a thousand lines per call to stdout and stderr."""

import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    print("correctness: PASS\n" * 500)
    sys.stderr.write("tuning ...\n" * 500)
    return torch.softmax(x, dim)
