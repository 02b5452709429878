"""KernelBench problems as kernels to optimise: fetch them, look at them, make one the active problem.

`setup` writes a kernel.py whose ModelNew is right from the first run. It never loses work: a kernel.py that is there
goes to its own problem's folder first, workspace/kb/<level>/<id>/, and comes back when that problem is set up again.
Exit status 0, or 2 with one line on what is in the way.

    uv run kernelbench/bridge.py fetch                           # the Hub; or --repo CLONE, or --file PROBLEM.py
    uv run kernelbench/bridge.py info --level 1 --problem 19
    uv run kernelbench/bridge.py setup --level 1 --problem 19 --backend triton
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path.append(sys.path.pop(0))  # the repository last: no file in it stands in for a library

import argparse  # noqa: E402

from autokernel import kernelbench as kb  # noqa: E402
from autokernel.cli import Parser  # noqa: E402


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="bring problems into the cache")
    source = fetch.add_mutually_exclusive_group()
    source.add_argument("--repo", type=Path, metavar="FOLDER", help="a local clone of KernelBench")
    source.add_argument("--file", type=Path, metavar="PROBLEM.py", help='one problem, for the level "custom"')
    source.add_argument("--revision", default="", metavar="SHA", help="of the Hub's dataset (default: the one "
                        "fetched before, at first what main is then)")  # fmt: skip
    listed = commands.add_parser("list", help="the problems of a level, and how far each one is")
    listed.add_argument("--level", required=True, choices=kb.LEVELS)
    for name, text in (("info", "sizes, memory and work of a problem"), ("setup", "make it the active problem")):
        one = commands.add_parser(name, help=text)
        one.add_argument("--level", required=True, choices=kb.LEVELS)
        one.add_argument("--problem", required=True, type=int, metavar="N")
    one.add_argument("--backend", default="triton", choices=["triton", "cuda"], help="of the starter")
    one.add_argument("--fresh", action="store_true", help="begin at a starter; what was there stays saved")
    return p


def main() -> int:
    args = parser().parse_args()
    try:
        print(answer(args))
    except kb.ProblemError as error:
        print(f"bridge.py: {error}", file=sys.stderr)
        return 2
    return 0


def answer(args: argparse.Namespace) -> str:
    match args.command:
        case "fetch" if args.file:
            problem = kb.fetch_file(args.file)
            return f"custom/{problem.id} {problem.name}\nnext: {kb.SETUP.format(*problem.key.split('/')[1:])}"
        case "fetch":
            found = kb.fetch_folder(args.repo) if args.repo else kb.fetch_hub(args.revision)
            counts = ", ".join(f"level {level}: {count}" for level, count in found.items())
            origin = kb.list_problems(next(iter(found)))[0].source
            return f"{counts}\nfrom {origin}\nnext: {kb.SETUP.format(next(iter(found)), 1)}"
        case "list":
            return "\n".join(line(p) for p in kb.list_problems(args.level))
    problem = kb.load_problem(args.level, args.problem)
    if args.command == "info":
        return info(problem)
    remarks = kb.setup(problem, args.backend, args.fresh)
    return "\n".join([f"{problem.key} {problem.name}", *remarks, "next: uv run kernelbench/bench_kb.py"])


def line(problem: kb.Problem) -> str:
    tries = kb.history(problem)
    best = next((r["speedup_vs_pytorch"] for r in reversed(tries) if r["best"]), "")
    state = f"best {float(best):.2f}x, {len(tries)} runs" if best else f"{len(tries)} runs" if tries else ""
    return f"{problem.id:>4}  {problem.name:<60.60}  {state}".rstrip()


def info(problem: kb.Problem) -> str:
    from autokernel.footprint import footprint  # PyTorch takes a second

    found = footprint(problem.code)
    known = found.seen == "all"
    facts = {
        **problem.facts,
        "inputs_mib": f"{found.inputs / 2**20:.1f}",
        "parameters_mib": f"{found.parameters / 2**20:.1f}" if known else "unknown",
        "outputs_mib": f"{found.outputs / 2**20:.1f}" if known else "unknown",
        "gflop": f"{found.flops / 1e9:.3f} (products, convolutions, attention)" if known else "unknown",
        "run_gib": f"{found.needed(2) / 2**30:.1f} (to judge it in fp32)" if known else "unknown",
        "cpu_call_s": f"{found.cpu_seconds:.2g} (a guess, on a CPU)" if known else "unknown",
        "folder": problem.folder,
    }
    return "\n".join(f"{key + ':':<15} {value}" for key, value in facts.items())


if __name__ == "__main__":
    sys.exit(main())
