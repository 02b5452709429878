"""Fresh content for a kernel's inputs, written in place into tensors that the judge owns.

Every call of a kernel gets new content from a generator seeded with operating-system entropy; nothing is ever
reproducible from the kernel's side. The kinds of content below are what the stages of `bench.py` are made of.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch

from autokernel.spec import Arg, Case, OpSpec, Size


def fresh_generator(device: torch.device) -> torch.Generator:
    """A generator whose seed nobody knows."""
    return torch.Generator(device).manual_seed(int.from_bytes(os.urandom(7), "little"))


def fill(spec: OpSpec, case: Case, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    """Draw every tensor of a case in place."""
    for name, tensor in tensors.items():
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[axis]:  # what is seen several times is written once
                tensor = tensor.narrow(axis, 0, 1)
        given = case.content if isinstance(case.content, str) else case.content.get(name, "normal")
        arg, scale = spec.args[name], spec.args[name].scale
        scale = scale(case.size) if callable(scale) else scale
        if given == "near_eps":
            scale = math.sqrt({**spec.scalars, **case.scalars}["eps"])
        fill_one(tensor, arg, given, case.size, scale, generator)


def perturb(tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Float64 copies, each element off by four float32 roundings of random sign: what any float32 kernel may do."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            sign = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device) * 2 - 1
            tensor = tensor.double() * (1 + sign * 2.0**-22)
        found[name] = tensor
    return found


def fill_one(
    tensor: torch.Tensor, arg: Arg, content: str, size: Size, scale: float, generator: torch.Generator
) -> None:
    if arg.draw == "index":
        tensor.random_(0, size[arg.below], generator=generator)
        if content == "some_ignored":  # -100 is what PyTorch's losses ignore; the first and the last row among them
            hide = torch.rand(tensor.shape, generator=generator, device=tensor.device) < 0.3
            if tensor.numel() > 2:
                hide[[0, -1]] = True
            tensor[hide] = -100
        elif content == "all_ignored":  # the mean is 0/0, NaN
            tensor.fill_(-100)
        elif content == "one_ignored" and tensor.numel() > 1:
            tensor.view(-1)[torch.randint(tensor.numel(), (1,), generator=generator, device=tensor.device)] = -100
    elif content == "ints" or (content in CONTENTS and arg.draw == "normal" and content != "normal"):
        values = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        tensor.copy_(CONTENTS[content](values, generator) * scale)
    elif arg.draw == "normal":
        tensor.normal_(0, scale, generator=generator)
    elif arg.draw == "gain":
        tensor.normal_(1, 0.25, generator=generator)
    elif arg.draw == "unit":
        tensor.uniform_(-math.pi, math.pi, generator=generator).cos_()
    else:
        raise ValueError(f"draw {arg.draw!r} is not one of normal, gain, unit, index")


def _normal(t, g):
    return t.normal_(0, 1, generator=g)


def _uniform(t, g, low, high):
    return t.uniform_(low, high, generator=g)


def _wide(t, g, decades):
    """Normal values whose magnitudes spread over 2 * decades powers of ten."""
    return _normal(t, g) * 10 ** _uniform(torch.empty_like(t), g, -decades, decades)


def _per_row(t, g):
    """One random value per row of the last axis."""
    return _normal(torch.empty((*t.shape[:-1], 1), device=t.device), g)


def _spike(t, g):
    """A quiet row with one loud element at a random position: it shows whether each position is really read."""
    _normal(t, g).mul_(0.1)
    at = torch.randint(t.shape[-1], (*t.shape[:-1], 1), generator=g, device=t.device)
    return t.scatter_(-1, at, 20.0)


def _needle(t, g):
    """Normal values, and in some rows one huge one at a random place: no sample of a row says that it is there."""
    _normal(t, g)
    at = torch.randint(t.shape[-1], (*t.shape[:-1], 1), generator=g, device=t.device)
    loud = torch.rand(at.shape, generator=g, device=t.device) < 0.25
    loud.view(-1)[0] = True
    return t.scatter_(-1, at, torch.where(loud, 100.0, t.gather(-1, at)))


def _loud_rows(t, g):
    """Normal values, and a few rows many times as large."""
    _normal(t, g)
    loud = torch.rand(t.shape[:-1], generator=g, device=t.device) < 1 / 32
    loud.view(-1)[-1] = True
    return t.mul_(torch.where(loud, 8.0, 1.0).unsqueeze(-1))


def _outliers(t, g):
    """Normal values, one in fifty of them a thousand times larger, anywhere."""
    loud = torch.rand(t.shape, generator=g, device=t.device) < 0.02
    return torch.where(loud, _normal(t, g) * 1e3, t)


def _swamp(t, g):
    """Large elements first, then many that a half-precision sum of squares rounds away beside them, all one way.

    24^2 = 576 is spaced 0.5 in float16: each 1.3^2 = 1.69 added to it loses 0.19; bfloat16 (spacing 4) loses all of it.
    Eight of them, of alternating sign: a sum kept in several lanes is swamped in each, and the mean stays near zero.
    """
    sign = torch.randint(0, 2, t.shape, generator=g, device=t.device) * 2 - 1
    _uniform(t, g, 1.29, 1.31).mul_(sign)
    t[..., :8:2], t[..., 1:8:2] = 24.0, -24.0
    return t


def _swamp_exp(t, g):
    """The same for a sum of exponentials: exp(-7.7) = 4.5e-4 is under half a step beside exp(0) = 1 in float16."""
    _normal(t, g).mul_(0.02).sub_(7.7)
    t[..., :1] = 0.0
    return t


def _cancel(t, g):
    """Second half of each row = minus the first half plus a little: partial sums are far larger than the sum."""
    _normal(t, g).mul_(4)
    half = t.shape[-1] // 2
    t[..., half : 2 * half] = -t[..., :half] + _normal(torch.empty_like(t[..., :half]), g) / 16
    return t


def _repeat(t, g):
    """Second half along the first axis = the first half: the partner of `cancel` in a product."""
    _normal(t, g)
    half = t.shape[0] // 2
    t[half : 2 * half] = t[:half]
    return t


def _rows_apart(t, g):
    """Positive or normal rows that are up to 16 powers of ten apart, the first two 12: no scale serves all."""
    power = _uniform(torch.empty((*t.shape[:-1], 1), device=t.device), g, -8, 8)
    power.view(-1)[:2] = torch.tensor([6.0, -6.0], device=t.device)[: power.numel()]
    return t.mul_(10**power)


def _infinite(t, g):
    """Normal values, and in one row an infinite one at a random place: what overflowed before must not be hidden."""
    _normal(t, g)
    at = torch.randint(max(t.numel(), 1), (1,), generator=g, device=t.device)
    t.view(-1)[at] = math.inf
    return t


def _masked(t, g):
    """A third of each row is minus infinity, never all of it."""
    hide = torch.rand(t.shape, generator=g, device=t.device) < 0.33
    hide[..., -1:] = False
    return _normal(t, g).masked_fill_(hide, -math.inf)


# kind -> how a float32 tensor is filled; each keeps float32 intermediates of an honest kernel finite
CONTENTS = {
    "normal": _normal,
    "positive": lambda t, g: _uniform(t, g, 0.5, 1.5),
    "x8": lambda t, g: _normal(t, g) * 8,
    "large": lambda t, g: (_normal(t, g) * 1e4).clamp_(-6e4, 6e4),
    "near_max": lambda t, g: _uniform(t, g, -6e4, 6e4),
    "tiny": lambda t, g: _normal(t, g) * 1e-3,
    "huge": lambda t, g: _normal(t, g) * 1e8,
    "minute": lambda t, g: _normal(t, g) * 1e-8,
    "spread": lambda t, g: _normal(t, g) * 16,  # exponentials down to the smallest that there are
    "near_eps": _normal,
    "uneven": lambda t, g: _rows_apart(_uniform(t, g, 0.5, 1.5), g),
    "uneven_columns": lambda t, g: _rows_apart(_uniform(t, g, 0.5, 1.5).mT, g).mT,
    "uneven_rows": lambda t, g: _rows_apart(_normal(t, g), g),
    "infinite": _infinite,
    "zeros": lambda t, g: t.zero_(),
    "offset": lambda t, g: _normal(t, g) + 100,
    "mild": lambda t, g: _wide(t, g, 1),
    "wide": lambda t, g: _wide(t, g, 3).clamp_(-6e4, 6e4),
    "constant_rows": lambda t, g: t.copy_(_per_row(t, g).expand_as(t)),
    "repeat_rows": lambda t, g: t.copy_(_normal(torch.empty_like(t[..., :1, :]), g).expand_as(t)),
    "spike": _spike,
    "needle": _needle,
    "loud_rows": _loud_rows,
    "outliers": _outliers,
    "swamp": _swamp,
    "swamp_exp": _swamp_exp,
    "cancel": _cancel,
    "repeat": _repeat,
    "masked": _masked,
    "ints": lambda t, g: t.random_(-1, 2, generator=g),
}
