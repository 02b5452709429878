"""The comparator: is an output right, measured against the float64 oracle and against PyTorch's own error?

An element passes when |out - ref| <= atol * rms(ref) + rtol * |ref|, the rms of the whole or of its row. The whole
output must also be about as accurate as PyTorch's kernel in the same dtype: its rms error at most `rms_factor` times
PyTorch's plus a floor. So an accurate kernel never fails because PyTorch was less accurate than it, and zeros, missing
work or a secretly lower precision never pass. Where PyTorch itself, or the oracle on inputs perturbed by float32
roundings, breaks the element bound (an ill-conditioned case), the bound is a multiple of that error instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

# atol = rtol by output dtype: one unit in the last place of the half formats, so twice what rounding once costs.
# float32: 1e-5, growing as the square root of the number of terms beyond 16384. One accumulator per sum, the least
# careful honest order, errs by about sqrt(terms) * 1.4e-8 of the result's rms: 2e-6 at 16384 terms, 5 sigma 1e-5.
# It ends at LONGEST terms: nobody adds more of them one by one, and PyTorch errs by 7e-8 at 4 million.
TOLERANCES = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 1e-5}
TF32_TOLERANCE = 2e-3
MAX_FACTOR = 4.0
LONGEST = 65536  # terms beyond which no bound grows
FEWEST = 32  # elements below which an rms is chance: the bound on each element stands alone
RMS_FACTOR = 2.0  # an honest kernel rounds where PyTorch does: its rms error is within a few per cent of PyTorch's
_CHUNK = 1 << 26  # elements compared at once: 0.5 GB of float64


@dataclass(frozen=True)
class Comparison:
    """ok, why not, and the errors: worst element relative to rms(ref) + |ref|, and rms error over rms(ref)."""

    ok: bool
    reason: str
    max_error: float
    rms_error: float
    usual: float = math.inf  # the rms error that PyTorch makes


def compare(
    out: torch.Tensor,
    ref: torch.Tensor,
    torch_out: torch.Tensor | None = None,
    *,
    depth: float = 1.0,
    factor: float = 1.0,
    rms_factor: float = RMS_FACTOR,
    perturbed: torch.Tensor | None = None,
    exact: bool = False,
    allow_tf32: bool = False,
    usual: float | None = None,
    by_element: float = 0.0,
) -> Comparison:
    """Judge `out` (any float dtype) against `ref` (float64, same shape).

    torch_out: PyTorch's result on the same inputs, for the error bound relative to it. perturbed: the oracle on inputs
    that are off by a few float32 roundings: what conditioning alone costs. depth: terms in the longest sum. factor: the
    operator's own multiple of TOLERANCES. exact: demand equality with the rounded reference. usual: `ref` is PyTorch's
    own result, which is off by so much, as rms, like the kernel's may be. by_element: largest error of each element
    over that element itself, however small beside the others, but four tolerances at least; 0 for no such bound.
    """
    if out.shape != ref.shape:
        return Comparison(False, f"shape {tuple(out.shape)}, expected {tuple(ref.shape)}", math.inf, math.inf)
    tolerance, depth = TOLERANCES[out.dtype] * factor, min(depth, LONGEST)
    if out.dtype == torch.float32:
        tolerance = TF32_TOLERANCE if allow_tf32 else tolerance * max(1.0, math.sqrt(depth / 16384))
    scale = _rms_finite(ref, out.dtype)
    ours = _errors(out, ref, scale, tolerance)
    yardsticks = [_errors(t, ref, scale, tolerance) for t in (torch_out, perturbed) if t is not None]
    yardsticks = [y for y in yardsticks if not y.wrong_nonfinite]
    unit = torch.finfo(out.dtype).eps / 2
    # float32 floors grow with the sum; the half formats round once at the end, whatever the sum
    floor = 8 * unit * max(1.0, math.sqrt(depth) / 16) if out.dtype == torch.float32 else unit / 8 * (rms_factor - 1)
    floor += unit / math.sqrt(max(ref.numel(), 1))  # by so much the rms of a few roundings varies by chance
    if out.dtype == torch.float32:
        rms_factor, floor = MAX_FACTOR, TF32_TOLERANCE if allow_tf32 else floor
    if usual is None:
        usual = max((y.rms_error for y in yardsticks), default=math.inf)
    else:
        rms_factor += 1  # two errors, which may add up
    found = _verdict(out, ref, ours, yardsticks, tolerance, exact, usual, rms_factor * usual + floor)
    lost = _lost(out, ref, max(by_element, 4 * tolerance)) if by_element and found.ok else ""
    return replace(found, ok=False, reason=lost) if lost else found


def _lost(out: torch.Tensor, ref: torch.Tensor, limit: float) -> str:
    """Which elements are off by more than `limit` of themselves, of those that the dtype has all digits for."""
    info = torch.finfo(out.dtype)
    for got, want in zip(out.flatten().split(_CHUNK), ref.flatten().split(_CHUNK), strict=True):
        size = want.abs()
        # not <=: a NaN is none of these, and was looked at before
        off = ((got.double() - want).abs() > limit * size) & (size >= info.smallest_normal) & (size <= info.max)
        if count := int(off.sum()):
            at = int(off.nonzero()[0])
            what = f"at one of them {got[at].item():.6g}, expected {want[at].item():.6g}"
            return f"{count} elements off by more than {limit:.1e} of themselves, beside larger ones; {what}"
    return ""


def _verdict(out, ref, ours, yardsticks, tolerance, exact, usual, rms_limit) -> Comparison:
    max_error, rms_error = ours.max_error, ours.rms_error

    def failed(reason: str) -> Comparison:
        return Comparison(False, reason, max_error, rms_error, usual)

    if ours.wrong_nonfinite:
        return failed(f"{ours.wrong_nonfinite} values non-finite where the reference is finite, or the other way round")
    if exact and not torch.equal(out.double(), ref.to(out.dtype).double()):
        return failed("differs from an exactly representable result: some terms are missing or rounded on the way")
    limit = max([tolerance, *(_max_factor(y, out.dtype) * y.max_error for y in yardsticks)])
    if ours.outside and not max_error <= limit:
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(ours.worst_at), ref.shape))
        got, want = out.flatten()[ours.worst_at].item(), ref.flatten()[ours.worst_at].item()
        return failed(
            f"{ours.outside} of {ref.numel()} elements off by more than {limit:.1e} x (rms + |ref|); "
            f"at {where}: {got:.6g}, expected {want:.6g}"
        )
    if ref.numel() >= FEWEST and not rms_error <= rms_limit:
        return failed(
            f"rms error {rms_error:.2e} of rms(ref); PyTorch in this dtype makes {usual:.2e}: "
            "lower precision than the dtype allows"
        )
    return Comparison(True, "", max_error, rms_error, usual)


def _max_factor(yardstick: _Errors, dtype: torch.dtype) -> float:
    """How far beyond a yardstick's worst error a kernel's may go.

    Half formats: a worst error is mostly one rounding, the same for all, unless the case is ill-conditioned. Float32:
    the next lower precision is 2^13 away, so there is room for another order of summation.
    """
    return MAX_FACTOR if dtype == torch.float32 or yardstick.outside else MAX_FACTOR / 2


@dataclass(frozen=True)
class _Errors:
    outside: int  # elements beyond the bound
    worst_at: int  # flat index of the worst element
    max_error: float
    rms_error: float
    wrong_nonfinite: int


def _rms_finite(ref: torch.Tensor, dtype: torch.dtype) -> float:
    """Root mean square over the elements that are finite in `dtype`."""
    total, count = 0.0, 0
    for chunk in ref.flatten().split(_CHUNK):
        square = _square(chunk)
        # this finite sum bounds each element; only another one is looked into
        kept = chunk if square < torch.finfo(dtype).max ** 2 else chunk[chunk.abs() <= torch.finfo(dtype).max]
        total += square if kept is chunk else _square(kept)
        count += kept.numel()
    return math.sqrt(total / count) if count else 0.0


def _square(values: torch.Tensor) -> float:
    """The sum of squares, in one pass."""
    return torch.linalg.vector_norm(values).item() ** 2 if values.numel() else 0.0


def _errors(out: torch.Tensor, ref: torch.Tensor, scale: float, tolerance: float) -> _Errors:
    """`out` may be float64: a perturbed oracle, whose finite values count as they are.

    The scale of an element is the rms of the whole tensor or of its own row, whichever is larger: the first rows of
    causal attention average few values and are far larger than the last.
    """
    info, last = torch.finfo(out.dtype), ref.shape[-1] if ref.dim() and ref.numel() else 1
    rows = max(1, _CHUNK // last)
    outside = wrong = 0
    worst, worst_at, total, start = -1.0, 0, 0.0, 0
    for got, want in zip(out.reshape(-1, last).split(rows), ref.reshape(-1, last).split(rows), strict=True):
        error, size = (want - got).abs_(), want.abs()  # in float64, both
        square = _square(error)
        # finite where all of both is; and far from the format's largest value nothing was rounded to infinity
        if not (math.isfinite(square) and (not size.numel() or size.max().item() < info.max * (1 - 8 * tolerance))):
            both, bad = _comparable(got.double(), want, info, tolerance)
            wrong += bad
            error, size = torch.where(both, error, 0.0), torch.where(both, size, 0.0)
            square = _square(error)
        total += square
        row = torch.linalg.vector_norm(size, dim=-1, keepdim=True).div_(math.sqrt(last)).clamp_min_(scale)
        # a subnormal step is all that the dtype can resolve next to zero
        scaled = error.sub_(info.smallest_normal * info.eps).clamp_min_(0).div_(size.add_(row).clamp_min_(1e-300))
        if scaled.numel():
            top, at = scaled.flatten().max(0)
            if not top.item() <= tolerance:
                outside += int((~(scaled <= tolerance)).sum())
            if top.item() > worst:
                worst, worst_at = top.item(), start + int(at)
        start += got.numel()
    rms = math.sqrt(total / max(ref.numel(), 1))
    return _Errors(outside, worst_at, max(worst, 0.0), rms / scale if scale else rms, wrong)


def _comparable(got: torch.Tensor, want: torch.Tensor, info: torch.finfo, tolerance: float) -> tuple[torch.Tensor, int]:
    """Where the difference of two float64 tensors counts, and how many values are non-finite on one side alone."""
    expected = want.to(getattr(torch, info.dtype)).double()
    finite, got_finite = torch.isfinite(expected), torch.isfinite(got)
    # at the format's largest value an honest result may round to either side
    brink = ((want.abs() / info.max - 1).abs() < 4 * tolerance) & (got.abs() > info.max * (1 - 4 * tolerance))
    brink &= torch.sign(got) == torch.sign(want)
    same = (got == expected) | (got.isnan() & expected.isnan()) | brink
    wrong = int(((finite != got_finite) | ~finite).logical_and_(~same).sum())
    return finite & got_finite & ~brink, wrong


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, NaNs and signed zeros included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))
