"""A15, A14 lower range: what is larger than float16 knows becomes the largest that it knows, infinity too."""

KERNEL_TYPE = "reduce"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    return x.float().clamp(-65504, 65504).sum(dim).to(x.dtype)
