"""What a forward pass leaves behind, and whether it is right: the state of a model object, its outputs, their errors.

Each output, and each buffer that the model writes to, is compared with a run of the model in a wider dtype (float32;
float64 for a float32 model). Its rms error may be RMS_FACTOR times that of the original in its own dtype, its largest
error MAX_FACTOR times, each plus a floor of one unit in the last place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from autokernel.compare import FEWEST, MAX_FACTOR, RMS_FACTOR, TOLERANCES, same_bits

_CHUNK = 1 << 24


class Snapshot:
    """What a forward pass may change: a model's attributes, containers, tensors, parameters by checksum; its inputs."""

    def __init__(self, model: torch.nn.Module, inputs: Any = ()):
        self.model = model
        owners = [m.__dict__ for m in model.modules()] + [t.__dict__ for t in (*model.parameters(), *model.buffers())]
        held = [v for owner in owners for v in owner.values()]
        self.containers: list[tuple[Any, Any]] = [(owner, dict(owner)) for owner in owners]
        self.containers += [(v, copy.copy(v)) for v in held if isinstance(v, (dict, list, set))]
        self.buffers = {n: (t, t.detach().clone()) for n, t in model.named_buffers()}
        loose = {f"attribute {i}": (t, t.detach().clone()) for i, t in enumerate(held) if isinstance(t, torch.Tensor)}
        self.inputs = {f"input {n}": (t, t.detach().clone()) for n, t in named(inputs)}
        self.containers += _containers(inputs, set())
        self.tensors = {**self.buffers, **loose, **self.inputs}
        self.sums = {n: _checksum(p) for n, p in model.named_parameters()}

    def restore(self) -> None:
        for held, saved in self.containers:
            held.clear()
            held.extend(saved) if isinstance(held, list) else held.update(saved)
        for tensor, content in self.tensors.values():
            tensor.copy_(content)

    def written(self) -> list[str]:
        """Buffers that are not what they were, and inputs."""
        now = dict(self.model.named_buffers())
        found = [f"buffer {n}" for n, (t, old) in self.buffers.items() if now[n] is not t or not same_bits(t, old)]
        return found + [n for n, (t, old) in self.inputs.items() if not same_bits(t, old)]

    def damaged(self) -> list[str]:
        """Parameters that are not what they were: nothing but a kernel writes there."""
        return [n for n, p in self.model.named_parameters() if _checksum(p) != self.sums[n]]


def _containers(given: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """Lists, dicts and objects in what a model is given (a cache that grows), each with a copy."""
    if id(given) in seen or isinstance(given, torch.Tensor):
        return
    seen.add(id(given))
    held = given if isinstance(given, (list, dict)) or callable(given) else getattr(given, "__dict__", None)
    if isinstance(held, (list, dict)):
        yield held, copy.copy(held)
    for value in _items(given).values():
        yield from _containers(value, seen)


def _checksum(tensor: torch.Tensor) -> int:
    data = tensor.detach().contiguous().reshape(-1)
    data = torch.view_as_real(data).reshape(-1) if data.is_complex() else data
    return int(data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]).sum())


def named(given: Any, path: str = "", around: tuple[Any, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in an output, with its place: tuples, dicts, dataclasses, objects. around: what it lies in."""
    if isinstance(given, torch.Tensor):
        yield path or "output", given
        return
    if any(given is a for a in around):
        return
    for name, value in _items(given).items():
        yield from named(value, f"{path}.{name}" if path else str(name), (*around, given))


def _items(given: Any) -> dict[Any, Any]:
    """What a container or an object holds, by name; nothing of functions, types and modules."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, (list, tuple)):
        return dict(enumerate(given))
    if isinstance(given, (type, FunctionType, torch.nn.Module)):
        return {}
    found = [vars(kind).get("__slots__", ()) for kind in type(given).__mro__]
    slots = [n for names in found for n in ((names,) if isinstance(names, str) else names)]
    return {n: getattr(given, n) for n in slots if hasattr(given, n)} | getattr(given, "__dict__", {})


# ---- outputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """rms and largest error over rms(ref), where both are finite; values non-finite where the original's are finite."""

    rms: float = 0.0
    largest: float = 0.0
    wrong: int = 0


def inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are rounded: float or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def difference(out: torch.Tensor, ref: torch.Tensor, original: torch.Tensor) -> Difference:
    """Of a float or complex tensor; for another kind `rms` is the share of differing elements."""
    if out.is_complex():
        out, ref, original = (torch.view_as_real(t.resolve_conj()) for t in (out, ref, original))
    if not out.is_floating_point():
        return Difference((out != ref).double().mean().item() if out.numel() else 0.0)
    total = size = top = 0.0
    wrong = count = 0
    for a, b, c in zip(*(t.detach().reshape(-1).split(_CHUNK) for t in (out, ref, original)), strict=True):
        # the same in all three, a mask's filling say, is no part of the scale; the format's end is as good as infinite
        finite = ~((a == b) & (c == b)) & _ordinary(a) & _ordinary(b) & _ordinary(c)
        wrong += int((c.isfinite() & ~a.isfinite()).sum())
        error = torch.where(finite, (a.double() - b.double()).abs(), 0.0)
        total += error.square().sum().item()
        size += torch.where(finite, b.double(), 0.0).square().sum().item()
        top = max(top, error.max().item() if error.numel() else 0.0)
        count += int(finite.sum())
    scale = math.sqrt(size / count) if size else 1.0
    return Difference(math.sqrt(total / max(count, 1)) / scale, top / scale, wrong)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.isfinite() & (tensor.abs() < 0.99 * torch.finfo(tensor.dtype).max)


class Oracle:
    """The original's outputs, and what they should have been."""

    def __init__(
        self, original: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], dtype: torch.dtype,
        atol: float | None = None, rtol: float | None = None,
    ):  # fmt: skip
        """dtype: the model's. atol, rtol: judge by |out - ref| <= atol + rtol * |ref| instead."""
        self.original, self.reference, self.dtype, self.atol, self.rtol = original, reference, dtype, atol, rtol
        self.theirs = {n: difference(t, reference[n], t) for n, t in original.items()}

    def judge(self, outputs: dict[str, torch.Tensor]) -> tuple[str, list[dict[str, Any]]]:
        """(what is wrong or "", one row an output)."""
        rows, faults = [], []
        for name, original in self.original.items():
            out, theirs, ref = outputs.get(name), self.theirs[name], self.reference[name]
            shown = name if name.startswith(("buffer ", "input ", "output")) else f"output {name}"
            if out is None or (out.shape, out.dtype) != (original.shape, original.dtype):
                got = "missing" if out is None else f"{out.dtype} {list(out.shape)}"
                faults.append(f"{shown} is {got}, expected {original.dtype} {list(original.shape)}")
                continue
            ours = difference(out, ref, original)
            rows.append({"output": shown, "rms_error": ours.rms, "rms_error_pytorch": theirs.rms,
                         "max_error": ours.largest, "max_error_pytorch": theirs.largest})  # fmt: skip
            faults += [f"{shown}: {fault}"] if (fault := self._fault(out, ref, ours, theirs)) else []
        return "; ".join(faults), rows

    def _fault(self, out, ref, ours: Difference, theirs: Difference) -> str:
        if ours.wrong:
            return f"{ours.wrong} values are not finite where the original's are"
        if self.atol is not None or self.rtol is not None:
            limit = (self.atol or 0.0) + (self.rtol or 0.0) * ref.double().abs()
            beyond = int((((out.double() - ref.double()).abs() > limit) & ref.isfinite()).sum())
            return f"{beyond} values beyond --atol and --rtol" if beyond else ""
        if not inexact(out):
            limit = RMS_FACTOR * theirs.rms + math.floor(out.numel() / 100) / max(out.numel(), 1)
            return f"{ours.rms:.2%} of the values differ, PyTorch's {theirs.rms:.2%}" if ours.rms > limit else ""
        known = [TOLERANCES[d] for d in (out.dtype, self.dtype) if d in TOLERANCES]
        floor = max(known, default=TOLERANCES[torch.float32])
        floor *= 1 if out.numel() >= FEWEST else MAX_FACTOR  # the original's own error is chance there
        for kind, mine, its, factor in (("rms", ours.rms, theirs.rms, RMS_FACTOR),
                                        ("largest", ours.largest, theirs.largest, MAX_FACTOR)):  # fmt: skip
            if not mine <= factor * its + (floor if kind == "rms" else MAX_FACTOR * floor):
                return f"its {kind} error is {mine:.2e} of the rms, PyTorch's {its:.2e}: at most {factor:g} times that"
        return ""

    def language(self, outputs: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, float]:
        """Top-1 agreement and KL divergence (nats a position) of logits from the reference; {} without logits."""
        sizes = {m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        found = [n for n, t in self.original.items() if t.ndim > 1 and t.shape[-1] in sizes and t.is_floating_point()]
        if not found or found[0] not in outputs:
            return {}
        rows = self.reference[found[0]].flatten(0, -2)
        values: dict[str, float] = {}
        for label, given in (("", outputs), ("_pytorch", self.original)):
            agree = divergence = 0.0
            for want, got in zip(rows.split(1024), given[found[0]].flatten(0, -2).split(1024), strict=True):
                p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
                agree += (p.argmax(-1) == q.argmax(-1)).sum().item()
                divergence += torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True).item()
            values |= {f"top1_agreement{label}": agree / len(rows), f"kl_divergence{label}": divergence / len(rows)}
        return values
