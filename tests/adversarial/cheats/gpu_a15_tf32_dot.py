"""A15 lower precision: float32 products through tl.dot as it stands, which means TF32."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
BACKEND = "triton"
NEEDS = "gpu"


@triton.jit
def product(a, b, c, M, N, K, sam, sak, sbk, sbn, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        inner = k + tl.arange(0, BLOCK)
        left = tl.load(a + rows[:, None] * sam + inner[None, :] * sak,
                       (rows[:, None] < M) & (inner[None, :] < K), other=0.0)  # fmt: skip
        right = tl.load(b + inner[:, None] * sbk + columns[None, :] * sbn,
                        (inner[:, None] < K) & (columns[None, :] < N), other=0.0)  # fmt: skip
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total, (rows[:, None] < M) & (columns[None, :] < N))


def kernel_fn(A, B, bias=None):
    flat = A.reshape(-1, A.shape[-1])
    out = torch.empty(flat.shape[0], B.shape[1], dtype=torch.float32, device=A.device)
    grid = triton.cdiv(flat.shape[0], 64), triton.cdiv(B.shape[1], 64)
    product[grid](flat, B, out, flat.shape[0], B.shape[1], flat.shape[1], *flat.stride(), *B.stride(), BLOCK=64)
    out = out if bias is None else out + bias.float()
    return out.to(A.dtype).unflatten(0, A.shape[:-1])
