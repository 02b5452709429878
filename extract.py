"""Turn the profile's hottest targets into work: one folder each, with the starter kernel and the model's real shapes.

A target is every site of the model with the same operator, shapes, dtype and layout. Writes, from
workspace/profile.json, workspace/targets/<rank>_<op>/kernel.py (the starter, verbatim), target.json beside it, and
workspace/plan.json with what each target can give the model by Amdahl's law. Exit status 0, or 2 with one line on why
nothing could be extracted.

    uv run extract.py --top 5
    uv run extract.py --kernel-type matmul --backend cuda
    uv run extract.py --rank 3            # add one target to those there
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from autokernel.cli import Parser
from autokernel.gitkeep import in_run
from autokernel.paths import as_object, atomic_write, read_object, repo_root, shared, workspace
from autokernel.tables import CPU, cells, table, width, wrapped

STARTERS = {"triton": Path("kernels"), "cuda": Path("kernels/cuda")}
SPEEDUPS = (1.5, 2.0, 3.0)  # of a target, for the what-if


class ExtractError(ValueError):
    """One line: what is missing and the next command."""


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--top", type=int, default=5, metavar="N", help="the N targets with the largest share (default: 5)")
    p.add_argument("--kernel-type", metavar="OP", help="only targets of one operator")
    p.add_argument("--backend", choices=list(STARTERS), default="triton", help="the starter's language")
    p.add_argument("--rank", type=int, metavar="R", help="only the target of this rank, added to those there")
    p.add_argument("--report", action="store_true", help="only show what would be extracted, and write nothing")
    p.add_argument("--json", action="store_true", help="print the plan as JSON")
    return p


def main() -> int:
    args = parser().parse_args()
    try:
        profile = read_profile()
        chosen, skipped = choose(profile, args)
        plan = make_plan(profile, chosen, skipped, args.backend, earlier_targets(profile) if args.rank else [])
        if not args.report:
            write(plan, chosen)
    except ExtractError as error:
        print(f"extract.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan, indent=1) if args.json else shown(plan, args.report))
    return 0


def read_profile() -> dict[str, Any]:
    path = shared() / "profile.json"
    try:
        data = path.read_bytes()
        profile = as_object(data)
        if profile["schema"] == 1:
            if not all({"op", "shape", "share"} <= set(t) for t in profile["targets"]):
                raise ValueError("a target lacks op, shape or share")
            return {**profile, "sha256": hashlib.sha256(data).hexdigest()}
        raise ValueError(f"schema {profile['schema']}, expected 1")
    except FileNotFoundError:
        raise ExtractError(f"no {path}; write it with: uv run profile.py --model FILE --class-name NAME") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExtractError(f"{path}: {error}; write it anew with: uv run profile.py") from None


def choose(profile: dict[str, Any], args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """(targets to extract, those that are not with the reason). Raises ExtractError when there is none."""
    targets = profile["targets"]
    if not targets:
        raise ExtractError("the profile has no target: the model runs none of our operators (see its `other` rows)")
    if args.rank is not None and args.rank not in [t["rank"] for t in targets]:
        raise ExtractError(f"--rank {args.rank}: the profile has ranks 1 to {len(targets)}")
    known = sorted({t["op"] for t in targets})
    if args.kernel_type and args.kernel_type not in known:
        raise ExtractError(f"--kernel-type {args.kernel_type}: the profile has {', '.join(known)}")
    chosen: list[dict] = []
    skipped: list[dict] = []
    for target in targets:
        starter = repo_root() / STARTERS[args.backend] / f"{target['op']}.py"
        if args.rank not in (None, target["rank"]):
            why = f"not rank {args.rank}"
        elif args.kernel_type not in (None, target["op"]):
            why = f"not {args.kernel_type}"
        elif not starter.exists():
            why = f"no {args.backend} starter: {STARTERS[args.backend]}/{target['op']}.py"
        elif len(chosen) >= args.top and args.rank is None:
            why = f"beyond --top {args.top}"
        else:
            chosen.append(target)
            continue
        skipped.append({**{k: target[k] for k in ("rank", "op", "where", "shape", "share", "ms")}, "why": why})
    for row in profile["other"]:
        reason = row["reason"] or ("they compute nothing" if row["op"] == "views" else "no operator of ours")
        skipped.append({"rank": None, **{k: row[k] for k in ("op", "where", "shape", "share", "ms")}, "why": reason})
    if not chosen:
        raise ExtractError(f"nothing to extract: {skipped[0]['why']}")
    return chosen, sorted(skipped, key=lambda s: -s["share"])


def earlier_targets(profile: dict[str, Any]) -> list[dict]:
    """Targets that were extracted from this very profile."""
    try:
        plan = read_object(shared() / "plan.json")
        return plan["targets"] if plan["profile_sha256"] == profile["sha256"] else []
    except (OSError, ValueError, KeyError):
        return []


def make_plan(
    profile: dict[str, Any], chosen: list[dict], skipped: list[dict], backend: str, earlier: list[dict]
) -> dict[str, Any]:
    """workspace/plan.json: targets in order of rank with their Amdahl estimates, and what is left out."""
    fields = ("rank", "op", "where", "shape", "dtype", "calls", "ms", "share", "cumulative", "bound", "pct_roofline",
              "at_most", "flops", "bytes", "reference_sha256")  # fmt: skip
    targets = [
        {"name": f"{t['rank']}_{t['op']}", "backend": backend, **{k: t[k] for k in fields},
         "model_speedup_if": _what_if(t["share"])}
        for t in chosen
    ]  # fmt: skip
    ranks = {t["rank"] for t in targets}
    targets = sorted([*targets, *(t for t in earlier if t["rank"] not in ranks)], key=lambda t: t["rank"])
    ranks = {t["rank"] for t in targets}
    share = sum(t["share"] for t in targets)
    return {
        "schema": 1,
        "profile_sha256": profile["sha256"],
        **{k: profile.get(k) for k in ("model", "inputs", "dtype", "device", "total_ms", "modes_ms", "options")},
        "targets": targets,
        "share": share,
        "model_speedup_if": _what_if(share),
        "skipped": [s for s in skipped if s["rank"] not in ranks],
    }


def _what_if(share: float) -> dict[str, float]:
    return {f"{s:g}x": amdahl(share, s) for s in SPEEDUPS}


def amdahl(share: float, speedup: float) -> float:
    """Speed-up of the whole when a share of its time gets faster (Amdahl 1967)."""
    return 1 / (1 - share + share / speedup)


def write(plan: dict[str, Any], chosen: list[dict]) -> None:
    """Make workspace/targets what the plan says. An active target that is gone is no longer active."""
    folder, names = shared() / "targets", [t["name"] for t in plan["targets"]]
    for old in folder.glob("*") if folder.exists() else ():
        if old.name not in names:
            shutil.rmtree(old)
    backends = {t["rank"]: t["backend"] for t in plan["targets"]}
    for target in chosen:
        own, backend = folder / f"{target['rank']}_{target['op']}", backends[target["rank"]]
        starter = repo_root() / STARTERS[backend] / f"{target['op']}.py"
        atomic_write(own / "kernel.py", starter.read_bytes())
        atomic_write(own / "target.json", (json.dumps({**target, "backend": backend}, indent=1) + "\n").encode())
    active = workspace() / "active"
    if active.exists() and active.read_text().strip() not in names:
        active.unlink()
    atomic_write(shared() / "plan.json", (json.dumps(plan, indent=1) + "\n").encode())


def shown(plan: dict[str, Any], only_report: bool) -> str:
    head = f"{plan['model']} {plan['inputs']} {plan['dtype']}: {plan['total_ms']:.4g} ms a forward"
    lines = wrapped(head) + (wrapped(f"note: {CPU}") if plan["device"] == "cpu" else [])
    lines += ["", *table([cells(t) for t in plan["targets"]], width())]
    estimate = ", ".join(f"{v:.2f}x if each gets {k} faster" for k, v in plan["model_speedup_if"].items())
    lines += ["", *wrapped(f"The model by Amdahl's law (an estimate; verify.py measures): {estimate}.")]
    left = [s for s in plan["skipped"] if s["share"] >= 0.001]
    if left:
        lines += ["", "not extracted:"]
        for s in left[:12]:
            what = f"{s['op']} {s['shape']}".rstrip()
            lines += wrapped(f"  {100 * s['share']:>5.1f}%  {what}: {s['why']}", indent=10)
    if more := [s for s in plan["skipped"] if s not in left[:12]]:
        lines.append(f"  {100 * sum(s['share'] for s in more):>5.1f}%  {len(more)} more, in plan.json")
    written = f"written: {shared() / 'targets'}\nnext: uv run orchestrate.py {'next' if in_run() else 'start TAG'}"
    return "\n".join([*lines, "", "nothing written (--report)" if only_report else written])


if __name__ == "__main__":
    sys.exit(main())
