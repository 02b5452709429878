"""Sweeps on a GPU: throughput, agreement with measuring alone, faults, two GPUs. The bars: one H200 and 16 cores."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from autokernel import space

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]
TILES = "BLOCK_M=64,128 BLOCK_N=128,256 BLOCK_K=64,128 GROUP_M=4,8 num_warps=4,8 num_stages=3..5"  # 96


def bench(kernel: Path, *arguments: str) -> tuple[dict, float]:
    """(the record, wall seconds) of bench.py."""
    began = time.perf_counter()
    command = [sys.executable, "bench.py", "--kernel", str(kernel), "--json", "--allow-dirty-harness", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), time.perf_counter() - began


def table(tmp_path: Path) -> list[dict[str, str]]:
    lines = [line.split("\t") for line in (tmp_path / "workspace" / "sweep.tsv").read_text().splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_matmul_96_variants(tmp_path):
    """1,000 an hour, 8 times less wall than one by one, every time within 2 % of that alone, the winner's too."""
    kernel = tmp_path / "kernel.py"
    shutil.copy(ROOT / "kernels" / "matmul.py", kernel)
    record, wall = bench(kernel, "--sweep", TILES, "--sizes", "large")
    rows = table(tmp_path)
    timed = sorted((r for r in rows if r["status"] == "timed"), key=lambda r: float(r["us"]))
    assert record["correctness"] == "PASS" and len(rows) == 96 and len(timed) >= 48
    assert record["sweep"]["variants_per_hour"] >= 1000
    names, walls = list(space.parse(TILES, kernel.read_bytes())), []
    data, alone = kernel.read_bytes(), {}
    for row in [timed[0], timed[1], timed[5], timed[len(timed) // 2], timed[-1]]:
        kernel.write_bytes(space.rewrite(data, {name: int(row[name]) for name in names}))
        values, seconds = bench(kernel, "--sizes", "large")
        walls.append(seconds)
        alone[row["variant"]] = values["latency_us"] / float(row["us"])
    assert max(abs(ratio - 1) for ratio in alone.values()) <= 0.02, alone
    assert 96 * statistics.mean(walls) / wall >= 8, (walls, wall)


def test_rmsnorm_cuda_32_variants(tmp_path):
    kernel = tmp_path / "kernel.py"
    shutil.copy(ROOT / "kernels" / "cuda" / "rmsnorm.py", kernel)
    record, wall = bench(kernel, "--sweep", "auto")
    rows = table(tmp_path)
    assert record["correctness"] == "PASS" and len(rows) == 32 and all(r["status"] == "timed" for r in rows), rows
    assert all(int(r["registers"]) > 0 for r in rows) and wall < 90, wall


FAULTY = '''import torch
import triton
import triton.language as tl
KERNEL_TYPE = "reduce"
BACKEND = "triton"
CONFIG = {"FAULT": "none"}
@triton.jit
def _kernel(x_ptr, flag_ptr, FAULT: tl.constexpr, BIG: tl.constexpr):
    if FAULT == "illegal":
        tl.store(x_ptr + (1 << 44), 1.0)
    if FAULT == "loop":
        while tl.load(flag_ptr, volatile=True) == 0:
            pass
    if FAULT == "shared":
        a = tl.load(x_ptr + tl.arange(0, BIG)[:, None] * 0 + tl.arange(0, BIG)[None, :] * 0).to(tl.float16)
        tl.store(flag_ptr, tl.sum(tl.sum(tl.dot(a, a), 0), 0).to(tl.int32) * 0)
    if FAULT == "syntax":
        tl.nonsense(x_ptr)
def kernel_fn(x, dim=-1):
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    _kernel[(1,)](x, flag, CONFIG["FAULT"], 1024 if CONFIG["FAULT"] == "shared" else 16)
    return x.sum(dim)
'''


def test_faults_cost_only_themselves(tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(FAULTY)
    bench(kernel, "--sweep", "FAULT=illegal,loop,shared,syntax,none,fine", "--sizes", "medium", "--timeout", "20")
    states = {row["FAULT"]: row["status"] for row in table(tmp_path)}
    assert states["none"] == states["fine"] == "timed" and states["illegal"] == "crash"
    assert states["loop"] == "timeout" and states["syntax"] == "compile_error"
    assert states["shared"] in ("out_of_resources", "compile_error", "timeout", "crash")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    """The same variants, 1.8 times as fast: enough of them that starting up does not count."""
    kernel, rates = tmp_path / "kernel.py", {}
    shutil.copy(ROOT / "kernels" / "matmul.py", kernel)
    ranges = TILES.replace("GROUP_M=4,8", "GROUP_M=2,4,8,16,32") + " PERSISTENT=true,false"  # 480
    for gpus in ("0", "0,1"):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # both compile
        record, _ = bench(kernel, "--sweep", ranges, "--sizes", "large", "--max-variants", "480", "--gpus", gpus)
        assert record["correctness"] == "PASS" and record["variants"] == 480
        rates[gpus] = record["sweep"]["variants_per_hour"], record["sweep"]["winner"]
    assert rates["0,1"][0] >= 1.8 * rates["0"][0], rates
