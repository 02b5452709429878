"""Score the saved solutions of a KernelBench level: right? how fast? fast_p over the whole level. (frozen)

A solution is best.py, else kernel.py, in workspace/kb/<level>/<id>/; nothing there and no kernel.py is changed. Each
problem is judged by bench_kb.py in a process of its own, on every GPU given, and its score is kept: the same command
continues an interrupted run and judges only what changed. Prints a table; scores.json and scores.png of the level lie
in workspace/kb/<level>/. Exit status 0 when every solution asked for is scored, 1 when some are not, 2 on a bad option.

    uv run kernelbench/scorer.py --level 1 --problems 1-20,33
    uv run kernelbench/scorer.py --level 1 --gpus all --minutes 30 --compile-baseline
    uv run kernelbench/scorer.py --level 1 --report --json              # what is scored already, nothing is run
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path.append(sys.path.pop(0))  # the repository last: no file in it stands in for a library

import argparse  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import shutil  # noqa: E402
import time  # noqa: E402

from autokernel import kbscore, scale  # noqa: E402
from autokernel.cli import Parser  # noqa: E402
from autokernel.kernelbench import LEVELS, ProblemError, list_problems, select  # noqa: E402


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--level", required=True, choices=LEVELS)
    p.add_argument("--problems", default="", metavar="LIST", help="1-20,33 (default: the whole level)")
    p.add_argument("--report", action="store_true", help="show what is scored already; nothing is run")
    p.add_argument("--json", action="store_true", help="print the scores as JSON instead of the tables")
    p.add_argument("--starters", action="store_true", help="score the untouched starters instead, for comparison")
    p.add_argument("--again", action="store_true", help="judge everything anew")
    where = p.add_argument_group("where and how long")
    where.add_argument("--gpus", default="", metavar="LIST", help="0,1 or all (default: the first)")
    where.add_argument("--cluster", default="", metavar="ADDRESS", help="the same on a Ray cluster (extra: cluster)")
    where.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="begin no problem after this time")
    where.add_argument("--problem-minutes", type=float, default=15, metavar="M", help="most for one (default: 15)")
    how = p.add_argument_group("as bench_kb.py has them")
    how.add_argument("--precision", default="fp32", choices=["fp32", "fp16", "bf16"])
    for name in ("--compile-baseline", "--quick", "--shrink", "--allow-dirty-harness"):
        how.add_argument(name, action="store_true")
    return p


def main() -> int:
    args = parser().parse_args()
    flags = ("compile_baseline", "quick", "shrink", "allow_dirty_harness")
    options = ("--precision", args.precision, *("--" + f.replace("_", "-") for f in flags if getattr(args, f)))
    try:
        problems = select(args.level, args.problems)
        todo = kbscore.jobs(problems, options, 60 * args.problem_minutes, args.starters)
        failed = {} if args.report else run(args, todo)
    except (ProblemError, scale.ScaleError) as error:
        print(f"scorer.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("scorer.py: interrupted; what is scored is kept, the same command goes on", file=sys.stderr)
        return 1
    level = list_problems(args.level)
    every = kbscore.jobs(level, options, 0, args.starters)
    rows = {j.problem.id: r for j in every if (r := kbscore.kept(j, starters=args.starters))}
    asked = tuple(p.id for p in problems) if args.problems else ()
    score = kbscore.Score(args.level, {p.id: p.name for p in level}, tuple(j.problem.id for j in every), rows, asked)
    written = kbscore.write(score, "scores" + kbscore.suffix(options, args.starters))
    left = [j.problem.id for j in todo if j.problem.id not in rows]
    columns = shutil.get_terminal_size().columns
    print(json.dumps(score.values(), indent=1) if args.json else kbscore.tables(score, columns))
    for line in [*(f"written: {path}" for path in written), *unfinished(args.level, left, failed)]:
        print(line, file=sys.stderr if args.json else sys.stdout)
    return 1 if left else 0


def run(args: argparse.Namespace, jobs: list[kbscore.Job]) -> dict[int, str]:
    """Judge what has no score yet. Returns the problems that could not be judged, with the reason."""
    device = "" if args.cluster else kbscore.device_here()
    gpus = scale.gpu_ids(args.gpus or "0") if args.gpus or device not in ("", "cpu") else []
    todo = [j for j in jobs if args.again or not kbscore.kept(j, device, args.starters)]
    begin, failed = time.monotonic(), {}
    if not todo:
        return {}
    for done, (job, record) in enumerate(kbscore.spread(todo, gpus, args.cluster, begin + 60 * args.minutes), 1):
        what = record.get("failed") or record["correctness"]
        if "failed" in record:
            failed[job.problem.id] = record["failed"]
        else:
            kbscore.keep(job, record, args.starters)
            ratio = record.get("speedup_vs_pytorch")
            what += "" if ratio is None else f" {ratio:.3g}x"
        print(f"[{done}/{len(todo)}, {time.monotonic() - begin:.0f} s] {job.problem.key} {job.problem.name}: {what}",
              file=sys.stderr, flush=True)  # fmt: skip
    return failed


def unfinished(level: str, left: list[int], failed: dict[int, str]) -> list[str]:
    """What was not scored and how to go on."""
    lines = [f"not judged: kb/{level}/{i}: {failed[i]}" for i in left if i in failed]
    if others := [i for i in left if i not in failed]:
        names = ",".join(map(str, others[:8])) + ",..." * (len(others) > 8)
        lines.append(f"not scored yet: {len(others)} problems ({names}); the same command goes on")
    return lines


if __name__ == "__main__":
    sys.exit(main())
