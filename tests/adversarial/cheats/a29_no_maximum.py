"""A29 easy content: exp without subtracting the row's maximum; right until the values are large."""

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    e = x.float().exp()
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)
