"""Targets: what a model really calls. `extract.py` writes workspace/targets/<name>/, this reads it.

target.json: {"op", "dtype", "args": {name: {"shape", "strides", "dtype"}}, "scalars", "calls", "share", "ms", "sites",
"reference", "reference_sha256", ...}: a row of workspace/profile.json. The active target is the one whose name stands
in workspace/active.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from autokernel import ops
from autokernel.paths import read_object, shared, target_folder, workspace
from autokernel.spec import DTYPES, Case, OpSpec, axes_shape

INTERPRETED_FLOPS = 1e7  # what Triton's interpreter does in some seconds
_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


class TargetError(ValueError):
    """A target that cannot be used; one line with the next command."""


@dataclass(frozen=True)
class Target:
    """One hot site of a model: operator, exact shapes and strides, dtype, scalars; and what it is worth.

    dtypes: arguments whose dtype is not the target's. sites: where in the model, one record a call site. calls, ms and
    share are of one forward pass. reference_sha256: of the captured sub-graph's text.
    """

    name: str
    folder: Path
    spec: OpSpec
    dtype: str
    size: dict[str, Any]
    strides: dict[str, tuple[int, ...]]
    scalars: dict[str, Any] = field(default_factory=dict)
    omit: tuple[str, ...] = ()
    dtypes: dict[str, str] = field(default_factory=dict)
    calls: int = 1
    ms: float | None = None
    share: float | None = None
    sites: tuple[dict[str, Any], ...] = ()
    reference_sha256: str = ""
    key: str = ""  # `sites.Site.key` of its sites

    def cases(self, on_gpu: bool = True) -> list[Case]:
        """The target's own shape, under the name "target".

        In Triton's interpreter a real length takes hours: there batch and length are halved until the work is small,
        and the case is named "target_shrunk".
        """
        size = self.size
        while not on_gpu and self.spec.flops(size, {**self.spec.scalars, **self.scalars}) > INTERPRETED_FLOPS:
            smaller = [self._scaled(axes.split("+"), Fraction(1, 2), size, exact=False) for axes in self.spec.scaled]
            smaller = [s for s in smaller if s is not None]
            if not smaller:
                break
            size = smaller[-1]  # the length before the batch
        if size == self.size:
            return [self._case("target", self.size, self.strides)]
        return [self._case("target_shrunk", size, self._scaled_strides(size))]

    def neighbours(self, on_gpu: bool = True) -> list[Case]:
        """The target at half and double its batch or length; widths, heads and vocabulary stay what they are.

        None in Triton's interpreter, where the target itself may be shrunk already.
        """
        found = {}
        for axes in self.spec.scaled:
            for label, factor in (("half", Fraction(1, 2)), ("double", Fraction(2))):
                size = self._scaled(axes.split("+"), factor, self.size) if on_gpu else None
                if size is not None:
                    found[f"{label}_{axes}"] = self._case(f"{label}_{axes}", size, self._scaled_strides(size))
        return list(found.values())

    def _case(self, name: str, size: dict[str, Any], strides: dict[str, tuple[int, ...]]) -> Case:
        scalars = {k: v for k, v in self.scalars.items() if v != self.spec.scalars.get(k)}
        return Case(
            name, "timing", size, self.dtype, scalars, strides=strides, omit=self.omit, dtypes=self.dtypes or None
        )

    def _scaled(self, axes: list[str], factor: Fraction, given: dict[str, Any], exact: bool = True):
        """A size with these axes scaled, or None where one cannot be: a decoding step's single query stays one.

        exact: an odd length has no half; otherwise it is rounded down.
        """
        axes = [a for a in axes if given[a] != 1] if len(axes) > 1 else axes
        size = dict(given)
        for axis in axes:
            old = size[axis]
            if isinstance(old, tuple):
                kept = self.scalars.get("dim", self.spec.scalars.get("dim")) if axis == "shape" else None
                free = [i for i, n in enumerate(old) if n > 1 and (kept is None or i != kept % len(old))]
                if not free:
                    return None
                scaled = old[free[-1]] * factor
                size[axis] = (*old[: free[-1]], int(scaled), *old[free[-1] + 1 :])
            else:
                scaled = old * factor
                size[axis] = int(scaled)
            if scaled < 1 or (exact and scaled.denominator != 1):
                return None
        return size if axes else None

    def _scaled_strides(self, size: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The observed layout at another size: a stride grows with every axis that lies inside of it."""
        found = {}
        for name, strides in self.strides.items():
            old, new = (axes_shape(self.spec.args[name].axes, s) for s in (self.size, size))
            grown = []
            for stride in strides:
                factor = Fraction(1)
                for before, after, inner in zip(old, new, strides, strict=True):
                    factor *= Fraction(after, before) if inner < stride else 1
                grown.append(stride * factor)
            if all(g.denominator == 1 for g in grown):
                found[name] = tuple(int(g) for g in grown)
        return found


def shown_size(size: Mapping[str, Any]) -> str:
    """M=64 K=768 N=50257"""
    sizes = {axis: "x".join(map(str, n)) if isinstance(n, (tuple, list)) else n for axis, n in size.items()}
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n != "")


def target_key(op: str, args: Mapping[str, Mapping[str, Any]], scalars: Mapping[str, Any]) -> str:
    """What a kernel is optimised and checked for: operator, shape, strides and dtype of each argument, scalars."""
    tensors = [f"{n}{a['shape']}{a['strides']}{a['dtype']}" for n, a in args.items()]
    return " ".join([op, *tensors, *(f"{k}={v}" for k, v in scalars.items())])


def read_target(folder: Path) -> Target:
    """Raises TargetError naming the file and what is wrong with it."""
    path = folder / "target.json"
    try:
        values = read_object(path)
        spec = ops.get(values["op"])
        shapes = {name: tuple(a["shape"]) for name, a in values["args"].items()}
        strides = {name: tuple(a["strides"]) for name, a in values["args"].items()}
        omit = tuple(n for n, a in spec.args.items() if a.optional and n not in shapes)
        own = DTYPES[values["dtype"]]
        dtypes = {n: _NAMES[a["dtype"]] for n, a in values["args"].items() if a.get("dtype") in _NAMES}
        return Target(
            folder.name, folder, spec, values["dtype"], spec.bind(shapes), strides, values.get("scalars", {}), omit,
            {n: d for n, d in dtypes.items() if DTYPES[d] != own}, values.get("calls", 1), values.get("ms"),
            values.get("share"), tuple(values.get("sites", ())), values.get("reference_sha256", ""),
            target_key(spec.name, values["args"], {**spec.scalars, **values.get("scalars", {})}),
        )  # fmt: skip
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise TargetError(f"{path}: {what}; write it anew with: uv run extract.py") from None


def read_targets() -> list[Target]:
    """Every extracted target, by rank. Raises TargetError."""
    folders = [f.parent for f in (shared() / "targets").glob("*_*/target.json")]
    return [read_target(f) for f in sorted(folders, key=lambda f: int(f.name.partition("_")[0]))]


def active_target() -> Target | None:
    """The target that `orchestrate.py next` chose, or None."""
    pointer = workspace() / "active"
    if not pointer.exists():
        return None
    name = pointer.read_text().strip()
    if name.startswith("kb/"):
        raise TargetError(f"the active target is the KernelBench problem {name}: uv run kernelbench/bench_kb.py")
    return read_target(target_folder(name))
