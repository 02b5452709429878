"""bench.py as people and agents use it: every starter passes, every mistake gets one line, nothing is left behind."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autokernel import counters, ops, report, runner, timing, worker
from autokernel.run import KEYS, UsageError
from autokernel.timing import CPU_REPETITIONS

ROOT = Path(__file__).resolve().parent.parent
GOOD = '''KERNEL_TYPE = "reduce"
BACKEND = "triton"
def kernel_fn(x, dim=-1):
    {body}
    return x.sum(dim)
'''


def reduce_with(body: str) -> str:
    return GOOD.format(body=body)


@pytest.mark.parametrize("op", ops.names())
def test_starters_pass(op, judge):
    values = judge(ROOT / "kernels" / f"{op}.py")
    assert values["correctness"] == "PASS", values["reason"]
    assert all(values[stage].startswith("PASS") for stage in ("smoke_test", "shape_sweep", "edge_cases"))
    assert values["latency_us"] > 0 and values["gpu_name"] is None and values["pct_peak_compute"] is None
    assert "not a measurement" in report.block(values)


@pytest.mark.parametrize("op", ["matmul", "reduce"])
def test_threads_of_libraries_are_no_work_of_the_kernels(op, judge, monkeypatch):
    """A user sets no OMP_NUM_THREADS, unlike these tests: the threads of numpy and PyTorch take part."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    values = judge(ROOT / "kernels" / f"{op}.py")
    assert values["correctness"] == "PASS", values["reason"]


def test_kernel_py_is_the_matmul_starter():
    assert (ROOT / "kernel.py").read_bytes() == (ROOT / "kernels" / "matmul.py").read_bytes()


def test_starters_take_few_large_tiles_in_the_interpreter():
    """GPT2's head, fp32, was 37,728 steps of 6 ms: no call ended within the judge's limit."""
    matmul, mlp, attention = (runner.by_path(op, ROOT / "kernels" / f"{op}.py")
                              for op in ("matmul", "fused_mlp", "flash_attention"))  # fmt: skip
    m, n, k, *_ = matmul._tiling(torch.empty(64, 768), 50257)
    assert m == 64 and -(-50257 // n) * -(-768 // k) < 1000
    m, n, k, *_ = mlp._tiling(torch.empty(64, 768), 3072, mlp.CONFIG["GATE_BLOCK_N"], True)
    assert m == 64 and (3072 // n) * (768 // k) < 200
    same = {attention._blocks(torch.empty(1, 1, 512, 64, dtype=d), 512, 64) for d in (torch.float32, torch.float16)}
    assert {blocks[:2] for blocks in same} == {(attention.CONFIG["BLOCK_M"], attention.CONFIG["BLOCK_N"])}


MISTAKES = {
    "syntax error": ("def kernel_fn(x:\n", ["kernel.py:1", "syntax error"]),
    "no KERNEL_TYPE": ("def kernel_fn(x): pass\n", ["no KERNEL_TYPE", "matmul"]),
    "unknown KERNEL_TYPE": (GOOD.replace('"reduce"', '"conv"'), ["unknown KERNEL_TYPE 'conv'", "flash_attention"]),
    "unknown BACKEND": (GOOD.replace('"triton"', '"metal"'), ["unknown BACKEND 'metal'", "cuda"]),
    "no kernel_fn": ('KERNEL_TYPE = "reduce"\n', ["no function kernel_fn", "kernel_fn(x, dim=-1)"]),
    "renamed parameter": (GOOD.replace("(x, dim=-1)", "(y, dim=-1)"), ["kernel.py:3", "lacks the parameter 'x'"]),
    "extra parameter": (GOOD.replace("(x, dim=-1)", "(x, flag, dim=-1)"), ["unknown parameter 'flag'"]),
    "positional only": (GOOD.replace("(x, dim=-1)", "(x, /, dim=-1)"), ["by name"]),
    "a null byte": ("\0", ["kernel.py:1"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_line(mistake, judge):
    source, words = MISTAKES[mistake]
    values = judge(source)
    assert values["correctness"] == "FAIL"
    assert "\n" not in values["reason"] and all(word in values["reason"] for word in words), values["reason"]
    printed = report.block(values)
    assert [line.split(":")[0] for line in printed.splitlines()] == list(KEYS)
    assert values["latency_us"] is None


def test_a_missing_file_says_which(judge, tmp_path):
    with pytest.raises(UsageError, match="nothing was judged: .*nowhere.py: No such file.*--kernel FILE"):
        judge(tmp_path / "nowhere.py")
    with pytest.raises(UsageError, match="nothing was judged: .*no regular file"):
        judge(tmp_path)


def test_unknown_size_lists_the_known(judge):
    with pytest.raises(UsageError, match="unknown --sizes 'giant' for reduce; known: all, small, medium, large"):
        judge(GOOD, sizes="giant")


FAULTS = {
    "raises": ("raise ValueError('boom')", "CRASH", "ValueError (kernel.py line 4): boom"),
    "exits": ("import os; os._exit(0)", "CRASH", "exit code 0"),
    "exits politely": ("raise SystemExit(0)", "CRASH", "SystemExit"),
    "hangs": ("while True: pass", "TIMEOUT", "within 5 s, killed; Triton's interpreter needs so long for many small"),
    "hangs in a native call": ("import time; time.sleep(3600)", "TIMEOUT", "no answer within 5 s"),
    "dies by a signal": ("import ctypes; ctypes.string_at(0)", "CRASH", "SIGSEGV"),
    "aborts in C++": ("import os; os.write(2, b'terminate called\\n  what():  CUDA error: bad address\\n'); os.abort()",
                      "CRASH", "killed by SIGABRT: what():  CUDA error: bad address"),
    "asks for all memory": ("import torch; torch.empty(1 << 60, dtype=torch.uint8)", "CRASH", "memory"),
    "returns nothing": ("return None", "FAIL", "returned an object of type NoneType"),
    "wrong dtype": ("return x.sum(dim).double()", "FAIL", "output dtype float64, expected float16"),
    "wrong shape": ("return x.sum(dim, keepdim=True)", "FAIL", "output shape"),
    "returns an input": ("return x[..., 0]", "FAIL", "shares memory with an input"),
    "writes an input": ("x.zero_()", "FAIL", "overwritten"),
    "zeros": ("import torch; return torch.zeros_like(x.sum(dim))", "FAIL", "elements off by more than"),
}  # fmt: skip


@pytest.mark.parametrize("times, outcome", [(1, "PASS"), (timing.ATTEMPTS, "FAIL")])
def test_clocks_that_disagree_once_are_chance(times, outcome, judge, monkeypatch):
    """A disturbed size is timed again; a kernel that hides work does so every time."""
    found = ["the judge's clock sees 522 us more"] * times

    def hidden(timed):
        assert {len(s.device) for s in timed.samples.values()} <= set(CPU_REPETITIONS)  # its own, no earlier ones
        return found.pop() if found else ""

    monkeypatch.setattr(timing, "_hidden_on_cpu", hidden)
    values = judge(GOOD.format(body="pass"), sizes="small")
    assert values["correctness"] == outcome and ("522 us" in str(values["reason"])) == (outcome == "FAIL")
    assert not found


TRITON = """import torch, triton
import triton.language as tl
KERNEL_TYPE = "reduce"

@triton.jit
def _inner(x):
    y = x + 1
    return tl.reshape(y, (3,))

@triton.autotune([triton.Config({})], key=[])
@triton.jit
def _outer(out):
    tl.store(out + tl.arange(0, 4), _inner(tl.arange(0, 4)))

def kernel_fn(x, dim=-1):
    _outer[(1,)](x.sum(dim))
"""
PLACE = TRITON.splitlines().index("    return tl.reshape(y, (3,))") + 1
COMPILING = """
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from autokernel import exposed
kernel = exposed.imported(sys.argv[1])
try:
    triton.compile(ASTSource(kernel._outer.fn, {"out": "*i32"}, {}), target=GPUTarget("cuda", 90, 32))
except Exception as error:
    print(exposed.error_of(exposed.Failure([error])))
"""


def test_a_crash_inside_a_triton_function_names_its_line(judge, tmp_path):
    """The deepest line of kernel.py, not the launch: in the interpreter, and as the compiler for a GPU reports it."""
    assert f"(kernel.py line {PLACE})" in judge(TRITON)["reason"]
    (tmp_path / "kernel.py").write_text(TRITON)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILING, str(tmp_path / "kernel.py")], cwd=ROOT, text=True,
                          env=environment, capture_output=True, timeout=120)  # fmt: skip
    said = worker._reported(ast.literal_eval(done.stdout))
    assert str(said).startswith(f"CompilationError (kernel.py line {PLACE}): at 3:11: "), str(said)
    assert "power of 2" in str(said)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_get_a_verdict(fault, judge):
    body, outcome, words = FAULTS[fault]
    values = judge(reduce_with(body), timeout=5)
    assert values["correctness"] == outcome and words in values["reason"], values["reason"]
    assert values["smoke_test"].startswith(outcome) and values["edge_cases"] == "not run"
    assert values["latency_us"] is None and "\n" not in values["reason"]


def test_the_next_run_is_unharmed_and_a_fork_is_ended(judge, tmp_path):
    mark = tmp_path / "alive"
    body = f"import os, time; os.fork() or (os.setsid(), time.sleep(20), open({str(mark)!r}, 'w'))"
    assert judge(reduce_with(body), timeout=5)["correctness"] != "PASS"
    assert judge(reduce_with("pass"), quick=True)["correctness"] == "PASS"
    processes = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not any(str(tmp_path).encode() in command for command in processes) and not mark.exists()


def test_quick_is_marked_and_skips_stages(judge):
    values = judge(reduce_with("pass"), quick=True)
    assert values["quick"] is True and values["shape_sweep"] == "not run (--quick)"


def test_best_is_timed_in_pairs(judge, tmp_path):
    best = tmp_path / "best.py"
    best.write_text(reduce_with("pass"))
    values = judge(reduce_with("import time; time.sleep(0.02)"), best=best, quick=True)
    assert 0 < values["speedup_vs_best"] < 0.7 and values["paired_gain_pct"] < -30
    assert values["keep_above_pct"] == max(25.0, values["noise_pct"], 1.5 * values["gain_spread_pct"])
    shape = ops.get("reduce").cpu_shapes[values["size"]]["shape"]
    assert f"\n  shape={'x'.join(map(str, shape))}" in report.block(values)


def test_command_line(tmp_path):
    """Exit status, the JSON record beside the block, and nothing written outside workspace and cache."""
    kernel = tmp_path / "mine.py"
    kernel.write_text(reduce_with("pass"))
    home = tmp_path / "home"
    home.mkdir()
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOKERNEL", "XDG"))}
    env = keep | {"HOME": str(home), "AUTOKERNEL_WORKSPACE": str(tmp_path / "workspace")}
    status = ["git", "status", "--porcelain", "--ignored"]
    before = subprocess.run(status, cwd=ROOT, capture_output=True, text=True).stdout
    command = [sys.executable, "bench.py", "--kernel", str(kernel), "--quick"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "workspace" / "last_run.json").read_text())
    assert f"correctness:{' ' * 12}PASS" in run.stdout and record["correctness"] == record["outcome"] == "PASS"
    assert max(map(len, run.stdout.splitlines())) <= 100 and run.stderr == ""
    assert {p.name for p in home.iterdir()} <= {".cache"}
    assert {p.name for p in (tmp_path / "workspace").iterdir()} == {"last_run.json", "runs", "runs.jsonl"}
    assert not any((tmp_path / "workspace" / "runs").iterdir())
    assert subprocess.run(status, cwd=ROOT, capture_output=True, text=True).stdout == before
    bad = subprocess.run([*command, "--sizes", "huge"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2 and bad.stderr.startswith("bench.py: unknown --sizes 'huge'") and not bad.stdout
    kernel.unlink()
    none = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert none.returncode == 2 and none.stderr.startswith("bench.py: nothing was judged: ") and not none.stdout


def test_counters_say_why_there_are_none(judge):
    values = judge(reduce_with("pass"), quick=True, ncu=True)
    assert values["counters"] == {"ncu": "no counters: no GPU here"} and "no counters" in report.block(values)


def test_counters_are_read_from_the_longest_kernel():
    head = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    rows = [("0", "small", "gpu__time_duration.sum", "ns", "1,000"),
            ("1", "large", "gpu__time_duration.sum", "ns", "9,000"),
            ("1", "large", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "91.5"),
            ("1", "large", "launch__occupancy_limit_registers", "block", "2"),
            ("1", "large", "launch__occupancy_limit_warps", "block", "8"),
            ("1", "large", counters.STALL.format("long_scoreboard"), "inst", "7.25"),
            ("1", "large", counters.STALL.format("wait"), "inst", "n/a")]  # fmt: skip
    text = "==PROF== noise\n" + head + "".join(f'"{i}","7","{k}","{m}","{u}","{v}"\n' for i, k, m, u, v in rows)
    found = counters.parse(text)
    assert found["ncu_kernel"] == "large" and found["ncu_us"] == 9 and found["dram_pct"] == 91.5
    assert found["occupancy_limiter"] == "registers"
    assert found["top_stalls"] == "long_scoreboard 7.2" and found["l2_pct"] is None
    with pytest.raises(counters.CountersMissing, match="ERR_NVGPUCTRPERM"):
        counters.parse("==ERROR== ERR_NVGPUCTRPERM - no permission\n")


@pytest.mark.nvcc
def test_cuda_without_a_gpu_is_compiled_not_run(judge):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    source = (ROOT / "kernels" / "cuda" / "reduce.py").read_text()
    values = judge(source, timeout=60)
    assert values["correctness"] == "FAIL" and values["reason"].startswith("compiled, not run")
    assert values["registers"] > 0 and values["spill_bytes"] == 0
    values = judge(source.replace('extern "C"', 'int broken = ;\nextern "C"', 1), timeout=60)
    assert values["correctness"] == "CRASH" and "CudaCompileError: CUDA_SRC line" in values["reason"]
    assert "int broken = ;" in values["traceback"] and "\n" not in values["reason"]


def test_cuda_without_nvcc_says_how_to_get_it(judge, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    reason = judge((ROOT / "kernels" / "cuda" / "reduce.py").read_text())["reason"]
    if not reason.startswith("compiled"):  # a toolkit in /usr/local/cuda or from pip is found without PATH
        assert reason.startswith("not compiled, not run")
        assert "--extra cuda" in reason or "install g++" in reason  # nvcc is missing, or its host compiler


def test_a_bad_best_is_a_bad_option(judge, tmp_path):
    with pytest.raises(UsageError, match="--best: .*No such file"):
        judge(reduce_with("pass"), best=tmp_path / "none.py")
