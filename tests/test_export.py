"""export_hf.py on a CPU: Triton in its interpreter, CUDA compiled and loaded, the Hub on a loopback port."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("kernels", minversion="0.17.2", reason="uv sync --extra hub --extra models")

from loopback_hub import LoopbackHub  # noqa: E402

from autokernel import export as exporter  # noqa: E402
from autokernel import export_cuda, hub, ops, paths  # noqa: E402
from autokernel.cuda_source import parse_launchers  # noqa: E402
from autokernel.export import ExportError, Project, export, read_source, verdict  # noqa: E402
from autokernel.source import KernelError, read_kernel  # noqa: E402

ROOT = paths.repo_root()
TRITON, CUDA = sorted((ROOT / "kernels").glob("*.py")), sorted((ROOT / "kernels/cuda").glob("*.py"))
STEMS = [path.stem for path in TRITON]
needs_nvcc = pytest.mark.skipif(not Path("/usr/local/cuda/bin/nvcc").exists() and not shutil.which("nvcc"),
                                reason="no nvcc")  # fmt: skip


def python(code: str, cwd: Path, interpret: bool = True, **environment) -> str:
    """Run code in a fresh process outside of the repository; its standard output."""
    unwanted = ("DO_NOT_TRACK", "DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")  # kernels 0.17.2 breaks on them
    variables = {k: v for k, v in os.environ.items() if k not in unwanted}
    variables |= {"TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"HF_HOME": str(cwd / "hf"), **environment}
    # the Hub's loader goes by PyTorch's build, not by the machine: here it must take the CPU variant
    code = f"import torch\ntorch.version.cuda = None\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def server(monkeypatch):
    """A Hub on a loopback port that huggingface_hub in this process talks to, with a token."""
    import huggingface_hub

    if huggingface_hub.__version__ < "2":
        pytest.skip("huggingface_hub 1 cannot write kernel repositories")
    server = LoopbackHub()
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + template)
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_shown")
    yield server
    server.close()


@pytest.fixture
def unchecked(monkeypatch):
    """Exports without the run of their own tests, which one test below makes."""
    monkeypatch.setattr(exporter, "_run_tests", lambda work, folder: "passed")


def exported(path: Path, folder: Path, name: str = "", backends=("cpu",)) -> Path:
    name = name or f"my-{path.stem.replace('_', '-')}"
    project = Project(name, f"user/my-{path.stem}", backends=backends, force=True)
    return export(project, read_source(path), folder / project.name)["folder"]


@pytest.fixture
def command(monkeypatch, capsys):
    """command(*words) -> (exit status, standard output, standard error) of export_hf.py."""
    import export_hf

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["export_hf.py", *map(str, words)])
        status = export_hf.main()
        return status, *capsys.readouterr()

    return run


def judged(path: Path, **values) -> dict:
    """Write the judge's record of a kernel file, as bench.py would."""
    source = read_kernel(path)
    size = {"size": "large", "axes": {"rows": [4096], "dim": 4096}, "dtype": "fp16", "latency_us": 31.234,
            "speedup_vs_pytorch": 1.375, "speedup_vs_pytorch_spread": 0.004, "speedup_vs_compile": 1.1}  # fmt: skip
    record = {"schema": 1, "outcome": "PASS", "source_sha256": source.sha256, "kernel_type": source.kernel_type,
              "started": "2026-11-30T12:00:00Z", "device": "cuda", "gpu_name": "NVIDIA H200", "torch": "2.13.0",
              "harness": "clean", "harness_sha256": "ab" * 32, "quick": False, "smoke_test": "PASS (1/1)",
              "sizes": [size], **values}  # fmt: skip
    paths.atomic_write(paths.workspace() / "last_run.json", json.dumps(record).encode())
    return record


def test_command_exports_validates_and_uploads(tmp_path, monkeypatch, command, server):
    """The whole way of one kernel: verdict, export, tests in a fresh process, dry run, upload, get_kernel elsewhere."""
    kernel = tmp_path / "kernel.py"
    kernel.write_text((ROOT / "kernels/rmsnorm.py").read_text())
    judged(kernel)
    words = ["--name", "my-rms", "--kernel", str(kernel), "--repo-id", "user/my-rms", "--backends",
             "cpu", "--license", "apache-2.0", "--output", str(tmp_path / "out")]  # fmt: skip

    def run(*more):
        return command(*words, *more)

    status, out, err = run()
    folder = tmp_path / "out/my-rms"
    assert status == 0 and "torch-cpu (passed in Triton's interpreter)" in out, err
    assert (folder / "torch-ext/my_rms/kernel.py").read_bytes() == kernel.read_bytes()
    card = (folder / "CARD.md").read_text()
    for fact in ("NVIDIA H200", "31.23", "1.38x ± 0.4 %", "1.10x", read_kernel(kernel).sha256, "ab" * 32,
                 "license: apache-2.0", "library_name: kernels"):  # fmt: skip
        assert fact in card, fact
    status, _, err = run()
    assert status == 2 and "exists already" in err and err.count("\n") == 1

    monkeypatch.setattr(hub, "validate", lambda folder: {"torch-cpu": "passed"})
    status, out, _ = run("--upload", "--dry-run")
    assert status == 0 and "build/torch-cpu/op.py" in out and "README.md" in out and not server.calls
    server.fail[("POST", "commit/main")] = 413  # the builds arrive, the card does not
    status, _, err = run("--upload")
    assert status == 2 and "run the same command again" in err
    server.fail.clear()
    status, out, err = run("--upload")
    assert status == 0 and "0 files sent to v1" in out and "hf_not_to_be_shown" not in out + err
    assert server.repos["user/my-rms"]["main"]["README.md"] == card.encode()
    assert "Bearer hf_not_to_be_shown" in server.tokens
    shown = python(
        "import torch\nfrom kernels import get_kernel\n"
        "k = get_kernel('user/my-rms', version=1, trust_remote_code=True)\n"
        "x, w = torch.randn(3, 77), torch.randn(77)\n"
        "assert torch.allclose(k.rmsnorm(x, w), torch.rms_norm(x, (77,), w, 1e-6), atol=1e-6)\nprint(k.__file__)",
        tmp_path, HF_ENDPOINT=server.endpoint)  # fmt: skip
    assert "kernels--user--my-rms" in shown
    (folder / "build/torch-cpu/op.py").write_text("changed")
    status, _, err = run("--upload")
    assert status == 2 and "differs" in err and "--version 2" in err and err.count("\n") == 1


@pytest.fixture
def rms(tmp_path, unchecked, monkeypatch):
    """An exported RMSNorm whose repository is not yet known, without a run of its tests."""
    kernel = tmp_path / "kernel.py"
    kernel.write_text((ROOT / "kernels/rmsnorm.py").read_text())
    judged(kernel)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return export(Project("my-rms", backends=("cpu",)), read_source(kernel), tmp_path / "out/my-rms")["folder"]


RMS = Project("my-rms", "user/my-rms", backends=("cpu",))


def test_the_next_command_is_the_one_to_run(tmp_path, unchecked, command):
    """It names every option that is not at its default; without the folder it says how to make it."""
    kernel = tmp_path / "a kernel.py"
    kernel.write_text((ROOT / "kernels/rmsnorm.py").read_text())
    words = ["--name", "my-rms", "--kernel", kernel, "--version", 3, "--license", "apache-2.0", "--output",
             tmp_path / "an output", "--backends", "cpu", "--force"]  # fmt: skip
    status, _, err = command(*words, "--upload")
    assert status == 2 and "--repo-id USER/my-rms" in err and not (tmp_path / "an output").exists()
    status, _, err = command(*words, "--upload", "--repo-id", "user/my-rms", "--dry-run")
    assert status == 2 and "is not there yet" in err and err.count("\n") == 1
    first = shlex.split(err.partition("export it first: ")[2])[3:]
    assert first == [*map(str, words[:4]), "--repo-id", "user/my-rms", *map(str, words[4:])]
    status, out, _ = command(*first)
    following = shlex.split(out.partition(", then: ")[2])
    assert status == 0 and following[:3] == ["uv", "run", "export_hf.py"]
    assert sorted(following[3:]) == sorted([*first, "--upload"])
    status, out, _ = command(*following[3:], "--dry-run")
    assert status == 0 and "  v3    build/torch-cpu/metadata.json" in out


def test_only_what_the_export_wrote_is_sent(rms, tmp_path):
    for name in (".env", ".git/config", "notes.txt", "tests/__pycache__/x.pyc", "tests/.pytest_cache/x"):
        paths.atomic_write(rms / name, b"secret")
    parcel = hub.parcel(RMS, rms)
    sent = {name for files in parcel.branches.values() for name in files}
    assert {"README.md", "build.toml", "flake.nix", "torch-ext/my_rms/op.py", "tests/test_my_rms.py",
            "benchmarks/benchmark.py", "build/torch-cpu/_ops.py"} <= sent  # fmt: skip
    assert not any(b"secret" in data for files in parcel.branches.values() for data in files.values())
    assert parcel.left == [".env", ".git", "notes.txt"] and "not sent: .env, .git, notes.txt" in parcel.listing(False)
    for name, words in {"tests/link.py": "a link", "torch-ext/.env": "a hidden file", "LICENSE": "a link"}.items():
        place = rms / name
        place.write_text("secret") if "hidden" in words else place.symlink_to("/etc/passwd")
        with pytest.raises(ExportError, match=f"{place} is {words}"):
            hub.parcel(RMS, rms)
        place.unlink()
    (rms / "benchmarks").rename(tmp_path / "away")
    (rms / "benchmarks").symlink_to(tmp_path / "away")
    with pytest.raises(ExportError, match="benchmarks is a link"):
        hub.parcel(RMS, rms)


@pytest.mark.parametrize("name, words", [
    ("torch-ext/my_rms/kernel.py", "not built from the sources"), ("torch-ext/my_rms/new.py", "not built from the"),
    ("torch-ext/torch_binding.cpp", "not built from"), ("my_rms_cuda/my_rms.cu", "not built from the sources"),
    ("build/torch-cpu/kernel.py", "is not valid"), ("CARD.md", ""),
])
def test_sources_that_were_changed_are_not_sent(rms, name, words):
    paths.atomic_write(rms / name, (rms / name).read_bytes() + b"\n# mine\n" if (rms / name).exists() else b"")
    if not words:
        assert b"# mine" in hub.parcel(RMS, rms).branches["main"]["README.md"]
        return
    with pytest.raises(ExportError, match=words) as caught:
        hub.parcel(RMS, rms)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_repository_of_another_project_is_left_alone(rms, server):
    server.repos["user/my-rms"] = {"main": {"build.toml": b'[general]\nname = "other"\n'}}
    with pytest.raises(ExportError, match="holds another project, 'other'"):
        hub.send(hub.parcel(RMS, rms))
    server.repos["user/my-rms"]["main"]["build.toml"] = b"\xff"
    with pytest.raises(ExportError, match="holds another project, 'an unreadable build.toml'"):
        hub.send(hub.parcel(RMS, rms))
    assert list(server.repos["user/my-rms"]) == ["main"] and not any("commit" in path for _, path in server.calls)
    # an older version of this one: what it had and this has not goes, from main and from the branch made of it
    old = {"build.toml": b'[general]\nname = "my-rms"\n', "torch-ext/my_rms/gone.py": b"", "mine.txt": b"kept"}
    server.repos["user/my-rms"] = {"main": old}
    hub.send(hub.parcel(RMS, rms))
    for files in server.repos["user/my-rms"].values():
        assert "torch-ext/my_rms/gone.py" not in files and files["mine.txt"] == b"kept"
    assert "torch-ext/my_rms/op.py" in server.repos["user/my-rms"]["main"]


def test_upload_of_a_folder_is_of_the_kernel_that_was_asked_for(rms, tmp_path, command):
    words = ["--name", "my-rms", "--output", rms.parent, "--backends", "cpu", "--upload", "--dry-run"]
    words += ["--repo-id", "user/my-rms"]
    assert command(*words)[0] == command(*words, "--kernel", tmp_path / "kernel.py")[0] == 0
    status, _, err = command(*words, "--kernel", ROOT / "kernels/cuda/rmsnorm.py")
    assert status == 2 and "another kernel (sha256" in err and err.count("\n") == 1
    for more, found in ((["--version", 2], "--version 1, not 2"), (["--license", "isc"], "--license mit, not isc"),
                        (["--backends", "rocm,cpu"], "--backends cpu, not rocm,cpu")):  # fmt: skip
        status, _, err = command(*words, *more)
        assert status == 2 and found in err and err.count("\n") == 1


def test_a_repository_named_only_at_the_upload_is_filled_in(rms, server):
    card = (rms / "CARD.md").read_text() + "my own words\n"
    (rms / "CARD.md").write_text(card)
    hub.send(hub.parcel(RMS, rms))
    main = server.repos["user/my-rms"]["main"]
    assert main["README.md"].decode() == card.replace("USER/my-rms", "user/my-rms") and "my own words" in card
    assert not any(b"USER/" in data for files in server.repos["user/my-rms"].values() for data in files.values())
    (rms / "build.toml").write_bytes(main["build.toml"])
    assert exporter.read_general(rms / "build.toml")["hub"] == {"repo-id": "user/my-rms"}
    exporter._loader().Build.open(rms)
    with pytest.raises(ExportError, match="--repo-id user/my-rms, not other/my-rms"):
        hub.parcel(replace(RMS, repo_id="other/my-rms"), rms)


@pytest.mark.parametrize("name, data, words", [
    ("CARD.md", None, "CARD.md is missing"), ("build.toml", b"\xff", "no project's build.toml"),
    ("build.toml", b"[general", "no project's build.toml"), ("build.toml", b"x = 1", "no project's build.toml"),
    ("build.toml", None, "No such file"), ("build/torch-cpu/metadata.json", None, "is not valid"),
    ("torch-ext/my_rms/kernel.py", None, "no torch-ext/my_rms/kernel.py"),
])
def test_a_damaged_folder_is_one_line(rms, command, name, data, words):
    (rms / name).unlink() if data is None else (rms / name).write_bytes(data)
    status, _, err = command("--name", "my-rms", "--output", rms.parent, "--backends", "cpu", "--upload", "--repo-id",
                             "user/my-rms")  # fmt: skip
    assert status == 2 and words in err and err.count("\n") == 1


FROM_MAIN = """
import runpy, torch
from kernels import get_kernel
tests = runpy.run_path("tests/test_my_rms.py")
tests["CASES"][2:] = ()
tests["test_values"]()
assert "/kernels--user--my-rms/" in tests["kernel"].__file__
x = torch.randn(3, 7)
torch.version.cuda = "13.0"  # as PyPI's PyTorch is, also where there is no GPU
k = get_kernel("user/my-rms", version=1, trust_remote_code=True, backend="cpu")
assert torch.allclose(k.rmsnorm(x, x[0]), torch.rms_norm(x, (7,), x[0], 1e-6), atol=1e-6)
for given, name in (((None, x), "x"), ((x, None), "weight"), ((None, None), "x, weight")):
    for call in (k.rmsnorm, torch.compile(k.rmsnorm, backend="aot_eager")):
        try:
            call(*given)
            raise AssertionError(name)
        except Exception as error:
            assert f"rmsnorm: {name} is None, a tensor is wanted" in str(error), error
"""


def test_the_tests_on_the_hubs_main_take_the_build_from_its_branch(rms, tmp_path, server):
    """There is no build/ on main; a required tensor that is None is named."""
    hub.send(hub.parcel(RMS, rms))
    main = server.repos["user/my-rms"]["main"]
    for name, data in main.items():
        paths.atomic_write(tmp_path / "copy" / name, data)
    assert not (tmp_path / "copy/build").exists() and "on branch `v1`" in main["README.md"].decode()
    assert "TRITON_INTERPRET=1" in main["README.md"].decode() and 'backend="cpu")' in main["README.md"].decode()
    python(FROM_MAIN, tmp_path / "copy", HF_ENDPOINT=server.endpoint)


@pytest.mark.parametrize("record, refusal, there, absent", [
    ({}, "it was never judged; x", ["> **Not accepted by the judge**: it was never judged.", "Triton, exported by"],
     ["judged and", "Times hold", "the GPU above", "| judged on |"]),
    ({"outcome": "PASS", "device": "cpu (Triton's interpreter: timings are not a measurement)", "sizes": [{}]}, "",
     ["Triton, judged and exported by", "| judged on | a CPU, in Triton's interpreter |", "had no GPU"], ["Times h"]),
    ({"outcome": "FAIL", "device": "cuda", "gpu_name": "NVIDIA H200"}, "its verdict is FAIL: x; y",
     ["Triton, exported by", "the kernel did not get that far"], ["had no GPU", "Times hold"]),
])
def test_the_card_says_what_is_so(record, refusal, there, absent):
    source = read_source(ROOT / "kernels/rmsnorm.py")
    text = exporter.card(Project("my-rms"), source, ops.get("rmsnorm"), record, refusal, {"torch-cuda": "passed"})
    assert "Builds, on branch `v1` (`build/` of an export): `torch-cuda` (passed)" in text
    assert all(words in text for words in there) and not any(words in text for words in absent)
    assert "backend=" not in text


def test_the_card_of_a_cuda_kernel_names_what_its_build_needs():
    source = read_source(ROOT / "kernels/cuda/rmsnorm.py")
    cuda = export_cuda.read_cuda(source, "my_rms_cuda/my_rms.cu")
    state = {"torch-stable-abi211-cu130-x86_64-linux": "not run: no GPU here"}
    record = {"outcome": "FAIL", "device": "cpu (Triton's interpreter: timings are not a measurement)"}
    text = exporter.card(Project("my-rms"), source, ops.get("rmsnorm"), record, "its verdict is FAIL", state, cuda)
    for words in (f"compute capability {cuda.capability} with CUDA 13.0", "PyTorch 2.11 or later", "was never run",
                  "| judged on | no GPU: it did not run |"):  # fmt: skip
        assert words in text, words
    assert "interpreter" not in text.lower()


EVERY = """
import json, torch
from pathlib import Path
from kernels import get_kernel, get_local_kernel
loaded = {}
for index, (op, folder) in enumerate(json.loads(Path("projects.json").read_text()).items()):
    loaded[op] = get_local_kernel(Path(folder)) if index % 2 else get_kernel(f"user/my-{op}", version=1)
    tests = next(Path(folder, "tests").glob("*.py"))
    scope = {"__file__": str(tests), "__name__": "tests"}
    exec(compile(tests.read_text(), str(tests), "exec"), scope)
    assert scope["kernel"] is loaded[op]
    dtypes = {case[2] for case in scope["CASES"]}
    scope["CASES"][:] = scope["CASES"][:3] + scope["CASES"][3::5]
    for name in [n for n in scope if n.startswith("test_")]:
        scope[name]()
    print(op, sorted(dtypes))
x = torch.randn(5, 7)
a, b = loaded["softmax"], loaded["reduce"]
assert a.softmax(x).shape == (5, 7) and b.reduce(x).shape == (5,) and a.__name__ != b.__name__
"""


def test_every_triton_starter_loads_in_a_fresh_process(tmp_path, unchecked):
    """Values at odd sizes in three dtypes, one compiled graph, no backward; all nine together in one process."""
    folders = {path.stem: str(exported(path, tmp_path)) for path in TRITON}
    (tmp_path / "projects.json").write_text(json.dumps(folders))
    local = ":".join(f"user/my-{op}={folder}" for op, folder in folders.items())
    lines = python(EVERY, tmp_path, LOCAL_KERNELS=local).splitlines()
    assert [line.split()[0] for line in lines] == STEMS and len(lines) == 9
    assert all(line.endswith("['bfloat16', 'float16', 'float32']") for line in lines), lines


LLAMA = """
import re, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64)
ids = torch.randint(0, 97, (2, 19))
padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.arange(3), 0)}
for op in ("rmsnorm", "fused_mlp", "rotary_embedding", "flash_attention"):
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
        want, want_padded = model(ids).logits, model(**padded).logits
    card = Path(f"my-{op.replace('_', '-')}/CARD.md").read_text().replace('"cuda"', '"cpu"')
    scope = {"model": model}
    blocks = re.findall(r"```python\\n(.*?)```", card, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block.replace("float16", "float32"), scope)
    calls = []
    kernel = scope["kernel"]
    original = kernel.op.kernel_fn
    kernel.op.kernel_fn = lambda calls=calls, original=original, **given: calls.append(1) or original(**given)
    model = scope["model"]
    with torch.no_grad():
        got, got_padded = model(ids).logits, model(**padded).logits
        assert calls, op
        assert (got - want).abs().max() < 1e-4, (op, (got - want).abs().max())
        assert (got_padded - want_padded)[:, 3:].abs().max() < 1e-4, op
        count = len(calls)
        step = model(ids[:, :9], use_cache=True)
        step = model(ids[:, 9:10], past_key_values=step.past_key_values).logits
        assert (step[:, 0] - want[:, 9]).abs().max() < 1e-4, op
    print(op, count)
"""


def test_transformers_llama_with_the_exported_layers(tmp_path, unchecked):
    """The card's own code, on a tiny Llama: kernelize and AttentionInterface, with padding and with a cache."""
    pytest.importorskip("transformers")
    server = LoopbackHub()
    for op in ("rmsnorm", "fused_mlp", "rotary_embedding", "flash_attention"):
        folder = exported(ROOT / f"kernels/{op}.py", tmp_path)
        builds = hub.parcel(Project(folder.name, f"user/my-{op}", backends=("cpu",)), folder).branches["v1"]
        server.repos[f"user/my-{op}"] = {"main": {}, "v1": builds}
    assert len(python(LLAMA, tmp_path, HF_ENDPOINT=server.endpoint).splitlines()) == 4
    server.close()


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CUDA, ids=[p.stem for p in CUDA])
def test_cuda_starter_is_taken_apart(path):
    """kernel_fn stays as it was judged; the source moves to a .cu file; every launcher becomes an operator."""
    source = read_source(path)
    cuda = export_cuda.read_cuda(source, "my_cuda/my.cu")
    before, after = source.data.decode(), cuda.python
    assert before[before.index("\ndef kernel_fn") :] == after[after.index("\ndef kernel_fn") :]
    assert "from ._cuda import compile_cuda" in after and "autokernel" not in after and "__global__" not in after
    names = re.findall(r'extern "C" int (\w+)\(', before)
    assert names and re.findall(r"m.impl\(\"launch_(\w+)\"", cuda.binding) == names
    assert cuda.defines == source.config and f"#define {next(iter(source.config))} " in cuda.text


HOST_KERNEL = '''
import torch
from autokernel.cuda import compile_cuda

KERNEL_TYPE = "rmsnorm"
BACKEND = "cuda"
CONFIG = {"TWO": 2}
CUDA_SRC = r"""
#include <cmath>
extern "C" int rms(const float* x /* strided */, const float* check, const int* none /* optional */, float* out,
                   unsigned rows, int columns, long long row_stride, float eps, double scale, bool wanted,
                   cudaStream_t stream) {
    if (none || !wanted || TWO != 2 || scale != 0.5 || stream) return 1;
    for (unsigned r = 0; r < rows; r++) {
        float sum = 0;
        for (int c = 0; c < columns; c++) sum += x[r * row_stride + c] * x[r * row_stride + c];
        for (int c = 0; c < columns; c++)
            out[r * columns + c] = x[r * row_stride + c] / std::sqrt(sum / columns + eps) * check[c];
    }
    return rows == 7 ? 1 : 0;
}
"""


def kernel_fn(x, weight, eps=1e-6):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.shape[0] if x.shape[0] != 5 else -5
    compile_cuda(CUDA_SRC, defines=CONFIG).rms(x, weight, None, out, rows, x.shape[1], x.stride(0), eps, 0.5, True)
    return out
'''

RUN_HOST_KERNEL = """
import torch
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(next(Path("my-host/build").iterdir()))
x, weight = torch.randn(3, 14)[:, :11], torch.rand(11)
assert torch.allclose(kernel.rmsnorm(x, weight, 0.5), kernel.reference.rmsnorm(x, weight, 0.5), atol=1e-6)
compiled = torch.compile(kernel.rmsnorm, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(x, weight), kernel.rmsnorm(x, weight))
for rows, words in {5: "rows is -5: out of range", 7: "launcher rms: CUDA error 1: invalid argument"}.items():
    try:
        kernel.rmsnorm(torch.ones(rows, 11), weight)
        raise AssertionError(words)
    except RuntimeError as error:
        assert words in str(error), error
for bad, words in ((weight.double(), "weight is torch.float64"), (weight[:3], "axis dim is 3 in weight and 11")):
    try:
        kernel.rmsnorm(x, bad)
        raise AssertionError(words)
    except ValueError as error:
        assert words in str(error), error
"""


def test_a_launchers_parameters_may_have_any_name():
    """Names of the binding's own helpers, Python's and TorchScript's words, and more of them than letters."""
    names = ["check", "address", "integer", "device_of", "std", "in_", "self", "lambda", "Tensor", "ak_device", "in"]
    names += [f"p{i}" for i in range(30)]
    text = 'extern "C" int check(' + ", ".join(f"float* {n}" for n in names) + ", int check, cudaStream_t s) {}"
    launcher = parse_launchers(text.replace("int check,", "int rows,"))["check"]
    schema = export_cuda._schema(launcher)
    torch.library.define("autokernel_test::launch_check", schema.removeprefix("launch_check"))
    arguments = torch.ops.autokernel_test.launch_check.default._schema.arguments
    assert [a.name for a in arguments] == [f"{n}_" for n in [*names, "rows"]]
    assert all(a.alias_info.is_write for a in arguments[:-1])
    declared = re.findall(r"const Tensor& (\w+)", export_cuda._function(launcher))
    assert len(set(declared)) == len(names) and not set(declared) & set(names)


@needs_nvcc
def test_binding_passes_every_kind_of_argument(tmp_path, unchecked, monkeypatch):
    """A launcher that computes on the host, through the generated library: pointers, None, integers, floats, bool."""
    made = export_cuda.binding

    def on_host(*given):
        text = made(*given).replace("t.is_cuda()", "true").replace("const DeviceGuard ak_guard(ak_device)", "(void)0")
        text = text.replace("if (code == 0) code = cudaGetLastError();", "")  # there is no driver here
        return text.replace("void* const ak_stream = stream_of(ak_device)", "void* const ak_stream = nullptr")

    monkeypatch.setattr(export_cuda, "binding", on_host)
    kernel = tmp_path / "host.py"
    kernel.write_text(HOST_KERNEL)
    folder = exported(kernel, tmp_path, "my-host")
    variant = next((folder / "build").iterdir())
    (variant / "op.py").write_text((variant / "op.py").read_text().replace('DEVICES = ("cuda",)', 'DEVICES = ("cpu",)'))
    python(RUN_HOST_KERNEL, tmp_path, interpret=False)


def test_without_nvcc_the_project_has_no_build(tmp_path, unchecked, monkeypatch):
    def missing():
        raise export_cuda.CudaCompilerMissing("nvcc not found")

    monkeypatch.setattr(export_cuda, "find_nvcc", missing)
    found = export(Project("my-rms", "u/my-rms", force=True), read_source(CUDA[6]), tmp_path / "my-rms")
    assert found["variants"] == [] and "nvcc not found" in found["note"] and "kernel-builder" in found["note"]
    with pytest.raises(ExportError, match="has no build to send"):
        hub.parcel(Project("my-rms", "u/my-rms"), tmp_path / "my-rms")


@needs_nvcc
def test_cuda_build_loads_without_a_gpu(tmp_path):
    """nvcc's library for Hopper: made, named, validated as far as it goes here, loaded, and clear about the device."""
    folder = tmp_path / "a folder/my-rms"
    found = export(Project("my-rms", force=True), read_source(ROOT / "kernels/cuda/rmsnorm.py"), folder)
    card = (folder / "CARD.md").read_text()
    assert "compute capability 9.0a with CUDA 13." in card and "(not run: no GPU here)" in card
    assert re.fullmatch(r"torch-stable-abi211-cu\d+-\w+-linux", found["variants"][0])
    assert list(found["validated"].values()) == ["not run: no GPU here"]
    with pytest.raises(ExportError, match="not run: no GPU here: upload from a machine that can run it"):
        hub.parcel(Project("my-rms", "user/my-rms"), folder)
    sent = hub.parcel(Project("my-rms", "user/my-rms", force=True), folder).branches
    assert "my_rms_cuda/my_rms.cu" in sent["main"] and "torch-ext/torch_binding.cpp" in sent["main"]
    (folder / "torch-ext/torch_binding.cpp").write_text("changed")
    with pytest.raises(ExportError, match="not built from the sources"):
        hub.parcel(Project("my-rms", "user/my-rms", force=True), folder)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, hint", [("My-Kernel", "my-kernel"), ("my_kernel", "my-kernel"), ("1st", "st"),
                                        ("x", "my-kernel"), ("a--b", "a-b"), ("../up", "up"), ("é", "my-kernel"),
                                        ("a-", "my-kernel"),
                                        ("class", "my-class"), ("import", "my-import"), ("torch", "my-torch"),
                                        ("kernels", "my-kernels"), ("triton", "my-triton"), ("os", "my-os")])
def test_bad_names_come_with_a_good_one(name, hint):
    with pytest.raises(ExportError, match=f"--name {hint}$"):
        Project(name)


@pytest.mark.parametrize("options, words", [
    ({"repo_id": "my-rms"}, "USER/NAME is wanted"), ({"repo_id": "user/a b"}, "user/my-rms"),
    ({"repo_id": "user/a--b"}, "--"), ({"repo_id": "user/-a"}, "user/my-rms"), ({"repo_id": "u/x.git"}, r"\.git"),
    ({"repo_id": "a/b/c"}, "USER/NAME"), ({"repo_id": "USER/x"}, "USER stands for your"),
    ({"version": 0}, "count from 1"), ({"version": 10**20}, "from 1 to 999999"),
    ({"backends": ()}, "cuda,rocm,cpu"), ({"license": "MIT-ish"}, "none that the Hub knows"),
    ({"backends": ("triton",)}, "cuda,rocm,cpu"),
])
def test_bad_options_are_named(options, words):
    with pytest.raises(ExportError, match=words):
        Project("my-rms", **options)


@pytest.mark.parametrize("change, words", [
    ({"outcome": "FAIL", "reason": "wrong sums"}, "its verdict is FAIL: wrong sums"), ({"quick": True}, "--quick only"),
    ({"harness": "dirty"}, "own files had been changed"),
    ({"source_sha256": "cd" * 32}, "differs from the one that passed"),
])
def test_a_kernel_without_a_verdict_is_refused(tmp_path, change, words):
    path = ROOT / "kernels/rmsnorm.py"
    with pytest.raises(ExportError, match="never judged.*bench.py --kernel"):
        export(Project("my-rms"), read_source(path), tmp_path / "out/my-rms")
    runs = paths.workspace() / "runs.jsonl"
    run = {"source_sha256": read_kernel(path).sha256, "outcome": "PASS", "started": "2026-11-30T12:00:00Z"}
    paths.atomic_write(runs, json.dumps(run).encode() + b"\n[1]\n{half")
    judged(ROOT / "kernels/softmax.py")
    with pytest.raises(ExportError, match=r"record \(PASS, 2026-11-30T12:00:00Z\) was overwritten.*bench.py --kernel"):
        export(Project("my-rms"), read_source(path), tmp_path / "out/my-rms")
    runs.unlink()
    judged(path, **change)
    with pytest.raises(ExportError, match=words):
        export(Project("my-rms"), read_source(path), tmp_path / "out/my-rms")
    assert not (tmp_path / "out").exists()
    forced = exporter.card(Project("my-rms", force=True), read_source(path), ops.get("rmsnorm"), {}, words, {})
    assert f"**Not accepted by the judge**: {words}" in forced


def test_a_kernel_in_another_encoding_is_one_line(tmp_path, command):
    kernel = tmp_path / "kernel.py"
    text = "# -*- coding: latin-1 -*-\n# \u00e9\n" + (ROOT / "kernels/rmsnorm.py").read_text().replace("\u00b5", "u")
    kernel.write_bytes(text.encode("latin-1", "replace"))
    status, _, err = command("--name", "my-rms", "--kernel", kernel, "--force", "--output", tmp_path / "out")
    assert status == 2 and "byte 28 is not UTF-8" in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_all_is_looked_at_before_the_first_is_made(tmp_path, unchecked, monkeypatch, command):
    """A kernel that is refused stops all; what an earlier run made stays, unless it is another kernel's."""
    best = {f"{i}_{op}": tmp_path / f"{op}.py" for i, op in enumerate(("softmax", "rmsnorm", "reduce"))}
    for path in best.values():
        path.write_text((ROOT / "kernels" / path.name).read_text())
    monkeypatch.setattr(exporter, "kept", lambda: best)
    monkeypatch.setattr(exporter, "read_target", lambda p: SimpleNamespace(spec=ops.get(p.name.partition("_")[2])))
    words = ["--name", "llama", "--all", "--backends", "cpu", "--output", tmp_path / "out"]
    judged(best["0_softmax"])
    status, _, err = command(*words)
    assert status == 2 and "rmsnorm.py is refused" in err and not (tmp_path / "out").exists()
    status, out, err = command(*words, "--force")
    assert status == 0 and out.count("(passed)") == 3 and out.count("next: ") == 1, err
    assert out.rstrip().endswith("--backends cpu --upload --force")
    shutil.rmtree(tmp_path / "out/llama-rmsnorm")
    status, out, _ = command(*words, "--force")
    assert status == 0 and out.count("exported already") == 2 and out.count("(passed)") == 1
    best["2_reduce"].write_text(best["2_reduce"].read_text() + "# more\n")
    shutil.rmtree(tmp_path / "out/llama-rmsnorm")
    status, out, err = command(*words, "--force")
    assert status == 2 and "llama-reduce exists already" in err and not (tmp_path / "out/llama-rmsnorm").exists()
    upload = [*words, "--upload", "--repo-id", "user/llama", "--dry-run"]
    status, out, err = command(*upload)
    assert status == 2 and "llama-rmsnorm is not there yet" in err and not out


@pytest.mark.parametrize("text, words", [
    ("import numpy\n", "imports numpy"), ("from autokernel import ops\n", "imports autokernel"),
    ("from . import x\n", "imports"),
])
def test_imports_that_the_loader_has_not_are_refused(tmp_path, text, words):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(text + (ROOT / "kernels/rmsnorm.py").read_text())
    with pytest.raises(ExportError, match=words):
        read_source(kernel)


@pytest.mark.parametrize("old, new, words", [
    ('extern "C" int rms', "int rms", "no launcher"),
    ("compile_cuda(CUDA_SRC, defines=CONFIG)", "compile_cuda(x.source)", "known only in the call"),
    ("compile_cuda(CUDA_SRC, defines=CONFIG)", "compile_cuda(CUDA_SRC, arch='sm_80')", "known: source, defines, flags"),
    ("    return out", "    compile_cuda(CUDA_SRC)\n    return out", "found 1 and 2"),
    ("const float* x", "float** x", "which no argument converts to"),
])
def test_cuda_sources_without_one_clear_library_are_refused(tmp_path, old, new, words):
    kernel = tmp_path / "host.py"
    kernel.write_text(HOST_KERNEL.replace(old, new))
    with pytest.raises(KernelError, match=words):
        export(Project("my-host", force=True), read_source(kernel), tmp_path / "out/my-host")
    assert not list(tmp_path.glob("out/*"))


def test_nothing_is_left_of_a_failed_export(tmp_path):
    """A kernel whose own tests fail in the fresh process is not exported; the line says which."""
    kernel = tmp_path / "kernel.py"
    text = (ROOT / "kernels/rmsnorm.py").read_text()
    kernel.write_text(text.replace("    return out\n", "    return out + 1\n"))
    with pytest.raises(ExportError, match="fails its own tests"):
        export(Project("my-rms", backends=("cpu",), force=True), read_source(kernel), tmp_path / "out/my-rms")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("words, said", [
    (["--output", ""], "is empty"), (["--target", " "], "is empty"), (["--kernel", ""], "is empty"),
    (["--dry-run"], "give both"),
])
def test_options_that_choose_nothing_are_refused(command, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        command("--name", "my-rms", *words)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and err.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, command, unchecked):
    (tmp_path / "file").write_text("")
    words = ["--name", "my-rms", "--kernel", ROOT / "kernels/rmsnorm.py", "--force", "--backends", "cpu"]
    status, _, err = command(*words, "--output", tmp_path / "file/out")
    assert status == 2 and err.count("\n") == 1 and "[Errno" not in err and "another --output" in err


def test_leftovers_of_a_killed_export_go_with_the_next_one(tmp_path, unchecked):
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone, mine = tmp_path / f".my-rmsnorm.{ended.pid}.ab_c", tmp_path / f".my-rmsnorm.{os.getpid()}.ab_c"
    for folder in (gone, mine, tmp_path / ".my-rmsnorm.notes", tmp_path / f".my-rms.{ended.pid}.ab_c"):
        folder.mkdir()
    exported(ROOT / "kernels/rmsnorm.py", tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - {"workspace"}
    assert left == {"my-rmsnorm", mine.name, ".my-rmsnorm.notes", f".my-rms.{ended.pid}.ab_c"}


@pytest.mark.parametrize("code, said", [
    ("import sys; print('ValueError: first', file=sys.stderr); raise KeyError('x')", "KeyError: 'x'"),
    ("raise SystemExit('odd words')", "odd words"), ("raise SystemExit(3)", "exit status 3"),
    ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
    ("import torch; print('torch.AcceleratorError: CUDA error'); print('  more words'); raise SystemExit(1)",
     "torch.AcceleratorError: CUDA error"),
])
def test_a_failed_test_run_says_why(code, said):
    code = code.replace("import torch; ", "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert exporter._last_error(done) == said


def test_rotary_layer_takes_every_shape_that_transformers_has():
    """cos and sin of a batch, of one row, without a batch axis; heads before or after the sequence."""
    layer = exporter.template("layers/rotary_embedding.py.in", repo_id="u/r", version=1)
    calls, scope = [], {}
    run = "def rotary_embedding(*given):\n    calls.append(1)\n    return formula(*given)"
    scope = {"calls": calls, "formula": ops.get("rotary_embedding").reference}
    exec(layer.replace("from .op import rotary_embedding", run), scope)
    q, k, cos = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 4).repeat(1, 1, 2)
    for c, dim, fits in ((cos, 1, True), (cos[:1], 1, True), (cos, 2, True), (cos[0], 0, False), (cos, -3, False)):
        x, y = (t.transpose(1, 2) if dim == 2 else t for t in (q, k))
        if dim == 0:
            x, y = x[0], y[0]
        calls.clear()
        got = scope["RotaryPosEmb"]()(x, y, c, c / 2, unsqueeze_dim=dim)
        for one, out in zip((x, y), got, strict=True):
            half = torch.cat((-one[..., 4:], one[..., :4]), -1)
            torch.testing.assert_close(out, one * c.unsqueeze(dim) + half * (c / 2).unsqueeze(dim))
        assert bool(calls) == fits


def test_a_project_without_its_tests_is_one_line(tmp_path):
    with pytest.raises(ExportError, match="has no test_"):
        exporter._run_tests(tmp_path, tmp_path)


def test_best_record_and_kept_kernels(tmp_path, monkeypatch, capsys):
    """The record on a GPU counts more than one without; --target and --all read the ledger."""
    import export_hf
    from autokernel.records import Ledger, Row

    path = ROOT / "kernels/softmax.py"
    record = judged(path)
    worse = {**record, "device": "cpu", "sizes": [], "started": "2026-12-01T00:00:00Z"}
    paths.atomic_write(paths.workspace() / "experiments/3/record.json", json.dumps(worse).encode())
    assert verdict(read_source(path)) == (record, "")
    ledger = Ledger()
    assert exporter.kept() == {}
    rows = [("1_softmax", "baseline", b"1"), ("1_softmax", "keep", b"2"), ("1_softmax", "revert", b"3"),
            ("10_matmul", "keep", b"4"), ("2_reduce", "revert", b"5")]  # fmt: skip
    for target, decision, source in rows:
        ledger.append(Row(None, kernel_type="x", target=target, decision=decision, correctness="PASS"), source)
    best = {target: path.read_bytes() for target, path in exporter.kept().items()}
    assert best == {"1_softmax": b"2", "10_matmul": b"4"}
    monkeypatch.setattr(sys, "argv", ["export_hf.py", "--name", "x-y", "--target", "2_reduce"])
    assert export_hf.main() == 2 and "targets with one: 1_softmax, 10_matmul" in capsys.readouterr().err


@pytest.mark.parametrize("status, words", [(401, "hf auth login"), (403, "approval"), (404, "check --repo-id"),
                                           (None, "no connection")])
def test_every_answer_of_the_hub_has_a_remedy(server, status, words):
    if status:
        server.fail[("POST", "repos/create")] = status
    else:
        server.close()
    with pytest.raises(ExportError, match=words) as caught:
        with hub._one_line_errors(Project("my-rms", "user/my-rms")):
            hub._send(Project("my-rms", "user/my-rms"), {"v1": {}, "main": {}}, False)
    assert "\n" not in str(caught.value) and "hf_not" not in str(caught.value)


def test_what_the_hub_says_and_what_it_does_not(rms, server, monkeypatch):
    """Its reason for a refusal, an answer that is none, no answer at all, offline mode, a token that cannot be sent."""
    parcel, create = hub.parcel(RMS, rms), ("POST", "repos/create")

    def told() -> str:
        with pytest.raises(ExportError) as caught:
            hub.send(parcel)
        assert "\n" not in str(caught.value) and "hf_not" not in str(caught.value)
        return str(caught.value)

    server.fail[create] = lambda h: h.answer({"error": "license\nis unknown, hf_not_to_be_shown"}, 400)
    assert "answers 400" in told() and "license is unknown, hf_..." in told()
    server.fail[create] = 413
    assert "larger than it takes" in told()
    server.fail[create] = lambda h: h.answer(b"<html>")
    assert "is no Hub" in told()
    server.fail[create] = lambda h: h.answer({})
    assert "is no Hub" in told()
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    server.fail[create] = lambda h: time.sleep(0.6)
    assert "no connection" in told() and "Timeout" in told()
    monkeypatch.setenv("HF_TOKEN", "hf_not_\u00e9")
    assert "holds a character" in told()
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_shown")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in told()


def test_an_old_huggingface_hub_is_one_line():
    with pytest.raises(ExportError, match="is too old to write kernel repositories.*uv sync --extra hub"):
        with hub._one_line_errors(Project("my-rms", "user/my-rms")):
            raise ValueError("Invalid repo type, must be one of [None, 'model', 'dataset', 'space']")


def test_a_tenth_operator_needs_no_change_here(tmp_path, unchecked, monkeypatch):
    """Names, axes, formula and output rule come from the spec alone; an option that the kernel lacks is left out."""
    spec = replace(ops.get("softmax"), name="tenth")
    narrow = exporter.narrowed(ops.get("matmul"), ("A", "B"))
    assert narrow.schema() == "(Tensor A, Tensor B) -> Tensor"
    assert exporter._doc(narrow) == "A (*rows, K) @ B (K, N) -> (*rows, N)."
    assert exporter._doc(ops.get("matmul")) == "A (*rows, K) @ B (K, N) + bias (N,) -> (*rows, N)."
    source = read_kernel(ROOT / "kernels/softmax.py")
    files = exporter.package(Project("my-tenth"), source, spec, None)
    assert "def tenth(x: Tensor, dim: int = -1) -> Tensor:" in files["op.py"] and "layers.py" not in files
    compile(files["op.py"], "op.py", "exec"), compile(files["reference.py"], "reference.py", "exec")
