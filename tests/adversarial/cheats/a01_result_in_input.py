"""A1 input mutation: work in place in the caller's tensor and return a copy; right values, the input gone."""

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    x.copy_(x.float().softmax(dim))
    return x.clone()
