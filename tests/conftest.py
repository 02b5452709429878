"""What all tests share: a workspace and a cache of their own, and one run of the judge in this process."""

from __future__ import annotations

import os

import pytest

from autokernel.process import launcher

# one thread a process, as the suite runs one process a core: on a full machine threads that wait for each other take
# milliseconds for microseconds of work, and the judge takes that for interference. Read when torch is imported, later.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """No test writes into the repository or the user's cache."""
    monkeypatch.setenv("AUTOKERNEL_WORKSPACE", str(tmp_path / "workspace"))
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AUTOKERNEL_LEDGER", str(tmp_path / "results.tsv"))


@pytest.fixture
def judge(tmp_path):
    """judge(source, **options) -> the values of one run on kernel text or a kernel file."""
    from autokernel.run import Options, run

    def judged(source, **options):
        path = source
        if isinstance(source, str):
            path = tmp_path / "kernel.py"
            path.write_text(source)
        with launcher() as children:
            return run(Options(path, **options), children).values

    return judged
