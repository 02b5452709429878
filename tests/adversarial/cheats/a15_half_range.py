"""A15 lower range: float32 operands as two float16 parts each; nothing beyond 65504, nothing below 6e-8."""

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def parts(t):
    high = t.half().float()
    return high, ((t - high) * 2048).half().float()


def kernel_fn(A, B, bias=None):
    (a, b), (c, d) = parts(A.float()), parts(B.float())
    out = a @ c + (a @ d + b @ c) / 2048
    return (out if bias is None else out + bias.float()).to(A.dtype)
