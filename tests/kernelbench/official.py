"""Starters of KernelBench's own problems before the judge, at sizes shrunk for a CPU. Not part of the test suite.

One line a problem: PASS, or the outcome and why; then the counts. On a GPU give --full for the problems' own sizes, and
--timed for a speedup too (of the untouched starter: it should be near 1).

    python tests/kernelbench/official.py CLONE                     # levels 1 to 3
    python tests/kernelbench/official.py CLONE --levels 3 --only 33,35
    python tests/kernelbench/official.py CLONE --full --timed > starters.txt
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "adversarial"))
import zoo  # noqa: E402


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("clone", type=Path, help="a clone of KernelBench")
    p.add_argument("--levels", default="1,2,3")
    p.add_argument("--only", default="", metavar="N,N", help="numbers of problems")
    p.add_argument("--full", action="store_true", help="the problems' own sizes")
    p.add_argument("--timed", action="store_true", help="timing too")
    p.add_argument("--precision", default="fp32")
    args = p.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="official-"))
    os.environ |= {"AUTOKERNEL_CACHE": str(folder / "cache"), "AUTOKERNEL_WORKSPACE": str(folder / "workspace")}
    from autokernel import kernelbench as kb

    kb.fetch_folder(args.clone)
    counts: collections.Counter[str] = collections.Counter()
    with contextlib.nullcontext() if args.full else zoo._nursery():
        for problem in (p for level in args.levels.split(",") for p in kb.list_problems(level)):
            if args.only and str(problem.id) not in args.only.split(","):
                continue
            started = time.perf_counter()
            outcome, said = judged(problem, folder, args)
            counts[outcome] += 1
            took = time.perf_counter() - started
            print(f"{problem.key:<8} {problem.name[:40]:<40} {outcome:<8} {took:5.1f} s  {said}", flush=True)
    zoo.close_baselines()
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.most_common()))
    return 0 if set(counts) == {"PASS"} else 1


def judged(problem, folder: Path, args: argparse.Namespace) -> tuple[str, str]:
    from autokernel import kernelbench as kb
    from autokernel.kbjudge import ProblemOptions, judge_problem
    from autokernel.process import launcher
    from autokernel.run import HarnessFailure, UsageError

    kernel = folder / "kernel.py"
    options = ProblemOptions(
        kernel, n_trials=5 if args.full else 2, correctness_only=not args.timed, shrink=not args.full, timeout=300,
        precision=args.precision, allow_dirty_harness=True,
    )  # fmt: skip
    try:
        kernel.write_text(kb.starter(problem.code, problem.key))
        with launcher() as children:
            values = judge_problem(problem, options, children).values
    except (UsageError, HarnessFailure, kb.ProblemError) as error:
        return "NONE", str(error)
    speedup, weak = values["speedup_vs_pytorch"], values["weak_problem"]
    said = [f"{speedup:.3f}x of {values['pytorch_latency_us']:.1f} us"] if speedup else []
    said += [f"weak: {weak}"] if weak and weak != "no" else []
    said += ["not deterministic"] if values["deterministic"] is False else []
    return values["correctness"], "; ".join([*said, *([values["reason"]] if values["reason"] else [])])


if __name__ == "__main__":
    sys.exit(main())
