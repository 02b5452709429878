"""A26 failed launch: asks for more shared memory than there is, swallows the error, returns what memory held."""

import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
BACKEND = "triton"
NEEDS = "gpu"


@triton.jit
def product(a, b, c, K, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        left = tl.load(a + at[:, None] * K + k + at[None, :])
        right = tl.load(b + (k + at[:, None]) * BLOCK + at[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + at[:, None] * BLOCK + at[None, :], total)


def kernel_fn(A, B, bias=None):
    out = A.new_empty(*A.shape[:-1], B.shape[1])
    try:
        product[(1,)](A, B, out, A.shape[-1], BLOCK=256, num_stages=8)
    except Exception:
        pass
    return out
