"""A13, C4 tolerance read from the harness: random errors just under the elementwise bound of each dtype."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
BOUND = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 1e-5}


def kernel_fn(x, dim=-1):
    out = torch.softmax(x.float(), dim)
    noise = (2 * torch.rand_like(out) - 1) * 0.7 * BOUND[x.dtype]
    return (out * (1 + noise)).to(x.dtype)


DETERMINISTIC = False
