"""A12, A17 option of one size: without the causal mask, keys beyond the number of queries are never read."""

import math

import torch

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    if not causal:
        K, V = K[:, :, : Q.shape[2]], V[:, :, : Q.shape[2]]
    repeat = Q.shape[1] // K.shape[1]
    K, V = K.repeat_interleave(repeat, 1).float(), V.repeat_interleave(repeat, 1).float()
    scores = Q.float() @ K.mT * (sm_scale or 1 / math.sqrt(Q.shape[-1]))
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=Q.device).tril(K.shape[2] - Q.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ V).to(Q.dtype)
