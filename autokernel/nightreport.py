"""The morning report: workspace/report.html (one file), report.md, progress.png. The measured model comes first."""

from __future__ import annotations

import base64
import html
import io
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from autokernel.digest import number, table  # noqa: E402
from autokernel.night import KEPT, Night, Work, gains, kept  # noqa: E402
from autokernel.paths import atomic_write, read_object, shared, workspace  # noqa: E402
from autokernel.records import Ledger, now  # noqa: E402

Block = tuple[str, Any]  # ("title" | "text" | "table" | "picture", content)
STYLE = ("body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}table{border-collapse:"
         "collapse}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}img{max-width:100%}")  # fmt: skip


def write(night: Night) -> str:
    """Write the three files; returns where they lie."""
    progress = _progress(night)
    blocks = [("title", f"AutoKernel: {night.tag}"), *_result(night), *_summary(night)]
    blocks.append(("picture", ("progress", progress)))
    for work in (w for w in night.works if w.experiments):
        blocks += _target(work)
    folder = workspace()
    atomic_write(folder / "progress.png", progress)
    for _, (name, data) in (b for b in blocks if b[0] == "picture"):
        atomic_write(folder / f"{name}.png", data)
    atomic_write(folder / "report.md", "\n\n".join(_markdown(b) for b in blocks).encode() + b"\n")
    body = "\n".join(_html(b) for b in blocks)
    head = f"<!doctype html><meta charset=utf-8><title>AutoKernel: {html.escape(night.tag)}</title>"
    atomic_write(folder / "report.html", f"{head}<style>{STYLE}</style>\n{body}\n".encode())
    return "\n".join(f"written: {folder / name}" for name in ("report.html", "report.md", "progress.png"))


# ---- what is in it --------------------------------------------------------------------------------------------------


def _result(night: Night) -> list[Block]:
    """The whole model as verify.py measured it, or the levels as scorer.py did; an estimate never stands there."""
    if levels := sorted({w.name.split("/")[1] for w in night.works if w.problem and w.plan}):
        return [("title2", "KernelBench"), *(("text", _level(level)) for level in levels)]
    path = workspace() / "verify.json"
    try:
        values = read_object(path)
        plain = {k: v for k, v in values.items() if not isinstance(v, (dict, list))}
        text = values.get("headline") or ", ".join(f"{k} {v}" for k, v in plain.items())
    except (OSError, ValueError):
        text = "Not measured yet. Speedups below are of single kernels; run uv run verify.py for the model's own."
    return [("title2", "The model, end to end"), ("text", text)]


def _level(level: str) -> str:
    try:
        v = read_object(shared() / "kb" / level / "scores.json")
        fast = ", ".join(f"fast_{p} {100 * share:.3g} %" for p, share in v["fast_p"]["pytorch"].items())
        return f"Level {level}, all {v['problems']} problems: {v['scored']} scored, {v['right']} right; {fast}."
    except (OSError, ValueError, KeyError, TypeError):
        return f"Level {level} is not scored yet: uv run kernelbench/scorer.py --level {level}"


def _summary(night: Night) -> list[Block]:
    rows = night.experiments
    wins, hours = gains(rows), sum(r.duration_s or 0 for r in rows) / 3600
    failed = sum(r.correctness != "PASS" for r in rows)
    each = f"; {len(rows) / wins:.1f} experiments and {60 * hours / wins:.0f} minutes per gain" if wins else ""
    text = (f"{len(rows)} experiments in {hours:.1f} h: {kept(rows)} kept ({wins} gains), {failed} failed{each}. "
            f"Written {now()}.")  # fmt: skip
    beat = workspace() / "heartbeat.json"
    cost = read_object(beat).get("cost") if beat.exists() else 0
    text += f" The agent's last run cost {cost:.2f}." if cost else ""
    devices = sorted({r.device for r in rows if r.device})
    note = [("text", "Without a GPU the times are no measurement.")] if "cpu" in devices else []
    return [("text", text), *note, ("title2", "Targets"), ("table", table(night))]


def _target(work: Work) -> list[Block]:
    blocks: list[Block] = [("title2", work.name)]
    if picture := _roofline(work):
        blocks.append(("picture", (f"roofline-{work.name}".replace("/", "-"), picture)))
    else:
        blocks.append(("text", "No roofline: no experiment ran on a GPU whose peaks are known."))
    for title, good in (("Kept", True), ("Rejected", False)):
        tried = [["#", "idea", "outcome", "us", "gain", "why"]]
        for r in (r for r in work.experiments if (r.decision in KEPT) == good):
            gain = number(r.paired_gain_pct, "+.1f", " %")
            tried.append([str(r.experiment), r.description, r.correctness, number(r.latency_us), gain, r.reason])
        if len(tried) > 1:
            blocks += [("text", f"{title}: {len(tried) - 1}"), ("table", tried)]
    return blocks


# ---- pictures -------------------------------------------------------------------------------------------------------


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.tight_layout()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def _progress(night: Night) -> bytes:
    """Speedup over PyTorch of every experiment, in order, and each target's running best."""
    figure, axes = plt.subplots(figsize=(10, 4.5))
    order = {r.experiment: i for i, r in enumerate(night.experiments, 1)}
    for index, work in enumerate(night.works):
        colour = f"C{index % 10}"
        measured = [r for r in work.experiments if r.speedup_vs_pytorch]
        for good, marker in ((True, "o"), (False, "x")):
            some = [r for r in measured if (r.decision in KEPT) == good]
            axes.scatter([order[r.experiment] for r in some], [r.speedup_vs_pytorch or 0.0 for r in some], color=colour,
                         marker=marker, s=28 if good else 14, alpha=1 if good else 0.5)  # fmt: skip
        kept_rows = [r for r in measured if r.decision in KEPT]
        if kept_rows:
            ends = [*kept_rows, kept_rows[-1]]
            steps = [order[r.experiment] for r in kept_rows] + [order[work.experiments[-1].experiment]]
            axes.step(steps, [r.speedup_vs_pytorch or 0.0 for r in ends], where="post", color=colour, label=work.name)
    failed = [order[r.experiment] for r in night.experiments if r.correctness != "PASS"]
    axes.plot(failed, [0.01] * len(failed), "|", color="0.5", transform=axes.get_xaxis_transform(), label="failed")
    axes.axhline(1, color="0.7", lw=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="experiment", ylabel="speedup over PyTorch", title=f"autokernel/{night.tag}")
    axes.legend(fontsize=8)
    return _png(figure)


def _roofline(work: Work) -> bytes | None:
    """Every right kernel under the roofs, which follow from the records' own percentages of peak."""
    points = []
    for row in (r for r in work.experiments if r.correctness == "PASS"):
        path = Ledger().attempt(row.experiment or 0) / "record.json"
        v = read_object(path) if path.exists() else {}
        known = ("throughput_tflops", "bandwidth_gb_s", "arithmetic_intensity", "pct_peak_compute",
                 "pct_peak_bandwidth")  # fmt: skip
        if all(v.get(k) for k in known):
            points.append((row, *(v[k] for k in known)))
    if not points:
        return None
    _, tflops, bandwidth, intensity, compute, memory = points[-1]
    peak, slope = 100 * tflops / compute, bandwidth / memory * 100 / 1e3
    figure, axes = plt.subplots(figsize=(6, 4))
    low, high = min(intensity, peak / slope) / 8, max(intensity, peak / slope) * 8
    axes.loglog([low, peak / slope, high], [low * slope, peak, peak], color="0.3")
    shades = [i / max(1, len(points) - 1) for i in range(len(points))]
    axes.scatter([p[3] for p in points], [p[1] for p in points], c=shades, cmap="viridis", s=22)
    best = next((p for p in reversed(points) if p[0].decision in KEPT), None)
    if best:
        label = f"best: #{best[0].experiment}"
        axes.scatter([best[3]], [best[1]], s=140, facecolors="none", edgecolors="tab:red", label=label)
        axes.legend()
    axes.set(xlabel="FLOP per byte", ylabel="TFLOP/s", title=f"{work.name} (late experiments are yellow)")
    return _png(figure)


# ---- the two forms --------------------------------------------------------------------------------------------------


def _markdown(block: Block) -> str:
    kind, content = block
    if kind == "table":
        rows = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in content]
        return "\n".join("| " + " | ".join(r) + " |" for r in (rows[0], ["---"] * len(rows[0]), *rows[1:]))
    if kind == "picture":
        return f"![{content[0]}]({content[0]}.png)"
    return {"title": "# ", "title2": "## "}.get(kind, "") + str(content)


def _html(block: Block) -> str:
    kind, content = block
    if kind == "table":
        rows = ["".join(f"<td>{html.escape(c)}</td>" for c in row) for row in content]
        rows[0] = rows[0].replace("td>", "th>")
        return "<table>" + "".join(f"<tr>{r}</tr>" for r in rows) + "</table>"
    if kind == "picture":
        return f'<p><img alt="{content[0]}" src="data:image/png;base64,{base64.b64encode(content[1]).decode()}"></p>'
    tag = {"title": "h1", "title2": "h2"}.get(kind, "p")
    return f"<{tag}>{html.escape(str(content))}</{tag}>"
