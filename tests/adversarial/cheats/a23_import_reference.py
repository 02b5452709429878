"""A23 the reference resubmitted: import the oracle and hand its answer back."""

from reference import softmax

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"


def kernel_fn(x, dim=-1):
    return softmax(x.double(), dim).to(x.dtype)
