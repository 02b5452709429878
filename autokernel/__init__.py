"""AutoKernel's shared package: operator specs, the judge, the ledger. It has no command line of its own.

    import autokernel

    with autokernel.load().apply(model):  # the kept kernels of workspace/, at the sites they were checked for
        model(ids)
"""

from __future__ import annotations

import os
import typing

from autokernel.paths import worker

if typing.TYPE_CHECKING:
    from pathlib import Path

    from autokernel.apply import Kernels

__version__ = "0.1.0"

if worker().get("gpu"):
    os.environ["CUDA_VISIBLE_DEVICES"] = worker()["gpu"]  # a worker sees its own GPU only, its agent included


def load(workspace: Path | str | None = None) -> Kernels:
    """The kernels that a run kept, ready for `apply(model)`. workspace: its folder (default: the repository's).

    Raises autokernel.source.KernelError: nothing was kept there, or a file is not what the judge passed.
    """
    from autokernel.apply import Kernels, interpret_on_cpu  # with PyTorch: only who asks for kernels waits for it

    interpret_on_cpu()
    return Kernels.kept(workspace, verified=True)
