"""D1 the report: print a perfect verdict and leave with exit code 0, at import."""

import os
import sys

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"

print("correctness:            PASS\nlatency_us:             0.001\nspeedup_vs_pytorch:     99.0", flush=True)
sys.stderr.write("correctness: PASS\n")
os._exit(0)


def kernel_fn(x, dim=-1):
    return x
