"""What the defences cost: the same run with them and without them, in turn. Prints the share of a run's wall time.

    python tests/adversarial/cost.py kernels/softmax.py --runs 3

Off are: fresh content for every call, noise around and under the tensors, input and output comparisons after a call,
near-duplicates, hard content and checks of outputs between and in timed calls, the confinement of the child, the
comparison with PyTorch alone at the end, the audit of library calls, and the look at the harness's own files. There
is no option of bench.py for this: a run without them is worth nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from zoo import ROOT  # noqa: F401 - makes the package importable

from autokernel import integrity, judge, run, timing, worker
from autokernel.process import launcher

LIMIT = 0.35  # of a run's wall time


@contextlib.contextmanager
def without_defences() -> Iterator[None]:
    drawn = {}

    def same_content(self, case, layout):
        key = self.spec.name, case.label, case.stage == "numerical_stability"
        if key not in drawn:
            drawn[key] = original_draw(self, case, layout)
        return drawn[key]

    def stage_only(self, layout, private):
        self.arena[: layout.input_bytes].copy_(private)

    original_draw = judge.Bench.draw
    off = {
        (judge.Bench, "draw"): same_content,
        (worker.Worker, "stage"): stage_only,
        (worker.Worker, "inputs_untouched"): lambda *_: True,
        (worker.Worker, "outputs_settled"): lambda *_: True,
        (worker.Worker, "audit"): lambda *_: ([], []),
        (worker, "CONFINED"): False,
        (judge, "near_duplicate_fault"): lambda *_: "",
        (timing, "_between"): lambda *_: [],
        (timing, "_wrong"): lambda *_: "",
        (run, "foul_play"): lambda *_: "",
        (integrity, "digest"): lambda *_: "",
        (run, "scan"): lambda _: [],
    }
    before = {(owner, name): getattr(owner, name) for owner, name in off}
    for (owner, name), value in off.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


def seconds(kernel: Path) -> float:
    started = time.perf_counter()
    with launcher(ahead=2) as children:
        record = run.run(run.Options(kernel, allow_dirty_harness=True), children)
    if record.values["correctness"] != "PASS":
        sys.exit(f"{kernel}: {record.values['correctness']}: {record.values.get('reason')}")
    return time.perf_counter() - started


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kernels", nargs="+", type=Path, help="kernels that pass")
    p.add_argument("--runs", type=int, default=3, help="runs of each kind (default: 3)")
    args = p.parse_args()
    worst = 0.0
    for kernel in args.kernels:
        seconds(kernel)  # fills the compile cache
        on, off = [], []
        for _ in range(args.runs):
            on.append(seconds(kernel))
            with without_defences():
                off.append(seconds(kernel))
        share = 1 - statistics.median(off) / statistics.median(on)
        worst = max(worst, share)
        print(f"{kernel}: {statistics.median(on):.2f} s with the defences, {statistics.median(off):.2f} s without: "
              f"{100 * share:.0f} % of the run (at most {100 * LIMIT:.0f} %)", flush=True)  # fmt: skip
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
