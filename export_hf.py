"""Publish a kept kernel: a complete Hugging Face `kernels` project, and with --upload its place on the Hub.

Writes DIR/NAME (workspace/export/NAME): build.toml, flake.nix, torch-ext/, tests/, benchmarks/, CARD.md and build/ with
what the Hub's loader takes, validated in a fresh process. The kernel must be what the judge passed. Exit status 0, or 2
with one line on why nothing was exported or sent. --upload sends a project that exists as it is.

    uv run export_hf.py --name my-rmsnorm --kernel kernel.py --repo-id user/my-rmsnorm
    uv run export_hf.py --name my-rmsnorm --repo-id user/my-rmsnorm --upload --dry-run
    uv run export_hf.py --name llama --all --repo-id user/llama --license apache-2.0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autokernel.cli import Parser
from autokernel.paths import repo_root, workspace


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--name", required=True, help="name of the project; with --all its beginning: NAME-<operator>")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--kernel", type=Path, help="kernel file (default: kernel.py)")
    which.add_argument("--target", metavar="T", help="the best kernel so far of a target, such as 1_rmsnorm")
    which.add_argument("--all", action="store_true", help="the best kernel so far of every target")
    p.add_argument("--repo-id", default="", metavar="USER/NAME", help="where it is to live; needed for --upload")
    p.add_argument("--version", type=int, default=1, metavar="N", help="version of the kernel's interface (default: 1)")
    p.add_argument("--license", default="mit", metavar="ID", help="a licence, by the Hub's id (default: mit)")
    p.add_argument("--output", type=Path, metavar="DIR", help="folder of the projects (default: workspace/export)")
    p.add_argument("--backends", default="cuda", metavar="LIST", help="of a Triton build: cuda,rocm,cpu; default: cuda")
    p.add_argument("--upload", action="store_true", help="send it: card and sources to main, builds to branch v<N>")
    p.add_argument("--dry-run", action="store_true", help="with --upload: show what would be sent, and send nothing")
    p.add_argument("--private", action="store_true", help="make a new repository private")
    p.add_argument("--force", action="store_true", help="export what the judge did not pass; the card says so")
    return p


def main() -> int:
    args = parser().parse_args()
    from autokernel.export import ExportError
    from autokernel.records import RecordError
    from autokernel.source import KernelError
    from autokernel.targets import TargetError

    try:
        for project, kernel, target in chosen(args):
            publish(args, project, kernel, target)
    except (ExportError, KernelError, TargetError, RecordError, OSError) as error:
        print(f"export_hf.py: {error}", file=sys.stderr)
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


def publish(args: argparse.Namespace, project, kernel: Path, target: str) -> None:
    from autokernel import hub
    from autokernel.export import export, read_source
    from autokernel.report import progress

    folder = (args.output or workspace() / "export") / project.name
    if not (args.upload and folder.exists()):
        with progress() as show:
            made = export(project, read_source(kernel, target), folder, show)
        builds = [f"{variant} ({state})" for variant, state in made["validated"].items()] or ["none"]
        print(f"{folder}: builds {', '.join(builds)}" + f"\n{made['note']}" * bool(made["note"]))
        print(f"not accepted by the judge, and marked so: {made['refusal']}\n" * bool(made["refusal"]), end="")
    if args.upload:
        print(hub.upload(project, folder, args.private, args.dry_run))
    else:
        print(f"next: read {folder / 'CARD.md'}, then: uv run export_hf.py --name {project.name} "
              f"--repo-id {project.shown_repo} --upload")


if __name__ == "__main__":
    sys.exit(main())
