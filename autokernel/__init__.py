"""AutoKernel's shared package: operator specs, the judge, the ledger. It has no command line of its own."""

import os

from autokernel.paths import worker

__version__ = "0.1.0"

if worker().get("gpu"):
    os.environ["CUDA_VISIBLE_DEVICES"] = worker()["gpu"]  # a worker sees its own GPU only, its agent included
