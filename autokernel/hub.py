"""Send an exported project to the Hugging Face Hub: sources and card to main, builds to branch v<N> of a kernel repo.

Sent is what the export wrote and nothing else that lies in the folder, validated first. A version is written once: its
branch takes what is not there yet, so a broken upload is resumed by the same command, and other content under the same
version is refused. No token is read, shown or kept here: huggingface_hub finds the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from autokernel.export import ExportError, Project, difference, read_general, validate

SKIPPED = {"__pycache__", ".pytest_cache"}  # what running the tests leaves behind
SECONDS = 60  # without an answer from the Hub; huggingface_hub itself waits for ever


@dataclass(frozen=True)
class Parcel:
    """A validated project: branch -> path in the repository -> content, and what of its folder stays here."""

    project: Project
    branches: dict[str, dict[str, bytes]]
    left: list[str]

    def listing(self, private: bool) -> str:
        rows = [f"  {branch:<5} {name} ({len(data):,} bytes)" for branch, files in self.branches.items()
                for name, data in files.items()]  # fmt: skip
        kind = "private if it is new" if private else "public if it is new"
        head = f"would be sent to the kernel repository {self.project.repo_id} ({kind}):"
        notes = [f"not sent: {', '.join(self.left)}"] * bool(self.left)
        if "LICENSE" not in self.branches["main"]:
            notes.append(f"no LICENSE: put the text of {self.project.license} beside CARD.md")
        return "\n".join([head, *rows, *notes])


def parcel(project: Project, folder: Path, sha256: str = "") -> Parcel:
    """Validate `folder`, which must hold this project (and the kernel with this hash, if one is given).

    Raises ExportError with the remedy in one line."""
    if not project.repo_id:
        raise ExportError(f"--upload wants to know where: --repo-id USER/{project.name}")
    if wrong := difference(project, folder, sha256):
        raise ExportError(f"{folder} was exported with {wrong}: give the options it was exported with, or export "
                          "again with another --name or --output")  # fmt: skip
    files, left = _contents(project, folder)
    states = validate(folder)
    if not states:
        raise ExportError(f"{folder} has no build to send: build it where nvcc is, or upload it with kernel-builder")
    if not_run := next((f"{v} was {s}" for v, s in states.items() if s.startswith("not run")), None):
        if not project.force:
            raise ExportError(f"{not_run}: upload from a machine that can run it, or send it untested with --force")
    builds = {n: data for n, data in files.items() if n.startswith(("build/torch-", "benchmarks/"))}
    main = {n: data for n, data in files.items() if not n.startswith("build/")}
    return Parcel(project, {f"v{project.version}": builds, "main": main}, left)


def _contents(project: Project, folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """(what the export wrote: path in the repository -> content; names that are not its). Refuses links, hidden files.

    A repository that was not known at the export is filled in, in what is sent."""
    python, files = project.python_name, {}
    ours = "CARD.md LICENSE build.toml flake.nix torch-ext tests benchmarks build".split() + [f"{python}_cuda"]
    for top in (folder / name for name in ours):
        for path in [top, *sorted(top.rglob("*"))]:
            name = str(path.relative_to(folder))
            if SKIPPED & set(path.relative_to(folder).parts):
                continue
            if path.is_symlink() or path.name.startswith("."):
                kind = "a link" if path.is_symlink() else "a hidden file"
                raise ExportError(f"{path} is {kind}, which is not sent: take it out of the project")
            if path.is_file():
                files["README.md" if name == "CARD.md" else name] = path.read_bytes()
    if missing := next((n for n in ("README.md", "build.toml") if n not in files), None):
        raise ExportError(f"{folder / missing.replace('README', 'CARD')} is missing: put it back, or export again with "
                          "another --output")  # fmt: skip
    if b"repo-id" not in files["build.toml"]:
        where = f'\n[general.hub]\nrepo-id = "{project.repo_id}"\n\n[torch'
        files["build.toml"] = files["build.toml"].replace(b"\n[torch", where.encode(), 1)
    for name in files:
        if not name.startswith(("build/", "torch-ext/", f"{python}_cuda/")):
            files[name] = files[name].replace(f"USER/{project.name}".encode(), project.repo_id.encode())
    return files, sorted(p.name for p in folder.iterdir() if p.name not in ours and p.name not in SKIPPED)


def send(parcel: Parcel, private: bool = False) -> str:
    """Upload; says what was sent and how to load it. Raises ExportError with the remedy in one line."""
    with _one_line_errors(parcel.project):
        return _send(parcel.project, parcel.branches, private)


def _send(project: Project, sent: dict[str, dict[str, bytes]], private: bool) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session

    get_session().timeout = SECONDS
    api, branch = HfApi(), f"v{project.version}"
    where: dict[str, Any] = {"repo_id": project.repo_id, "repo_type": "kernel"}
    api.create_repo(**where, private=private or None, exist_ok=True)

    def tree(revision: str) -> dict[str, Any]:
        listed = api.list_repo_tree(**where, revision=revision, recursive=True)
        return {f.path: f for f in listed if hasattr(f, "blob_id")}

    there = {"main": tree("main")}
    if "build.toml" in there["main"] and (name := _name_there(api, where)) != project.name:
        raise ExportError(f"{project.repo_id} holds another project, {name!r}: choose another --repo-id")
    api.create_branch(**where, branch=branch, exist_ok=True)
    there[branch] = tree(branch)
    builds = {n: f for n, f in there[branch].items() if n.startswith("build/")}
    if other := next((n for n, f in builds.items() if not _same(f, sent[branch].get(n))), None):
        raise ExportError(f"{project.repo_id} has another version {project.version} already (its {other} differs): "
                          f"export with --version {project.version + 1}, or choose another --repo-id")  # fmt: skip
    sources = ("torch-ext/", f"{project.python_name}_cuda/")  # of an older version, on main or in a branch made from it
    counts = {}
    for revision, files in track(list(sent.items()), "uploading", console=Console(stderr=True), transient=True):
        new = {n: data for n, data in files.items() if not _same(there[revision].get(n), data)}
        stale = [n for n in there[revision] if n.startswith(sources) and n not in files]
        operations: list[Any] = [CommitOperationAdd(n, data) for n, data in new.items()]
        operations += map(CommitOperationDelete, stale)
        counts[revision] = len(new)
        if operations:
            message = f"{project.name}, version {project.version}"
            api.create_commit(**where, operations=operations, commit_message=message, revision=revision)
    call = f'get_kernel("{project.repo_id}", version={project.version}, trust_remote_code=True)'
    counted = f"{counts[branch]} files sent to {branch}, {counts['main']} to main"
    return f"{api.endpoint}/kernels/{project.repo_id}: {counted}; load it with: {call}"


def _name_there(api: Any, where: dict[str, Any]) -> str:
    """The name of the project on the repository's main."""
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(**where, filename="build.toml", revision="main", cache_dir=folder)
        with contextlib.suppress(ExportError):
            return str(read_general(Path(path)).get("name"))
        return "an unreadable build.toml"


def _same(remote: Any, data: bytes | None) -> bool:
    """Is a file of the Hub this one? Git's name of its content tells, or the SHA-256 of a large file's."""
    if remote is None or data is None:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == hashlib.sha256(data).hexdigest()
    return remote.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _said(text: object) -> str:
    """Somebody else's words on one line, without what looks like a token."""
    return re.sub(r"hf_\w+", "hf_...", " ".join(str(text or "no reason given").split()))[:300]


@contextlib.contextmanager
def _one_line_errors(project: Project) -> Iterator[None]:
    """The Hub's errors as ExportError."""
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    transport: Any = HfHubHTTPError.__mro__[1]  # the HTTP library's own errors: which one depends on the release

    owner, endpoint = project.repo_id.partition("/")[0], os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    again = "run the same command again: what has arrived is not sent twice"
    remedies = {
        401: "it does not know your token: log in with `hf auth login`, or set HF_TOKEN to one that may write",
        403: f"your token may not do this: it needs write access to {owner!r}, and creating kernel repositories needs "
             "an approval once (hf.co: account settings, Request Kernels Creation)",
        404: f"there is no {project.repo_id} that you may see, or no user {owner!r}: check --repo-id",
        409: f"{project.repo_id} exists as something else: choose another --repo-id",
        413: f"a file is larger than it takes in one request: see sizes with --dry-run, make it smaller, then {again}",
        429: "too many requests: wait a few minutes, then run the same command again",
    }  # fmt: skip
    token = "the token holds a character that none has: log in again with `hf auth login`, or set HF_TOKEN anew"
    try:
        yield
    except (ExportError, HFValidationError) as error:
        raise ExportError(_said(error)) from None
    except LocalTokenNotFoundError:
        raise ExportError(f"upload: {remedies[401]}") from None
    except OfflineModeIsEnabled:
        raise ExportError("upload: HF_HUB_OFFLINE is set, so nothing can be sent: unset it") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        remedy = remedies.get(status, again)
        if status in (400, 422):
            remedy = f"{_said(error.server_message)}; mend that in the project or its options, then {again}"
        raise ExportError(f"upload: the Hub answers {status}: {remedy}") from None
    except UnicodeEncodeError:
        raise ExportError(f"upload: {token}") from None
    except (transport, OSError) as error:
        why = f"no connection to {endpoint} ({type(error).__name__}); {again}"
        raise ExportError(f"upload: {token if 'Illegal header' in str(error) else why}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # also huggingface_hub's own words on a card
        if "Invalid repo type" in str(error):
            raise ExportError(f"upload: huggingface_hub {huggingface_hub.__version__} is too old to write kernel "
                              "repositories; get a later one with: uv sync --extra hub") from None  # fmt: skip
        raise ExportError(f"upload: {endpoint} is no Hub, or refuses the card: {type(error).__name__}: {_said(error)}; "
                          "check HF_ENDPOINT and the head of CARD.md") from None  # fmt: skip
