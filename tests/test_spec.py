"""Specs: shapes bind and name the wrong axis, layouts are what they say, bytes and FLOPs are counted once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from autokernel import ops
from autokernel.inputs import CONTENTS, fill, fresh_generator
from autokernel.spec import STAGES, Case, SpecError, axes_shape, content_dtypes, strides_of
from autokernel.worker import Layout


def test_nine_operators_and_an_unknown_one():
    nine = {
        "cross_entropy", "flash_attention", "fused_mlp", "layernorm", "matmul", "reduce", "rmsnorm",
        "rotary_embedding", "softmax",
    }  # fmt: skip
    written = sorted(p.stem for p in Path(ops.__file__).parent.glob("*.py") if p.name != "__init__.py")
    assert ops.names() == written and nine <= set(written)  # a user's tenth is one more file
    with pytest.raises(SpecError, match="unknown operator 'conv'; known: cross_entropy, flash_attention"):
        ops.get("conv")


@pytest.mark.parametrize("op", ops.names())
def test_every_size_is_complete_and_binds_back(op):
    spec = ops.get(op)
    rng = random.Random(0)
    sizes = [*spec.shapes.values(), *spec.edges.values(), *spec.cpu_shapes.values(), *spec.cpu_edges.values()]
    sizes += [hidden(rng, on_gpu) for hidden in spec.hidden.values() for on_gpu in (True, False) for _ in range(20)]
    for size in sizes:
        case = Case("any", "shape_sweep", size, "bf16")
        shapes = {name: tensor.shape for name, tensor in spec.tensors(case).items()}
        bound = spec.bind(shapes)
        assert all(axes_shape(a.axes, bound) == shapes[n] for n, a in spec.args.items())
        assert spec.output(case).dtype == (torch.float32 if op == "cross_entropy" else torch.bfloat16)
        empty = any(0 in shape for shape in shapes.values())
        assert spec.flops(size, spec.scalars) >= 0 and (spec.bytes_moved(case) > 0 or empty)
    assert {"small", "medium", "large"} <= set(spec.shapes) and set(spec.timed) <= set(spec.cpu_shapes)


@pytest.mark.parametrize(
    "op,shapes,words",
    [
        ("matmul", {"A": (2, 3), "B": (4, 5)}, "matmul: B: axis K is 4 here and 3 elsewhere"),
        ("matmul", {"A": (2, 3)}, "no shape for B; required: A, B"),
        ("layernorm", {"x": (4, 8), "weight": (7,), "bias": (8,)}, "weight: axis dim is 7 here and 8 elsewhere"),
        ("flash_attention", {"Q": (1, 2, 3), "K": (1, 2, 3, 4), "V": (1, 2, 3, 4)}, "expected axes (batch, heads,"),
        ("rotary_embedding", {"x": (2, 5, 8), "cos": (5, 3), "sin": (5, 4)}, "axis head_dim is 6 here and 8 elsewhere"),
        ("cross_entropy", {"logits": (4, 9), "targets": (5,)}, "axis rows is 5 here and 4 elsewhere"),
    ],
)
def test_a_wrong_shape_names_its_axis(op, shapes, words):
    with pytest.raises(SpecError) as error:
        ops.get(op).bind(shapes)
    assert words in str(error.value)


def test_flops_and_bytes_by_hand():
    matmul, attention = ops.get("matmul"), ops.get("flash_attention")
    size = {"rows": (3, 5), "N": 7, "K": 11}
    assert matmul.flops(size, {}) == 2 * 15 * 7 * 11
    case = Case("any", "shape_sweep", size, "fp16", omit=("bias",))
    assert matmul.bytes_moved(case) == 2 * (15 * 11 + 11 * 7 + 15 * 7)
    heads = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 4, "kv_len": 4, "head_dim": 8}
    assert attention.flops(heads, {"causal": False}) == 4 * 16 * 8
    assert attention.flops(heads, {"causal": True}) == 4 * 10 * 8  # 1 + 2 + 3 + 4 scores
    assert attention.flops({**heads, "kv_len": 6}, {"causal": True}) == 4 * (3 + 4 + 5 + 6) * 8
    assert attention.flops({**heads, "q_len": 6}, {"causal": True}) == 4 * 10 * 8  # two queries see nothing


def test_schemas():
    assert ops.get("rmsnorm").schema() == "(Tensor x, Tensor weight, float eps=1e-06) -> Tensor"
    assert ops.get("matmul").schema() == "(Tensor A, Tensor B, Tensor? bias=None) -> Tensor"
    assert 'str activation="silu"' in ops.get("fused_mlp").schema()
    assert "bool causal=True, float? sm_scale=None" in ops.get("flash_attention").schema()


def test_layouts():
    assert strides_of((3, 4), "contiguous") == ((4, 1), 0)
    assert strides_of((3, 4), "transposed") == ((1, 3), 0)
    assert strides_of((2, 3, 5, 7), "heads") == ((105, 7, 21, 1), 0)
    assert strides_of((3, 4), "padded") == ((20, 1), 8)
    assert strides_of((3, 4), "odd") == ((7, 1), 1)
    assert strides_of((2, 3, 5), "swapped") == ((5, 10, 1), 0)
    assert strides_of((3, 4), "stepped") == ((8, 2), 0) and strides_of((3,), "stepped") == ((2,), 0)
    assert strides_of((3, 4), "expanded") == ((0, 1), 0)


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("op", ops.names())
def test_every_value_of_every_axis_is_drawn_in_every_run(op, on_gpu):
    spec = ops.get(op)
    for seed in range(5):
        cases = spec.cases(on_gpu, set(spec.optional_names()), random.Random(seed))
        drawn = [c for c in cases if not isinstance(c.layout, str)]
        assert {c.name.split()[0] for c in drawn} >= set(spec.hidden)
        for name, values in spec.options.items():
            assert {c.scalars.get(name) for c in drawn if c.dtype == "fp32"} >= set(values)
        for name, arg in spec.args.items():
            shown = {c.layout[name] for c in drawn if name in c.layout and not spec.tensors(c)[name].plain}
            assert shown == set(arg.layouts)
        layouts = [tuple(c.layout.values()) for c in drawn if len(c.layout) > 1]
        if layouts and min(len(arg.layouts) for arg in spec.args.values() if arg.layouts) > 2:
            assert sum(len(set(each)) > 1 for each in layouts) >= 3  # to each its own


def test_cases_cover_the_stages_and_skip_options_that_the_kernel_lacks():
    spec = ops.get("flash_attention")
    every = spec.cases(True, {"causal", "sm_scale"}, random.Random(1))
    assert [s for s in STAGES if any(c.stage == s for c in every)] == list(STAGES)
    assert {c.dtype for c in every if c.stage == "shape_sweep"} == {"fp16", "bf16", "fp32"}
    assert any(c.scalars.get("causal") is False for c in every)
    assert all(not c.scalars for c in spec.cases(True, set(), random.Random(1)))
    without = ops.get("matmul").cases(True, set(), random.Random(1))
    assert all(c.omit == ("bias",) for c in without)


@pytest.mark.parametrize("content", sorted(CONTENTS.keys() - {"near_eps"}))
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_contents_are_fresh_finite_and_stay_in_their_tensor(content, dtype):
    spec = ops.get("softmax")
    case = Case("any", "edge_cases", {"shape": (5, 64)}, dtype, layout="odd", content=content)
    layout = Layout.of(spec.tensors(case), spec.output(case))
    region = torch.zeros(layout.input_bytes, dtype=torch.uint8)
    draws = []
    for _ in range(2):
        fill(spec, case, layout.views(region), fresh_generator(torch.device("cpu")))
        draws.append(layout.views(region)["x"].clone())
    known = dtype in content_dtypes(content) and content not in ("masked", "infinite")
    assert not draws[0].isnan().any() and (not known or draws[0].isfinite().all())
    assert content == "zeros" or dtype not in content_dtypes(content) or not torch.equal(*draws)
    layout.views(region)["x"].zero_()
    assert not region.any()  # nothing was written beside the view


@pytest.mark.parametrize("name", ["softmax", "reduce"])
def test_oracles_work_along_an_empty_dimension(name):
    spec, x = ops.get(name), torch.zeros(0, 34, dtype=torch.float64)
    for dim in (-1, -2, 0, 1):
        assert spec.reference(x, dim=dim).shape == spec.baseline(x, dim=dim).shape
