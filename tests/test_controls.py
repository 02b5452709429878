"""Negative controls: wrong answers must fail and honest ones pass, for every operator, shape and dtype."""

from __future__ import annotations

import random

import pytest
import torch

import reference
from autokernel import ops
from autokernel.judge import Bench
from autokernel.spec import DTYPES, Case, content_dtypes

CPU = torch.device("cpu")


def question(op: str, size: str, dtype: str, **options):
    """A case with its inputs and oracle, and the judge's answer to an output of it."""
    spec = ops.get(op)
    bench = Bench(spec, CPU)
    stage = "numerical_stability" if options else "shape_sweep"
    case = Case(size, stage, (spec.cpu_shapes | spec.cpu_edges)[size], dtype, **options)
    layout = bench.layout(case)
    private = bench.draw(case, layout)
    dtype_out = DTYPES[dtype] if spec.out_dtype == "float" else torch.float32

    def verdict(out):
        return bench.judged(case, layout, private, out.to(dtype_out))

    return layout.views(private), bench.expected(case, layout, private), verdict


SIZES = [(op, size) for op in ops.names() for size in ops.get(op).cpu_shapes]
EVERY = [(op, size, dtype) for op, size in SIZES for dtype in DTYPES]


@pytest.mark.parametrize("op,size,dtype", EVERY)
def test_wrong_answers_fail(op, size, dtype):
    inputs, ref, verdict = question(op, size, dtype)
    tolerance = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 1e-5}[dtype]
    wrong = {
        "zeros": torch.zeros_like(ref),
        "ten tolerances too large": ref * (1 + 10 * tolerance),
        "ten tolerances too small": ref * (1 - 10 * tolerance),
    }
    if ref.numel() > 1:
        wrong["the mean everywhere"] = torch.full_like(ref, ref.mean())
        missing = ref.clone()
        missing.view(-1)[-min(16, ref.numel()) :] = 0
        wrong["one tile missing"] = missing
    if ref.dim() > 1 and ref.shape[-2] > 1:
        wrong["rows shuffled"] = ref.roll(1, -2)
    for value in inputs.values():
        if value.shape == ref.shape:
            wrong["an input passed through"] = value.double()
    accepted = [name for name, out in wrong.items() if verdict(out).ok]
    assert not accepted


def half_sum(x: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """Sum over the last axis in a half-precision accumulator, eight lanes wide, as a careless kernel does."""
    pad = -x.shape[-1] % 8
    x = torch.nn.functional.pad(x.to(half), (0, pad)).unflatten(-1, (-1, 8))
    total = torch.zeros_like(x[..., 0, :])
    for step in x.unbind(-2):
        total = total + step
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]


def half_product(a, b, half):
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=half)
    for k in range(0, a.shape[-1], 4):
        total = total + (a[..., k : k + 4].double() @ b[k : k + 4].double()).to(half)
    return total.double()


def half_accumulated(op: str, inputs: dict, half: torch.dtype) -> torch.Tensor:
    """The operator with its sums kept in half precision, everything else exact."""
    d = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    if op == "matmul":
        return half_product(d["A"], d["B"], half) + d["bias"]
    if op == "softmax":
        e = torch.exp(d["x"] - d["x"].amax(-1, keepdim=True))
        return e / half_sum(e, half).double().unsqueeze(-1)
    if op == "layernorm":
        n = d["x"].shape[-1]
        c = d["x"] - (half_sum(d["x"], half).double() / n).unsqueeze(-1)
        return c * torch.rsqrt(half_sum(c * c, half).double() / n + 1e-5).unsqueeze(-1) * d["weight"] + d["bias"]
    if op == "rmsnorm":
        mean = half_sum(d["x"] ** 2, half).double() / d["x"].shape[-1]
        return d["x"] * torch.rsqrt(mean + 1e-6).unsqueeze(-1) * d["weight"]
    if op == "reduce":
        return half_sum(d["x"], half)
    if op == "cross_entropy":
        top = d["logits"].amax(-1, keepdim=True)
        lse = half_sum(torch.exp(d["logits"] - top), half).double().log() + top.squeeze(-1)
        return (lse - d["logits"].gather(-1, d["targets"][:, None]).squeeze(-1)).mean()
    if op == "rotary_embedding":
        return reference.rotary_embedding(*(t.to(half) for t in inputs.values()))
    if op == "fused_mlp":
        g, u = half_product(d["x"], d["w_gate"], half), half_product(d["x"], d["w_up"], half)
        return half_product(torch.nn.functional.silu(g) * u, d["w_down"], half)
    assert op == "flash_attention"
    q, k, v = d["Q"][0, 0], d["K"][0, 0], d["V"][0, 0]
    out = reference.flash_attention(d["Q"], d["K"], d["V"])
    p = torch.exp(torch.full((q.shape[0], k.shape[0]), -torch.inf).triu(1 + k.shape[0] - q.shape[0])
                  + half_product(q, k.T, half) / q.shape[-1] ** 0.5)  # fmt: skip
    out[0, 0] = half_product(p, v, half) / half_sum(p, half).double().unsqueeze(-1)
    return out


SUMMING = (
    "matmul", "softmax", "layernorm", "rmsnorm", "reduce", "cross_entropy", "rotary_embedding", "fused_mlp",
    "flash_attention",
)  # fmt: skip
# contents on which a half accumulator shows even in short sums; "normal" is tried first
TELLING = {
    "matmul": {"A": "cancel", "B": "repeat"}, "reduce": "cancel", "softmax": "swamp_exp", "layernorm": {"x": "swamp"},
    "rmsnorm": {"x": "swamp"}, "cross_entropy": {"logits": "swamp_exp"},
}  # fmt: skip


@pytest.mark.parametrize("op,size,dtype", [case for case in EVERY if case[0] in SUMMING])
def test_half_precision_accumulation_fails(op, size, dtype):
    half = torch.bfloat16 if dtype == "bf16" else torch.float16
    refused = []
    for content in ("normal", TELLING.get(op, "normal")):
        inputs, _, verdict = question(op, size, dtype, content=content)
        refused.append(not verdict(half_accumulated(op, inputs, half)).ok)
    assert any(refused)


def honest(op: str, inputs: dict, **scalars) -> torch.Tensor:
    """float32 arithmetic, rounded once at the end; the intermediate of the MLP in the input's dtype."""
    floats = {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
    if op == "fused_mlp":
        activate = reference.ACTIVATIONS[scalars.get("activation", "silu")]
        h = activate(floats["x"] @ floats["w_gate"]) * (floats["x"] @ floats["w_up"])
        return h.to(inputs["x"].dtype).float() @ floats["w_down"]
    return getattr(reference, op)(**floats, **scalars)


CONTENTS = [
    (op, name, dtype)
    for op in ops.names()
    for name, content in ops.get(op).stability.items()
    for dtype in content_dtypes(content)
]


@pytest.mark.parametrize("op,content,dtype", CONTENTS)
def test_accurate_kernels_pass_on_hard_content(op, content, dtype):
    for _ in range(3):
        inputs, _, verdict = question(op, "small", dtype, content=ops.get(op).stability[content])
        assert not verdict(honest(op, inputs)).reason


@pytest.mark.parametrize("op,size", SIZES + [(op, size) for op in ops.names() for size in ops.get(op).cpu_edges])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accurate_kernels_pass_at_every_shape(op, size, dtype):
    inputs, _, verdict = question(op, size, dtype)
    assert not verdict(honest(op, inputs)).reason


@pytest.mark.parametrize("op", ops.names())
def test_accurate_kernels_pass_whatever_is_drawn(op):
    spec, bench = ops.get(op), Bench(ops.get(op), CPU)
    for case in spec.cases(False, set(spec.optional_names()), random.Random()):
        layout = bench.layout(case)
        private = bench.draw(case, layout)
        out = honest(op, layout.views(private), **case.scalars).to(layout.outputs[0].dtype)
        assert not bench.judged(case, layout, private, out).reason, case.label
