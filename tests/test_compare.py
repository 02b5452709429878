"""The comparator: what it lets through and what it does not, at the edges of the formats."""

from __future__ import annotations

import math

import pytest
import torch

from autokernel.compare import TOLERANCES, compare, same_bits

INF, NAN = math.inf, math.nan


def verdict(out, ref, dtype=torch.float16, **options):
    return compare(torch.tensor(out, dtype=dtype), torch.tensor(ref, dtype=torch.float64), **options)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_rounding_passes_and_four_do_not(dtype):
    ref = torch.randn(1000, dtype=torch.float64)
    unit = torch.finfo(dtype).eps
    assert compare(ref.to(dtype), ref).ok
    wrong = ref.clone()
    wrong[500] = 3 + 8 * max(unit, TOLERANCES[dtype])
    ref[500] = 3
    found = compare(wrong.to(dtype), ref)
    assert not found.ok and "1 of 1000 elements" in found.reason and "(500,)" in found.reason


@pytest.mark.parametrize("out,ref,ok", [
    ([1.0, NAN], [1.0, 2.0], False),
    ([1.0, INF], [1.0, 2.0], False),
    ([1.0, 2.0], [1.0, NAN], False),
    ([1.0, NAN], [1.0, NAN], True),
    ([1.0, INF], [1.0, INF], True),
    ([1.0, -INF], [1.0, INF], False),
    ([1.0, NAN], [1.0, INF], False),
    ([1.0, INF], [1.0, 1e6], True),  # beyond float16: infinity is the right answer
    ([1.0, 65504.0], [1.0, 65519.0], True),
    ([1.0, INF], [1.0, 65504.0], True),  # at the brink either side is honest
    ([1.0, INF], [1.0, 60000.0], False),
    ([1.0, -INF], [1.0, 65504.0], False),
    ([1.0, 65504.0], [1.0, 1e6], False),  # an overflow is not to be hidden
])  # fmt: skip
def test_non_finite_values(out, ref, ok):
    assert verdict(out, ref).ok is ok


def test_all_nan_is_never_right():
    assert not verdict([NAN] * 4, [1.0, 2.0, 3.0, 4.0]).ok


def test_subnormal_results_are_not_held_to_a_relative_bound():
    ref = torch.full((64,), 6.6e-6, dtype=torch.float64)  # a softmax over 151936 classes
    assert compare(ref.half(), ref).ok
    assert not compare(torch.zeros(64, dtype=torch.float16), ref).ok


def test_zero_reference_demands_zeros():
    zeros = torch.zeros(8, dtype=torch.float64)
    assert compare(zeros.half(), zeros).ok
    assert not compare(zeros.half() + 1e-4, zeros).ok


def test_exact_demands_equality():
    assert verdict([3.0, 4.0], [3.0, 4.0], exact=True).ok
    assert not verdict([3.0, 4.002], [3.0, 4.0], exact=True).ok


def test_lower_precision_than_pytorch_is_found_though_every_element_is_near():
    ref = torch.randn(100_000, dtype=torch.float64)
    rounded = ref.half()
    twice_worse = (ref * (1 + torch.randn(ref.shape) * 2.0**-11)).half()
    assert compare(rounded, ref, rounded).ok
    found = compare(twice_worse, ref, rounded, factor=8)
    assert not found.ok and "lower precision" in found.reason


def test_lower_precision_shows_beside_pytorch_alone_too():
    ref = torch.randn(100_000, dtype=torch.float64)
    theirs = ref.half()
    usual = compare(theirs, ref, theirs).usual
    nearly = (ref * (1 + torch.randn(ref.shape) * 2.0**-13)).half()  # another order of rounding
    coarse = (ref * (1 + torch.randn(ref.shape) * 2.0**-10)).half()
    assert compare(nearly, theirs.double(), factor=8, usual=usual).ok
    assert not compare(coarse, theirs.double(), factor=8, usual=usual).ok


def test_an_inaccurate_pytorch_does_not_fail_a_better_kernel():
    ref = torch.randn(1000, dtype=torch.float64)
    poor = (ref + 0.1 * torch.randn_like(ref)).half()
    assert compare(ref.half(), ref, poor).ok


def test_float32_tolerance_grows_with_the_sum_and_tf32_needs_leave():
    ref = torch.randn(1000, dtype=torch.float64)
    off = (ref * (1 + 5e-5)).float()
    assert not compare(off, ref).ok and not compare(off, ref, depth=16384 * 100).ok  # however long the sum
    assert compare((ref * (1 + 1.5e-5)).float(), ref, depth=65536).ok
    tf32 = (ref * (1 + 5e-4)).float()
    assert not compare(tf32, ref, ref.float()).ok
    assert compare(tf32, ref, ref.float(), allow_tf32=True).ok


def test_rows_are_judged_on_their_own_scale():
    ref = torch.cat((torch.full((1, 100), 10.0), torch.full((99, 100), 0.01))).double()
    noisy = ref.clone()
    noisy[0, 3] = 0.001  # small beside its row
    ref[0, 3] = 0.0
    assert compare(noisy.half(), ref).ok
    noisy[50, 3] = 0.0
    assert not compare(noisy.half(), ref).ok


def test_each_element_by_itself_where_nothing_cancels():
    ref = torch.tensor([[1.0, 1e-4, 1e-30, 1e-45]], dtype=torch.float64)
    assert compare(ref.float(), ref, by_element=0.02).ok
    for value in (0.0, 0.97e-30, 1.1e-30):
        out = ref.float()
        out[0, 2] = value
        assert compare(out, ref).ok
        assert "1 elements off by more than 2.0e-02" in compare(out, ref, by_element=0.02).reason
    out = ref.float()
    out[0, 3] = 0.0  # below what the dtype has all digits for
    assert compare(out, ref, by_element=0.02).ok


def test_float32_digits_lost_to_the_length_of_a_sum_are_seen():
    ref, depth = torch.randn(100, dtype=torch.float64), 4 << 20
    usual = (ref * (1 + torch.randn(100) * 7e-8)).float()
    assert compare((ref * (1 + torch.randn(100) * 1e-6)).float(), ref, usual, depth=depth).ok  # 4096 in each of 1024
    assert not compare((ref * (1 + torch.randn(100) * 2e-5)).float(), ref, usual, depth=depth).ok


def test_shape_and_scalars():
    assert "shape (2,), expected (3,)" in verdict([1.0, 2.0], [1.0, 2.0, 3.0]).reason
    assert verdict(1.0, 1.0).ok and not verdict(1.1, 1.0).ok
    assert compare(torch.empty(0, 4).half(), torch.empty(0, 4).double()).ok


def test_same_bits():
    a = torch.tensor([0.0, NAN, 1.0])
    assert same_bits(a, a.clone()) and not same_bits(a, torch.tensor([-0.0, NAN, 1.0]))
    assert not same_bits(a, a.half()) and not same_bits(a, a[:2])
