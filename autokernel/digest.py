"""What orchestrate.py says: the plan, what is next, what was tried. Written for an agent that lost its memory."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from autokernel.night import CONTROLS, Night, Rules, Work, gains, kept
from autokernel.paths import best_path, read_object, shared, workspace
from autokernel.records import Row
from autokernel.tables import CPU, width, wrapped
from autokernel.workers import MAIN, everyone

TRIED = 12  # experiments that `next` and the agent's brief repeat


def aligned(rows: list[list[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """Columns of one width each; the last one is as long as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    ways = ["<" if i in left else ">" for i in range(len(widths))]
    return ["  ".join(f"{c:{way}{w}}" for c, way, w in zip(r, ways, widths, strict=True)).rstrip() for r in rows]


def number(value: float | None, form: str = ".4g", unit: str = "") -> str:
    return "n/a" if value is None else f"{value:{form}}{unit}"


def pairs(**values: Any) -> list[str]:
    wide = max(map(len, values)) + 2
    known = {name: value for name, value in values.items() if value is not None}
    return [line for name, value in known.items() for line in wrapped(f"{name + ':':<{wide}}{value}", wide)]


def caution(on_cpu: bool) -> list[str]:
    return wrapped(f"note: {CPU}") if on_cpu else []


# ---- one line per target, one per experiment ------------------------------------------------------------------------


def table(night: Night) -> list[list[str]]:
    """One row a target, for the terminal and the report; speedup is over the quicker of PyTorch and torch.compile."""
    rows = [["", "target", "share", "best", "us", "speedup", "roofline", "to gain", "kept", "tried", "hours", "state"]]
    for work in (w for w in night.works if w in night.candidates or w.experiments):
        reason = work.closed(night.rules)[0]
        model = work.plan is not None and not work.problem
        share = work.plan["share"] if work.plan and model else None
        roof = work.pct_roofline or (work.plan or {}).get("pct_roofline")
        rows.append([
            "*" if work is night.current else "", work.name, number(share and 100 * share, ".1f", "%"),
            f"#{work.best.experiment}" if work.best else "none", number(work.best.latency_us if work.best else None),
            number(work.speedup, ".3g", "x"), number(roof, ".0f", "%"),
            number(night.model_gain(work), ".1f", "%") if model and work.headroom_known else "n/a",
            str(kept(work.experiments)), str(len(work.experiments)), f"{work.hours:.1f}",
            reason or (f"worker {other}'s" if (other := night.holder(work)) else "open"),
        ])  # fmt: skip
    return rows


def targets(night: Night) -> list[str]:
    """`table` as lines: where a row is too long for the terminal, the target and its state stand above its numbers."""
    rows = table(night)
    lines = aligned(rows, (0, 1, 11))
    if max(map(len, lines)) <= width():
        return lines
    numbers = aligned([row[2:11] for row in rows], ())
    heads = [wrapped(f"{row[0] or ' '} {row[1]}: {row[11]}", 6) for row in rows]
    return [line for head, below in zip(heads, numbers, strict=True) for line in [*head, f"    {below}"]]


def tried(row: Row) -> str:
    """One experiment on one line: number, outcome, figures, what it was, why it went."""
    if row.decision in CONTROLS:
        return f"#{row.experiment} {row.decision}: {row.description or 'no reason given'}"
    outcome = row.decision if row.correctness == "PASS" else row.correctness
    gain = "" if row.paired_gain_pct is None else f" {row.paired_gain_pct:+.1f}%"
    figures = "" if row.latency_us is None else f" {row.latency_us:.4g} us"
    return f"#{row.experiment} {outcome}{gain}{figures}  {row.description or '(no description)'} | {row.reason}"


def about(night: Night, work: Work) -> list[str]:
    """The target, its best kernel and its headroom."""
    plan, best, model = work.plan or {}, work.best, work.plan and not work.problem
    bound = (best.bottleneck if best else plan.get("bound")) or "unknown"
    peak = best.pct_peak_measured or best.pct_peak if best else plan.get("pct_roofline")
    what = "none: measure the starter first"
    if best:
        over = [number(s, ".3g", "x") for s in (best.speedup_vs_pytorch, best.speedup_vs_compile)]
        what = f"experiment {best.experiment}, {number(best.latency_us)} us, {over[0]} PyTorch, {over[1]} torch.compile"
    return pairs(
        target=f"{work.name}  {plan.get('shape', '')} {plan.get('dtype', '')}".rstrip(),
        where=plan.get("where") and plan["where"] + f", {plan.get('calls') or '?'} calls a forward" * bool(model),
        share=f"{100 * plan['share']:.1f} % of the model's time, {number(plan.get('ms'))} ms" if model else None,
        best=what,
        roofline=f"{number(peak, '.0f', ' %')} reached, bound: {bound}",
        model_gain=night.headroom(work) if model else None,
        best_file=best_path(work.name if work.plan else "", work.op) if best else None,
        spent=f"{len(work.experiments)} experiments, {kept(work.experiments)} kept, {work.hours:.1f} h",
    ) if best or plan else pairs(target=work.name, best=what)  # fmt: skip


def ideas(work: Work, limit: int = TRIED) -> list[str]:
    """What was tried on a target: everything kept, and the last of the others."""
    rows = work.since_reset
    shown = [r for r in rows if r.decision == "keep"][-limit:] + [r for r in rows if r.decision != "keep"][-limit:]
    lines = [line for r in sorted(shown, key=lambda r: r.experiment or 0) for line in wrapped(tried(r), 6)]
    more = len(rows) - len(shown)
    return lines + ([f"... and {more} more: uv run orchestrate.py history --kernel {work.name}"] if more else [])


# ---- the commands ---------------------------------------------------------------------------------------------------


def plan(night: Night) -> str:
    lines = []
    if night.plan:
        p = night.plan
        took = f": {number(p['total_ms'])} ms a forward" if "total_ms" in p else ""
        lines += [*wrapped(f"{p.get('model')} {p.get('inputs')} {p.get('dtype')}{took}"), ""]
    lines += targets(night)
    if night.plan and (what_if := night.plan.get("model_speedup_if")):
        estimate = ", ".join(f"{v:.2f}x if each target gets {k} faster" for k, v in what_if.items())
        lines += ["", *wrapped(f"The model by Amdahl's law (an estimate; verify.py measures): {estimate}.")]
    elif not night.plan:
        lines += ["", *wrapped("No model is planned: the operator of kernel.py is worked on by itself. To begin from a "
                               "model: uv run profile.py, then uv run extract.py")]  # fmt: skip
    rules = ", ".join(f"{f.name} {getattr(night.rules, f.name):g}" for f in fields(Rules))
    return "\n".join([*lines, "", *caution(night.on_cpu), *wrapped(f"rules: {rules}")])


def next_up(verb: str, work: Work | None, why: str, night: Night, remarks: list[str]) -> str:
    lines = wrapped(f"{verb}{' ' + work.name if work else ''}: {why}")
    lines += [f"note: {r}" for r in remarks] + caution(night.on_cpu)
    if work is None:
        after = "uv run kernelbench/scorer.py --level N" if any(w.problem for w in night.works) else "uv run verify.py"
        return "\n".join([*lines, f"next: uv run orchestrate.py report, then {after}"])
    lines += ["", *about(night, work), ""]
    if work.since_reset:
        lines += ["tried:", *ideas(work), ""]
    begin = "edit kernel.py, " if work.best else ""
    return "\n".join([*lines, f"next: {begin}{work.bench}, then uv run orchestrate.py record -m 'what was tried'"])


def recorded(row: Row, night: Night, remarks: list[str], new: bool) -> str:
    work = next(w for w in night.works if any(r.experiment == row.experiment for r in w.rows))
    best, state = work.best, "kept: kernel.py is the best kernel now"
    if row.decision == "revert":
        state = f"kernel.py is experiment {best.experiment}'s again" if best else "no best yet, kernel.py stays"
        state += f"; the attempt lies in {shared() / 'experiments' / str(row.experiment)}"
    verb, target, why = night.choose()
    again = f"edit kernel.py, {work.bench}, uv run orchestrate.py record -m 'what was tried'"
    after = f"next: {again}" if verb == "CONTINUE" else f"next: uv run orchestrate.py next   ({verb}: {why})"
    if not new:
        said = f"nothing new to record, the last run is experiment {row.experiment} already ({row.decision.upper()})"
        return "\n".join([f"{said}; {after}", *[f"note: {r}" for r in remarks]])
    return "\n".join([
        *pairs(
            experiment=row.experiment, decision=row.decision.upper(), outcome=row.correctness, reason=row.reason,
            latency_us=number(row.latency_us), speedup_vs_pytorch=number(row.speedup_vs_pytorch),
            commit=row.commit or None, state=state,
            best=f"experiment {best.experiment}, {number(best.latency_us)} us" if best else "none",
        ),
        *[f"note: {r}" for r in remarks],
        *caution(row.device == "cpu"),
        after,
    ])  # fmt: skip


def status(night: Night) -> str:
    rows = night.experiments
    failed, spent = sum(r.correctness != "PASS" for r in rows), sum(r.duration_s or 0 for r in rows) / 3600
    beat = workspace() / "heartbeat.json"
    return "\n".join([
        *pairs(
            run=f"autokernel/{night.tag}",
            experiments=f"{len(rows)}: {kept(rows)} kept ({gains(rows)} gains), {failed} failed, {spent:.1f} h",
            current=night.current.name if night.current else "none",
            driver=_beat(read_object(beat)) if beat.exists() else None,
        ),
        *caution(night.on_cpu), "", *targets(night), *workers(night), "", "next: uv run orchestrate.py next",
    ])  # fmt: skip


def workers(night: Night) -> list[str]:
    """All who work on the run, where anybody does beside the main checkout."""
    rows = [["worker", "GPU", "works on", "tried", "kept", "silent", "folder"]]
    for w in everyone():
        own = [r for r in night.experiments if (r.worker or MAIN) == w.name]
        target = next((t for t, holder in night.claims.items() if holder == w.name), "nothing")
        silent = w.silent()
        rows.append([w.name, w.gpu[:12] or "n/a", target, str(len(own)), str(kept(own)),
                     f"{silent:.0f} min" if silent < 600 else f"{silent / 60:.0f} h", str(w.root)])  # fmt: skip
    return ["", *aligned(rows, (0, 1, 2, 6))] if len(rows) > 2 else []


def _beat(v: dict[str, Any]) -> str:
    return f"{v['state']}, session {v['session']}, {v['experiments']} experiments in this run, at {v['time']}"


def history(night: Night, name: str | None = None, failed: bool = False) -> str:
    """The digest: per target its best and everything tried."""
    lines = [f"run autokernel/{night.tag}: {len(night.experiments)} experiments", *caution(night.on_cpu)]
    for work in ([night.find(name)] if name else night.works):
        rows = [r for r in work.rows if not failed or r.correctness not in ("PASS", "")]
        if rows:
            best = work.best
            head = f"best is experiment {best.experiment}" if best else "no best yet"
            lines += ["", f"{work.name}: {head}, {number(work.speedup, '.3g', 'x')}"]
            lines += [line for r in rows for line in wrapped("  " + tried(r), 8)]
    return "\n".join(lines)


def as_json(night: Night, name: str | None = None, failed: bool = False) -> list[dict[str, Any]]:
    rows = night.find(name).rows if name else night.rows
    return [{k: v for k, v in vars(r).items() if v not in (None, "")} for r in rows
            if not failed or r.correctness not in ("PASS", "")]  # fmt: skip


def brief(night: Night, pending: bool) -> str:
    """What a freshly started agent is told: who it is, the loop, the state."""
    verb, work, why = night.choose()
    problems = any(w.problem and w.plan for w in night.works)
    page = "program_kb.md" if problems else "program.md"
    measure = "uv run kernelbench/bench_kb.py" if problems else "uv run bench.py"
    lines = [
        f"You optimise GPU kernels in this repository, alone and unattended. Read {page} first: it holds the loop, "
        "the rules and the playbook. Edit kernel.py only. Do not ask and do not wait for anybody: go on until "
        "`uv run orchestrate.py next` answers DONE.",
        "",
        f"The loop: uv run orchestrate.py next; then again and again: edit kernel.py, {measure}, "
        "uv run orchestrate.py record -m 'one line: what was tried'.",
        "",
        *(["The last measurement has no row yet: begin with uv run orchestrate.py record -m '...'.", ""] * pending),
        f"Now: {verb}{' ' + work.name if work else ''}: {why}",
        "",
        *targets(night),
    ]
    if work:
        lines += ["", *about(night, work), *(["", "tried on it:", *ideas(work)] if work.rows else [])]
    return "\n".join(lines) + "\n"
