"""A31 wrong dtype: float32 out of half inputs hides the last rounding from a tolerance."""

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return x.float().softmax(dim)
