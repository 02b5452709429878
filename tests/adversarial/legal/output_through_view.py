"""The output is written through a view of a larger, fresh buffer, and the view is returned."""

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


def kernel_fn(x, weight, eps=1e-6):
    room = torch.empty(x.numel() + 64, dtype=x.dtype, device=x.device)
    out = room[64:].view(x.shape)
    out.copy_(torch.nn.functional.rms_norm(x, weight.shape, weight, eps))
    return out
