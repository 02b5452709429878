"""Sites are found in every spelling that models use, told apart from lookalikes, and can be replaced."""

import math
from collections import Counter

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from autokernel import graph as graph_module
from autokernel import ops, sites
from autokernel.graph import Capture, View, default_eps, flops, name
from models.bert_base import BertModel
from models.gpt2 import GPT2
from models.llama_7b import LlamaModel

torch.set_num_threads(1)
DIM = 24


class Spelled(nn.Module):
    """A module around a function of x and parameters of the given shapes."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        for i, size in enumerate(shapes):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(size)))
        self.names = [f"w{i}" for i in range(len(shapes))]
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())
        self.register_buffer("angles", torch.outer(torch.arange(64.0), 100.0 ** -torch.linspace(0, 1, 4)))

    def forward(self, *inputs):
        return self.function(self, *inputs, *[getattr(self, n) for n in self.names])


def capture(model, *inputs, **kwargs):
    captured = Capture(model.eval())
    captured.keep_inputs = True
    with torch.no_grad():
        captured(*inputs, **kwargs)
    return captured, sites.find(captured)


def counts(found):
    return dict(Counter(site.op for site in found.sites))


def replaced(captured, found):
    """Have every site computed by the operator's reference; returns the kernels, which count their calls."""
    kernels = {s: counted(s) for s in found.sites}
    for graph in captured.graphs:
        graph.run = sites.replace(graph, {s: k for s, k in kernels.items() if s.graph is graph})
    return kernels.values()


def counted(site):
    def kernel(**arguments):
        kernel.calls += 1
        for argument, tensor in site.tensors.items():
            assert arguments[argument].stride() == tensor.stride()  # weights as they lie
        return site.spec.reference(**arguments)

    kernel.calls, kernel.__name__ = 0, f"reference_{site.op}"
    return kernel


# ---- one operator, many spellings -----------------------------------------------------------------------------------


def rms_plain(m, x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def rms_division(m, x, w):
    return w * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5))


def rms_sum(m, x, w):
    return x * (torch.sum(x**2, -1, keepdim=True) / x.shape[-1] + 1e-5).pow(-0.5) * w


def rms_casts(m, x, w):
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rms_offset(m, x, w):  # Gemma
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)


def ln_written(m, x, w, b):
    mean = x.mean(-1, keepdim=True)
    return w * ((x - mean) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)) + b


def ln_rsqrt(m, x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b


def swiglu(m, x, g, u, d):
    return F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)


def swiglu_fused(m, x, gu, d):
    gate, up = F.linear(x, gu).chunk(2, -1)
    return F.linear(up * (gate * torch.sigmoid(gate)), d)


def swiglu_conv1d(m, x, g, u, d):  # weights stored (in, out)
    return (F.silu(x @ g) * (x @ u)) @ d


def geglu_tanh(m, x, g, u, d):
    h = F.linear(x, g)
    act = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
    return F.linear(act * F.linear(x, u), d)


def geglu_erf(m, x, g, u, d):
    h = F.linear(x, g)
    return F.linear(h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0))) * F.linear(x, u), d)


def attend_sdpa(m, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_bool_mask(m, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m.mask[: q.shape[2], : k.shape[2]], scale=0.3)


def attend_in_place(m, q, k, v):
    scores = q @ k.transpose(2, 3)
    scores *= q.shape[-1] ** -0.5
    scores.masked_fill_(~m.mask[: q.shape[2], : k.shape[2]], float("-inf"))
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def attend_additive(m, q, k, v):
    bias = torch.zeros(q.shape[2], k.shape[2]).masked_fill(~m.mask[: q.shape[2], : k.shape[2]], -1e9)
    return torch.matmul(((q * 0.2) @ k.mT + bias).softmax(-1), v)


def attend_bmm(m, q, k, v):
    b, h, s, d = q.shape
    q, k, v = (t.reshape(b * h, -1, d) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, h, s, -1) / math.sqrt(d)
    weights = torch.softmax(torch.where(m.mask[:s, :s], scores, torch.finfo(scores.dtype).min), -1)
    return torch.bmm(weights.view(b * h, s, -1), v)


def attend_einsum(m, q, k, v):
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k) / 4.0
    return torch.einsum("bhqk,bhkd->bhqd", weights.softmax(-1), v)


def attend_einsum_rows(m, q, k, v):  # (batch, seq, heads, head_dim)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(~m.mask[:9, :9], -1e4) * 1.0
    return torch.einsum("bhqk,bkhd->bhqd", torch.softmax(scores, dim=-1), v)


def attend_grouped(m, q, k, v):
    k, v = (t[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def attend_interleaved_groups(m, q, k, v):
    k, v = (t[:, :2].repeat_interleave(2, dim=1) for t in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def attend_enable_gqa(m, q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def rope_complex(m, x):  # Meta's LLaMA: (batch, seq, heads, head_dim)
    x = x.transpose(1, 2)
    table = torch.polar(torch.ones_like(m.angles), m.angles)[: x.shape[1]].view(1, x.shape[1], 1, -1)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


def rope_stacked(m, x):
    cos, sin = m.angles[: x.shape[2]].cos(), m.angles[: x.shape[2]].sin()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).reshape(x.shape)


def rope_rotate_half(m, x):
    angles = torch.cat((m.angles, m.angles), -1)[None, None, : x.shape[2]]
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * angles.cos() + turned * angles.sin()


def rope_chunks(m, x):
    cos, sin = m.angles[: x.shape[2]].cos(), m.angles[: x.shape[2]].sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_every_two(m, x):  # GPT-J
    angles = m.angles[: x.shape[2]].repeat_interleave(2, -1)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x * angles.cos()) + (turned * angles.sin())


HEADS, X, WIDE = (2, 4, 9, 8), (2, 5, DIM), (2, 4, 9, 8)
SPELLINGS = [
    ("rmsnorm", rms_plain, X, [(DIM,)]),
    ("rmsnorm", rms_division, X, [(DIM,)]),
    ("rmsnorm", rms_sum, X, [(DIM,)]),
    ("rmsnorm", rms_casts, X, [(DIM,)]),
    ("rmsnorm", rms_offset, X, [(DIM,)]),
    ("rmsnorm", lambda m, x, w: F.rms_norm(x, (DIM,), w), X, [(DIM,)]),
    ("rmsnorm", lambda m, x: F.rms_norm(x, (DIM,), eps=1e-4), X, []),
    ("layernorm", lambda m, x, w, b: F.layer_norm(x, (DIM,), w, b, 1e-6), X, [(DIM,), (DIM,)]),
    ("layernorm", lambda m, x: F.layer_norm(x, (DIM,)), X, []),
    ("layernorm", lambda m, x, w: F.layer_norm(x, (DIM,), w), X, [(DIM,)]),
    ("layernorm", ln_written, X, [(DIM,), (DIM,)]),
    ("layernorm", ln_rsqrt, X, [(DIM,), (DIM,)]),
    ("fused_mlp", swiglu, X, [(7, DIM), (7, DIM), (DIM, 7)]),
    ("fused_mlp", swiglu_fused, X, [(14, DIM), (DIM, 7)]),
    ("fused_mlp", swiglu_conv1d, X, [(DIM, 7), (DIM, 7), (7, DIM)]),
    ("fused_mlp", geglu_tanh, X, [(7, DIM), (7, DIM), (DIM, 7)]),
    ("fused_mlp", geglu_erf, X, [(7, DIM), (7, DIM), (DIM, 7)]),
    ("flash_attention", attend_sdpa, HEADS, None),
    ("flash_attention", attend_bool_mask, HEADS, None),
    ("flash_attention", attend_in_place, HEADS, None),
    ("flash_attention", attend_additive, HEADS, None),
    ("flash_attention", attend_bmm, HEADS, None),
    ("flash_attention", attend_einsum, HEADS, None),
    ("flash_attention", attend_einsum_rows, HEADS, None),
    ("flash_attention", attend_grouped, HEADS, None),
    ("flash_attention", attend_interleaved_groups, HEADS, None),
    ("flash_attention", attend_enable_gqa, HEADS, None),
    ("rotary_embedding", rope_complex, WIDE, []),
    ("rotary_embedding", rope_stacked, WIDE, []),
    ("rotary_embedding", rope_rotate_half, WIDE, []),
    ("rotary_embedding", rope_chunks, WIDE, []),
    ("rotary_embedding", rope_every_two, WIDE, []),
    ("softmax", lambda m, x: torch.softmax(x, 1), X, []),
    ("softmax", lambda m, x: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True), X, []),
    ("reduce", lambda m, x: x.sum(1), X, []),
    ("reduce", lambda m, x: torch.sum(x, dim=-1, keepdim=True), X, []),
    ("matmul", lambda m, x, w, b: F.linear(x, w, b), X, [(7, DIM), (7,)]),
    ("matmul", lambda m, x, w: x @ w, X, [(DIM, 7)]),
    ("matmul", lambda m, x, w, b: torch.addmm(b, x.view(-1, DIM), w), X, [(DIM, 7), (7,)]),
    ("matmul", lambda m, x, w: x @ w, X, [(DIM,)]),
    ("matmul", lambda m, x, w: torch.bmm(x.reshape(1, -1, DIM), w), X, [(1, DIM, 7)]),
    ("matmul", lambda m, x, w: torch.einsum("bsd,dn->bsn", x, w), X, [(DIM, 7)]),
    ("matmul", lambda m, x, w: torch.einsum("bshk,hkd->bsd", x.unflatten(-1, (4, -1)), w), X, [(4, DIM // 4, 7)]),
    ("matmul", lambda m, x, w: torch.einsum("bsd,hdk->bhsk", x, w), X, [(4, DIM, 7)]),
]


@pytest.mark.parametrize(("op", "function", "size", "weights"), SPELLINGS, ids=lambda v: getattr(v, "__name__", ""))
def test_spelling_is_found_and_replaced(op, function, size, weights):
    torch.manual_seed(0)
    inputs = [torch.randn(size) for _ in range(3 if weights is None else 1)]
    model = Spelled(function, *(weights or ()))
    captured, found = capture(model, *inputs)
    assert [s.op for s in found.sites] == [op], found.refused
    replaced(captured, found)
    with torch.no_grad():
        torch.testing.assert_close(captured(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


def soft_cap(m, q, k, v):
    scores = torch.tanh(q @ k.transpose(-2, -1) / math.sqrt(8) / 50.0) * 50.0
    return torch.softmax(scores, -1) @ v


def top_left_causal(m, q, k, v):
    return F.scaled_dot_product_attention(q[:, :, :4], k, v, is_causal=True)


def sliding_window(m, q, k, v):
    near = m.mask & ~m.mask.tril(-3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near[:9, :9])


def with_trained_bias(m, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m.w0)


def offset_read_as_plain(m, x, w):  # the scale is (1 + w): no plain norm with weight w
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)


def sums_of_squares_only(m, x, w):  # no mean: another scale
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * w


def quick_gelu(m, x, g, u, d):
    h = F.linear(x, g)
    return F.linear(h * torch.sigmoid(1.702 * h) * F.linear(x, u), d)


def halves_swapped(m, x):
    cos, sin = m.angles[: x.shape[2]].cos(), m.angles[: x.shape[2]].sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos - a * sin), dim=-1)


def shared_intermediate(m, x, g, u, d):
    h = F.silu(F.linear(x, g)) * F.linear(x, u)
    return F.linear(h, d), h


@pytest.mark.parametrize(
    ("op", "function", "size", "weights"),
    [
        ("flash_attention", soft_cap, HEADS, []),
        ("flash_attention", top_left_causal, HEADS, []),
        ("flash_attention", sliding_window, HEADS, []),
        ("flash_attention", with_trained_bias, HEADS, [(9, 9)]),
        ("rmsnorm", sums_of_squares_only, X, [(DIM,)]),
        ("fused_mlp", quick_gelu, X, [(7, DIM), (7, DIM), (DIM, 7)]),
        ("fused_mlp", shared_intermediate, X, [(7, DIM), (7, DIM), (DIM, 7)]),
        ("rotary_embedding", halves_swapped, WIDE, []),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_lookalike_is_refused(op, function, size, weights):
    torch.manual_seed(0)
    count = 3 if op == "flash_attention" else 1
    model = Spelled(lambda m, *a: function(m, *a[:count], *(a[count:] if count == 1 else ())), *weights)
    for scale in (1.0, 1e-3):  # values so small that a soft-cap or an offset hardly shows on them
        torch._dynamo.reset()
        found = capture(model, *(torch.randn(size) * scale for _ in range(count)))[1]
        assert op not in counts(found)


def test_a_zero_weight_does_not_make_an_offset_norm_a_plain_one():
    model = Spelled(offset_read_as_plain, (DIM,))
    nn.init.zeros_(model.w0)
    site = capture(model, torch.randn(X))[1].sites[0]
    weight = site.match.args["weight"]
    assert isinstance(weight, View) and name(weight.node) == "add"


def test_mixed_dtypes_and_scalars_are_recorded():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(DIM))

        def forward(self, x):
            return rms_offset(self, x, self.weight)

    site = capture(Mixed(), torch.randn(X, dtype=torch.float16))[1].sites[0]
    assert (site.dtype, site.tensors["weight"].dtype, site.scalars) == ("fp16", torch.float32, {"eps": 1e-6})


def test_explicit_epsilon_of_rms_norm_is_that_of_the_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.full((1, 8), 1e-2, dtype=dtype)
        assert torch.equal(F.rms_norm(x, (8,)), F.rms_norm(x, (8,), eps=default_eps(x))), dtype


# ---- the shipped models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (GPT2(vocab=101, length=64, dim=32, heads=4), {"layernorm": 25, "flash_attention": 12, "matmul": 49}),
        (
            LlamaModel(vocab=101, dim=32, heads=4, kv_heads=2, hidden=48),
            {"rmsnorm": 25, "flash_attention": 12, "rotary_embedding": 24, "fused_mlp": 12, "matmul": 49},
        ),
        (BertModel(vocab=101, length=64, dim=32, heads=4), {"layernorm": 25, "flash_attention": 12, "matmul": 73}),
    ],
    ids=["gpt2", "llama", "bert"],
)
def test_shipped_model(model, expected):
    torch.manual_seed(0)
    ids = torch.randint(0, 101, (2, 11))
    captured, found = capture(model, ids)
    assert counts(found) == expected
    assert len(captured.graphs) == 1 and not captured.breaks
    nodes = [n for n in captured.graphs[0].module.graph.nodes if flops(n)]
    assert {n for s in found.sites for n in s.nodes if flops(n)} == set(nodes)
    with torch.no_grad():
        before = model(ids)
        kernels = replaced(captured, found)
        after = captured(ids)
    assert [k.calls for k in kernels] == [1] * len(kernels)  # also where a site's argument is another's output
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_shapes_strides_and_places_of_llama():
    model = LlamaModel(vocab=101, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
    found = capture(model, torch.randint(0, 101, (2, 11)))[1]
    places = {(s.op, s.module) for s in found.sites}
    assert {("rmsnorm", "norm"), ("fused_mlp", "blocks.1.mlp"), ("flash_attention", "blocks.0.attention")} <= places
    attention = next(s for s in found.sites if s.op == "flash_attention")
    assert tuple(attention.tensors["K"].shape) == (2, 2, 11, 8)
    assert tuple(attention.tensors["V"].stride()) == (176, 8, 16, 1)  # heads inside of rows, as the product left them
    head = next(s for s in found.sites if s.module == "head")
    assert tuple(head.tensors["B"].stride()) == (1, 32)
    assert head.bytes == 4 * (2 * 11 * 32 + 32 * 101 + 2 * 11 * 101)
    assert len({s.key for s in found.sites if s.op == "matmul"}) == 3  # wq and wo, wk and wv, head


def test_every_operator_has_sites():
    assert all(ops.get(op).sites and ops.get(op).scaled for op in ops.names())


def test_a_graph_that_cannot_be_lowered_has_no_known_flops(monkeypatch):
    def fail(source, inputs):
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(graph_module, "lower", fail)
    captured, found = capture(nn.Linear(DIM, 7), torch.randn(X))
    assert captured.graphs[0].problem == "NotImplementedError: no such operator" and not found.sites
    assert sum(flops(n) for n in captured.graphs[0].module.graph.nodes) == 0


R = torch.randn
COUNTED = {
    "lstm": (lambda m, x: m.lstm(x)[0], (R(3, 5, 16),), 2 * 15 * 2 * (96 * 16 + 96 * 24 + 96 * 48 + 96 * 24)),
    "gru": (lambda m, x: m.gru(x)[0], (R(3, 5, 16),), 2 * 15 * 72 * (16 + 24)),
    "bilinear": (lambda m, x, y: m.bilinear(x, y), (R(3, 5), R(3, 7)), 2 * 3 * 11 * (5 * 7 + 7)),
    "transposed": (lambda m, x: m.transposed(x), (R(2, 4, 9),), 2 * 2 * 9 * 4 * 6 * 3),
    "dot": (lambda m, x, y: torch.dot(x, y), (R(5), R(5)), 10),
    "addbmm": (lambda m, c, a, b: torch.addbmm(c, a, b), (R(4, 6), R(3, 4, 5), R(3, 5, 6)), 2 * 3 * 4 * 5 * 6),
    "addmv": (lambda m, c, a, b: torch.addmv(c, a, b), (R(4), R(4, 5), R(5)), 2 * 4 * 5),
    "tensordot": (lambda m, a, b: torch.tensordot(a, b, dims=2), (R(3, 4, 5), R(4, 5, 6)), 2 * 3 * 20 * 6),
    "einsum": (lambda m, *x: torch.einsum("ij,jk,kl->il", *x), (R(3, 4), R(4, 5), R(5, 6)), 2 * (3 * 20 + 3 * 30)),
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTED)
def test_flops_of_what_is_no_site(kind):
    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True)
            self.gru, self.bilinear = torch.nn.GRU(16, 24, batch_first=True), torch.nn.Bilinear(5, 7, 11)
            self.transposed = torch.nn.ConvTranspose1d(4, 6, 3)

        def forward(self, *inputs):
            return COUNTED[kind][0](self, *inputs)

    captured = Capture(Counted().eval())
    with torch.no_grad():
        captured(*COUNTED[kind][1])
    assert sum(flops(n) for g in captured.graphs for n in g.module.graph.nodes) == pytest.approx(COUNTED[kind][2])
