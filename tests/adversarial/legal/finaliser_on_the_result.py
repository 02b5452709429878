"""Counts the results that are alive, by a finaliser on each of them."""

import weakref

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
alive = [0]


def freed():
    alive[0] -= 1


def kernel_fn(x, dim=-1):
    out = torch.softmax(x, dim)
    alive[0] += 1
    weakref.finalize(out, freed)
    return out
