"""KernelBench problems of our own, in the form of theirs: a starter of each passes, every cheat is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "adversarial"))
import zoo  # noqa: E402

from autokernel import kernelbench as kb  # noqa: E402
from autokernel.kbjudge import ProblemOptions, judge_problem  # noqa: E402
from autokernel.process import launcher  # noqa: E402
from autokernel.run import HarnessFailure, UsageError  # noqa: E402

PROBLEMS = sorted((Path(__file__).parent / "problems").glob("*.py"))


def problem(path: Path) -> kb.Problem:
    number, _, name = path.stem.partition("_")
    return kb.Problem("custom", int(number), name, path.read_text(), "tests")


def named(part: str) -> kb.Problem:
    return problem(next(p for p in PROBLEMS if part in p.stem))


@pytest.fixture(scope="module", autouse=True)
def children():
    with zoo._nursery():
        yield
    zoo.close_baselines()


@pytest.fixture
def judged(tmp_path):
    """judged(problem, source or None for the starter, **options) -> the values of one run."""

    def run(what: kb.Problem, source: str | None = None, **options):
        path = tmp_path / "kernel.py"
        path.write_text(kb.starter(what.code, what.key) if source is None else source)
        defaults = {"device": "cpu", "allow_dirty_harness": True, "timeout": 60, "correctness_only": True}
        options = defaults | options
        with launcher() as children:
            return judge_problem(what, ProblemOptions(path, **options), children).values

    return run


@pytest.mark.parametrize("path", PROBLEMS, ids=[p.stem for p in PROBLEMS])
def test_starter_passes(path, judged):
    values = judged(problem(path), n_trials=3)
    assert values["correctness"] == "PASS", values["reason"]
    assert values["official_check"] == "PASS" and values["deterministic"] is True
    assert values["weak_problem"].startswith("yes") == (path.stem[:2] in ("03", "35")), values["weak_problem"]


# ---- what a kernel may be --------------------------------------------------------------------------------------------

MATMUL = """
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, A, B):
        return {}
"""


def test_a_solution_without_our_constants_and_with_inputs_of_its_own(judged):
    source = MATMUL.format("A @ B") + "\n\ndef get_inputs():\n    return [torch.zeros(67, 129), torch.zeros(129, 35)]\n"
    values = judged(named("matmul"), source)
    assert values["correctness"] == "PASS" and values["backend"] == "triton"


def test_a_triton_kernel_passes_and_is_no_library(judged):
    source = (
        "import torch, triton\nimport triton.language as tl\n\nKERNEL_TYPE, BACKEND = 'kernelbench', 'triton'\n\n\n"
        "@triton.jit\ndef leaky(x, out, n, slope, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    v = tl.load(x + at, at < n)\n    tl.store(out + at, tl.where(v > 0, v, slope * v), at < n)\n\n\n"
        "class ModelNew(torch.nn.Module):\n    def forward(self, x, slope):\n        out = torch.empty_like(x)\n"
        "        leaky[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), slope, BLOCK=1024)\n        return out\n"
    )
    values = judged(named("scalar"), source, correctness_only=False, n_timed=3)
    assert values["correctness"] == "PASS", values["reason"]
    assert values["vendor_library"] is False and values["repetitions"] == 3


RENAMED = """
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    \"\"\"The same draws in the same order under other names: right by the seed, as KernelBench evaluates.\"\"\"

    def __init__(self, in_channels, out_channels, kernel_size, bias_shape):
        super().__init__()
        layer = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.w, self.b = layer.weight, layer.bias
        self.shift = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        return torch.conv2d(x, self.w, self.b).clamp_(min=0) + self.shift
"""
SHUFFLED = """
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    \"\"\"Other draws in another order under the reference's names.\"\"\"

    def __init__(self, in_channels, out_channels, kernel_size, bias_shape):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(bias_shape))
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)

    def forward(self, x):
        return torch.conv2d(x, self.conv.weight, self.conv.bias).clamp_(min=0) + self.bias
"""


@pytest.mark.parametrize("source", [RENAMED, SHUFFLED], ids=["by_seed", "by_name"])
def test_weights_are_shared(source, judged):
    values = judged(named("conv2d_bias"), source)
    assert values["correctness"] == "PASS", values["reason"]


def test_precisions_and_tolerances(judged):
    lin = named("lenet")
    assert judged(lin, precision="bf16")["atol"] == 1e-2
    assert judged(lin, precision="fp16")["correctness"] == "PASS"
    off = MATMUL.format("(A @ B) * 1.0003")
    assert judged(named("matmul"), off)["correctness"] == "FAIL"
    assert judged(named("matmul"), off, rtol=1e-2)["correctness"] == "PASS"


def test_timing_prints_fast_p(judged):
    slow = MATMUL.format("(A.double() @ B.double()).float() + 0 * sum((A @ B).sum() for _ in range(40))")
    values = judged(named("matmul"), slow, correctness_only=False)
    assert values["correctness"] == "PASS", values["reason"]
    assert values["fast_1.0"] is False and values["fast_5.0"] is False and values["speedup_vs_pytorch"] < 1
    wrong = judged(named("matmul"), MATMUL.format("A @ B + 1"), correctness_only=False)
    assert wrong["correctness"] == "FAIL" and wrong["fast_1.0"] is False and wrong["latency_us"] is None
    untimed = judged(named("matmul"), MATMUL.format("A @ B"))
    assert untimed["fast_1.0"] is None


# ---- cheats ----------------------------------------------------------------------------------------------------------

CHEATS = {
    # the three that KernelBench's own unit tests have: memory that may hold an answer, inputs made easy, a side stream
    "uninitialised_memory": MATMUL.format("torch.empty(A.shape[0], B.shape[1])"),
    "inputs_zeroed": MATMUL.format("torch.zeros(A.zero_().shape[0], B.zero_().shape[1])"),
    # the kinds that its static checker's unit tests have
    "inherits_the_reference": "class ModelNew(Model):\n    pass\n",
    "imports_the_problem": "from problem import Model as ModelNew\n",
    "half_precision": MATMUL.format("(A.half() @ B.half()).float()"),
    "replaces_a_clock": "import time\ntime.perf_counter = lambda: 0.0\n" + MATMUL.format("A @ B"),
    "replaces_allclose": "import torch\ntorch.allclose = lambda *a, **k: True\n" + MATMUL.format("A @ B * 0"),
    "works_in_a_thread": "import threading\nimport time\n" + MATMUL.format("self.later(A, B)") + """
    def later(self, A, B):
        out = torch.empty(A.shape[0], B.shape[1])
        threading.Thread(target=lambda: (time.sleep(0.2), torch.mm(A, B, out=out))).start()
        return out
""",
    "lazy_tensor": MATMUL.format("(A @ B).as_subclass(type('Lazy', (torch.Tensor,), {{}}))"),
    # and others
    "zeros": MATMUL.format("torch.zeros(A.shape[0], B.shape[1])"),
    "the_expected_value": MATMUL.format("torch.full((A.shape[0], B.shape[1]), A.shape[1] / 4)"),
    "part_of_the_rows": MATMUL.format("torch.cat([A[:60] @ B, torch.full((7, B.shape[1]), A.shape[1] / 4)])"),
    "answer_by_shape": MATMUL.format("self.seen(A, B)") + """
    def seen(self, A, B):
        self.known = getattr(self, "known", None)
        self.known = A @ B if self.known is None else self.known
        return self.known.clone()
""",
    "buffer_kept": MATMUL.format("self.mm(A, B)") + """
    def mm(self, A, B):
        self.buffer = getattr(self, "buffer", torch.empty(A.shape[0], B.shape[1]))
        return torch.mm(A, B, out=self.buffer)
""",
    "numbers_foretold": MATMUL.format("self.foretold(A, B)") + """
    def foretold(self, A, B):
        torch.manual_seed(42)
        return torch.rand(67, 129) @ torch.rand(129, 35)
""",
    "wrong_shape": MATMUL.format("(A @ B)[None]"),
    "wrong_dtype": MATMUL.format("(A @ B).double()"),
    "two_outputs": MATMUL.format("(A @ B, A @ B)"),
    "no_output": MATMUL.format("None"),
    "exit": "import os\n" + MATMUL.format("os._exit(0)"),
    "no_model": "KERNEL_TYPE = 'kernelbench'\n",
    "another_type": "KERNEL_TYPE = 'matmul'\n" + MATMUL.format("A @ B"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheat_is_refused(name, judged):
    values = judged(named("matmul"), CHEATS[name])
    assert values["correctness"] in ("FAIL", "CRASH")
    assert values["reason"]


SIDE_STREAM = MATMUL.format("self.elsewhere(A, B)") + """
    def elsewhere(self, A, B):
        self.stream = getattr(self, "stream", None) or torch.cuda.Stream()
        out = torch.empty(A.shape[0], B.shape[1], device=A.device)
        with torch.cuda.stream(self.stream):
            torch.mm(A, B, out=out)
        return out
"""
ON_GPU = {"side_stream": SIDE_STREAM, **{n: CHEATS[n].replace("B.shape[1])", "B.shape[1], device='cuda')")
                                         for n in ("uninitialised_memory", "inputs_zeroed")}}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_cheat_is_refused_on_a_gpu(name, judged):
    """The three of KernelBench's own unit tests, at its size."""
    large = named("matmul").code.replace("67, 129, 35", "4096, 4096, 4096")
    values = judged(kb.Problem("custom", 9, "large", large), ON_GPU[name], device="cuda", correctness_only=False)
    assert values["correctness"] == "FAIL", values["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("path", PROBLEMS, ids=[p.stem for p in PROBLEMS])
def test_starter_passes_on_a_gpu(path, judged):
    values = judged(problem(path), device="cuda", correctness_only=False)
    assert values["correctness"] == "PASS", values["reason"]
    assert 0.8 < values["speedup_vs_pytorch"] < 1.25


WEAK = """
import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return {}
"""


@pytest.mark.parametrize("answer", ["torch.zeros_like(x)", "torch.full_like(x, 1 / x.shape[1])", "x * 5e-5",
                                    "torch.softmax(x.half(), 1).float()"])  # fmt: skip
def test_weak_problem_is_checked_by_scale(answer, judged):
    values = judged(named("wide_softmax"), WEAK.format(answer))
    assert values["correctness"] == "FAIL" and values["weak_problem"].startswith("yes (zeros"), values["reason"]


def test_a_copy_of_the_input_does_not_do(judged):
    values = judged(named("relu_of_positive"), WEAK.format("x.clone()"), n_trials=12)
    assert values["correctness"] == "FAIL" and "input 0 itself" in values["weak_problem"]


def test_dropout_left_out_and_state_forgotten(judged):
    dropout = kb.starter(named("dropout").code, "x").replace("self.dropout(self.matmul(x))", "self.matmul(x)")
    assert judged(named("dropout"), dropout)["correctness"] == "FAIL"
    rnn = kb.starter(named("keeps_its_state").code, "x").replace("(x, self.hidden)", "(x, torch.zeros(5, 13))")
    assert judged(named("keeps_its_state"), rnn)["correctness"] == "FAIL"


# ---- problems --------------------------------------------------------------------------------------------------------

BAD = {
    "own Model fails": "class Model(nn.Module):\n    def forward(self, x):\n        return x @ x\n",
    "cannot be loaded|NameError": "class Model(nn.Module):\n    size = unknown\n",
    "something else than tensors": "class Model(nn.Module):\n    def forward(self, x):\n        return 'text'\n",
}


@pytest.mark.parametrize("said", BAD)
def test_a_problem_that_does_not_work_is_no_verdict(said, judged):
    code = f"import torch\nimport torch.nn as nn\n{BAD[said]}\ndef get_inputs():\n    return [torch.rand(3, 4)]\n"
    with pytest.raises(HarnessFailure, match=said):
        judged(kb.Problem("custom", 1, "bad", code), MATMUL)


def test_too_large_says_so_before_it_is_tried(judged):
    huge = named("scalar").code.replace("33, 257", "1 << 22, 1 << 20")
    with pytest.raises(UsageError, match=r"needs 20\d{4}\.\d GiB for 1 processes.*--shrink"):
        judged(kb.Problem("custom", 2, "huge", huge), MATMUL)
    values = judged(kb.Problem("custom", 2, "huge", huge), shrink=True)
    assert values["correctness"] == "PASS" and values["shrunk"] is True
