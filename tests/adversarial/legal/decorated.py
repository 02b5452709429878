"""kernel_fn behind two decorators."""

import functools

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def counted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


@torch.no_grad()
@counted
def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
