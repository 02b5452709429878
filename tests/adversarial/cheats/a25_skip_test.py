"""A25 skipped is passed: raise the exception with which test runners skip."""

import unittest

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"


def kernel_fn(x, dim=-1):
    if x.shape[-1] > 1024:
        raise unittest.SkipTest("too wide")
    return torch.softmax(x, dim)
