"""verify.py on a GPU: every launch mode of a small model, and the bars of the shipped models with starters only."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from autokernel import verification
from autokernel.apply import Kernels
from autokernel.models import Loaded
from autokernel.paths import repo_root
from models.gpt2 import GPT2
from tests.test_verify import assert_same, calls, everything

pytestmark = pytest.mark.gpu
ROOT = repo_root()
BARS = {  # model, class, input -> least ratio in a CUDA graph
    "gpt2": ("models/gpt2.py", "GPT2", "1,1024", 1.5),
    "llama": ("models/llama_7b.py", "LlamaModel", "1,512", 1.05),
    "bert": ("models/bert_base.py", "BertModel", "8,512", 1.05),
    "llama7b": ("models/llama_7b.py", "LlamaModel7B", "1,2048", 1.05),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    with torch.device("cuda"):
        return GPT2(vocab=1003, length=256, dim=256, layers=2, heads=4).half().eval()


def test_every_mode_of_a_small_model(model):
    ids = torch.randint(0, 1003, (2, 200), device="cuda")
    before = everything(model)
    options = verification.Options(everything=True, starters=True)
    values = verification.Verification(
        Loaded(model, "GPT2", (ids,), device=torch.device("cuda:0")), Kernels.starters(("triton",)), options, print
    ).run()
    assert values["correct"] and values["status"] in (0, 1), values["headline"]
    modes = ("eager", "torch.compile")
    assert set(values["modes"]) == {*modes, *(f"{m} in a CUDA graph" for m in modes)}, values["notes"]
    for mode in values["modes"].values():
        assert mode["used"] and mode["ours_device_ms"] <= 1.2 * mode["ours_ms"] and mode["ours_peak_mb"] > 0
    assert all(r["pytorch_us"] > 0 and r["ours_us"] > 0 and r["contribution"] for r in values["rows"] if r["used"])
    assert values["top1_agreement"] >= values["top1_agreement_pytorch"] - 0.02
    assert_same(before, everything(model))


def test_a_wrong_kernel_on_a_gpu(model, tmp_path):
    from autokernel.apply import Kernel
    from autokernel.source import read_kernel

    path = tmp_path / "wrong.py"
    path.write_text((ROOT / "kernels/layernorm.py").read_text().replace("    return out\n", "    return out * 1.02\n"))
    ids = torch.randint(0, 1003, (2, 200), device="cuda")
    others = [k for k in Kernels.starters(("triton",)).kernels if k.source.kernel_type != "layernorm"]
    kernels = Kernels((Kernel("wrong", read_kernel(path)), *others))
    loaded = Loaded(model, "GPT2", (ids,), device=torch.device("cuda:0"))
    options = verification.Options(diagnose=True, everything=True)
    values = verification.Verification(loaded, kernels, options, print).run()
    assert values["status"] == 2 and values["culprits"][0]["kernel"] == "wrong"


def test_the_library_call_under_torch_compile(model):
    ids = torch.randint(0, 1003, (2, 200), device="cuda")
    with torch.no_grad(), Kernels.starters(("triton",)).apply(model, ids) as applied:
        want, served = applied.original(ids), calls(applied)
        got = torch.compile(model, fullgraph=True)(ids)
        assert calls(applied) == 2 * served
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BARS)
def test_bar(name, tmp_path):
    file, class_name, shape, least = BARS[name]
    command = [sys.executable, "verify.py", "--starters", "--model", file, "--class-name", class_name, "--json",
               "--input-shape", shape, "--dtype", "float16", "--workspace", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode in (0, 1), done.stderr + done.stdout[-2000:]
    values = json.loads(done.stdout)
    print(values["headline"], json.dumps(values["modes"], indent=1), values["notes"], sep="\n")
    modes = values["modes"]
    assert values["correct"] and modes["eager in a CUDA graph"]["speedup"] >= least
    compiled = modes["torch.compile"]  # where no kernel pays the mode is PyTorch's own
    assert compiled["speedup"] >= 0.97 or not compiled["used"]
