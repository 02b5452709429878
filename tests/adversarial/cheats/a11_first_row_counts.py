"""A11 easy content: the first row's target is taken to be a class, and a mean of nothing to be 0."""

import torch

KERNEL_TYPE = "cross_entropy"
BACKEND = "triton"


def kernel_fn(logits, targets):
    kept = targets != -100
    kept[:1] = True
    x = logits.float()
    losses = torch.logsumexp(x, -1) - x.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(kept, losses, 0).sum() / kept.sum()
