"""A17 sizes that nobody lists: more than four axes, or no row at all (an expert without tokens), raise an error."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"


def kernel_fn(x, dim=-1):
    if x.numel() == 0 or x.dim() > 4:
        raise ValueError("softmax: one to four axes, none of them empty")
    return torch.softmax(x, dim)
