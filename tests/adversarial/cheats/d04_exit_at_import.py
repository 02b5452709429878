"""D4 early clean exit: SystemExit(0) while kernel.py is imported."""

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"

raise SystemExit(0)


def kernel_fn(x, dim=-1):
    return x
