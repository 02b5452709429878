"""What the night decides: keep or revert, stay or move on. Everything is recomputed from the plan and the ledger."""

from __future__ import annotations

import ast
import io
import json
import statistics
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from typing import Any

from autokernel.kernelbench import KERNEL_TYPE
from autokernel.paths import atomic_write, operator_of, read_object, repo_root, shared, workspace
from autokernel.records import Ledger, Row, RunRecord
from autokernel.workers import MAIN, claims, me

KEPT = ("baseline", "keep")
CONTROLS = ("skip", "revisit", "reset")
RECENT = 10  # experiments that say how likely the next one is kept


class NightError(Exception):
    """One line: what is wrong and the next command."""


def _rule(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Rules:
    """When a kernel is kept and when a target is left. What differs from these lies in workspace/rules.json."""

    min_gain_pct: float = _rule(1.0, "keep only above this gain over the best, in percent, and above the noise")
    min_gain_cpu_pct: float = _rule(25.0, "the same without a GPU, where times are not a measurement")
    max_vram_pct: float = _rule(80.0, "revert above this share of the GPU's memory")
    plateau: int = _rule(10, "leave a target after this many right kernels without a gain")
    stuck: int = _rule(8, "leave a target after this many failures in a row")
    near_peak_pct: float = _rule(92.0, "a kernel as fast as PyTorch and at this share of the roofline is finished")
    target_speedup: float = _rule(0.0, "finished at this speedup over both PyTorch and torch.compile (0: never)")
    target_hours: float = _rule(2.0, "leave a target after this time, from the ledger's stamps")
    target_experiments: int = _rule(60, "leave a target after this many experiments")
    min_model_gain_pct: float = _rule(0.3, "leave a target that can give the model no more than this")
    revisits: int = _rule(1, "how often a left target is opened again when there is no other")
    idle_minutes: float = _rule(60.0, "a longer pause between two experiments counts as this much, and a worker silent "
                                "for so long loses its target to others")  # fmt: skip

    @classmethod
    def read(cls) -> Rules:
        try:
            return cls(**read_object(shared() / "rules.json"))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError) as error:
            raise NightError(f"{shared() / 'rules.json'}: {error}; remove it, or give the rules anew to: "
                             "uv run orchestrate.py start <tag>") from None  # fmt: skip

    def least_gain_pct(self, values: Mapping[str, Any]) -> float:
        """Of a run's record: the rule for its device."""
        return self.min_gain_pct if values.get("gpu_name") else self.min_gain_cpu_pct

    @classmethod
    def change(cls, given: Mapping[str, Any]) -> None:
        """Keep the given rules (None: not given) for all later commands."""
        changed = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
        if changed:
            old = {f.name: v for f in fields(cls) if (v := getattr(cls.read(), f.name)) != f.default}
            atomic_write(shared() / "rules.json", (json.dumps({**old, **changed}, indent=1) + "\n").encode())


@dataclass
class Work:
    """One target of the plan, or one operator worked on without a model. rows: its experiments and control rows."""

    name: str
    op: str
    plan: dict[str, Any] | None = None
    rows: list[Row] = field(default_factory=list)
    earlier: Row | None = None  # the best kernel of another run, where this one begins

    @property
    def problem(self) -> bool:
        """Whether it is a KernelBench problem; then it is no part of a model's time."""
        return self.op == KERNEL_TYPE

    @property
    def bench(self) -> str:
        """The command that measures kernel.py on it."""
        return "uv run kernelbench/bench_kb.py" if self.problem else "uv run bench.py"

    @property
    def size(self) -> str:
        return self.plan["shape"] if self.plan else ""

    @cached_property
    def since_reset(self) -> list[Row]:
        return _after(self.rows, "reset")

    @cached_property
    def experiments(self) -> list[Row]:
        return [r for r in self.since_reset if r.decision not in CONTROLS]

    @property
    def lately(self) -> list[Row]:
        """Experiments since the target was last opened again: what the move-on rules look at."""
        return [r for r in _after(self.since_reset, "revisit") if r.decision not in CONTROLS]

    @property
    def best(self) -> Row | None:
        return next((r for r in reversed(self.experiments) if r.decision in KEPT), None)

    @property
    def headroom_known(self) -> bool:
        """Whether a roofline says how much faster it can get: not on a CPU."""
        return bool(self.pct_roofline or (self.plan or {}).get("pct_roofline"))

    @property
    def hours(self) -> float:
        return sum(r.duration_s or 0.0 for r in self.experiments) / 3600

    @property
    def speedup(self) -> float | None:
        """Over the quickest known alternative: PyTorch's operator, and torch.compile where it was measured."""
        best = self.best
        known = [s for s in (best.speedup_vs_pytorch, best.speedup_vs_compile) if s] if best else []
        return min(known) if known else None

    @property
    def pct_roofline(self) -> float | None:
        best = self.best
        return (best.pct_peak_measured or best.pct_peak) if best else None

    @property
    def keep_rate(self) -> float:
        """How likely the next experiment is kept: the recent ones, with one kept and one not added (Laplace)."""
        return (gains(self._recent) + 1) / (len(self._recent) + 2)

    @property
    def _recent(self) -> list[Row]:
        return [r for r in self.lately if r.decision != "baseline"][-RECENT:]

    @property
    def luck(self) -> str:
        """What `keep_rate` rests on."""
        recent = self._recent
        return f"{gains(recent)} of the last {len(recent)} ideas gained" if recent else "no idea tried"

    def spent(self) -> tuple[float, float]:
        """(share of the original model's time that the target takes now, share at its roofline).

        The operator in the model is PyTorch's unless our kernel is faster. Where no roofline is known, half the time
        stands for it: that gives targets an order by their share.
        """
        share = self.plan["share"] if self.plan else 1.0
        best, planned = self.best, (self.plan or {}).get("pct_roofline")
        ours = share / best.speedup_vs_pytorch if best and best.speedup_vs_pytorch else share
        now = min(share, ours)
        if self.pct_roofline:
            return now, ours * min(self.pct_roofline, 100.0) / 100
        if planned:
            return now, min(now, share * min(planned, 100.0) / 100)
        return now, now / 2

    def closed(self, rules: Rules) -> tuple[str, bool]:
        """Why no further experiment is due, or "", and whether a revisit may change that."""
        last = next((r for r in reversed(self.since_reset) if r.decision in CONTROLS), None)
        if last and last.decision == "skip":
            return f"skipped: {last.description or 'no reason given'}", False
        reopened = last is not None and (self.best is None or (self.best.experiment or 0) < (last.experiment or 0))
        if not reopened and (reason := self._finished(rules)):
            return reason, False
        lately = self.lately
        if len(lately) >= rules.target_experiments:
            return f"{len(lately)} experiments, the budget of a target", True
        if (hours := sum(r.duration_s or 0.0 for r in lately) / 3600) >= rules.target_hours:
            return f"{hours:.1f} h, the budget of a target is {rules.target_hours:g} h", True
        right = [r.decision for r in lately if r.correctness == "PASS"]
        if (flat := _trailing(d not in KEPT for d in right)) >= rules.plateau:
            return f"plateau: {flat} right kernels without a gain", True
        if (failed := _trailing(r.correctness != "PASS" for r in lately)) >= rules.stuck:
            return f"stuck: {failed} failures in a row", True
        return "", False

    def _finished(self, rules: Rules) -> str:
        """Why it is good enough; opening a target again sets that aside until the next kept kernel."""
        if rules.target_speedup and (self.speedup or 0) >= rules.target_speedup:
            return f"{self.speedup:.2f}x, the target speedup is {rules.target_speedup:g}x"
        if (self.pct_roofline or 0) >= rules.near_peak_pct and (self.speedup or 0) >= 1:
            return f"finished: {self.pct_roofline:.0f} % of the roofline, {self.speedup:.2f}x"
        now, floor = self.spent()
        left = 100 * max(0.0, now - floor if self.headroom_known else now)
        if self.plan and not self.problem and left < rules.min_model_gain_pct:
            return f"at most {left:.1f} % of the model's time is left in it"
        return ""

    def revisitable(self, rules: Rules) -> bool:
        reason, again = self.closed(rules)
        return bool(reason) and again and sum(r.decision == "revisit" for r in self.since_reset) < rules.revisits


def kept(rows: Iterable[Row]) -> int:
    """How many are kept: gains over a target's best kernel, and each target's first right kernel, its baseline."""
    return sum(r.decision in KEPT for r in rows)


def gains(rows: Iterable[Row]) -> int:
    return sum(r.decision == "keep" for r in rows)


def _after(rows: list[Row], decision: str) -> list[Row]:
    last = max((i for i, r in enumerate(rows) if r.decision == decision), default=-1)
    return rows[last + 1 :]


def _trailing(flags: Iterable[bool]) -> int:
    count = 0
    for flag in flags:
        count = count + 1 if flag else 0
    return count


@dataclass
class Night:
    """The state of one run (tag), computed anew by every command."""

    tag: str
    rules: Rules
    rows: list[Row]
    plan: dict[str, Any] | None
    works: list[Work]
    current: Work | None  # what kernel.py is for
    claims: dict[str, str]  # target -> the living worker that has it

    @classmethod
    def read(cls, ledger: Ledger, tag: str) -> Night:
        """Raises NightError for an unreadable plan, RecordError for an unreadable ledger."""
        every, plan = ledger.rows(), read_plan()
        works = [Work(t["name"], t["op"], t) for t in (plan["targets"] if plan else [])]
        rows = [r for r in every if r.tag == tag]
        for row in rows:
            work = next((w for w in works if (w.name, w.size) == (row.target, row.size) and w.plan), None)
            if work is None:
                name = row.target or row.kernel_type
                work = next((w for w in works if w.name == name and not w.plan), None)
                if work is None:
                    works.append(work := Work(name, row.kernel_type))
            work.rows.append(row)
        pointer = workspace() / "active"
        active = pointer.read_text().strip() if pointer.exists() else ""
        current = next((w for w in works if w.name == active and w.plan), None)
        typed = next((r.kernel_type for r in reversed(rows) if not r.target), "")  # where kernel.py is no longer Python
        if current is None and (op := operator_of(kernel_bytes()) or typed):
            current = next((w for w in works if w.name == op and not w.plan), None)
            if current is None:
                works.append(current := Work(op, op))
        for work in works:
            key = (work.op, work.name, work.size) if work.plan else (work.op, "", "")
            kept = [r for r in every if r.tag != tag and r.decision in KEPT]
            same = [r for r in kept if (r.kernel_type, r.target, r.size if r.target else "") == key]
            work.earlier = same[-1] if same and not work.rows else None
        rules = Rules.read()
        return cls(tag, rules, rows, plan, works, current, claims(rules.idle_minutes))

    @property
    def candidates(self) -> list[Work]:
        """What `next` chooses from: the plan's targets; without a plan the operator of kernel.py."""
        own = self.current if self.current and not self.current.plan and (self.current.rows or not self.plan) else None
        return [w for w in self.works if w.plan] + ([own] if own else [])

    @property
    def experiments(self) -> list[Row]:
        return [r for r in self.rows if r.decision not in CONTROLS]

    @property
    def on_cpu(self) -> bool:
        """Whether times of the plan or of an experiment are a CPU's."""
        return (self.plan or {}).get("device") == "cpu" or any(r.device == "cpu" for r in self.experiments)

    @property
    def mine(self) -> list[Row]:
        """Experiments of this checkout's own agent."""
        return [r for r in self.experiments if (r.worker or MAIN) == me()]

    def holder(self, work: Work) -> str:
        """Another worker that has the target, or ""."""
        name = self.claims.get(work.name, "")
        return name if name != me() else ""

    def model_gain(self, work: Work) -> float:
        """How much of today's model time the target could still give back, in percent."""
        saved = sum(w.plan["share"] - w.spent()[0] for w in self.candidates if w.plan)
        now, floor = work.spent()
        return 100 * max(0.0, now - floor) / max(1e-9, 1 - saved)

    def headroom(self, work: Work) -> str:
        """`model_gain` in words, where it is known."""
        known = f"{self.model_gain(work):.1f} % of today's time lies above its roofline"
        return known if work.headroom_known else "how much of it can be gained is unknown (no roofline)"

    def priority(self, work: Work) -> float:
        """Expected gain of the model by the next experiment, in percent."""
        return self.model_gain(work) * work.keep_rate

    def find(self, name: str) -> Work:
        """A target by its name, or by its operator: the plan's first of it. Raises NightError with the known names."""
        planned = [w for w in self.works if w.plan and name in (w.name, w.op)]
        found = next(iter([*planned, *(w for w in self.works if w.name == name)]), None)
        if found is None and (repo_root() / "kernels" / f"{name}.py").exists():
            found = Work(name, name)
        if found is None:
            known = ", ".join(w.name for w in self.works) or "an operator, e.g. rmsnorm"
            raise NightError(f"no target {name!r}; known: {known}")
        return found

    def choose(self) -> tuple[str, Work | None, str]:
        """(NEXT, CONTINUE, REVISIT or DONE, the target, why)."""
        works = [w for w in self.candidates if not self.holder(w)]
        opened = sorted((w for w in works if not w.closed(self.rules)[0]), key=self.priority, reverse=True)
        current = self.current if self.current in works else None
        if current in opened and (opened[0] is current or 2 * self.priority(current) >= self.priority(opened[0])):
            return ("CONTINUE", current, self._why(current)) if current.rows else ("NEXT", current, self._why(current))
        left = f"{current.name}: {current.closed(self.rules)[0] or 'another gives more'}. " if current else ""
        if self.current and (other := self.holder(self.current)):
            left = f"{self.current.name} is worker {other}'s. "
        if opened:
            return "NEXT", opened[0], left + self._why(opened[0])
        again = [w for w in works if w.revisitable(self.rules)]
        if again:
            work = max(again, key=self.model_gain)
            return "REVISIT", work, f"{work.closed(self.rules)[0]}; no other is open: try something radically different"
        return "DONE", None, left + ("no other target is open" if self.candidates else "there is no target")

    def _why(self, work: Work) -> str:
        if not work.plan:
            return "the operator of kernel.py"
        if work.problem:
            return f"{work.size}, {work.plan['where']}, {work.luck}"
        return f"{100 * work.plan['share']:.1f} % of the model's time, {self.headroom(work)}, {work.luck}"


def read_plan() -> dict[str, Any] | None:
    """workspace/plan.json, or None where no model was extracted."""
    path = shared() / "plan.json"
    try:
        plan = read_object(path)
        if all({"name", "op", "shape", "dtype", "share"} <= set(t) for t in plan["targets"]):
            return plan
        raise ValueError("a target lacks name, op, shape, dtype or share")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NightError(f"{path}: {error}; write it anew with: uv run extract.py") from None


# ---- one experiment -------------------------------------------------------------------------------------------------


def decide(values: Mapping[str, Any], source: bytes, best: bytes | None, gains: list[float | None], rules: Rules,
           simpler: bool = False) -> tuple[str, str]:  # fmt: skip
    """(keep, revert or baseline, why) for one measured kernel.

    gains: percent over the best in every run of this very source against that best, None for a run that did not pass:
    the middle one counts, so that nothing is won by measuring until the noise is kind.
    """
    if values["outcome"] != "PASS":
        return "revert", " ".join(str(values.get("reason") or "no reason given").split())[:300]
    vram, memory = values.get("peak_vram_mb"), values.get("gpu_memory_mb")
    if vram and memory and 100 * vram > rules.max_vram_pct * memory:
        return "revert", f"needs {vram:.0f} MB, more than {rules.max_vram_pct:g} % of the GPU's {memory:.0f} MB"
    if best is None:
        return "baseline", "the first kernel that passes"
    if same_code(source, best):
        return "revert", "the code of the best kernel: nothing changed"
    gain = statistics.median_low(-100.0 if g is None else g for g in gains)
    least, noise = rules.least_gain_pct(values), noise_pct(values)
    runs = f", the middle of {len(gains)} runs" if len(gains) > 1 else ""
    measured = f"{gain:+.2f} %{runs}"
    slower = [s for s in values.get("sizes") or [] if (s.get("paired_gain_pct") or 0.0) < -max(least, noise_pct(s))]
    if slower:
        return "revert", f"{measured}, but slower at {slower[0]['size']} ({slower[0]['paired_gain_pct']:+.1f} %)"
    if gain >= least and gain > noise:
        return "keep", f"{measured} over the best, noise {noise:.2f} %"
    if simpler and gain >= -least:
        ours, theirs = code_lines(source), code_lines(best)
        if ours < theirs:
            return "keep", f"equal ({measured}) and shorter: {theirs} to {ours} lines"
        return "revert", f"--simpler, but {ours} lines of code where the best has {theirs}"
    return "revert", f"{measured}: not above the least gain of {least:g} % and the noise of {noise:.2f} %"


def noise_pct(values: Mapping[str, Any]) -> float:
    """Percent. 1.5 times a 95 % interval is three standard errors: equal kernels seem better once in 700 times."""
    return max(values.get("noise_pct") or 0.0, 1.5 * (values.get("gain_spread_pct") or 0.0))


def keep_above_pct(values: Mapping[str, Any], rules: Rules) -> float:
    """The gain over the best, in percent, below which `decide` reverts."""
    return max(rules.least_gain_pct(values), noise_pct(values))


def same_code(one: bytes, other: bytes) -> bool:
    """Whether two sources differ in comments and layout only."""
    try:
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    except (SyntaxError, ValueError):
        return one == other


def code_lines(source: bytes) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
                              tokenize.ENCODING, tokenize.ENDMARKER):  # fmt: skip
            lines |= set(range(token.start[0], token.end[0] + 1))
    texts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    for text in texts:
        lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def kernel_bytes() -> bytes:
    try:
        return (repo_root() / "kernel.py").read_bytes()
    except FileNotFoundError:
        return b""


def other_runs(run: RunRecord) -> list[float | None]:
    """Gains of all bench runs of this source against the same best, this one included, from workspace/runs.jsonl."""
    own = {run.values["run_id"]: run.values}
    path = workspace() / "runs.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
            if all(values[k] == run.values.get(k) for k in ("source_sha256", "best_sha256", "target")):
                own.setdefault(values["run_id"], values)
        except (ValueError, KeyError):
            continue  # half a line: bench.py was killed while writing it
    return [v.get("paired_gain_pct") if v["outcome"] == "PASS" else None for v in own.values()]


def duration(run: RunRecord, rows: list[Row], rules: Rules) -> float:
    """Seconds that an experiment took, its agent's thinking included: since the end of the one before."""
    end = _stamp(run.values["started"]) + (run.values.get("bench_time_seconds") or 0.0)
    earlier = [_stamp(r.started) + (r.bench_time_seconds or 0.0) for r in rows if r.started]
    since = end - max(earlier) if earlier else run.values.get("bench_time_seconds") or 0.0
    return min(max(0.0, since), 60 * rules.idle_minutes)


def _stamp(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
