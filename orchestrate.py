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
from autokernel import digest, keep
from autokernel.driver import Driver
from autokernel.gitkeep import GitError, Repo
from autokernel.night import Night, NightError, Rules
from autokernel.records import Ledger, RecordError


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    start = commands.add_parser("start", help="begin a run, or continue it: branch autokernel/<tag>")
    start.add_argument("tag", help="name of the run")
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
    commands.add_parser("report", help="workspace/report.html, report.md and progress.png")
    run = commands.add_parser("run", help="drive a coding agent until a budget is used up or nothing is left to do")
    run.add_argument("--agent", required=True, metavar="CMD", help="command with {brief}, e.g. 'codex exec {brief}'")
    run.add_argument("--hours", type=float, metavar="H", help="stop after this time")
    run.add_argument("--max-experiments", type=int, metavar="N", help="stop after this many experiments")
    run.add_argument("--max-cost-per-win", type=float, metavar="C", help="stop when a kept kernel costs more than this "
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
        print(answer(args))
    except (GitError, NightError, RecordError) as error:
        print(f"orchestrate.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"orchestrate.py: {error.filename or ''}: {error.strerror or error}; free space or permissions there, "
              "then run the command again", file=sys.stderr)  # fmt: skip
        return 2
    return 0


def answer(args: argparse.Namespace) -> str:
    if args.command == "start":
        said = Repo.here().start(args.tag)
        Rules.change(vars(args))
        return f"{said}\nnext: uv run orchestrate.py next"
    if args.command == "next":
        return digest.next_up(*keep.choose(args.name))
    if args.command == "record":
        return digest.recorded(*keep.record(args.message, args.simpler))
    if args.command in ("skip", "revisit", "reset"):
        row, _ = keep.control(args.command, args.name, args.message)
        return f"{row.decision} {row.target or row.kernel_type}\nnext: uv run orchestrate.py next"
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


if __name__ == "__main__":
    sys.exit(main())
