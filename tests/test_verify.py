"""Kernels back in their models: routing, counts, restoration, torch.compile; verify.py's verdicts and exit statuses."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn as nn

import autokernel
from autokernel import apply, nightreport, ops, outputs, profiling, verification
from autokernel.apply import Kernel, Kernels
from autokernel.models import Loaded
from autokernel.night import Night, Rules
from autokernel.paths import repo_root
from autokernel.records import RunRecord
from autokernel.source import KernelError, read_kernel
from models.gpt2 import GPT2
from tests.test_profile import FAMILIES, script

torch.set_num_threads(1)
ROOT = repo_root()
PLAIN = '''
import torch
import torch.nn.functional as F
KERNEL_TYPE = "{op}"
BACKEND = "triton"
def kernel_fn({parameters}):
    {body}
'''
BODIES = {
    "matmul": "out = A @ B\n    return out if bias is None else out + bias",
    "layernorm": "return F.layer_norm(x, x.shape[-1:], weight, bias, eps)",
    "rmsnorm": "return F.rms_norm(x, x.shape[-1:], weight, eps)",
    "softmax": "return x.softmax(dim)",
    "reduce": "return x.sum(dim)",
    "flash_attention": "return F.scaled_dot_product_attention(Q, K, V, is_causal=causal, scale=sm_scale, "
                       "enable_gqa=True).contiguous()",
    "fused_mlp": "act = {'silu': F.silu, 'gelu': F.gelu, 'relu': F.relu}[activation]\n"
                 "    return (act(x @ w_gate) * (x @ w_up)) @ w_down",
    "rotary_embedding": "a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)\n"
                        "    parts = a * cos - b * sin, b * cos + a * sin\n"
                        "    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)",
    "cross_entropy": "return F.cross_entropy(logits, targets)",
}  # fmt: skip
HARD = """
    import dataclasses, time
    import torch, torch.nn as nn, torch.nn.functional as F
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(32, 32), nn.Linear(32, 48), nn.LayerNorm(32)
        def forward(self, x):
            return self.b(self.norm(self.a(x)))
    class Nested(Two):
        def forward(self, x):
            h = self.norm(self.a(x))
            return {"h": h, "deep": [self.b(h), (h.argmax(-1), None)]}
    @dataclasses.dataclass
    class Result:
        y: torch.Tensor
        h: torch.Tensor = None
        n: int = 3
    class Data(Two):
        def forward(self, x):
            h = self.norm(self.a(x))
            return Result(self.b(h), h)
    class Nans(Two):
        def forward(self, x):
            return self.b(self.a(x)) * float("nan")
    class Nothing(Two):
        def forward(self, x):
            self.b(self.a(x))
    class Mutates(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(32))
            self.steps, self.seen = 0, []
        def forward(self, x):
            self.count += 1
            self.steps += 1
            self.seen.append(len(x))
            h = self.a(x)
            self.mean.mul_(0.9).add_(h.mean(0) * 0.1)
            return self.b(h), self.count * 2
    class Rebinds(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(32))
        def forward(self, x):
            h = self.a(x)
            self.mean = self.mean * 0.9 + h.mean(0)
            return self.b(h)
    class Drops(Two):
        def train(self, mode=True):
            return super().train(True)
        def forward(self, x):
            return self.b(F.dropout(self.a(x), 0.5, self.training))
    class Clock(Two):
        def forward(self, x):
            return self.b(self.a(x)) + time.perf_counter() % 1
    class Breaks(Two):
        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(self.norm(x))
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(1, 2, 3)
        def forward(self, x):
            return self.c(x[None, None])
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.norm, self.head = nn.Embedding(61, 32), nn.LayerNorm(32), nn.Linear(32, 61, bias=False)
            self.head.weight = self.tokens.weight
        def forward(self, ids):
            return self.head(self.norm(self.tokens(ids)))
    """


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the kernels here are plain PyTorch: nothing is interpreted
    monkeypatch.setenv("COLUMNS", "100")


def plain(op, body=""):
    """A kernel file's text in plain PyTorch."""
    spec = ops.get(op)
    parameters = ", ".join(n if d is ... else f"{n}={d!r}" for n, d in spec.parameters.items())
    return PLAIN.format(op=op, parameters=parameters, body=body or BODIES[op])


@pytest.fixture
def starters(tmp_path):
    """starters(op=body, ...) -> a plain kernel for every operator, some with another body."""

    def made(**bodies):
        found = []
        for op in ops.names():
            path = tmp_path / f"starter_{op}.py"
            path.write_text(plain(op, bodies.get(op, "")))
            found.append(Kernel(f"{op} (plain)", read_kernel(path, op)))
        return Kernels(tuple(found))

    return made


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a script's main: (exit status, stdout, stderr)."""

    def go(name, *words):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        status = script(name).main()
        return (status, *capsys.readouterr())

    return go


@pytest.fixture
def night(run, tmp_path):
    """night(class, bodies by target) -> the workspace of a profiled model whose targets have kept kernels."""
    model = tmp_path / "model.py"
    model.write_text(textwrap.dedent(HARD))

    def made(name, shape="8,32", **bodies):
        run("profile", "--model", model, "--class-name", name, "--input-shape", shape, "--device", "cpu")
        run("extract", "--top", "9")
        workspace = tmp_path / "workspace"
        for number, folder in enumerate(sorted((workspace / "targets").iterdir())):
            op = folder.name.partition("_")[2]
            keep(workspace, folder.name, number, plain(op, bodies.get(folder.name, bodies.get(op, ""))))
        return workspace

    return made


def keep(workspace, name, number, text, **values):
    """As orchestrate.py record leaves a kept kernel."""
    (workspace / "targets" / name / "best.py").write_text(text)
    values = {"target": name, "harness": "clean", "device": "cpu", "speedup_vs_pytorch": 2.0, **values}
    record = RunRecord.new(text.encode(), "PASS", kernel_type=name.partition("_")[2], **values)
    record.write(workspace / "experiments" / str(number) / "record.json")


def tiny():
    torch.manual_seed(0)
    return GPT2(vocab=61, length=32, dim=32, layers=2, heads=4).eval(), torch.randint(0, 61, (2, 16))


def calls(applied):
    return sum(route.calls for route in applied.routes.values())


def everything(model):
    """All that a model object is, as values to compare."""
    return (
        {n: (id(t), t.clone(), dict(t.__dict__)) for n, t in [*model.named_parameters(), *model.named_buffers()]},
        [(n, id(m), m.training, {k: copy.copy(v) for k, v in m.__dict__.items()}) for n, m in model.named_modules()],
        torch.get_rng_state(),
    )


def assert_same(before, after):
    assert before[0].keys() == after[0].keys() and torch.equal(before[2], after[2])
    for name, (identity, value, attributes) in before[0].items():
        assert identity == after[0][name][0] and torch.equal(value, after[0][name][1]), name
        assert attributes == after[0][name][2], name
    for (*one, a), (*other, b) in zip(before[1], after[1], strict=True):
        assert one == other and a.keys() == b.keys()
        assert all(type(v) is type(b[k]) for k, v in a.items()) and list(a["_modules"]) == list(b["_modules"])


# ---- the library call -----------------------------------------------------------------------------------------------


def test_importing_the_package_is_cheap():
    code = "import sys, autokernel; assert autokernel.load and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_load_and_apply(night, tmp_path):
    workspace = night("Tied", "2,7")
    spec = script_model(tmp_path, "Tied")
    ids = torch.randint(0, 61, (2, 7))
    with torch.no_grad():
        before, want = everything(spec), spec(ids)
        with autokernel.load(workspace).apply(spec) as applied:
            torch.testing.assert_close(spec(ids), want)
            spec(ids)
            assert [r.calls for r in applied.routes.values()] == [2, 2] and "matmul" in applied.report()
            torch.testing.assert_close(spec(ids[:, :5]), spec.head(spec.norm(spec.tokens(ids[:, :5]))))
            assert [r.calls for r in applied.routes.values()] == [2, 2]  # another shape: nobody checked that
        assert_same(before, everything(spec))
        applied = autokernel.load(workspace).apply(spec, ids)  # for good, with an example call
        with pytest.raises(KernelError, match="remove"):
            autokernel.load(workspace).apply(spec)
        assert [r.calls for r in applied.routes.values()] == [1, 1]
        applied.remove()
        assert_same(before, everything(spec))


def script_model(tmp_path, name):
    from autokernel.models import load_file

    torch.manual_seed(0)
    return getattr(load_file(tmp_path / "model.py"), name)().eval()


def test_training_and_autocast_go_to_the_original(starters):
    model, ids = tiny()
    with starters().apply(model) as applied:
        loss = model(ids).float().square().mean()
        loss.backward()
        assert model.head.weight.grad is not None and not calls(applied)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(ids)
        assert sum(applied.originals.values()) == 2 and "gradients are enabled" in applied.report()


def test_many_shapes_do_not_capture_for_ever(starters, night, tmp_path):
    workspace = night("Two")
    model = script_model(tmp_path, "Two")
    with torch.no_grad(), autokernel.load(workspace).apply(model) as applied:
        for rows in range(9, 30):
            model(torch.randn(rows, 32))
        assert len(applied.capture.graphs) == apply.UNSERVED_SHAPES
        model(torch.randn(8, 32))
        assert applied.originals["no kernel for inputs of this shape"] == 22  # those looked into, too


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Bert"])
def test_transformers_model(family, starters):
    transformers = pytest.importorskip("transformers")
    name, config, expected = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(getattr(transformers, f"{family}Config")(**config)).eval()
    kwargs = {"input_ids": torch.randint(0, 99, (2, 17))} | ({} if family == "Bert" else {"use_cache": False})
    with torch.no_grad():
        before, want = everything(model), model(**kwargs)
        with starters().apply(model) as applied:
            got = model(**kwargs)
            served = calls(applied)
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**kwargs)
            assert served == sum(expected.values())
            assert calls(applied) == 2 * served  # under torch.compile the kernels too
        for given in (got, compiled):
            assert type(given) is type(want)
            for name, tensor in outputs.named(want):
                torch.testing.assert_close(dict(outputs.named(given))[name], tensor, rtol=1e-4, atol=1e-5)
        assert_same(before, everything(model))


def test_torch_compile_before_the_first_call_and_again(starters):
    model, ids = tiny()
    with torch.no_grad(), starters().apply(model) as applied:
        compiled = torch.compile(model, backend="aot_eager")
        want = model.head.weight.new_tensor(0)
        for _ in range(3):
            want = compiled(ids)
        assert calls(applied) == 3 * 16
        torch.testing.assert_close(want, applied.original(ids), rtol=1e-4, atol=1e-5)
        assert compiled(ids[:, :5]).shape == (2, 5, 61)


def test_custom_operators_are_sound(starters):
    model, ids = tiny()
    with torch.no_grad(), starters().apply(model, ids) as applied:
        site = next(s for s in applied.served if s.op == "flash_attention")
        kernel = applied.routes[site.key].candidates[0]
        operator = apply._operator(kernel, site, applied.routes[site.key])
        given = {n: torch.randn(t.shape).as_strided(t.shape, t.stride()) if t.is_contiguous() else
                 torch.randn(9999).as_strided(t.shape, t.stride()) for n, t in site.tensors.items()}  # fmt: skip
        torch.library.opcheck(operator, (), given, test_utils=("test_schema", "test_faketensor"))


# ---- routing --------------------------------------------------------------------------------------------------------


def test_kernels_of_one_operator_serve_their_own_shape_only(night, tmp_path):
    strict = "assert tuple(B.shape) == (32, {}), B.shape\n    " + BODIES["matmul"]
    workspace = night("Two", matmul=strict.format(32))
    shapes = {p: json.loads((p / "target.json").read_text())["args"]["B"]["shape"]
              for p in (workspace / "targets").glob("*_matmul")}  # fmt: skip
    wide = next(p for p, shape in shapes.items() if shape == [32, 48])
    keep(workspace, wide.name, 7, plain("matmul", strict.format(48)))
    model, x = script_model(tmp_path, "Two"), torch.randn(8, 32)
    with torch.no_grad(), autokernel.load(workspace).apply(model) as applied:
        torch.testing.assert_close(model(x), applied.original(x))
        assert [r.calls for r in applied.routes.values()] == [1, 1, 1]
        bigger = torch.randn(9, 32)
        torch.testing.assert_close(model(bigger), applied.original(bigger))


def test_a_kernel_without_an_optional_parameter_stays_at_its_default(starters):
    kernels = starters()
    path = kernels.kernels[0].source.path.with_name("no_bias.py")
    path.write_text('KERNEL_TYPE = "matmul"\ndef kernel_fn(A, B):\n    return A @ B\n')
    model, ids = tiny()
    with torch.no_grad(), Kernels((Kernel("mine", read_kernel(path)),)).apply(model) as applied:
        want = applied.original(ids)
        torch.testing.assert_close(model(ids), want, rtol=1e-4, atol=1e-5)
        assert {s.module for s in applied.served} == {"head"}


def test_a_layout_that_nobody_checked_is_not_served(starters):
    """A norm that leaves its result transposed: the product behind it was checked for contiguous rows only."""
    kernels = starters(layernorm="return F.layer_norm(x, x.shape[-1:], weight, bias, eps).mT.contiguous().mT")
    model, ids = tiny()
    with torch.no_grad():
        keyed = apply.Applied(model, kernels)
        keyed.run((ids,), {})
        own = [dataclasses.replace(r.candidates[0], key=r.key) for r in keyed.routes.values()]
        keyed.remove()
        with Kernels(tuple(own)).apply(model) as applied:
            torch.testing.assert_close(model(ids), applied.original(ids), rtol=1e-4, atol=1e-5)
            served = {(s.op, s.module) for s in applied.served}
            assert ("layernorm", "blocks.0.norm1") in served and ("matmul", "blocks.0.attention.qkv") not in served
            assert ("matmul", "blocks.0.attention.proj") in served


def test_a_kernel_that_raises_is_named(starters):
    model, ids = tiny()
    with torch.no_grad(), starters(flash_attention="raise RuntimeError('no such tile')").apply(model):
        for _ in range(2):  # the second call does not run without kernels unseen
            with pytest.raises(apply.CallFault, match=r"flash_attention \(plain\) at blocks.0.attention: .*such tile"):
                model(ids)


@pytest.mark.parametrize("body", ["return x.double()", "return x[..., :1]", "return None"])
def test_a_result_of_another_kind_is_named(starters, body):
    model, ids = tiny()
    with torch.no_grad(), starters(layernorm=body).apply(model), pytest.raises(apply.CallFault, match="expected"):
        model(ids)


def test_what_was_not_judged_is_not_loaded(night):
    workspace = night("Two")
    targets = sorted(p.name for p in (workspace / "targets").iterdir())
    (workspace / "targets" / targets[0] / "best.py").write_text(plain("matmul") + "# changed")
    keep(workspace, targets[1], 20, plain(targets[1].partition("_")[2], "pass"), target="another")
    kernels = autokernel.load(workspace)
    assert [k.name for k in kernels.kernels] == targets[2:] and len(kernels.notes) == 2
    (workspace / "targets" / targets[2] / "best.py").unlink()
    with pytest.raises(KernelError, match=r"no kept kernel \(.*is not used.*--starters"):
        autokernel.load(workspace)


# ---- verify.py ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("Two", 1, "no GPU"),
        ("Nested", 1, "output deep.1.0"),
        ("Data", 1, "output h"),
        ("Mutates", 1, "buffer mean"),
        ("Rebinds", 1, "buffer mean"),
        ("Drops", 1, "random numbers"),
        ("Breaks", 1, "correct"),
        ("Nans", 3, "every output of Nans is NaN"),
        ("Nothing", 3, "gives no tensor"),
        ("Clock", 3, "other outputs from the same inputs"),
        ("Convolution", 3, "no site of our operators"),
    ],
)
def test_hard_model(name, status, says, starters, run, tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(textwrap.dedent(HARD))
    monkeypatch.setattr(Kernels, "starters", lambda: starters())
    options = ("--class-name", name, "--input-shape", "8,32", "--device", "cpu", "--no-compile")
    found, out, err = run("verify", "--starters", "--model", tmp_path / "model.py", *options)
    assert found == status and says in " ".join((out + err).split())
    assert err.count("\n") == (1 if status == 3 else 0)


def test_the_model_is_afterwards_what_it_was(starters, tmp_path):
    (tmp_path / "model.py").write_text(textwrap.dedent(HARD))
    for name in ("Mutates", "Rebinds"):
        model = script_model(tmp_path, name)
        before = everything(model)
        options = verification.Options(compiled=False)
        loaded = Loaded(model, name, (torch.randn(8, 32),))
        torch.set_rng_state(before[2])
        assert verification.Verification(loaded, starters(), options, print).run()["correct"]
        assert_same(before, everything(model))
        assert name == "Rebinds" or (model.steps, model.seen, model.count.item()) == (0, [], 0.0)


def test_verify_of_a_night(night, run):
    workspace = night("Two")
    status, out, _ = run("verify", "--no-compile")
    record = json.loads((workspace / "verify.json").read_text())
    assert status == record["status"] == 1 and record["correct"] and record["kernels"] == "kept"
    assert sorted(r["kernel"] for r in record["rows"]) == [k.name for k in autokernel.load(workspace).kernels]
    assert record["promise"] == pytest.approx(1 / (1 - sum(
        k.share / 2 for k in autokernel.load(workspace).kernels)))  # fmt: skip
    nothing = Night(tag="may", rules=Rules(), rows=[], plan=None, works=[], current=None, claims={})
    assert nightreport._result(nothing)[1] == ("text", record["headline"])
    assert record["headline"] in " ".join(out.split())
    assert max(map(len, out.splitlines()[:-1])) <= 100


def test_what_the_interpreter_would_take_hours_for_is_not_begun(starters, monkeypatch):
    monkeypatch.setattr(profiling, "INTERPRETED_FLOPS", 1e3)
    model, ids = tiny()
    kernels = starters(matmul="raise AssertionError('called')")
    with pytest.raises(apply.VerifyError, match="too long in Triton's interp.*smaller --input-shape, or .*tiny"):
        verification.Verification(Loaded(model, "GPT2", (ids,)), kernels, verification.Options(), print).run()


def test_zero_replaced_calls_are_an_error(night, run):
    workspace = night("Two")
    status, _, err = run("verify", "--no-compile", "--input-shape", "9,32")
    assert status == 3 and "no call of Two reaches a kernel: no kernel for this shape, dtype and layout" in err
    assert "extracted and checked for: 1_matmul (rows=8 " in err and "profile.py at this one" in err
    assert not (workspace / "verify.json").exists()


def test_verify_without_anything(run, tmp_path):
    status, _, err = run("verify")
    said = f"verify.py: no model in {tmp_path}/workspace/profile.json: name one with --model FILE --class-name NAME"
    assert status == 3 and err == f"{said}, or run uv run profile.py first\n"


def test_a_wrong_kernel_is_incorrect_and_found(night, run):
    wrong = "out = A @ B + (0 if bias is None else bias)\n    out[3, 5] += 0.5 * (B.shape[1] == 48)\n    return out"
    night("Two", matmul=wrong)
    status, out, _ = run("verify", "--no-compile")
    assert status == 2 and "INCORRECT in eager" in out
    status, out, _ = run("verify", "--diagnose", "--json")
    record = json.loads(out)
    (culprit,) = record["culprits"]
    assert status == 2 and culprit["module"] == "b" and "(3, 5)" in culprit["reason"]
    assert [r["alone"] == "right" for r in record["rows"]].count(False) == 1
    assert run("verify", "--no-compile", "--atol", "2")[0] == 1  # who says so may take it


def test_bisection_finds_the_layer(starters):
    """One kernel for many sites, wrong at one of them."""
    body = "kernel_fn.n = getattr(kernel_fn, 'n', 0) + 1\n    out = F.layer_norm(x, x.shape[-1:], weight, bias, eps)\n"
    kernels = starters(layernorm=body + "    return out * (1 + (weight[0] == 1.25))")
    model, ids = tiny()
    model.blocks[1].norm2.weight.data[0] = 1.25
    options = verification.Options(diagnose=True)
    values = verification.Verification(Loaded(model, "GPT2", (ids,)), kernels, options, print).run()
    (culprit,) = values["culprits"]
    assert (values["status"], culprit["module"], culprit["kernel"]) == (2, "blocks.1.norm2", "layernorm (plain)")
    right = verification.Verification(Loaded(model, "GPT2", (ids,)), starters(), options, print).run()
    assert (right["status"], right["culprits"]) == (1, [])


def test_a_kernel_that_writes_to_weights_is_incorrect(starters):
    model, ids = tiny()
    body = "out = F.layer_norm(x, x.shape[-1:], weight, bias, eps)\n    weight.mul_(1)\n    bias.data[0] += 1e-9\n"
    options = verification.Options(compiled=False)
    for kernels in (starters(layernorm=body + "    return out"),):
        values = verification.Verification(Loaded(model, "GPT2", (ids,)), kernels, options, print).run()
    assert values["status"] == 2 and "a kernel wrote to the parameter blocks.0.norm1.bias" in values["headline"]


def test_errors_are_measured_against_a_wider_run():
    ref = torch.linspace(-2, 2, 1000)
    original = {"output": ref.half()}
    oracle = outputs.Oracle(original, {"output": ref}, torch.float16)
    assert not oracle.judge(original)[0]
    assert not oracle.judge({"output": (ref + 1e-4).half()})[0]
    assert "rms error" in oracle.judge({"output": (ref * 1.01).half()})[0]
    one = original["output"].clone()
    one[77] += 0.03
    assert "largest error" in oracle.judge({"output": one})[0]
    one[77] = torch.inf
    assert "1 values are not finite" in oracle.judge({"output": one})[0]
    assert "expected torch.float16" in oracle.judge({"output": ref})[0] and "missing" in oracle.judge({})[0]
    zeros = {"output": torch.zeros(1000, dtype=torch.float16)}
    assert oracle.judge(zeros)[0]
    overflown = {"output": torch.where(ref > 1.9, torch.inf, ref).half()}
    oracle = outputs.Oracle(overflown, {"output": ref}, torch.float16)
    assert not oracle.judge(overflown)[0] and not oracle.judge(original)[0]


def test_logits_of_a_language_model():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7).double()
    model = nn.ModuleDict({"tokens": nn.Embedding(7, 4)})
    oracle = outputs.Oracle({"logits": logits.half()}, {"logits": logits}, torch.float16)
    values = oracle.language({"logits": logits.roll(1, -1)}, model)
    assert values["top1_agreement"] < 0.3 and values["top1_agreement_pytorch"] == 1
    p, q = logits.softmax(-1), logits.roll(1, -1).softmax(-1)
    assert values["kl_divergence"] == pytest.approx((p * (p / q).log()).sum(-1).mean().item())
    assert oracle.language({"logits": logits}, nn.Linear(2, 2)) == {}


# ---- choices, by a clock of our own ---------------------------------------------------------------------------------


class Clocked(verification.Verification):
    """A verification as on a GPU whose times are what a table says: us of an operator by mode, PyTorch's and ours."""

    def __init__(self, model, ids, kernels, times, **options):
        super().__init__(Loaded(model, "GPT2", (ids,)), kernels, verification.Options(**options), print)
        self.on_gpu, self.times = True, times

    def _about(self):
        return {}

    def _reference(self, original):
        return original

    def _in_place(self):
        self.total_us = 1000.0
        for key in self.choice:
            self.rows[key].update(pytorch_us=100.0, ours_us=self.times.get(self.rows[key]["op"], {}).get("place", 50.0))
        self._decide({key: (self.rows[key]["ours_us"], k) for key, k in self.choice.items()})

    def _call(self, mode, choice):
        call = super()._call((mode[0].partition(" in ")[0], ""), choice)
        saved = sum(self.times.get(self.rows[key]["op"], {}).get(mode[0], 0.01) for key in choice or ())
        call.seconds = 1.0 - saved
        return call

    def _peak(self, call):
        return 1.0


class InPlace(Clocked):
    _in_place = verification.Verification._in_place


@pytest.fixture
def clock(monkeypatch):
    def paired(theirs, ours, *rest):
        return verification.Pair([theirs.seconds] * 3, [ours.seconds] * 3, [theirs.seconds] * 3, [ours.seconds] * 3)

    monkeypatch.setattr(verification, "paired", paired)


def test_a_starter_slower_than_pytorch_is_left(starters, clock):
    model, ids = tiny()
    times = {"layernorm": {"place": 120.0}}
    values = Clocked(model, ids, starters(), times).run()
    left = [r for r in values["rows"] if not r["used"]]
    assert {r["op"] for r in left} == {"layernorm"} and all("slower" in r["why"] for r in left)
    assert values["status"] == 0 and values["estimate"] == pytest.approx(1000 / (1000 - 50 * 6))
    forced = Clocked(model, ids, starters(), times, everything=True).run()
    assert all(r["used"] for r in forced["rows"] if r["kernel"])
    with pytest.raises(apply.VerifyError, match="every kernel is slower"):
        Clocked(model, ids, starters(), {op: {"place": 120.0} for op in ops.names()}).run()


def test_in_place_the_slower_one_is_left(starters, clock):
    """Times of PyTorch's own profiler: an attention that does its work many times over, and what lies inside of it."""
    slow = "out = [F.scaled_dot_product_attention(Q, K, V, is_causal=causal) for _ in range(200)]\n    return out[0]"
    model, ids = tiny()
    values = InPlace(model, ids, starters(flash_attention=slow), {}).run()
    rows = {r["op"]: r for r in values["rows"]}
    assert rows["flash_attention"]["why"] == "slower than PyTorch here" and not rows["flash_attention"]["used"]
    assert rows["flash_attention"]["ours_us"] > rows["flash_attention"]["pytorch_us"] > 0
    assert rows["softmax"]["ours_us"] > 0 and rows["softmax"]["calls"] == 2  # measured once the attention was out
    assert values["correct"]


def test_a_mode_keeps_what_pays_in_it(starters, clock):
    model, ids = tiny()
    times = {"layernorm": {"eager": -0.1, "torch.compile": -0.3, "torch.compile in a CUDA graph": -0.3},
             "matmul": {"torch.compile": -0.2}}  # fmt: skip
    modes = Clocked(model, ids, starters(), times).run()["modes"]
    used = {mode: {u.partition(" ")[0] for u in m["used"]} for mode, m in modes.items()}
    assert used["eager"] == {"matmul", "flash_attention"}  # left out one by one
    assert used["eager in a CUDA graph"] == {"matmul", "flash_attention", "layernorm"}
    assert used["torch.compile in a CUDA graph"] == {"matmul", "flash_attention"}  # the norms are Inductor's to fuse
    assert used["torch.compile"] == set()  # nothing pays: PyTorch's own


def test_the_headline_names_both_modes(starters, clock):
    model, ids = tiny()
    slow = {op: {"torch.compile": -0.5, "eager": 0.02} for op in ops.names()}
    values = Clocked(model, ids, starters(), slow, graph=False).run()
    assert values["mode"] == "eager" and values["status"] == 0 and values["speedup"] > 1
    assert "in eager" in values["headline"] and any("contribution" in r for r in values["rows"])
    equal = {op: {"eager": 0.0} for op in ops.names()}
    assert Clocked(model, ids, starters(), equal, graph=False, compiled=False).run()["status"] == 1


def test_pairs():
    pair = verification.Pair([2.0, 2.1, 1.9], [1.0, 1.0, 1.1], [], [])
    assert pair.ratio.value == 2.0 and pair.faster
    assert not verification.Pair([1.0, 1.1, 0.9], [1.0, 1.0, 1.0], [], []).faster
    calls = []
    found = verification.paired(lambda: calls.append(0), lambda: calls.append(1), torch.device("cpu"), 2, 5)
    assert len(found.ours) == 5 and calls[4:] in ([1, 0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1, 0, 0, 1])


# ---- with Triton ----------------------------------------------------------------------------------------------------


def test_the_starters_in_a_small_llama(tmp_path):
    path = tmp_path / "small.py"
    path.write_text("from llama_7b import LlamaModel\ndef small():\n    return LlamaModel(61, 16, 32, 1, 4, 2, 48)\n")
    command = [sys.executable, "verify.py", "--starters", "--model", path, "--class-name", "small", "--device", "cpu",
               "--input-shape", "1,8", "--no-compile", "--json"]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "models")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    values = json.loads(done.stdout)
    assert values["correct"] and all(r["used"] for r in values["rows"]) and values["top1_agreement"] == 1
    operators = {"rmsnorm", "matmul", "rotary_embedding", "flash_attention", "fused_mlp"}
    assert {r["op"] for r in values["rows"]} == operators


IN_PLACE = """
class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(32, 32)
    def forward(self, x):
        x.add_(1)
        return self.line(x)
class Grows(InPlace):
    def forward(self, x, cache):
        cache.append(self.line(x))
        return sum(cache)
class Branches(InPlace):
    def forward(self, x):
        y = self.line(x)
        return y if x.dtype == torch.float32 else -y
"""


@pytest.mark.parametrize("name", ["InPlace", "Grows"])
def test_what_a_call_does_to_its_inputs_is_undone_and_compared(starters, tmp_path, name):
    (tmp_path / "model.py").write_text("import torch\nfrom torch import nn\n" + IN_PLACE)
    x, cache = torch.randn(8, 32), [torch.ones(8, 32)]
    before, kwargs = x.clone(), {"cache": cache} if name == "Grows" else {}
    loaded = Loaded(script_model(tmp_path, name), name, (x,), kwargs)
    values = verification.Verification(loaded, starters(), verification.Options(compiled=False), print).run()
    assert values["correct"] and torch.equal(x, before) and len(cache) == 1 and not values["notes"]
    assert ("input 0.0" in {r["output"] for r in values["outputs"]}) is (name == "InPlace")


def test_a_reference_that_computes_something_else_is_none(starters, tmp_path):
    (tmp_path / "model.py").write_text("import torch\nfrom torch import nn\n" + IN_PLACE)
    for options in (verification.Options(compiled=False), verification.Options(compiled=False, atol=1e-4, rtol=1e-4)):
        loaded = Loaded(script_model(tmp_path, "Branches"), "Branches", (torch.randn(8, 32),))
        judged = verification.Verification(loaded, starters(), options, print)
        if options.atol is None:
            with pytest.raises(apply.VerifyError, match="another computation: its outputs are 200% of their rms away"):
                judged.run()
        else:
            assert judged.run()["correct"]


@pytest.mark.parametrize("text", ["[]", "5", "null", '"x"', '{"rows": null}', '{"rows": [1]}', "{", ""])
def test_a_file_that_holds_something_else_hides_no_kernel(night, run, text):
    workspace = night("Two")
    known = [k.name for k in autokernel.load(workspace).kernels]
    (workspace / "experiments" / "999").mkdir(parents=True)
    for name in ("verify.json", "experiments/999/record.json", "last_run.json"):
        (workspace / name).write_text(text)
    assert [k.name for k in autokernel.load(workspace).kernels] == known
    (workspace / "targets" / known[0] / "target.json").write_text(text)
    kernels = autokernel.load(workspace)
    assert [k.name for k in kernels.kernels] == known[1:] and "target.json: " in kernels.notes[0]
    for name in ("profile.json", "plan.json"):
        (workspace / name).write_text(text)
        status, out, err = run("extract")
        assert status == 2 and err.startswith("extract.py: ") and err.count("\n") == 1 and not out
    status, _, err = run("verify", "--no-compile")
    assert status == 3 and err.count("\n") == 1


def test_time_that_stays_pytorchs_counts_once():
    """What lies inside of a larger site is part of that site's time."""
    model = GPT2(vocab=11, length=8, dim=16, layers=1, heads=2).eval()
    seen = verification.Verification(Loaded(model, "GPT2", (torch.zeros(1, 8, dtype=torch.int64),)), Kernels(()),
                                     verification.Options(), print)  # fmt: skip
    seen.total_us, seen.choice = 100.0, {}
    site = object()
    for key, (inner, us, used) in {"mlp": (False, 60.0, False), "gate": (True, 30.0, False), "down": (True, 20.0, True),
                                   "norm": (False, 10.0, True)}.items():  # fmt: skip
        seen.applied.routes[key] = apply.Route(key, [], sites=[] if inner else [site], inner=[site] if inner else [])
        seen.rows[key] = {"calls": 2, "pytorch_us": us, "used": used}
    (fallback,) = seen._why("eager", {"ours_device_ms": 1.0, "ours_ms": 1.0})
    assert "2 calls of 1 targets" in fallback and "40 % of the time" in fallback
