"""More accurate than PyTorch: everything in float64, rounded once."""

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    y = x.double()
    return (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(x.dtype)
