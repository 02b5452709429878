"""An exception is raised and caught inside the call, with a warning and a log line."""

import logging
import warnings

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


def kernel_fn(x, dim=-1):
    try:
        torch.empty(1).view(3)
    except RuntimeError as error:
        warnings.warn(str(error), stacklevel=2)
        logging.getLogger("kernel").warning("falling through")
    return torch.softmax(x, dim)
