"""What a sweep leaves behind: the key block and the table of the best, sweep.tsv and sweep.png."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from autokernel.lab import GOOD
from autokernel.records import RunRecord, escape
from autokernel.report import shown
from autokernel.tables import width

if TYPE_CHECKING:
    from autokernel.sweep import Sweep

# printed after every sweep, in this order; `n/a` where there is none. The winner's own block is in last_run.json
KEYS = (
    "kernel_type", "backend", "device", "gpu_name", "target", "case", "gpus", "grid", "variants", "right", "timed",
    "failed", "present_us", "winner", "winner_us", "gain_pct", "correctness", "speedup_vs_pytorch", "speedup_vs_best",
    "written_back", "reason", "experiment", "variants_per_hour", "sweep_seconds", "judge_seconds", "files",
)  # fmt: skip
SHOWN = 8  # rows of the table


def named(config: Mapping[str, Any]) -> str:
    """BLOCK_M=64 num_warps=4"""
    return " ".join(f"{name}={value}" for name, value in config.items())


def block(record: RunRecord, this: Sweep) -> str:
    """The key block, then the best variants."""
    failed: dict[str, int] = {}
    for finding in this.findings.values():
        if finding.status not in GOOD:
            failed[finding.status] = failed.get(finding.status, 0) + 1
    values = {**{k: record.values.get(k) for k in KEYS if k != "reason"}, **this.values}
    winner = next((n for n, v in this.variants.items() if v.name == this.values["winner"]), None)
    number = this.values.get("experiment")
    values |= {
        "failed": ", ".join(f"{count} {status}" for status, count in sorted(failed.items())) or 0,
        "present_us": _us(this, 0), "winner_us": None if winner is None else _us(this, winner),
        "reason": this.values["reason"] or None,
        "files": f"workspace/{f'experiments/{number}/' if number else ''}sweep.tsv, sweep.png",
    }  # fmt: skip
    wide = max(map(len, KEYS)) + 1
    return "\n".join([*(f"{key + ':':<{wide}} {shown(values.get(key))}" for key in KEYS), "", table(this)])


def _us(this: Sweep, number: int) -> float | None:
    return next(iter(this.findings[number].us.values()), None)


def table(this: Sweep) -> str:
    """The fastest variants and the present one; without times those that are right."""
    best = this.ranked() or [n for n, f in this.findings.items() if f.status in GOOD]
    cells: list[list[Any]] = []
    for number in [*best[:SHOWN], *([0] if 0 in best[SHOWN:] else [])]:
        finding = this.findings[number]
        gain, noise = (None if math.isnan(v) else round(v, 2) for v in this.gain(number))
        cells.append([number, _us(this, number), gain, noise, finding.pairs or None,
                      *(finding.resources.get(k) for k in ("registers", "spill_bytes")),
                      this.variants[number].name + " (present)" * (number == 0)])  # fmt: skip
    names = ("#", "us", "gain %", "+-", "pairs", "regs", "spill", "variant")
    known = [at for at in range(len(names)) if any(row[at] is not None for row in cells)]
    rows = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for at in known:
        last = names[at] == "variant"
        rows.add_column(names[at], justify="left" if last else "right", no_wrap=not last, overflow="fold")
    for row in cells:
        rows.add_row(*("" if row[at] is None else shown(row[at]) for at in known))
    console = Console(width=width(), file=io.StringIO(), force_terminal=False)
    with console.capture() as captured:
        console.print(rows)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def tsv(this: Sweep) -> bytes:
    """Every variant, in the order of its number."""
    names = list(next(iter(this.configs.values())))
    sizes = list(dict.fromkeys(size for f in this.findings.values() for size in f.us))
    fixed = ["variant", "status", *(f"us_{s}" if i else "us" for i, s in enumerate(sizes or ["us"])),
             "speedup_vs_pytorch", "spread_pct", "pairs", "registers", "spill_bytes", "smem_bytes"]  # fmt: skip
    lines = [[*fixed, *(names or ["file"]), "reason"]]
    for number, f in sorted(this.findings.items()):
        cells = [number, f.status, *(f.us.get(s) for s in sizes or [""]), f.speedup]
        cells += [100 * f.spread if f.spread is not None else None, f.pairs]
        cells += [f.resources.get(k) for k in ("registers", "spill_bytes", "smem_bytes")]
        cells += [this.configs[number][name] for name in names] if names else [this.variants[number].name]
        lines.append([_cell(c) for c in [*cells, f.reason]])
    return "".join("\t".join(line) + "\n" for line in lines).encode("utf-8", "surrogateescape")


def _cell(value: Any) -> str:
    return "" if value is None else format(value, ".6g") if isinstance(value, float) else escape(str(value))


# ---- the picture ----------------------------------------------------------------------------------------------------


def picture(this: Sweep) -> bytes:
    """One panel a swept name: each variant's time over its value, and the best of each value. Files: one bar each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(next(iter(this.configs.values())))
    columns = min(4, len(names)) or 1
    rows = -(-len(names) // columns) or 1
    figure = Figure(figsize=(3.4 * columns + 0.8, 2.9 * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=bool(names)).flatten()
    for panel, name in zip(panels, names, strict=False):
        _panel(panel, this, name)
    if not names:
        _bars(panels[0], this)
    for panel in panels[len(names) or 1 :]:
        panel.set_axis_off()
    device = "times, the best of each value marked" if this.ranked() else "no times"
    figure.suptitle(f"{this.source.kernel_type} {this.values['case']}: {device}", fontsize=10)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _panel(panel: Any, this: Sweep, name: str) -> None:
    values = sorted({c[name] for c in this.configs.values()}, key=lambda v: (str(type(v)), v))
    timed, present = this.ranked(), this.configs[0][name]
    for at, value in enumerate(values):
        mine = [n for n, c in this.configs.items() if c[name] == value and n in this.findings]
        if timed:
            us = [us for n in mine if n in timed and (us := _us(this, n))]
            panel.scatter([at] * len(us), us, s=12, color="tab:blue", alpha=0.35, linewidths=0)
            if us:
                panel.plot([at - 0.3, at + 0.3], [min(us)] * 2, color="tab:orange", lw=2)
        failed = sum(this.findings[n].status not in GOOD for n in mine)
        if failed and timed:
            panel.annotate(f"{failed} failed", (at, 0.98), xycoords=("data", "axes fraction"), ha="center", va="top",
                           fontsize=7, color="tab:red")  # fmt: skip
        elif not timed:
            panel.bar([at, at], [len(mine) - failed, failed], bottom=[0, len(mine) - failed], width=0.6,
                      color=["tab:green", "tab:red"])  # fmt: skip
    if timed:
        panel.set_yscale("log")
        panel.margins(y=0.15)  # room for what is written above
        panel.yaxis.set_major_formatter("{x:.4g}")
        panel.yaxis.set_minor_formatter("{x:.4g}")
        panel.tick_params(axis="y", which="both", labelsize=7)
    panel.set_ylabel("us" if timed else "variants: right, failed", fontsize=8)
    panel.set_xticks(range(len(values)), [f"{v!r}" + "\n(present)" * (v == present) for v in values], fontsize=7)
    panel.set_xlim(-0.6, len(values) - 0.4)
    panel.set_title(name, fontsize=9)


def _bars(panel: Any, this: Sweep) -> None:
    numbers = list(this.variants)
    us = [_us(this, n) or 0.0 for n in numbers]
    panel.barh(range(len(numbers)), us, color=["tab:orange" if n == 0 else "tab:blue" for n in numbers])
    labels = [f"{this.variants[n].name}: {this.findings[n].status}" for n in numbers]
    panel.set_yticks(range(len(numbers)), labels, fontsize=7)
    panel.invert_yaxis()
    panel.set_xlabel("us" if any(us) else "no times", fontsize=8)
