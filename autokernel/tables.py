"""Tables for people: one line a row where the terminal is wide, two where it is narrow. No torch: it must be quick."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

CPU = "times are a CPU's, not a measurement; shares hold for this CPU only"
HEADER = ("#", "operator", "where", "shape", "dtype", "calls", "ms", "share", "cum", "bound", "roof", "at most")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    at_most = f"{row['at_most']:.2f}x" if row["at_most"] else "n/a"
    return (
        str(row["rank"]), row["op"], row["where"], row["shape"], row["dtype"], str(row["calls"] or "?"),
        f"{row['ms']:.4g}", percent(100 * row["share"]), percent(100 * row["cumulative"]),
        row["bound"] or "n/a", percent(row["pct_roofline"]), at_most,
    )  # fmt: skip


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f}%" if value < 99.95 else f"{value:.0f}%"


def table(rows: list[tuple[str, ...]], columns: int) -> list[str]:
    """Aligned lines, one a row where there is room for all of it, else where and shape below the numbers."""
    numbers = [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]
    wide = {i: max(len(r[i]) for r in [HEADER, *rows]) for i in range(len(HEADER))}
    fixed = sum(wide[i] + 2 for i in numbers)
    if fixed + wide[2] + 2 + wide[3] <= columns:
        return [_line(r, range(len(HEADER)), wide) for r in [HEADER, *rows]]
    indent = " " * (wide[0] + 2)
    lines = [_line(HEADER, numbers, wide), f"{indent}where, shape"]
    for row in rows:
        below = textwrap.wrap(f"{row[2]}  {row[3]}", columns, initial_indent=indent, subsequent_indent=indent)
        lines += [_line(row, numbers, wide), *below]
    return lines


def _line(row: tuple[str, ...], columns: Iterable[int], wide: dict[int, int]) -> str:
    left = (1, 2, 3, 4, 9)
    words = [row[i].ljust(wide[i]) if i in left else row[i].rjust(wide[i]) for i in columns]
    return "  ".join(words).rstrip()


def summary(v: dict[str, Any], top: int = 25) -> str:
    """What profile.py prints: the totals, the table of targets, the rest, notes."""
    room = width()
    kind = "device time" if v["device"] != "cpu" else "CPU time"
    pairs = {
        "model": f"{v['model']}, {count(v['parameters'])} parameters, {v['dtype']}",
        "inputs": v["inputs"],
        "device": v["device"] if v["device"] != "cpu" else f"cpu ({CPU})",
        kind: f"{v['total_ms']:.4g} ms a forward (the model as it is: {v['as_is_ms']:.4g} ms)",
        **{mode: f"{ms:.4g} ms wall" for mode, ms in v["modes_ms"].items()},
        "in sites": f"{_share(v['time_in_sites'])} of the time, {_share(v['flops_in_sites'])} of "
                    f"{v['flops'] / 1e9:.4g} GFLOP",
    }  # fmt: skip
    lines = [line for key, text in pairs.items() for line in wrapped(f"{key + ':':<28} {text}", 29)]
    if v["targets"]:
        lines += ["", *table([cells(r) for r in v["targets"][:top]], room)]
    if any((r["pct_roofline"] or 0) > 100 for r in v["targets"][:top]):
        lines.append("above 100 %: the data still lay in the GPU's L2 cache")
    if (more := len(v["targets"]) - top) > 0:
        lines.append(f"... and {more} more targets (--top, or workspace/profile.json)")
    if v["other"]:
        lines += ["", "other (no operator of ours; not extracted)", *_other_lines(v["other"], room, top)]
    lines += [""] * bool(v["notes"]) + [line for n in v["notes"] for line in wrapped(f"note: {n}")]
    return "\n".join(lines + [line for text in verdict(v) for line in wrapped(text) or [""]])


def count(number: int) -> str:
    """`124.4M`, `32.1K`, `640`."""
    scale, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= s), (1.0, ""))
    return f"{number / scale:.1f}{unit}" if unit else str(number)


def _share(value: float | None) -> str:
    return percent(None if value is None else 100 * value)


def _other_lines(rows: list[dict[str, Any]], width: int, top: int) -> list[str]:
    shown, lines = [r for r in rows if r["share"] >= 0.001][: max(5, top // 2)], []
    for row in shown:
        text = f"  {row['ms']:>8.4g} ms {100 * row['share']:>5.1f}%  {row['op']} {row['shape']} {row['dtype']}".rstrip()
        lines += textwrap.wrap(f"{text}  {row['where']}", width, subsequent_indent=" " * 20)
        if row["reason"]:
            lines += textwrap.wrap(row["reason"], width, initial_indent=" " * 20, subsequent_indent=" " * 20)
    if hidden := rows[len(shown) :]:
        ms, share = sum(r["ms"] for r in hidden), sum(r["share"] for r in hidden)
        lines.append(f"  {ms:>8.4g} ms {100 * share:>5.1f}%  {len(hidden)} more operators")
    return lines


def verdict(v: dict[str, Any]) -> list[str]:
    """What follows from the launch modes: is the model launch-bound, and what do free measures give?"""
    modes: dict[str, float] = v["modes_ms"]
    lines: list[str] = []
    eager = modes.get("eager")
    if v["device"] == "cpu" or not eager:
        return lines
    busy = v["as_is_ms"] / eager
    if busy < 0.8:
        lines.append(
            f"The model is launch-bound: the GPU works {100 * busy:.0f}% of the {eager:.4g} ms; "
            "faster kernels show only where launches are hidden (a CUDA graph)."
        )
    for mode, ms in modes.items():
        if mode != "eager" and ms:
            lines.append(f"{mode} by itself: {eager / ms:.2f}x ({ms:.4g} ms)")
    return [""] * bool(lines) + lines


def width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def wrapped(text: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(text, width(), subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
