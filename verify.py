"""Put the kept kernels back into the model: are its outputs the same, is it faster in the same launch mode?

Reads workspace/targets (what orchestrate.py kept) and the model's options from workspace/profile.json, or from the
command line. Prints a `key: value` block, the kernels and the launch modes; writes workspace/verify.json. Exit status 0
when the model is right and measurably faster than PyTorch in the same mode, 1 when it is right but not faster (or there
is no GPU to measure on), 2 when it is wrong, 3 when nothing could be verified.

    uv run verify.py
    uv run verify.py --starters --model models/gpt2.py --class-name GPT2 --input-shape 1,1024
    uv run verify.py --diagnose
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autokernel.cli import Parser, count, tolerance  # isort: skip  (says what is missing before anything else misses it)
from autokernel import models, tables
from autokernel.apply import CallFault, Kernels, VerifyError, interpret_on_cpu
from autokernel.paths import atomic_write, read_object, workspace
from autokernel.source import KernelError
from autokernel.targets import TargetError


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    models.add_options(p)
    o = p.add_argument_group("verification")
    o.add_argument("--starters", action="store_true", help="the untouched starters instead of kept kernels")
    o.add_argument("--all", action="store_true", help="also kernels that are slower than PyTorch in their place")
    o.add_argument("--diagnose", action="store_true", help="which kernel makes the model wrong, where, which tensor")
    o.add_argument("--no-compile", action="store_true", help="without torch.compile")
    o.add_argument("--max-autotune", action="store_true", help="also torch.compile max-autotune (minutes)")
    o.add_argument("--no-graph", action="store_true", help="without CUDA graphs")
    o.add_argument("--warmup", type=count, default=3, metavar="N", help="calls before timing (default: 3)")
    o.add_argument("--timed", type=count, default=0, metavar="N", help="timed pairs of calls (default: 7 to 40)")
    o.add_argument("--atol", type=tolerance, help="judge by |out - ref| <= atol + rtol * |ref| instead")
    o.add_argument("--rtol", type=tolerance, help="see --atol; the reference is the model in float32")
    o.add_argument("--workspace", type=Path, metavar="FOLDER", help="default: workspace/")
    o.add_argument("--json", action="store_true", help="print the record instead")
    return p


def main() -> int:
    args, start = parser().parse_args(), time.perf_counter()
    if args.workspace:
        os.environ["AUTOKERNEL_WORKSPACE"] = str(args.workspace.resolve())
    try:
        given = args if args.model or args.module else profiled(args)
        interpret_on_cpu(given.device)
        values = verified(args, given)
    except (VerifyError, models.ModelError, KernelError, TargetError, CallFault) as error:
        return could_not(str(error))
    except (Exception, SystemExit) as error:  # whatever a model or a kernel raises is no verdict, and not status 1
        if os.environ.get("AUTOKERNEL_TRACEBACK"):
            raise
        return could_not(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; AUTOKERNEL_TRACEBACK=1 in the "
                         "environment shows where")  # fmt: skip
    values |= {"options": models.as_json(given), "seconds": time.perf_counter() - start}
    path = workspace() / "verify.json"
    atomic_write(path, (json.dumps(values, indent=1) + "\n").encode())
    print(path.read_text() if args.json else f"{shown(values)}\nwritten in {values['seconds']:.0f} s: {path}")
    return values["status"]


def could_not(why: str) -> int:
    print(f"verify.py: {why}", file=sys.stderr)
    return 3


def profiled(args: argparse.Namespace) -> argparse.Namespace:
    """The options of the profiled model; what is given on the command line counts more. Raises VerifyError."""
    path = workspace() / "profile.json"
    try:
        values = read_object(path)["options"]
    except (OSError, ValueError, KeyError):
        raise VerifyError(f"no model in {path}: name one with --model FILE --class-name NAME, or run uv run profile.py "
                          "first") from None  # fmt: skip
    own = models.as_json(args)
    return models.from_json({k: own[k] or v for k, v in values.items()})


def verified(args: argparse.Namespace, given: argparse.Namespace) -> dict[str, Any]:
    from autokernel import report, verification  # they import Triton, which must know by now whether to interpret
    from autokernel.run import gpu_lock

    options = verification.Options(
        args.all, args.starters, args.diagnose, not args.no_compile, args.max_autotune, not args.no_graph, args.warmup,
        args.timed, args.atol, args.rtol,
    )  # fmt: skip
    with report.progress() as progress, contextlib.redirect_stdout(models.Printed()):
        kernels = Kernels.starters() if args.starters else Kernels.kept()
        progress("building the model")
        loaded = models.load(given)
        with gpu_lock(loaded.device):
            return verification.Verification(loaded, kernels, options, progress).run()


# ---- for people -----------------------------------------------------------------------------------------------------


def shown(v: dict[str, Any]) -> str:
    from autokernel.report import shown as number

    keys = ("model", "inputs", "dtype", "device", "kernels", "correct", "fault", "top1_agreement", "kl_divergence",
            "promise", "estimate", "speedup", "best_against_best")  # fmt: skip
    lines = []
    for key in keys:
        text = number(v.get(key))
        if v.get(f"{key}_pytorch") is not None:
            text += f" (PyTorch in {v['dtype']}: {number(v[f'{key}_pytorch'])})"
        lines += tables.wrapped(f"{key + ':':<19} {text}", 20)
    for r in v.get("outputs", ()):
        lines += tables.wrapped(f"{r['output'] + ':':<19} rms error {r['rms_error']:.2e} (PyTorch "
                                f"{r['rms_error_pytorch']:.2e}), largest {r['max_error']:.2e} "
                                f"({r['max_error_pytorch']:.2e})", 20)  # fmt: skip
    lines += ["", *kernels(v["rows"], number)] + (["", *modes(v["modes"], number)] if v.get("modes") else [])
    lines += [""] + [line for n in (*v.get("why", ()), *v["notes"]) for line in tables.wrapped(f"note: {n}")]
    return "\n".join([*lines, *tables.wrapped(v["headline"])])


def kernels(rows: list[dict[str, Any]], number: Callable[[Any], str]) -> list[str]:
    """Which kernel serves which sites; microseconds a forward pass in their place, PyTorch's and ours."""
    lines = ["calls  PyTorch us    ours us  without  kernel, where, shape"]
    for r in rows:
        lines.append(f"{r['calls']:>5}  {number(r['pytorch_us']):>10}  {number(r['ours_us']):>9}  "
                     f"{number(r['contribution']):>7}  {r['kernel'] if r['used'] else 'PyTorch: ' + r['op']}")
        why = r.get("alone") or ("" if r["used"] else r["why"])
        lines += tables.wrapped(f"{'':36}{r['where']}  {r['shape']}" + f": {why}" * bool(why), 38)
    return lines


def modes(found: dict[str, dict[str, Any]], number: Callable[[Any], str]) -> list[str]:
    lines = [f"{'launch mode':<31} PyTorch ms    ours ms   speedup  kernels"]
    for mode, m in found.items():
        speed = f"{m['speedup']:.3f}" if "ours_device_ms" in m else "n/a"
        used = f"{len(m['used'])}" if m["used"] else "none pays"
        lines.append(f"{mode:<31} {number(m['pytorch_ms']):>10}  {number(m['ours_ms']):>9}  {speed:>8}  {used}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
