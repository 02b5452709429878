"""Hardware counters of one call, through Nsight Compute: the handful that decide the next experiment.

The kernel runs once more in a child of its own under `ncu`, outside every verdict and timing; clocks are left alone.
"""

from __future__ import annotations

import csv
import shutil
import time
from typing import Any

from autokernel.worker import Worker

SPEED = "pct_of_peak_sustained_elapsed"
METRICS = {
    "dram_pct": f"dram__throughput.avg.{SPEED}",
    "l2_pct": f"lts__throughput.avg.{SPEED}",
    "tensor_core_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fma_pct": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
LIMITERS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
}
STALLS = (
    "long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "mio_throttle", "lg_throttle", "wait",
    "not_selected", "no_instruction", "membar", "drain", "sleeping", "gmma", "tex_throttle", "dispatch_stall",
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
DURATION = "gpu__time_duration.sum"


class CountersMissing(RuntimeError):
    """No counters on this machine; one line with the reason."""


def command() -> list[str]:
    """The prefix that runs a program under ncu. Raises CountersMissing where ncu is not installed."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountersMissing("ncu is not on the PATH; it comes with Nsight Compute")
    names = [DURATION, *METRICS.values(), *LIMITERS.values(), *map(STALL.format, STALLS)]
    options = ["--clock-control", "none", "--profile-from-start", "off", "--print-units", "base", "--csv",
               "--metrics", ",".join(names)]
    return [ncu, *options]


def read(worker: Worker, timeout: float = 60) -> dict[str, Any]:
    """End a worker that ran under `command()` and read what ncu printed: the longest kernel's counters.

    Raises CountersMissing with ncu's own words when it was not allowed to count.
    """
    worker.child.sock.close()
    deadline = time.monotonic() + timeout
    while worker.child.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    worker.child.said.seek(0)
    return parse(worker.child.said.read().decode(errors="replace"))


def parse(text: str) -> dict[str, Any]:
    """ncu's CSV (one line per kernel and metric) -> counters of the kernel that took longest."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = [line for line in lines if "==ERROR==" in line or "ERR_" in line]
        raise CountersMissing(said[0].replace("==ERROR== ", "")[:200] if said else "ncu saw no kernel")
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[start:]):
        if row.get("Metric Value") is None:
            continue
        values = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        try:
            values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            continue  # "n/a" on this GPU
    return _summary(max(kernels.values(), key=lambda k: k.get(DURATION, 0.0)))


def _summary(kernel: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"ncu_kernel": kernel["kernel"][:80], "ncu_us": kernel.get(DURATION, 0.0) / 1e3}
    found |= {name: kernel.get(metric) for name, metric in METRICS.items()}
    limits = {name: kernel[metric] for name, metric in LIMITERS.items() if metric in kernel}
    found["occupancy_limiter"] = min(limits, key=lambda name: limits[name]) if limits else None
    stalls = {name: kernel[STALL.format(name)] for name in STALLS if STALL.format(name) in kernel}
    worst = sorted(stalls, key=lambda name: -stalls[name])[:3]
    found["top_stalls"] = ", ".join(f"{name} {stalls[name]:.2g}" for name in worst) or None
    return found

