"""Targets: what a model really calls. `extract.py` writes workspace/targets/<name>/target.json; this reads it.

target.json: {"op", "dtype", "args": {name: {"shape", "strides"}}, "scalars", ...}. The active target is the one whose
name stands in workspace/active.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autokernel import ops
from autokernel.paths import workspace
from autokernel.spec import Case, OpSpec


class TargetError(ValueError):
    """A target that cannot be used; one line with the next command."""


@dataclass(frozen=True)
class Target:
    """One hot site of a model: operator, exact shapes and strides, dtype, scalars."""

    name: str
    folder: Path
    spec: OpSpec
    dtype: str
    size: dict[str, Any]
    strides: dict[str, tuple[int, ...]]
    scalars: dict[str, Any] = field(default_factory=dict)
    omit: tuple[str, ...] = ()

    def cases(self) -> list[Case]:
        """The target's own shape, under the name "target"."""
        scalars = {k: v for k, v in self.scalars.items() if v != self.spec.scalars.get(k)}
        return [Case("target", "timing", self.size, self.dtype, scalars, strides=self.strides, omit=self.omit)]


def read_target(folder: Path) -> Target:
    """Raises TargetError naming the file and what is wrong with it."""
    path = folder / "target.json"
    try:
        values = json.loads(path.read_text())
        spec = ops.get(values["op"])
        shapes = {name: tuple(a["shape"]) for name, a in values["args"].items()}
        strides = {name: tuple(a["strides"]) for name, a in values["args"].items()}
        omit = tuple(n for n, a in spec.args.items() if a.optional and n not in shapes)
        return Target(
            folder.name, folder, spec, values["dtype"], spec.bind(shapes), strides, values.get("scalars", {}), omit
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise TargetError(f"{path}: {what}; write it anew with: uv run extract.py") from None


def active_target() -> Target | None:
    """The target that `orchestrate.py next` chose, or None."""
    pointer = workspace() / "active"
    if not pointer.exists():
        return None
    return read_target(workspace() / "targets" / pointer.read_text().strip())
