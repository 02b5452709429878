"""Print the whole zoo, judged: one line per file, the counts, exit status 0 only if all came out as they must.

    python tests/adversarial/table.py                 # what this machine can run
    python tests/adversarial/table.py --jobs 3        # several at once; on a GPU only the timing takes turns, and each
                                                      # judge takes up to 40 GB of its memory
    python tests/adversarial/table.py a05 legal       # files whose name contains one of these
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time

import torch
import zoo
from zoo import Result, Specimen, able, close_baselines, examine, side_by_side, specimens


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help="parts of file names; default: all")
    p.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    p.add_argument("--fresh", action="store_true", help="start every child as bench.py does, not by fork")
    p.add_argument("--only", choices=["cheats", "legal", "gpu"], help="one folder, or those that need a GPU")
    args = p.parse_args()
    on_gpu = torch.cuda.is_available() if args.jobs == 1 else _gpu_present()
    chosen = [s for s in specimens() if not args.names or any(n in s.name for n in args.names)]
    if args.only:
        chosen = [s for s in chosen if args.only == (s.needs if args.only == "gpu" else s.path.parent.name)]
    can = [s for s in chosen if able(s, on_gpu)]
    started = time.perf_counter()
    results = []
    for result in _examined(can, args):
        results.append(result)
        mark = "ok   " if result.as_expected else "WRONG"
        print(f"{mark} {result.specimen.name:<36} {result.outcome:<10} {result.seconds:5.1f} s  {result.reason[:150]}",
              flush=True)  # fmt: skip
    cheats, legal = ([r for r in results if r.specimen.legal is kind] for kind in (False, True))
    refused = sum(r.outcome not in ("PASS", "TAMPERED", "SURVIVORS", "NO VERDICT") for r in cheats)
    wrong = [r.specimen.name for r in results if not r.as_expected]
    accepted = sum(r.outcome == "PASS" for r in legal)
    print(f"\ndevice: {'gpu' if on_gpu else 'cpu'}   seconds: {time.perf_counter() - started:.0f}   "
          f"not for this machine: {len(chosen) - len(can)}")  # fmt: skip
    print(f"cheats refused: {refused} of {len(cheats)}   legal kernels accepted: {accepted} of {len(legal)}   "
          f"not as expected: {', '.join(wrong) or 'none'}")  # fmt: skip
    return 1 if wrong else 0


def _gpu_present() -> bool:
    """Without opening the device here: the workers are forked from this process."""
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/nvidia0")


def _examined(chosen: list[Specimen], args: argparse.Namespace):
    zoo.FRESH = args.fresh
    # the slow ones first; an ended worker's children end with it
    slow = sorted(chosen, key=lambda s: -s.options.get("timeout", 0) - 30 * (s.via == "bench"))
    if args.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(args.jobs, _fresh, (args.fresh,)) as pool:
            yield from pool.imap_unordered(_one, [s for s in slow if not s.alone])
    yield from map(_one, [s for s in slow if args.jobs == 1 or s.alone])
    close_baselines()


def _fresh(yes: bool) -> None:
    zoo.FRESH = yes


def _one(specimen: Specimen) -> Result:
    with side_by_side() if torch.cuda.is_available() else contextlib.nullcontext():
        return examine(specimen)


if __name__ == "__main__":
    sys.exit(main())
