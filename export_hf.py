"""Publish a kept kernel: a complete Hugging Face `kernels` project, and with --upload its place on the Hub.

Writes DIR/NAME (workspace/export/NAME): build.toml, flake.nix, torch-ext/, tests/, benchmarks/, CARD.md and build/ with
what the Hub's loader takes, validated in a fresh process. The kernel must be what the judge passed. Exit status 0, or 2
with one line on why nothing was exported or sent. --upload sends what an export made before.

    uv run export_hf.py --name my-rmsnorm --kernel kernel.py --repo-id user/my-rmsnorm
    uv run export_hf.py --name my-rmsnorm --repo-id user/my-rmsnorm --upload --dry-run
    uv run export_hf.py --name llama --all --repo-id user/llama --license apache-2.0
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from autokernel.cli import Parser
from autokernel.paths import repo_root, workspace


def filled(text: str) -> str:
    """An option's value that must not be empty: an unset variable of the shell is no choice."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: give a value, or leave the option out")
    return text


def some_path(text: str) -> Path:
    return Path(filled(text))


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--name", required=True, help="name of the project; with --all its beginning: NAME-<operator>")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--kernel", type=some_path, help="kernel file (default: kernel.py)")
    which.add_argument("--target", type=filled, metavar="T", help="the best kernel so far of a target: 1_rmsnorm")
    which.add_argument("--all", action="store_true", help="the best kernel so far of every target")
    p.add_argument("--repo-id", default="", metavar="USER/NAME", help="where it is to live; needed for --upload")
    p.add_argument("--version", type=int, default=1, metavar="N", help="version of the kernel's interface (default: 1)")
    p.add_argument("--license", default="mit", metavar="ID", help="a licence, by the Hub's id (default: mit)")
    p.add_argument("--output", type=some_path, metavar="DIR", help="folder of the projects (default: workspace/export)")
    p.add_argument("--backends", default="cuda", metavar="LIST", help="of a Triton build: cuda,rocm,cpu; default: cuda")
    p.add_argument("--upload", action="store_true", help="send it: card and sources to main, builds to branch v<N>")
    p.add_argument("--dry-run", action="store_true", help="with --upload: show what would be sent, and send nothing")
    p.add_argument("--private", action="store_true", help="make a new repository private")
    p.add_argument("--force", action="store_true", help="export what the judge did not pass; the card says so")
    return p


def main() -> int:
    args = parser().parse_args()
    if args.dry_run and not args.upload:
        parser().error("--dry-run shows what --upload would send: give both")
    from autokernel.export import ExportError
    from autokernel.records import RecordError
    from autokernel.source import KernelError
    from autokernel.targets import TargetError

    try:
        (upload if args.upload else make)(args, chosen(args))
    except (ExportError, KernelError, TargetError, RecordError) as error:
        print(f"export_hf.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or "the disk"
        print(f"export_hf.py: {where}: {error.strerror or error}; free it, or choose another --output", file=sys.stderr)
        return 2
    return 0


def chosen(args: argparse.Namespace) -> list[tuple]:
    """(project, kernel file, target) of each kernel that was asked for. Raises ExportError."""
    from autokernel.export import ExportError, Project, kept

    def project(suffix: str = "") -> Project:
        repo_id = args.repo_id + suffix * bool(args.repo_id)
        backends = tuple(filter(None, args.backends.split(",")))
        return Project(args.name + suffix, repo_id, args.version, args.license, backends, args.force)

    if not (args.all or args.target):
        return [(project(), args.kernel or repo_root() / "kernel.py", "")]
    best = kept()
    if args.target and args.target not in best:
        known = ", ".join(best) or "none"
        raise ExportError(f"--target {args.target!r} has no kept kernel; targets with one: {known}")
    if args.target:
        return [(project(), best[args.target], args.target)]
    if not best:
        raise ExportError("--all: no target has a kept kernel; make one with: uv run orchestrate.py run")
    suffixes: dict[str, str] = {}  # two targets of one operator keep their ranks apart
    for target in best:
        rank, _, op = target.partition("_")
        suffix = "-" + op.replace("_", "-")
        suffixes[f"{suffix}-{rank}" if suffix in suffixes else suffix] = target
    return [(project(suffix), best[target], target) for suffix, target in suffixes.items()]


def place(args: argparse.Namespace, project) -> Path:
    return (args.output or workspace() / "export") / project.name


def make(args: argparse.Namespace, chosen: list[tuple]) -> None:
    """Export: all of them are looked at before the first is made, and with --all what is there already stays."""
    from autokernel.export import admit, difference, export, read_source
    from autokernel.report import progress

    wanted = [(project, read_source(kernel, target), place(args, project)) for project, kernel, target in chosen]
    for project, source, folder in list(wanted):
        if args.all and folder.exists() and not difference(project, folder, source.sha256):
            print(f"{folder}: exported already")
            wanted.remove((project, source, folder))
        else:
            admit(project, source, folder)
    for project, source, folder in wanted:
        with progress() as show:
            made = export(project, source, folder, show)
        builds = [f"{variant} ({state})" for variant, state in made["validated"].items()] or ["none"]
        print(f"{folder}: builds {', '.join(builds)}" + f"\n{made['note']}" * bool(made["note"]))
        print(f"not accepted by the judge, and marked so: {made['refusal']}\n" * bool(made["refusal"]), end="")
    card = shlex.quote(str(place(args, chosen[-1][0]) / "CARD.md"))
    following = command(args, upload=True, repo_id=args.repo_id or f"USER/{args.name}")
    print(f"next: read {card}, put a LICENSE beside it, then: {following}")


def upload(args: argparse.Namespace, chosen: list[tuple]) -> None:
    """Send: all of them are validated before the first is sent."""
    from autokernel import hub
    from autokernel.export import ExportError, read_source

    if not args.repo_id:
        raise ExportError(f"--upload wants to know where: --repo-id USER/{args.name}")
    for project, _, _ in chosen:
        if not place(args, project).is_dir():
            first = command(args, upload=False, dry_run=False)
            raise ExportError(f"--upload: {place(args, project)} is not there yet; export it first: {first}")
    sources = [read_source(kernel, target).sha256 if args.kernel or target else "" for _, kernel, target in chosen]
    parcels = [hub.parcel(one[0], place(args, one[0]), sha256) for one, sha256 in zip(chosen, sources, strict=True)]
    for parcel in parcels:
        print(parcel.listing(args.private) if args.dry_run else hub.send(parcel, args.private))


def command(args: argparse.Namespace, **changes) -> str:
    """The command line of these options, with some of them changed: what is at its default is left out."""
    words, values = [], {**vars(args), **changes}
    for action in parser()._actions:
        value = values.get(action.dest, action.default)
        if value != action.default:
            words += [action.option_strings[0]] + [shlex.quote(str(value))] * (value is not True)
    return " ".join(["uv run export_hf.py", *words])


if __name__ == "__main__":
    sys.exit(main())
