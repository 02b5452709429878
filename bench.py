"""Judge kernel.py: is it right, and how fast is it? (frozen: an agent must not edit this file)

Prints one aligned `key: value` block, the same keys on success and failure, then one row per size; the same as JSON
goes to workspace/last_run.json. `correctness` is PASS, FAIL, TIMEOUT or CRASH; numbers exist only with PASS. Exit
status 0 only on PASS, 1 on any other verdict, 2 when nothing could be judged (bad option, busy GPU).

    uv run bench.py                                   # kernel.py at the operator's main sizes
    uv run bench.py --kernel kernels/softmax.py --sizes all
    uv run bench.py --quick                           # smoke test, determinism, timing: never keepable
    uv run bench.py --sweep "BLOCK_M=64,128 num_stages=2..5"     # other values of CONFIG; the best one is put in place
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # this folder last: no file in it stands in for a library
sys.dont_write_bytecode = True  # keep_bytecode finds a place, later

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

for place in ("__pycache__", "autokernel/**/__pycache__"):  # compiled code is not what git or a reader sees
    for compiled in Path(__file__).parent.glob(place):
        shutil.rmtree(compiled, ignore_errors=True)

from autokernel.cli import Parser  # noqa: E402
from autokernel.integrity import HarnessChanged, required  # noqa: E402
from autokernel.paths import best_kernel, repo_root, workspace  # noqa: E402
from autokernel.process import age, keep_bytecode, launcher, wanted  # noqa: E402
from autokernel.scale import ScaleError, cores_each, gpu_ids, places  # noqa: E402
from autokernel.space import SpaceError, ahead_of_sweep  # noqa: E402


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--kernel", type=Path, default=repo_root() / "kernel.py", help="kernel file (default: kernel.py)")
    p.add_argument("--sizes", default="", metavar="NAMES", help="all, or names of the operator's sizes: medium,large")
    p.add_argument("--dtype", default="", choices=["fp16", "bf16", "fp32"], help="dtype of the timed sizes")
    p.add_argument("--best", type=Path, help="timed in pairs with this one (default: the best kept so far)")
    p.add_argument("--quick", action="store_true", help="smoke test, determinism and timing only; never keepable")
    p.add_argument("--compile-baseline", action="store_true", help="compare with torch.compile max-autotune (cached)")
    p.add_argument("--profile", action="store_true", help="Chrome trace and a table of the candidate's kernels")
    p.add_argument("--ncu", action="store_true", help="hardware counters of one call, where Nsight Compute may count")
    p.add_argument("--calibrate", action="store_true", help="measure this GPU's ceilings once and keep them")
    p.add_argument("--allow-tf32", action="store_true", help="let float32 products use TF32, for both sides")
    p.add_argument("--timeout", type=float, default=60, metavar="S", help="seconds for one call, compiling included")
    p.add_argument("--allow-dirty-harness", action="store_true", help="judge with changed frozen files; never keepable")
    many = p.add_argument_group("many variants at once (docs/scale.md)")
    which = many.add_mutually_exclusive_group()
    which.add_argument("--sweep", nargs="+", default=[], metavar="RANGES", help="other CONFIG values: NAME=1,2,4 "
                       "NAME=2..5 ..., or auto (SWEEP in kernel.py), or FILE.json")  # fmt: skip
    which.add_argument("--candidates", type=Path, metavar="DIR", help="the kernel files of a folder instead")
    many.add_argument("--max-variants", type=int, default=256, metavar="N", help="a larger grid is searched")
    many.add_argument("--minutes", type=float, metavar="M", help="time for the variants, without the judge")
    many.add_argument("--gpus", default="", metavar="LIST", help="0,1 or all: one process per GPU, for these two")
    many.add_argument("--cluster", default="", metavar="ADDRESS", help="the same on a Ray cluster (extra: cluster)")
    p.add_argument("--json", action="store_true", help="print the record as JSON instead of the block")
    p.add_argument("--traceback", action="store_true", help="show the kernel's traceback after a crash")
    return p


def main() -> int:
    args = parser().parse_args()
    keep_bytecode()
    args.best = args.best or best_kernel(args.kernel)
    try:
        harness = required(args.allow_dirty_harness)
        args.sweep, args.gpus = " ".join(args.sweep), gpu_ids(args.gpus) if args.gpus else []
        if args.gpus:  # the winner's judge, too, runs on the first of them
            os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus[0]
        with contextlib.ExitStack() as stack:
            elsewhere, ahead = None, 0 if args.calibrate else wanted(args.kernel, bool(args.best))
            if args.sweep or args.candidates:
                ahead = ahead_of_sweep(args.kernel, args.sweep, args.candidates, args.max_variants, cores_each())
            if len(args.gpus) > 1 or args.cluster:
                if not (args.sweep or args.candidates):
                    raise ScaleError("several GPUs need several kernels: add --sweep RANGES or --candidates DIR")
                elsewhere, ahead = stack.enter_context(places(args.gpus, args.cluster, ahead)), 0
            return judge(args, stack.enter_context(launcher(ahead)), harness, elsewhere)
    except (HarnessChanged, ScaleError, SpaceError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2


def judge(args: argparse.Namespace, children, harness, elsewhere) -> int:
    # only now: the children import PyTorch while we do
    import torch

    from autokernel import report
    from autokernel.gitkeep import in_run
    from autokernel.gpu import GpuTableError
    from autokernel.night import NightError
    from autokernel.records import RecordError
    from autokernel.run import GpuBusy, HarnessFailure, Options, UsageError, calibrate, run
    from autokernel.targets import TargetError
    from autokernel.worker import COMPILE_ERRORS

    names = ("kernel", "sizes", "quick", "compile_baseline", "allow_tf32", "profile", "ncu", "best", "dtype",
             "timeout", "allow_dirty_harness")  # fmt: skip
    options = Options(**{name: getattr(args, name) for name in names})
    try:
        if args.calibrate:
            print(report.calibration(calibrate()))
            return 0
        screens = bool(args.sweep or args.candidates) and not torch.cuda.is_available()
        if not screens:
            (workspace() / "last_run.json").unlink(missing_ok=True)  # a judge that dies leaves no older verdict
        with report.progress() as progress:
            if args.sweep or args.candidates:
                record, shown = sweep(args, options, children, progress, harness, elsewhere)
            else:
                record = run(options, children, progress, harness, age())
                record.write()
                shown = report.block(record.values)
    except (UsageError, GpuBusy, HarnessFailure, TargetError, GpuTableError, NightError, RecordError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(record.values, indent=1) if args.json else shown)
    compiler = any(kind in str(record.values["reason"]) for kind in COMPILE_ERRORS)
    if (args.traceback or compiler) and record.values.get("traceback"):
        print(record.values["traceback"], file=sys.stderr)
    own = args.kernel.resolve() == repo_root() / "kernel.py" and not (args.sweep or args.candidates)  # they record
    if own and not (args.json or args.quick or args.allow_dirty_harness) and in_run():
        print('next: uv run orchestrate.py record -m "what was tried"', file=sys.stderr)
    return 0 if record.values["correctness"] == "PASS" or screens and record.values["sweep"]["right"] else 1


def sweep(args: argparse.Namespace, options, children, progress, harness, elsewhere):
    """(the winner's record, what to print)."""
    from autokernel import landscape, sweep

    say = lambda text: print(f"bench.py: {text}", file=sys.stderr, flush=True)  # noqa: E731
    request = sweep.Request(args.sweep, args.candidates, args.max_variants, args.minutes,
                            time.monotonic() - age(), say=say)  # fmt: skip
    record, found = sweep.sweep(options, request, children, progress, harness, elsewhere)
    return record, landscape.block(record, found)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # shared CUDA memory has nothing left to tear down in order
