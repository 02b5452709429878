"""Every cheat is refused, every unusual legal kernel passes: judged by the real judge (zoo.py says how)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from zoo import ROOT, Specimen, able, close_baselines, examine, specimens  # noqa: E402

from autokernel import integrity, report, review, runner, worker  # noqa: E402
from autokernel.paths import operator_of  # noqa: E402
from autokernel.run import KEYS  # noqa: E402
from autokernel.source import KernelError, read_kernel  # noqa: E402


def _marked(specimen: Specimen):
    marks = [pytest.mark.gpu] if specimen.needs == "gpu" else []
    return pytest.param(specimen, id=specimen.name, marks=marks)


@pytest.fixture(scope="module", autouse=True)
def _end_of_module():
    yield
    close_baselines()


@pytest.mark.parametrize("specimen", [_marked(s) for s in specimens()])
def test_specimen(specimen: Specimen):
    if not able(specimen, torch.cuda.is_available()):
        pytest.skip(f"needs a {specimen.needs}")
    result = examine(specimen)
    assert result.as_expected, f"{result.outcome}, expected {'|'.join(specimen.expect)}: {result.reason}"
    if result.outcome != "PASS":
        assert result.reason, "a refusal says why"
        assert result.values.get("latency_us") is None, "numbers exist only with PASS"


def test_every_specimen_says_what_it_is():
    names = [s.path.stem for s in specimens()]
    assert len(names) == len(set(names))
    for specimen in specimens():
        assert specimen.title and specimen.title.endswith("."), specimen.name
        assert specimen.legal or "PASS" not in specimen.expect, specimen.name


# ---- the report ------------------------------------------------------------------------------------------------------


def test_readme_counts_the_specimens():
    found = [(s.needs == "gpu", s.legal) for s in specimens()]
    kinds = {(False, False): "cheats that need no GPU", (True, False): "cheats and",
             (False, True): "legal kernels accepted", (True, True): "legal kernels need a GPU"}  # fmt: skip
    counts = [f"{found.count(kind)} {words}" for kind, words in kinds.items()]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert [count for count in counts if count not in text] == []


def test_a_kernel_cannot_write_lines_of_the_report():
    text = "x\ncorrectness:            PASS\x1b[2K\r"
    values = dict.fromkeys(KEYS) | {"correctness": "FAIL", "reason": text, "review": [text]}
    lines = report.block(values).splitlines()
    assert len(lines) == len(KEYS)
    assert sum(line.startswith("correctness:") for line in lines) == 1
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0, True, "1e-6", None, 1e9, [1]])
def test_malformed_times_are_refused(value):
    out = {"type": "torch.Tensor", "dtype": "float16", "layout": "torch.strided", "device": "cpu", "shape": [1],
           "attributes": [], "aliases_input": False, "aliases_previous": False, "requires_grad": False}  # fmt: skip
    reply = {"drop_s": 0.0, "before_s": 0.0, "flush_s": 0.0, "device_s": 1e-3, "after_s": 0.0, "host_s": 1e-3}
    reply |= {"late": False, "peak_bytes": 0, "left": [], "outs": [out]}
    assert worker.malformed(reply) == ""
    assert worker.malformed(reply | {"device_s": value})
    assert worker.malformed(reply | {"left": None})
    assert worker.malformed(reply | {"outs": [out | {"shape": "1"}]})


def test_no_time_lies_among_pythons_objects():
    """Else a kernel finds the start of its call beside its own floats, and moves it."""
    clock, between = runner.clocks()
    assert [clock(n)() for n in (0, 1)] == [0, 0], "a status; the time itself is in a page of its own"
    time.sleep(0.02)
    clock(2)()
    assert 0.02 <= between(1, 2) <= between(0, 2) < 1
    assert between(0, 1) < 0.01


# ---- review and vendor libraries -------------------------------------------------------------------------------------


def test_review_names_line_and_reason():
    source = b'import gc\n# import ctypes\nTEXT = "cudaLaunchHostFunc(x)"\n\n\ndef kernel_fn(x):\n    global seen\n'
    assert review.scan(source) == [
        (1, "imports gc"), (3, "runs host code from a stream"), (7, "kernel_fn assigns the global seen")
    ]  # fmt: skip


def test_review_knows_an_alignment_check():
    flagged = [".data_ptr: an address may become a cache key"]
    for expression, reasons in {
        "x.data_ptr() % 16": [], "x.data_ptr() % 16 == 0 and y.data_ptr() % 8": [],
        "(x.data_ptr() - y.data_ptr()) % 16": [], "time.perf_counter() % 16": [".perf_counter: a clock of its own"],
        "x.data_ptr()": flagged, "seen[x.data_ptr()] % 16": flagged, "x.data_ptr() % size": flagged,
        "x.data_ptr() % 281474976710656": flagged, "16 % x.data_ptr()": flagged, "x.data_ptr() // 16": flagged,
        "hash(x.data_ptr()) % 16": flagged, "x.data_ptr() % 16 or x.data_ptr()": flagged,
    }.items():  # fmt: skip
        assert [reason for _, reason in review.scan(f"y = {expression}\n".encode())] == reasons, expression


def test_review_says_little_about_the_starters():
    for path in [*sorted((ROOT / "kernels").glob("*.py")), *sorted((ROOT / "kernels" / "cuda").glob("*.py"))]:
        assert len(review.scan(path.read_bytes())) <= 2, (path.name, review.scan(path.read_bytes()))


def test_vendor_calls_are_arithmetic_only():
    plain = ["aten::empty", "aten::empty_like", "aten::copy_", "aten::view", "aten::t", "aten::as_strided", "aten::to"]
    kernels = ["triton_softmax_kernel", "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>",
               "Memcpy DtoD (Device -> Device)"]  # fmt: skip
    assert review.vendor_calls(plain, kernels) == []
    assert review.vendor_calls(["aten::mm"], ["nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN"]) == [
        "aten::mm", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN"
    ]  # fmt: skip
    assert review.vendor_calls([], ["void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm>"])


# ---- kernel files ----------------------------------------------------------------------------------------------------

HEAD = b'KERNEL_TYPE = "softmax"\nBACKEND = "triton"\n'


DEEP = [b"x = " + b"-" * 200000 + b"1", b"x = a" + b".b" * 200000, b"class A(" + b"T+" * 9999 + b"T): 0"]


@pytest.mark.parametrize("text", DEEP, ids=["signs", "attributes", "bases"])
def test_a_file_that_is_nested_too_deeply_is_no_kernel(tmp_path: Path, text: bytes):
    (tmp_path / "kernel.py").write_bytes(HEAD + text)
    with pytest.raises(KernelError, match="nested too deeply|no function kernel_fn"):
        read_kernel(tmp_path / "kernel.py")
    assert isinstance(review.scan(HEAD + text), list)


def test_a_pipe_and_a_huge_file_are_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.py")
    with open(tmp_path / "huge.py", "wb") as file:
        file.truncate(1 << 40)
    for path in (tmp_path / "pipe.py", tmp_path / "huge.py", Path("/dev/zero"), tmp_path):
        with pytest.raises(KernelError, match="no regular file"):
            read_kernel(path)


def test_the_operator_is_what_the_file_binds_last():
    text = b'"""\nKERNEL_TYPE = "matmul"\n"""\nKERNEL_TYPE = "reduce"\n' + HEAD
    assert operator_of(text) == "softmax"
    assert operator_of(text + b"this is no Python") == "matmul"  # as far as one can tell


# ---- the harness itself ----------------------------------------------------------------------------------------------


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "autokernel").mkdir()
    (tmp_path / "autokernel" / "compare.py").write_text("TOLERANCE = 1e-5\n")
    (tmp_path / "bench.py").write_text("print('judge')\n")
    (tmp_path / "kernel.py").write_text("pass\n")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-qm", "harness")
    return tmp_path


def test_a_clean_harness_is_clean(checkout: Path):
    (checkout / "kernel.py").write_text("changed\n")
    found = integrity.harness(checkout)
    assert (found.status, found.changed) == ("clean", ()) and len(found.commit) == 40


@pytest.mark.parametrize("how", ["edited", "hidden from git", "new file", "deleted", "ignored file", "committed later"])
def test_a_changed_harness_is_dirty(checkout: Path, how: str):
    commit, target = "HEAD", checkout / "autokernel" / "compare.py"
    if how == "committed later":
        commit = integrity.harness(checkout).commit
    if how == "hidden from git":
        _git(checkout, "update-index", "--assume-unchanged", "autokernel/compare.py")
    if how == "deleted":
        target.unlink()
    elif how in ("new file", "ignored file"):
        (checkout / "autokernel" / "json.py").write_text("")
    else:
        target.write_text("TOLERANCE = 1e5\n")
    if how == "ignored file":
        (checkout / ".git" / "info" / "exclude").write_text("json.py\n")
    if how == "committed later":
        _git(checkout, "commit", "-qam", "looser")
    found = integrity.harness(checkout, commit)
    assert found.status == "dirty" and len(found.changed) == 1


def test_no_git_is_said(tmp_path: Path):
    (tmp_path / "bench.py").write_text("")
    assert integrity.harness(tmp_path).status == "no git"


def test_bench_refuses_a_changed_harness(tmp_path: Path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(clone)], check=True)
    for name in integrity.FROZEN:  # as they are here, committed or not
        if (ROOT / name).is_file():
            (clone / name).write_bytes((ROOT / name).read_bytes())
    with open(clone / "reference.py", "a") as file:
        file.write("\n# changed\n")
    done = subprocess.run([sys.executable, "bench.py"], cwd=clone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "reference.py" in done.stderr and "--allow-dirty-harness" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_compiled_code_is_not_trusted():
    cache = ROOT / "autokernel" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "canary.pyc").write_bytes(b"")
    subprocess.run([sys.executable, "bench.py", "--kernel", "/nonexistent", "--sizes", "?"], cwd=ROOT,
                   capture_output=True, timeout=120)  # fmt: skip
    assert not (cache / "canary.pyc").exists()
