"""bench.py on a GPU: faults get a verdict in time and the next run is unharmed; the roofline stays below 100 %."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.gpu

TRITON = '''import torch
import triton
import triton.language as tl
KERNEL_TYPE = "reduce"
BACKEND = "triton"
@triton.jit
def _kernel(x_ptr, flag_ptr):
    {body}
def kernel_fn(x, dim=-1):
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    _kernel[(1,)](x, flag)
    return x.sum(dim)
'''
FAULTS = {
    "endless loop": ("while tl.load(flag_ptr, volatile=True) == 0:\n        pass", "TIMEOUT", "no answer within 10 s"),
    "illegal access": ("tl.store(x_ptr + (1 << 44), 1.0)", "CRASH", "illegal memory access"),
    "write beyond an input": ("tl.store(x_ptr - 2, 1.0)", "FAIL", "overwritten"),
    "does not compile": ("tl.nonsense(x_ptr)", "CRASH", "nonsense"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_device_faults_get_a_verdict_and_harm_nothing(fault, judge):
    body, outcome, words = FAULTS[fault]
    values = judge(TRITON.format(body=body), timeout=10)
    assert values["correctness"] == outcome and words in values["reason"], values["reason"]
    assert judge(TRITON.format(body="pass"), quick=True)["correctness"] == "PASS"


def test_out_of_memory(judge):
    hog = "    torch.empty(1 << 42, dtype=torch.uint8, device=x.device)\n    flag ="
    body = TRITON.format(body="pass").replace("    flag =", hog)
    values = judge(body)
    assert values["correctness"] == "CRASH" and "OutOfMemoryError" in values["reason"]


@pytest.mark.parametrize("op", ["matmul", "rmsnorm"])
def test_numbers_of_a_starter(op, judge):
    values = judge(ROOT / "kernels" / f"{op}.py", best=ROOT / "kernels" / f"{op}.py", quick=True)
    assert values["correctness"] == "PASS", values["reason"]
    for size in values["sizes"]:
        percents = [size[k] for k in size if k.startswith("pct_") and size[k] is not None]
        assert percents and max(percents) <= 100
        assert abs(size["paired_gain_pct"]) < 2 and size["peak_vram_mb"] > 0 and size["launch_us"] > 1
