"""B6 a hook: whatever the model around saves for its backward pass comes back as zeros."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: 0 * t)


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
