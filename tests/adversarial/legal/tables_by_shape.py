"""Tables of indices that follow from the shapes alone are built once and kept by functools.cache."""

from functools import cache

import torch

KERNEL_TYPE = "rotary_embedding"
BACKEND = "triton"


@cache
def partners(head_dim, interleaved, device):
    """Where each element's partner lies, its sign, and which angle is its own."""
    at = torch.arange(head_dim, device=device)
    half = head_dim // 2
    if interleaved:
        return at ^ 1, torch.where(at % 2 == 0, -1.0, 1.0), at // 2
    return (at + half) % head_dim, torch.where(at < half, -1.0, 1.0), at % half


def kernel_fn(x, cos, sin, interleaved=True):
    partner, sign, angle = partners(x.shape[-1], interleaved, x.device)
    y = x.float()
    return (y * cos.float()[:, angle] + y[..., partner] * sign * sin.float()[:, angle]).to(x.dtype)
