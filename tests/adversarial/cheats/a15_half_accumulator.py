"""A15 lower precision: the sum of squares runs in the half format it came in."""

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    square = x * x
    total = square[..., 0].clone()
    for i in range(1, x.shape[-1], max(1, x.shape[-1] // 128)):
        total += square[..., i : i + max(1, x.shape[-1] // 128)].sum(-1)
    scale = (total / x.shape[-1] + eps).rsqrt().unsqueeze(-1)
    return x * scale * weight
