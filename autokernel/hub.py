"""Send an exported project to the Hugging Face Hub: sources and card to main, builds to branch v<N> of a kernel repo.

What is sent is validated first. A version is written once: its branch takes what is not there yet, so a broken upload
is resumed by the same command, and other content under the same version is refused. No token is read, shown or kept
here: huggingface_hub finds the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from autokernel.export import ExportError, Project, validate

SKIPPED = ("build", "__pycache__", ".pytest_cache")  # of what goes to main


def upload(project: Project, folder: Path, private: bool = False, dry_run: bool = False) -> str:
    """Validate `folder` and send it; says what was or would be sent. Raises ExportError with the remedy in one line."""
    if not project.repo_id:
        raise ExportError(f"--upload wants to know where: --repo-id USER/{project.name}")
    text = (folder / "build.toml").read_text() if (folder / "build.toml").exists() else ""
    for line in (f'repo-id = "{project.repo_id}"', f"version = {project.version}", f'license = "{project.license}"'):
        if line not in text.splitlines():
            raise ExportError(f"{folder} was exported without {line}: remove it and export it again with these options")
    states = validate(folder)
    if not states:
        raise ExportError(f"{folder} has no build to send: build it where nvcc is, or upload it with kernel-builder")
    if not_run := next((f"{v} was {s}" for v, s in states.items() if s.startswith("not run")), None):
        if not project.force:
            raise ExportError(f"{not_run}: upload from a machine that can run it, or send it untested with --force")
    sent = {f"v{project.version}": _files(folder, True), "main": _files(folder, False)}
    if dry_run:
        rows = [f"  {branch:<5} {name} ({path.stat().st_size:,} bytes)" for branch, files in sent.items()
                for name, path in files.items()]  # fmt: skip
        kind = "private if it is new" if private else "public if it is new"
        return "\n".join([f"would be sent to the kernel repository {project.repo_id} ({kind}):", *rows])
    with _one_line_errors(project):
        return _send(project, sent, private)


def _files(folder: Path, builds: bool) -> dict[str, Path]:
    """Path in the repository -> file."""
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    if builds:
        return {n: p for n, p in files.items() if n.startswith(("build/torch-", "benchmarks/")) and p.suffix != ".pyc"}
    files["README.md"] = files.pop("CARD.md")
    return {n: p for n, p in files.items() if not set(SKIPPED) & set(Path(n).parts)}


def _send(project: Project, sent: dict[str, dict[str, Path]], private: bool) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi

    api, branch = HfApi(), f"v{project.version}"
    where: dict[str, Any] = {"repo_id": project.repo_id, "repo_type": "kernel"}
    api.create_repo(**where, private=private or None, exist_ok=True)
    api.create_branch(**where, branch=branch, exist_ok=True)
    there = {f.path: f for f in api.list_repo_tree(**where, revision=branch, recursive=True) if hasattr(f, "blob_id")}
    wanted = sent[branch]
    if other := next((n for n, f in there.items() if n.startswith("build/") and not _same(f, wanted.get(n))), None):
        raise ExportError(f"{project.repo_id} has another version {project.version} already (its {other} differs): "
                          f"export with --version {project.version + 1}, or choose another --repo-id")  # fmt: skip
    steps = [(revision, {n: p for n, p in files.items() if revision == "main" or not _same(there.get(n), p)})
             for revision, files in sent.items()]  # fmt: skip
    for revision, files in track(steps, "uploading", console=Console(stderr=True), transient=True):
        operations = [CommitOperationAdd(name, path) for name, path in files.items()]
        message = f"{project.name}, version {project.version}"
        if operations:
            api.create_commit(**where, operations=operations, commit_message=message, revision=revision)
    call = f'get_kernel("{project.repo_id}", version={project.version}, trust_remote_code=True)'
    return f"{api.endpoint}/kernels/{project.repo_id}: {len(steps[0][1])} files sent to {branch}; load it with: {call}"


def _same(remote, path: Path | None) -> bool:
    """Is a file of the Hub this one? Git's name of its content tells, or the SHA-256 of a large file's."""
    if remote is None or path is None:
        return False
    data = path.read_bytes()
    if remote.lfs is not None:
        return remote.lfs.sha256 == hashlib.sha256(data).hexdigest()
    return remote.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def _one_line_errors(project: Project) -> Iterator[None]:
    """The Hub's errors as ExportError. Their own texts, which may quote what was sent, are not repeated."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    transport: Any = HfHubHTTPError.__mro__[1]  # the HTTP library's own errors: which one depends on the release

    owner = project.repo_id.partition("/")[0]
    remedies = {
        401: "it does not know your token: log in with `hf auth login`, or set HF_TOKEN to one that may write",
        403: f"your token may not do this: it needs write access to {owner!r}, and creating kernel repositories needs "
             "an approval once (hf.co: account settings, Request Kernels Creation)",
        404: f"there is no {project.repo_id} that you may see, or no user {owner!r}: check --repo-id",
        409: f"{project.repo_id} exists as something else: choose another --repo-id",
        429: "too many requests: wait a few minutes, then run the same command again",
    }  # fmt: skip
    again = "run the same command again: what has arrived is not sent twice"
    try:
        yield
    except LocalTokenNotFoundError:
        raise ExportError(f"upload: {remedies[401]}") from None
    except HFValidationError:
        raise ExportError(f"--repo-id {project.repo_id!r} is no name that the Hub allows") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        raise ExportError(f"upload: the Hub answers {status}: {remedies.get(status, again)}") from None
    except (transport, OSError) as error:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise ExportError(f"upload: no connection to {endpoint} ({type(error).__name__}); {again}") from None
