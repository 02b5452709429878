"""The night: which kernel is worked on, what is kept, what was tried. State is workspace/plan.json and results.tsv.

Only kernel.py is committed or restored, on the branch autokernel/<tag>. Exit status 0, or 2 with one line on what is in
the way; `next` and `record` say which command follows.

    uv run orchestrate.py start may-rmsnorm
    uv run orchestrate.py record -m "two rows per program"
    uv run orchestrate.py run --hours 8 --agent 'claude -p {brief} --output-format json'
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields

from autokernel.cli import Parser  # isort: skip  (says what is missing before anything else misses it)
from autokernel import digest, keep, workers
from autokernel.driver import Driver
from autokernel.gitkeep import GitError, Repo
from autokernel.kernelbench import LEVELS, ProblemError, plan, select
from autokernel.night import Night, NightError, Rules
from autokernel.records import Ledger, RecordError


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    start = commands.add_parser("start", help="begin a run, or continue it: branch autokernel/<tag>")
    start.add_argument("tag", nargs="?", help="name of the run (--kernelbench: default kb<level>)")
    bench = start.add_argument_group("KernelBench problems as targets (program_kb.md)")
    bench.add_argument("--kernelbench", action="store_true", help="problems instead of a model's hot sites")
    bench.add_argument("--level", choices=LEVELS, help="of the problems")
    bench.add_argument("--problems", default="", metavar="LIST", help="1-20,33 (default: the whole level)")
    bench.add_argument("--backend", default="triton", choices=["triton", "cuda"], help="of their starters")
    commands.add_parser("plan", help="targets, shares, headroom, what-if, rules")
    following = commands.add_parser("next", help="which target now and why; installs its best kernel")
    following.add_argument("name", nargs="?", help="this target, or this operator")
    record = commands.add_parser("record", help="keep or revert what bench.py measured last, and write it down")
    record.add_argument("-m", "--message", required=True, help="what was tried, in one line")
    record.add_argument("--simpler", action="store_true", help="keep an equal kernel if its code is shorter")
    commands.add_parser("status", help="where the run stands")
    history = commands.add_parser("history", help="what was tried, with outcome and reason")
    history.add_argument("--kernel", metavar="NAME", help="one target or operator")
    history.add_argument("--failed", action="store_true", help="only what did not pass")
    history.add_argument("--json", action="store_true", help="the ledger's rows as JSON")
    for name, text in (("skip", "leave a target"), ("revisit", "open a left target again"),
                       ("reset", "forget a target's experiments and begin at its starter")):  # fmt: skip
        control = commands.add_parser(name, help=text)
        control.add_argument("name", nargs="?", help="default: the current target")
        control.add_argument("-m", "--message", default="", help="why")
    worker = commands.add_parser("worker", help="room for one more agent: a git worktree, one GPU, the same ledger")
    worker.add_argument("name", help="letters, digits, dashes")
    worker.add_argument("--gpu", type=int, metavar="N", help="which GPU (default: the one with the fewest workers)")
    worker.add_argument("--remove", action="store_true", help="free its target, move its folder to workspace/removed")
    commands.add_parser("report", help="workspace/report.html, report.md and progress.png")
    run = commands.add_parser("run", help="drive a coding agent until a budget is used up or nothing is left to do")
    run.add_argument("--agent", required=True, metavar="CMD", help="command with {brief}, e.g. 'codex exec {brief}'")
    run.add_argument("--hours", type=float, metavar="H", help="stop after this time")
    run.add_argument("--max-experiments", type=int, metavar="N", help="stop after this many experiments")
    run.add_argument("--max-cost-per-win", type=float, metavar="C", help="stop when a gain costs more than this "
                     "(as the agent reports total_cost_usd)")  # fmt: skip
    run.add_argument("--stall-minutes", type=float, default=60, metavar="N", help="restart an agent silent for so long")
    run.add_argument("--pause", type=float, default=10, metavar="S", help="first wait after a session that did nothing")
    for command in (start, run):
        group = command.add_argument_group("rules, kept for all later commands")
        for f in fields(Rules):
            group.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), metavar="N",
                               help=f"{f.metadata['help']} (default: {f.default:g})".replace("%", "%%"))  # fmt: skip
    return p


def main() -> int:
    args = parser().parse_args()
    try:
        said = answer(args)
    except (GitError, NightError, ProblemError, RecordError) as error:
        print(f"orchestrate.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"orchestrate.py: {error.filename or ''}: {error.strerror or error}; free space or permissions there, "
              "then run the command again", file=sys.stderr)  # fmt: skip
        return 2
    print(said)
    return 0


def answer(args: argparse.Namespace) -> str:
    if args.command == "start":
        return begin(args)
    if args.command == "next":
        return digest.next_up(*keep.choose(args.name))
    if args.command == "record":
        return digest.recorded(*keep.record(args.message, args.simpler))
    if args.command in ("skip", "revisit", "reset"):
        row, _ = keep.control(args.command, args.name, args.message)
        return f"{row.decision} {row.target or row.kernel_type}\nnext: uv run orchestrate.py next"
    if args.command == "worker":
        return place(args)
    if args.command == "run":
        Rules.change(vars(args))
        driver = Driver(args.agent, args.hours, args.max_experiments, args.max_cost_per_win, args.stall_minutes,
                        args.pause)  # fmt: skip
        return f"{driver.run()}\nnext: uv run orchestrate.py report"
    night = Night.read(Ledger(), Repo.here().tag())
    if args.command == "plan":
        return digest.plan(night)
    if args.command == "status":
        return digest.status(night)
    if args.command == "history":
        asked = night, args.kernel, args.failed
        return json.dumps(digest.as_json(*asked), indent=1) if args.json else digest.history(*asked)
    from autokernel import nightreport  # matplotlib takes a second

    return nightreport.write(night)


def begin(args: argparse.Namespace) -> str:
    """Begin or continue a run. Problems are read before, and planned after, the branch is there."""
    if (args.level is None) == args.kernelbench:
        raise NightError("--kernelbench and --level go together, e.g. start --kernelbench --level 1 --problems 1-20")
    if not args.tag and not args.kernelbench:
        raise NightError("a run needs a name: uv run orchestrate.py start TAG")
    problems = select(args.level, args.problems) if args.kernelbench else []
    said = [Repo.here().start(args.tag or f"kb{args.level}")]
    Rules.change(vars(args))
    if problems:
        said.append(plan(problems, args.backend))
    night = Night.read(Ledger(), Repo.here().tag())
    after = "uv run orchestrate.py next"
    if not (night.plan or night.rows):
        after = f"uv run profile.py --model FILE --class-name NAME, or for one operator: {after} OPERATOR"
    return "\n".join([*said, f"next: {after}"])


def place(args: argparse.Namespace) -> str:
    """Make or remove a worker."""
    if args.remove:
        aside = workers.remove(args.name)
        return f"worker {args.name} is gone, its kept kernels and its branch stay; its folder was moved to {aside}"
    worker, made = workers.add(args.name, args.gpu)
    return (f"worker {worker.name}: {'made' if made else 'there already'}, GPU {worker.gpu or 'n/a'}\n"
            f"next: cd {worker.root} && uv run orchestrate.py next")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
