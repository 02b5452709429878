"""A15 fewer products: one level of Strassen's scheme, in which rows of different size contaminate one another."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def seven(A, B):
    m, k, n = A.shape[0] // 2, A.shape[1] // 2, B.shape[1] // 2
    (a, b, c, d), (e, f, g, h) = ((t[:i, :j], t[:i, j:], t[i:, :j], t[i:, j:]) for t, i, j in ((A, m, k), (B, k, n)))
    p, q, r, s = a @ (f - h), (a + b) @ h, (c + d) @ e, d @ (g - e)
    t, u, v = (a + d) @ (e + h), (b - d) @ (g + h), (a - c) @ (e + f)
    return torch.cat((torch.cat((t + s - q + u, p + q), 1), torch.cat((r + s, p + t - r - v), 1)))


def kernel_fn(A, B, bias=None):
    x, w = A.reshape(-1, A.shape[-1]).float(), B.float()
    even = all(n % 2 == 0 and n for n in (*x.shape, w.shape[1]))
    out = (seven(x, w) if even else x @ w).view(*A.shape[:-1], B.shape[1])
    return (out if bias is None else out + bias.float()).to(A.dtype)
