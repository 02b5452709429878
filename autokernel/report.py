"""What people and agents read: the key block, the table of sizes, the progress line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from autokernel.run import KEYS
from autokernel.targets import shown_size

# column of the table of sizes -> key of a size's values, width; 80 columns in all
COLUMNS = {
    "size": ("size", 14), "dtype": ("dtype", 5), "us": ("latency_us", 9), "pytorch_us": ("pytorch_latency_us", 10),
    "speedup": ("speedup_vs_pytorch", 7), "TFLOP/s": ("throughput_tflops", 8), "GB/s": ("bandwidth_gb_s", 6),
    "%peak": ("pct_peak", 5),
}  # fmt: skip


def shown(value: Any) -> str:
    """A value as a reader wants it: three to four significant digits, `n/a` for what is not known."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value == 0 or 0.01 <= abs(value) < 1000:
            return f"{value:.4g}" if abs(value) < 100 else f"{value:.1f}"
        return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3e}"
    if isinstance(value, list):
        value = ("; ".join(map(str, value[:3])) + f"; {len(value) - 3} more" * (len(value) > 3)) or "none"
    return "".join(c if c.isprintable() else " " for c in str(value))


def block(values: dict[str, Any], keys: tuple[str, ...] = KEYS) -> str:
    """The aligned key block, then one row per size."""
    width = max(map(len, keys)) + 1
    lines = []
    for key in keys:
        text = shown(values.get(key))
        if key == "speedup_vs_best" and values.get(key) is not None:
            text += f" +-{values['gain_spread_pct'] / 100:.4f}"
        lines.append(f"{key + ':':<{width}} {text}")
    lines += [f"{name + ':':<{width}} {shown(value)}" for name, value in (values.get("counters") or {}).items()]
    lines += table(values.get("sizes") or [])
    return "\n".join(lines + (kernels(values["profile"]) if values.get("profile") else []))


def table(sizes: list[dict[str, Any]]) -> list[str]:
    """One row a size, its shape below."""
    if not sizes:
        return []
    rows = [["size", *list(COLUMNS)[1:]]]
    for size in sizes:
        bound = "compute" if size.get("bottleneck") == "compute" else "bandwidth"
        peak = {"pct_peak": size.get(f"pct_peak_{bound}")}
        rows.append([shown({**size, **peak}.get(key)) for key, _ in COLUMNS.values()])
    aligned = [f"{'<' if i == 0 else '>'}{width}" for i, (_, width) in enumerate(COLUMNS.values())]
    lines = ["  ".join(format(c, how) for c, how in zip(row, aligned, strict=True)).rstrip() for row in rows]
    shapes = ["", *(f"  {shown_size(size['axes'])}" if size.get("axes") else "" for size in sizes)]
    return ["", *(line for pair in zip(lines, shapes, strict=True) for line in pair if line)]


def kernels(rows: list[dict[str, Any]]) -> list[str]:
    """The table of --profile: per call, which kernels ran and for how long."""
    lines = ["", "calls        us  kernel (workspace/profile/trace.json has the timeline)"]
    return lines + [f"{row['calls']:>5.3g}  {row['us']:>8.2f}  {row['kernel'][:90]}" for row in rows]


def calibration(values: Any) -> str:
    """What --calibrate measured."""
    rows = {"copy_gb_s": values.copy_gb_s, "read_gb_s": values.read_gb_s}
    rows |= {f"{name}_tflops": rate for name, rate in values.tflops.items()}
    return "\n".join(f"{name + ':':<16} {shown(value)}" for name, value in rows.items())


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done; silent unless stderr is a terminal."""
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)
