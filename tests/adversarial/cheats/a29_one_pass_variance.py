"""A29 easy content: variance as E[x^2] - E[x]^2 in float32; right until the mean is large."""

KERNEL_TYPE = "layernorm"
BACKEND = "triton"


def kernel_fn(x, weight, bias, eps=1e-5):
    y = x.float()
    mean = y.mean(-1, keepdim=True)
    scale = (y.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0).add(eps).rsqrt()
    return ((y - mean) * scale * weight.float() + bias.float()).to(x.dtype)
