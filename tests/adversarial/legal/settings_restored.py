"""Changes the precision of products for the length of a call and puts it back."""

import torch

KERNEL_TYPE = "matmul"
BACKEND = "triton"


def kernel_fn(A, B, bias=None):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        out = torch.matmul(A.float(), B.float())
    finally:
        torch.set_float32_matmul_precision(before)
    return (out if bias is None else out + bias).to(A.dtype)
