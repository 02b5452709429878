"""Judge kernel.py on the active KernelBench problem: is ModelNew right, and how fast is it? (frozen: do not edit)

KernelBench's protocol (seeds, weights, train mode, tolerances, number of trials) on the judge of bench.py (a process of
its own, fresh inputs in every call, timed outputs checked, timing in pairs). Prints one aligned `key: value` block, the
same keys on success and failure; as JSON in workspace/last_run.json, and as a row in the problem's history.tsv. The
first kernel that passes, and each one that beats the best in pairs, is kept as best.py. Exit status 0 only on PASS,
1 on any other verdict, 2 when nothing could be judged.

    uv run kernelbench/bench_kb.py                              # kernel.py, the active problem
    uv run kernelbench/bench_kb.py --compile-baseline --n-timed 100
    uv run kernelbench/bench_kb.py --level 1 --problem 19 --kernel solution.py --correctness-only
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path.append(sys.path.pop(0))  # the repository last: no file in it stands in for a library
sys.dont_write_bytecode = True  # keep_bytecode finds a place, later

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402

for compiled in Path(sys.path[-1]).glob("autokernel/**/__pycache__"):  # compiled code is not what a reader sees
    shutil.rmtree(compiled, ignore_errors=True)

from autokernel.cli import Parser  # noqa: E402
from autokernel.integrity import HarnessChanged, required  # noqa: E402
from autokernel.kernelbench import LEVELS, ProblemError, active_problem, load_problem, note, planned  # noqa: E402
from autokernel.paths import repo_root, workspace  # noqa: E402
from autokernel.process import age, keep_bytecode, launcher, wanted  # noqa: E402


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--kernel", type=Path, default=repo_root() / "kernel.py", help="kernel file (default: kernel.py)")
    p.add_argument("--level", choices=LEVELS, help="with --problem: another problem than the active one")
    p.add_argument("--problem", type=int, metavar="N", help="number of the problem in its level")
    p.add_argument("--quick", action="store_true", help="one trial, three timed calls; never kept as best")
    p.add_argument("--correctness-only", action="store_true", help="no timing")
    p.add_argument("--n-trials", type=int, default=5, metavar="N", help="trials with new inputs (default: 5)")
    p.add_argument("--n-timed", type=int, default=0, metavar="N", help="timed calls (default: 12 to 100, by length)")
    p.add_argument("--atol", type=float, metavar="X", help="default: 1e-4 for fp32, 1e-2 for fp16 and bf16")
    p.add_argument("--rtol", type=float, metavar="X", help="default: the same")
    p.add_argument("--precision", default="fp32", choices=["fp32", "fp16", "bf16"], help="of weights and inputs")
    p.add_argument("--compile-baseline", action="store_true", help="compare with torch.compile too (cached)")
    p.add_argument("--best", type=Path, help="timed in pairs with this one (default: the problem's best.py)")
    p.add_argument("--shrink", action="store_true", help="smaller sizes, for a CPU; never kept as best")
    p.add_argument("--timeout", type=float, default=300, metavar="S", help="seconds for one call, compiling included")
    p.add_argument("--allow-dirty-harness", action="store_true", help="judge with changed frozen files; never kept")
    p.add_argument("--json", action="store_true", help="print the record as JSON instead of the block")
    p.add_argument("--traceback", action="store_true", help="show the kernel's traceback after a crash")
    return p


def main() -> int:
    args = parser().parse_args()
    keep_bytecode()
    try:
        if (args.level is None) != (args.problem is None):
            raise ProblemError("--level and --problem go together, e.g. --level 1 --problem 19")
        if args.n_trials < 1 or args.n_timed < 0:
            raise ProblemError(f"--n-trials {args.n_trials} --n-timed {args.n_timed}: fewest are 1 and 0")
        problem = load_problem(args.level, args.problem) if args.level else active_problem()
        harness = required(args.allow_dirty_harness)
    except (ProblemError, HarnessChanged) as error:
        print(f"bench_kb.py: {error}", file=sys.stderr)
        return 2
    best = problem.folder / "best.py"
    args.best = args.best or (best if best.is_file() and not args.correctness_only else None)
    with launcher(ahead=min(wanted(args.kernel, bool(args.best)), 2 + bool(args.best))) as children:
        return judge(args, problem, children, harness)


def judge(args: argparse.Namespace, problem, children, harness) -> int:
    # only now: the children import PyTorch while we do
    from autokernel import report
    from autokernel.gpu import GpuTableError
    from autokernel.kbjudge import KEYS, ProblemOptions, judge_problem
    from autokernel.night import NightError
    from autokernel.records import RecordError
    from autokernel.run import GpuBusy, HarnessFailure, UsageError

    names = ("kernel", "quick", "correctness_only", "n_trials", "n_timed", "atol", "rtol", "precision", "best",
             "compile_baseline", "shrink", "timeout", "allow_dirty_harness")  # fmt: skip
    (workspace() / "last_run.json").unlink(missing_ok=True)  # a judge that dies leaves no older verdict
    try:
        with report.progress() as progress:
            options = ProblemOptions(**{name: getattr(args, name) for name in names})
            say = lambda text: print(f"bench_kb.py: {text}", file=sys.stderr, flush=True)  # noqa: E731
            record = judge_problem(problem, options, children, progress, harness, say, age())
        record.write()
        note(problem, record.values, args.kernel, keep_best=not planned(problem))
    except (UsageError, GpuBusy, HarnessFailure, GpuTableError, NightError, RecordError, OSError) as error:
        print(f"bench_kb.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(record.values, indent=1) if args.json else report.block(record.values, KEYS))
    if args.traceback and record.values.get("traceback"):
        print(record.values["traceback"], file=sys.stderr)
    return 0 if record.values["correctness"] == "PASS" else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # shared CUDA memory has nothing left to tear down in order
