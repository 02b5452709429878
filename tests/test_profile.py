"""profile.py counts each kernel once and names it by site; extract.py turns sites into targets that bench.py reads."""

import importlib.util
import json
import re
import sys
import textwrap

import pytest
import torch

from autokernel import gitkeep, profiling, sites, tables, targets
from autokernel.graph import Capture
from autokernel.models import Loaded
from autokernel.paths import repo_root
from autokernel.profiling import FORWARD, RANGE, attribute

torch.set_num_threads(1)


def script(name):
    spec = importlib.util.spec_from_file_location(f"autokernel_script_{name}", repo_root() / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a script's main with arguments: (exit status, stdout, stderr). The workspace is a fresh folder."""
    monkeypatch.setenv("AUTOKERNEL_WORKSPACE", str(tmp_path / "workspace"))
    monkeypatch.setenv("COLUMNS", "100")

    def go(name, *words):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        status = script(name).main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return go


@pytest.fixture
def model(tmp_path):
    def write(text):
        path = tmp_path / "model.py"
        imports = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
        path.write_text(imports + textwrap.dedent(text))
        return path

    return write


# ---- kernel events --------------------------------------------------------------------------------------------------


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": tid, "args": args}


def gpu_trace():
    """Two forwards of two nodes: a linear with two kernels, a softmax whose kernel runs after its range has ended."""
    events = [event("kernel", "warm_up", 10, 99, tid=90, correlation=1)]
    events += [event("cuda_runtime", "cudaLaunchKernel", 1, 2, correlation=1)]
    for start, first in ((1000, 10), (2000, 20)):
        events += [
            event("user_annotation", FORWARD, start, 500),
            event("gpu_user_annotation", f"{RANGE}0.1", start + 300, 400, tid=90),  # a picture of a range, no kernel
            event("user_annotation", f"{RANGE}0.1", start + 10, 100),
            event("cpu_op", "aten::linear", start + 12, 90, **{"External id": first}),
            event("cpu_op", "aten::addmm", start + 15, 80, **{"External id": first + 1}),
            event("cuda_driver", "cuLaunchKernelEx", start + 5, 5, correlation=first),  # by another clock
            event("cuda_runtime", "cudaLaunchKernel", start + 40, 5, correlation=first + 1),
            event("cuda_runtime", "cudaStreamIsCapturing", start + 50, 1),
            event("cuda_runtime", "cudaEventRecord", start + 105, 30),  # by that clock it ends in the next range
            event("kernel", "gemm", start + 300, 60.5, tid=90, correlation=first, **{"External id": first + 1}),
            event("kernel", "splitKreduce", start + 370, 9.5, tid=90, correlation=first + 1),
            event("user_annotation", f"{RANGE}0.2", start + 120, 20),
            event("cuda_runtime", "cudaLaunchKernel", start + 130, 5, correlation=first + 2),
            event("kernel", "softmax", start + 800, 30, tid=90, correlation=first + 2),
            event("cpu_op", "aten::copy_", start + 200, 50, **{"External id": first + 5, "Input Dims": "[[3, 4]]"}),
            event("cuda_runtime", "cudaMemcpyAsync", start + 210, 5, correlation=first + 3),
            event("gpu_memcpy", "Memcpy HtoD", start + 840, 4, tid=91, correlation=first + 3),
            event("gpu_memset", "Memset", start + 850, 2, tid=90, **{"External id": first + 5}),
            event("cpu_op", f"{RANGE}site 0", start + 260, 50, **{"External id": first + 6}),
            event("cuda_driver", "cuLaunchKernelEx", start + 312, 3, correlation=first + 7),  # by that clock too late
            event("kernel", "ours", start + 860, 7, tid=90, correlation=first + 7, **{"External id": first + 6}),
            {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": start, "pid": 7, "tid": 90},
        ]
    return events


def test_each_kernel_is_counted_once_for_one_forward():
    found = attribute(gpu_trace(), on_gpu=True)
    assert {k: a.us for k, a in found.items()} == {
        "0.1": 70.0, "0.2": 30.0, "outside aten::copy_ [[3, 4]]": 6.0, "site 0": 7.0}  # fmt: skip
    assert found["0.1"].launches == 2 and dict(found["0.1"].kernels) == {"gemm": 60.5, "splitKreduce": 9.5}


def test_on_a_cpu_the_outermost_operators_count():
    found = attribute([e for e in gpu_trace() if e["tid"] == 1], on_gpu=False)
    assert {k: a.us for k, a in found.items()} == {"0.1": 90.0, "outside aten::copy_ [[3, 4]]": 50.0}


def test_a_disturbed_pass_does_not_count():
    """Three passes of two nodes, each disturbed in another pass, the second one missing from a pass altogether."""
    events = []
    for start, first, second in ((1000, 20, 900), (3000, 800, 30), (5000, 22, 0)):
        events.append(event("user_annotation", FORWARD, start, 1900))
        for node, at, length in ((1, start + 10, first), (2, start + 950, second)):
            if length:
                events.append(event("user_annotation", f"{RANGE}0.{node}", at, length + 2))
                events.append(event("cpu_op", "aten::linear", at + 1, length))
    assert {k: (a.us, a.launches) for k, a in attribute(events, False).items()} == {"0.1": (22, 1), "0.2": (30, 1)}


# ---- from a model to targets ----------------------------------------------------------------------------------------

LLAMA = """
    import sys
    sys.path.insert(0, {root!r})
    from models.llama_7b import LlamaModel
    class Small(LlamaModel):
        def __init__(self):
            super().__init__(vocab=101, dim=32, layers=3, heads=4, kv_heads=2, hidden=48)
    """


def test_a_model_too_large_for_the_interpreter_says_so_before_the_night(run, model, monkeypatch):
    """Small at 1,16: its head alone is 2 x 16 x 32 x 101 = 1.03e5 FLOPs."""
    monkeypatch.setattr(profiling, "INTERPRETED_FLOPS", 1e5)
    path = model(LLAMA.format(root=str(repo_root())))
    options = ("--class-name", "Small", "--input-shape", "1,16", "--device", "cpu")
    status, out, _ = run("profile", "--model", path, *options)
    said = " ".join(out.split())
    assert status == 0 and "the limit is 1e+05; give a smaller --input-shape, or take models/tiny.py" in said


def test_profile_then_extract(run, model, tmp_path, monkeypatch):
    path = model(LLAMA.format(root=str(repo_root())))
    extras = ["--device", "cpu", "--plot", "--export-trace", "--memory-snapshot"]
    status, out, _ = run("profile", "--model", path, "--class-name", "Small", "--input-shape", "2,16", *extras)
    assert status == 0
    workspace = tmp_path / "workspace"
    record = json.loads((workspace / "profile.json").read_text())
    parts = sum(r["ms"] for r in record["targets"]) + sum(r["ms"] for r in record["other"])
    assert parts == pytest.approx(record["total_ms"], rel=0.01) and record["total_ms"] > 0
    assert record["targets"][-1]["cumulative"] == pytest.approx(record["time_in_sites"])
    calls = {}
    for row in record["targets"]:
        calls[row["op"]] = calls.get(row["op"], 0) + row["calls"]
        assert len(row["sites"]) == row["calls"]
        assert row["ms"] == pytest.approx(sum(s["ms"] for s in row["sites"]))
    assert calls == {"rmsnorm": 7, "flash_attention": 3, "rotary_embedding": 6, "fused_mlp": 3, "matmul": 13}
    assert record["flops_in_sites"] == 1 and "will not run" not in out
    assert (workspace / "profile.png").stat().st_size > 1000 and json.loads((workspace / "trace.json").read_text())
    assert "needs a GPU" in out and max(len(line) for line in out.splitlines() if "/workspace" not in line) <= 100

    status, out, _ = run("extract", "--top", "3")
    assert status == 0 and "by Amdahl's law (an estimate" in out
    plan = json.loads((workspace / "plan.json").read_text())
    assert [t["rank"] for t in plan["targets"]] == [1, 2, 3]
    first = plan["targets"][0]
    assert first["model_speedup_if"]["2x"] == pytest.approx(1 / (1 - first["share"] / 2))
    assert {s["why"] for s in plan["skipped"] if s["rank"]} == {"beyond --top 3"}
    assert plan["share"] + sum(s["share"] for s in plan["skipped"]) == pytest.approx(1)
    assert tables.CPU in out and sum(float(p) for p in re.findall(r"^ +([\d.]+)%", out, re.M)) == pytest.approx(
        100 * (1 - plan["share"]), abs=0.5)  # fmt: skip
    for branch, command in ((True, "next"), (False, "start TAG")):
        monkeypatch.setattr(gitkeep, "in_run", lambda branch=branch: branch)
        assert run("extract", "--top", "3")[1].endswith(f"next: uv run orchestrate.py {command}\n")
    for read in targets.read_targets():
        starter = repo_root() / "kernels" / f"{read.spec.name}.py"
        assert (read.folder / "kernel.py").read_bytes() == starter.read_bytes()

    active = next(t for t in plan["targets"] if t["op"] != "rmsnorm")
    (workspace / "active").write_text(active["name"])
    assert targets.active_target().calls == active["calls"]
    wanted = next(r for r in record["targets"] if r["rank"] > 3)
    status, out, _ = run("extract", "--rank", wanted["rank"], "--backend", "cuda")
    ranks = [int(t.name.partition("_")[0]) for t in targets.read_targets()]
    assert status == 0 and ranks == [1, 2, 3, wanted["rank"]]
    assert "cuda" in targets.read_targets()[-1].folder.joinpath("kernel.py").read_text()

    status, out, _ = run("extract", "--kernel-type", "rmsnorm", "--report")
    assert status == 0 and "nothing written" in out and (workspace / "active").exists()
    run("extract", "--kernel-type", "rmsnorm")
    assert [t.spec.name for t in targets.read_targets()] == ["rmsnorm"] and not (workspace / "active").exists()
    assert run("extract", "--rank", 99)[0] == 2
    assert "the profile has flash_attention, fused_mlp" in run("extract", "--kernel-type", "softmax")[2]


def test_extract_without_a_profile(run, tmp_path):
    assert run("extract")[0::2] == (2, f"extract.py: no {tmp_path}/workspace/profile.json; write it with: "
                                       "uv run profile.py --model FILE --class-name NAME\n")  # fmt: skip
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "profile.json").write_text("{}")
    assert run("extract")[0] == 2


def target(folder, op, arguments, dtype="fp16", scalars=None):
    args = {n: {"shape": list(s), "strides": list(t), "dtype": d} for n, (s, t, d) in arguments.items()}
    folder.mkdir(exist_ok=True)
    values = {"op": op, "dtype": dtype, "args": args, "scalars": scalars or {}}
    (folder / "target.json").write_text(json.dumps(values))
    return targets.read_target(folder)


def test_neighbours_keep_heads_and_widths(tmp_path):
    qkv = (3 * 768 * 1024, 64, 3 * 768, 1)  # a slice of a fused product, heads inside of rows
    q = ((2, 12, 1024, 64), qkv, "float16")
    found = {c.name: c for c in target(tmp_path / "1_a", "flash_attention", {"Q": q, "K": q, "V": q}).neighbours()}
    assert list(found) == ["half_batch", "double_batch", "half_q_len+kv_len", "double_q_len+kv_len"]
    double = found["double_q_len+kv_len"]
    assert [double.size[a] for a in ("q_len", "kv_len", "head_dim", "heads")] == [2048, 2048, 64, 12]
    assert double.strides["Q"] == (3 * 768 * 2048, 64, 3 * 768, 1)
    decode = target(tmp_path / "2_d", "flash_attention", {
        "Q": ((1, 4, 1, 64), (256, 64, 256, 1), "float16"),
        "K": ((1, 4, 99, 64), (64 * 99 * 4, 64 * 99, 64, 1), "float16"),
        "V": ((1, 4, 99, 64), (64 * 99 * 4, 64 * 99, 64, 1), "float16"),
    })  # fmt: skip
    assert [(c.name, c.size["q_len"], c.size["kv_len"]) for c in decode.neighbours()] == [
        ("double_batch", 1, 99), ("double_q_len+kv_len", 1, 198)
    ]  # fmt: skip
    logits = target(tmp_path / "3_c", "cross_entropy", {
        "logits": ((6, 50257), (50257, 1), "float16"), "targets": ((6,), (1,), "int64")})  # fmt: skip
    assert [c.size for c in logits.neighbours()] == [{"rows": 3, "vocab": 50257}, {"rows": 12, "vocab": 50257}]
    scores = target(tmp_path / "4_s", "softmax", {"x": ((8, 10), (10, 1), "float16")}, scalars={"dim": 0})
    assert [c.size["shape"] for c in scores.neighbours()] == [(8, 5), (8, 20)]


def test_a_long_target_shrinks_for_the_interpreter(tmp_path):
    head = target(tmp_path / "1_m", "matmul", {
        "A": ((1, 1023, 768), (1023 * 768, 768, 1), "float16"), "B": ((768, 50257), (1, 768), "float16")})  # fmt: skip
    (case,) = head.cases(on_gpu=False)
    assert (case.name, case.size) == ("target_shrunk", {"rows": (1, 1), "K": 768, "N": 50257})
    assert case.strides["B"] == (1, 768) and head.neighbours(on_gpu=False) == []
    assert head.cases()[0].name == "target" and head.cases()[0].size["rows"] == (1, 1023)


def test_mixed_dtypes_reach_the_case(tmp_path):
    given = {"x": ((2, 8, 32), (256, 32, 1), "float16"), "weight": ((32,), (1,), "float32")}
    found = target(tmp_path / "1_r", "rmsnorm", given, scalars={"eps": 1e-5})
    tensors = found.spec.tensors(found.cases()[0])
    assert (tensors["x"].dtype, tensors["weight"].dtype) == (torch.float16, torch.float32)
    assert found.cases()[0].scalars == {"eps": 1e-5}


def test_a_broken_target_is_one_line(tmp_path):
    with pytest.raises(targets.TargetError, match="axis dim is 31 here and 32 elsewhere.*extract.py"):
        target(tmp_path / "1_r", "rmsnorm", {"x": ((2, 32), (32, 1), "float16"), "weight": ((31,), (1,), "float16")})


# ---- transformers ---------------------------------------------------------------------------------------------------

SMALL = dict(vocab_size=99, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=64)  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
LLAMA_LIKE = {"flash_attention": 2, "rotary_embedding": 4, "fused_mlp": 2, "matmul": 9}
FAMILIES = {
    "Llama": ("LlamaForCausalLM", GROUPED, {**LLAMA_LIKE, "rmsnorm": 5}),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, {**LLAMA_LIKE, "rmsnorm": 5}),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED, {**LLAMA_LIKE, "rmsnorm": 9}),
    "Gemma": ("GemmaForCausalLM", GROUPED, {**LLAMA_LIKE, "rmsnorm": 5}),
    "Gemma2": ("Gemma2ForCausalLM", {**GROUPED, "attn_implementation": "eager"},
               {"rotary_embedding": 4, "fused_mlp": 2, "matmul": 9, "rmsnorm": 9, "softmax": 2}),
    "Mistral": ("MistralForCausalLM", GROUPED, {**LLAMA_LIKE, "rmsnorm": 5}),
    "Phi3": ("Phi3ForCausalLM", {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
             {**LLAMA_LIKE, "matmul": 5, "rmsnorm": 5}),
    "Phi": ("PhiForCausalLM", SMALL, {"flash_attention": 2, "rotary_embedding": 4, "matmul": 13, "layernorm": 3}),
    "GPT2": ("GPT2LMHeadModel", dict(vocab_size=99, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0,
                                     eos_token_id=0), {"flash_attention": 2, "matmul": 9, "layernorm": 5}),
    "Bert": ("BertModel", SMALL, {"flash_attention": 2, "matmul": 13, "layernorm": 5}),
    "ViT": ("ViTModel", dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                             image_size=16, patch_size=4), {"flash_attention": 2, "matmul": 13, "layernorm": 5}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_model(family, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("AUTOKERNEL_WORKSPACE", str(tmp_path))
    name, config, expected = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**config)
    model = getattr(transformers, name)._from_config(config).eval()
    image = family == "ViT"
    kwargs = {"pixel_values": torch.randn(2, 3, 16, 16)} if image else {"input_ids": torch.randint(0, 99, (2, 17))}
    loaded = Loaded(model, name, (), kwargs | ({} if family in ("ViT", "Bert") else {"use_cache": False}))
    profile = profiling.profile(loaded)
    calls = {}
    for row in profile.targets:
        calls[row["op"]] = calls.get(row["op"], 0) + row["calls"]
    assert calls == expected
    assert profile.values["flops_in_sites"] >= 0.9
    if family == "Llama":
        rotary = next(row for row in profile.targets if row["op"] == "rotary_embedding")
        assert rotary["where"] == "model.layers.*.self_attn"
    json.dumps(profile.record())
    for row in profile.targets:  # what extract.py would write can be drawn and computed
        (tmp_path / "t").mkdir(exist_ok=True)
        (tmp_path / "t" / "target.json").write_text(json.dumps(row))
        read = targets.read_target(tmp_path / "t")
        case = read.cases()[0]
        given = {n: torch.empty_strided(t.shape, t.strides, dtype=t.dtype) for n, t in read.spec.tensors(case).items()}
        for tensor in given.values():
            tensor.zero_()
        assert read.spec.reference(**given, **case.scalars).shape == read.spec.output(case).shape


def test_replaced_transformers_model_is_the_same():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**GROUPED)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    capture = Capture(model)
    capture.keep_inputs = True
    ids = torch.randint(0, 99, (2, 17))
    with torch.no_grad():
        capture(ids, use_cache=False)
        for graph in capture.graphs:
            found = sites.find(capture)
            graph.run = sites.replace(graph, {s: s.spec.reference for s in found.sites})
        torch.testing.assert_close(
            capture(ids, use_cache=False).logits, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4
        )


# ---- hard models ----------------------------------------------------------------------------------------------------

HARD = """
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)
    class Breaks(Parts):
        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.norm(self.b(x))
    class Depends(Parts):
        def forward(self, x):
            x = self.a(x)
            if x.sum() > 1e9:
                return x
            for _ in range(2 + int(x.max().item() * 0)):
                x = self.b(x)
            return x
    class Loop(nn.Module):  # breaks inside of the loop over its layers
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(3))
        def forward(self, x):
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = x + layer(x)
            return x
    class Trains(Parts):
        def train(self, mode=True):
            return super().train(True)
        def forward(self, x):
            return self.b(F.dropout(self.a(x), 0.5, self.training))
    @torch.jit.script
    def scripted(x, y):
        return torch.relu(x) * y + 1.0
    class Scripted(Parts):
        def forward(self, x):
            return self.b(scripted(self.a(x), x))
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        def forward(self, x):
            return self.net(x)
    class Talks(Parts):
        def forward(me, x):
            print("x is", tuple(x.shape))
            return me.b(me.a(x))
    class Mutates(Parts):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
        def forward(self, x):
            self.count += 1
            x = self.a(x)
            x += 1
            return {"x": self.b(x), "n": self.count * 1}
    """


@pytest.mark.parametrize(
    ("name", "calls", "says"),
    [
        ("Breaks", {"matmul": 2, "layernorm": 1}, "2 graphs"),
        ("Depends", {"matmul": 3}, "graph break"),
        ("Loop", {"matmul": 3, "layernorm": 3}, ""),
        ("Trains", {"matmul": 2}, "stay in train mode"),
        ("Scripted", {"matmul": 2}, ""),
        ("Convolutions", {}, "nothing to extract"),
        ("Mutates", {"matmul": 2}, ""),
        ("Talks", {"matmul": 2}, "each different one once on stderr"),
    ],
)
def test_hard_model(name, calls, says, run, model, tmp_path):
    shape = ["--input-shape", "1,3,20,20"] if name == "Convolutions" else []
    status, out, err = run("profile", "--model", model(HARD), "--class-name", name, "--device", "cpu", *shape)
    assert status == 0, err
    record = json.loads((tmp_path / "workspace" / "profile.json").read_text())
    found = {}
    for row in record["targets"]:
        found[row["op"]] = found.get(row["op"], 0) + row["calls"]
    assert found == calls and says in " ".join(out.split())
    parts = sum(r["ms"] for r in record["targets"]) + sum(r["ms"] for r in record["other"])
    assert parts == pytest.approx(record["total_ms"], rel=0.01)
    assert ("x is" in out, err) == (False, "x is (8, 32)\n" if name == "Talks" else "")
    assert not any(re.match(r"[LG]\W", row["where"]) for row in record["targets"] + record["other"])
    if name == "Convolutions":
        assert record["other"][0]["op"].startswith("aten::") and "aten::conv2d" in {r["op"] for r in record["other"]}
        status, _, err = run("extract")
        assert status == 2 and err.count("\n") == 1


def test_counts_are_readable():
    given = {640: "640", 32_080: "32.1K", 124_400_000: "124.4M", 6_738_415_616: "6.7B"}
    assert {n: tables.count(n) for n in given} == given


@pytest.mark.parametrize("columns", [80, 120, 160])
def test_tables_fit_the_terminal(columns):
    row = {"rank": 12, "op": "rotary_embedding", "where": "model.layers.*.self_attn.rotary +3", "dtype": "fp16",
           "shape": "1x32x2048x128 2048x64", "calls": 64, "ms": 12.3456, "share": 0.0612, "cumulative": 0.9, "bound":
           "compute", "pct_roofline": 61.2, "at_most": 1.021}  # fmt: skip
    lines = tables.table([tables.cells(row), tables.cells({**row, "bound": None, "pct_roofline": None})], columns)
    assert max(map(len, lines)) <= columns
    assert len(lines) == (3 if columns == 160 else 6)
    words = ("12.35", "6.1%", "90.0%", "61.2%", "1.02x", "compute", "n/a", row["where"], row["shape"])
    assert all(word in " ".join(lines) for word in words)
