"""Kernels in models that are made to be mistaken: what a claim was proven for must hold at every call."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from autokernel import apply, ops, verification
from autokernel.apply import Kernel, Kernels
from autokernel.models import Loaded
from autokernel.source import read_kernel
from tests.test_verify import plain


@pytest.fixture
def kernels(tmp_path):
    """For every operator one in plain PyTorch: that runs anywhere."""
    for op in ops.names():
        (tmp_path / f"{op}.py").write_text(plain(op))
    return Kernels(tuple(Kernel(op, read_kernel(tmp_path / f"{op}.py", op)) for op in ops.names()))


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.line = function, nn.Linear(32, 32, bias=False)
        self.weight = nn.Parameter(torch.randn(32))
        self.register_buffer("mask", torch.ones(2, 1, 1, 8, dtype=torch.bool))

    def forward(self, *inputs):
        return self.function(self, *inputs)

    def heads(self, x):
        return self.line(x).view(2, -1, 2, 16).transpose(1, 2)


def masked(self, x, mask):
    q = self.heads(x)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None])


def added(self, x, mask):
    q = self.heads(x)
    scores = q @ q.transpose(-1, -2) / 4 + torch.zeros(2, 1, 1, 8).masked_fill(~mask[:, None, None], -1e9)
    return scores.softmax(-1) @ q


def own_mask(self, x):
    q = self.heads(x)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)


def rotated(self, x, cos, sin):
    q = self.heads(x)
    return q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin


def silent_keys(self, x):
    k = self.heads(x)
    scores = (k @ k.transpose(-1, -2) / 4).masked_fill((k.abs().sum(-1) == 0)[:, :, None], -1e9)
    return scores.softmax(-1) @ k


def clipped(self, x):
    k = self.heads(x)
    scores = k @ k.transpose(-1, -2) / 4
    return torch.where(scores > 30, 30.0, scores).softmax(-1) @ k


def clamped_norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=1e-2) + 1e-6) * self.weight


def overwritten_norm(self, x):
    y = self.line(x)
    variance = y.pow(2).mean(-1, keepdim=True)
    y[:, 0] = 5.0
    return y * torch.rsqrt(variance + 1e-6) * self.weight


def overwritten_view(self, x):
    y = self.line(x)
    variance = y.pow(2).mean(-1, keepdim=True)
    y.view(-1).add_(1)
    return y * torch.rsqrt(variance + 1e-6) * self.weight


def loss(self, x):
    return F.mse_loss(self.line(x), x)


def loss_of_classes(self, x, target):
    return F.cross_entropy(self.line(x).transpose(1, 2), target)


def mask_by_a_view(self, x, mask):
    k, q = torch.ones(2, 1, 1, 8, dtype=torch.bool), self.heads(x)
    k[:, 0, 0] = mask
    return F.scaled_dot_product_attention(q, q, q, attn_mask=k)


def mask_and_by_a_view(self, x, mask):
    a, q = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril(), self.heads(x)
    a[:, 0] &= mask[:, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=a)


def table_by_views(self, x, angles, shift):
    q, cos, sin = self.heads(x), torch.empty(8, 16), torch.empty(8, 16)
    cos[:, :8], cos[:, 8:] = angles.cos(), (angles + shift).cos()
    sin[:, :8], sin[:, 8:] = angles.sin(), (angles + shift).sin()
    return q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin


def diagonal(self, x):
    k = self.heads(x)
    scores = k @ k.transpose(-1, -2) / 4
    scores.diagonal(dim1=-2, dim2=-1).fill_(-1e9)
    return scores.softmax(-1) @ k


def windows(self, x):
    y = self.line(x)
    y.unfold(-1, 4, 4).mul_(2)
    return y


def written_result(self, x):
    q = self.heads(x)
    out = F.scaled_dot_product_attention(q, q, q).transpose(1, 2)
    out.view(2, 8, 32)[:, 0] = 5.0
    return out * 1


def many_written(self, x):
    y = self.line(x)
    variance = y.pow(2).mean(-1, keepdim=True)
    torch._foreach_add_([y], 1)
    return y * torch.rsqrt(variance + 1e-6) * self.weight


def matrix_transposed(self, x):
    return self.line(x) @ x.mT


def bits(self, x):
    return self.line(x).view(torch.int32).float()


def narrower(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.line(x).float() + self.line(x.float())


def gaps(self, x):
    y = self.line(x).clone()
    y[..., [0, 2]] = x[..., :2]
    return y


def unused(self, x):
    self.line(x)
    return F.rms_norm(x, (32,), self.weight, 1e-6)


def inputs():
    x, every = torch.randn(2, 8, 32), torch.ones(2, 8, dtype=torch.bool)
    padded, table, zeros = every.clone(), torch.randn(8, 8), x.clone()
    padded[:, 5:], zeros[:, 5:] = False, 0
    same = torch.cat((table, table), -1)
    return {
        masked: [(x, every), (x[:, :4], every[:, :4]), (x, padded), (x, every)], added: [(x, every), (x, padded)],
        rotated: [(x, same, same.sin()), (x, torch.randn(8, 16), torch.randn(8, 16))],
        silent_keys: [(x,), (zeros,)], clipped: [(x,), (x * 20,)], clamped_norm: [(x,), (x * 1e-3,)],
        overwritten_norm: [(x,)], overwritten_view: [(x,)], loss: [(x,)],
        mask_by_a_view: [(x, every), (x, padded)], mask_and_by_a_view: [(x, every), (x, padded)],
        table_by_views: [(x, table, torch.zeros(())), (x, table, torch.ones(()))], diagonal: [(x,)], windows: [(x,)],
        written_result: [(x,)], many_written: [(x,)], matrix_transposed: [(x,)], bits: [(x,)], narrower: [(x,)],
        loss_of_classes: [(x, torch.zeros(2, 8, dtype=torch.long))], gaps: [(x,)], unused: [(x,), (x * 2,)],
    }  # fmt: skip


@pytest.mark.parametrize("function", inputs(), ids=lambda f: f.__name__)
def test_every_call_is_right(kernels, function):
    model, calls = Model(function).eval(), inputs()[function]
    expected = [model(*copy.deepcopy(c)) for c in calls]
    with kernels.apply(model) as applied:
        for given, want in zip(calls, expected, strict=True):
            torch.testing.assert_close(model(*copy.deepcopy(given)), want, rtol=1e-4, atol=1e-5)
    served = {s.op for s in applied.served}
    assert served == {masked: {"matmul", "flash_attention"}, rotated: {"matmul", "rotary_embedding"},
                      added: {"matmul", "flash_attention"}, unused: {"rmsnorm"}}.get(function, served)  # fmt: skip
    assert function not in (masked, added) or applied.originals[apply.OTHER_VALUES] == 1


def test_a_mask_of_the_model_that_is_written_to(kernels):
    model, x = Model(own_mask).eval(), torch.randn(2, 8, 32)
    with kernels.apply(model) as applied:
        model(x)
        before = applied.report()
        model.mask[..., 5:] = False
        want = Model.forward(model, x)
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    assert "flash_attention" in before and applied.originals[apply.OTHER_VALUES] == 1


class Broken(nn.Module):
    """torch.compile captures nothing but its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        for layer in self.layers:
            self.count += 1
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def test_a_first_call_runs_the_model_once(kernels):
    model, x = Broken().eval(), torch.randn(4, 32)
    with kernels.apply(model) as applied:
        model(x)
        assert model.count == 3 and applied.originals[apply.PARTED] == 1
        model(x)
        assert model.count == 6 and sum(r.calls for r in applied.routes.values()) == 3


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm, self.drop = nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.5)
        self.double, self.table = False, torch.ones(32)

    def forward(self, x):
        y = self.drop(self.norm(self.line(x)) * self.table)
        return y * 2 if self.double else y


@pytest.mark.parametrize("change", ["double", "table", "hook", "train"])
def test_what_changes_after_the_first_call(kernels, change):
    model, x = Changing().eval(), torch.randn(4, 32)
    applied = kernels.apply(model, x)
    if change == "double":
        model.double = True
    elif change == "table":
        model.table = torch.full((32,), 5.0)
    elif change == "train":
        model.drop.train()
    else:
        model.norm.register_forward_hook(lambda module, given, out: out * 3)
    got = [model(x), torch.compile(model, backend="aot_eager")(x)]
    applied.remove()
    torch._dynamo.reset()
    if change == "train":
        assert all((y == 0).float().mean() > 0.2 for y in got)
    else:
        for y in got:
            torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)


def test_a_copy_has_no_kernels(kernels):
    model, x = Changing().eval(), torch.randn(4, 32)
    want = model(x)
    applied = kernels.apply(model, x)
    for other in (copy.deepcopy(model), torch.load(_saved(model), weights_only=False)):
        calls = sum(r.calls for r in applied.routes.values())
        torch.testing.assert_close(other(x), want)
        assert sum(r.calls for r in applied.routes.values()) == calls


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


# ---- verify.py ------------------------------------------------------------------------------------------------------


def few_are_huge(self, x):
    return self.line(x).masked_fill(x > 1.5, -1e9)


def few_are_the_least(self, x):
    return self.line(x).masked_fill(x > 1.5, torch.finfo(x.dtype).min)


class Slots:
    __slots__ = ("y",)


def spectrum(self, x):
    return torch.fft.rfft(self.line(x))


def in_slots(self, x):
    out = Slots()
    out.y = self.line(x)
    return out


@pytest.mark.parametrize("function", [spectrum, in_slots, few_are_huge, few_are_the_least], ids=lambda f: f.__name__)
def test_one_per_cent_too_much_is_seen(kernels, monkeypatch, function):
    options = verification.Options(compiled=False)
    product = Kernels(tuple(k for k in kernels.kernels if k.source.kernel_type == "matmul"))
    whole = product.kernels[0].function
    for factor in (1.0, 1.01):
        loaded = Loaded(Model(function).eval(), "Model", (torch.randn(4, 32),))
        scaled = partial(lambda f, **arguments: whole(**arguments) * f, factor)
        monkeypatch.setattr(apply.Kernel, "function", property(lambda kernel, scaled=scaled: scaled))
        assert verification.Verification(loaded, product, options, print).run()["correct"] is (factor == 1.0)
        monkeypatch.undo()


def test_hooks_of_the_model_itself_count(kernels):
    model = Changing().eval()
    model.register_forward_hook(lambda module, given, out: out * 3)
    loaded = Loaded(model, "Changing", (torch.randn(4, 32),))
    assert verification.Verification(loaded, kernels, verification.Options(compiled=False), print).run()["correct"]
