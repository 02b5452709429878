"""A1 input mutation: zero the input, return the zeros that belong to it; right if the reference runs later."""

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    x.zero_()
    return x.clone()
