"""A9 stale memory: freshly allocated device memory, where an earlier call's answer, or somebody else's, may lie."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"


def kernel_fn(x, dim=-1):
    torch.cuda.empty_cache()
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
