"""A1 input mutation: restride the caller's tensor in place (as_strided_); its bytes stay as they were."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    x.as_strided_((x.numel(),), (1,)) if x.is_contiguous() else None
    return out
