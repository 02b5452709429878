"""Returns an as_strided window of its own larger buffer, rows apart, which nobody else holds."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    y = x.float()
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    buffer = torch.empty(rows * (width + 24) + 8, dtype=x.dtype, device=x.device)
    out = torch.as_strided(buffer, (rows, width), (width + 24, 1), 8)
    out.copy_((y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).reshape(rows, width))
    return out.view(x.shape) if x.dim() == 2 else out.unflatten(0, x.shape[:-1])
