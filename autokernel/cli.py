"""What the scripts share on their command lines: a mistake is one line that leads on. Scripts import it first.

It also runs on Pythons that are too old for the rest, in order to say so.
"""

import argparse
import atexit
import contextlib
import difflib
import importlib.util
import os
import select
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_FILE = Path(sys.argv[0]).resolve()
SCRIPT = str(_FILE.relative_to(_ROOT)) if _ROOT in _FILE.parents else _FILE.name  # as one types it after `uv run`
CANNOT_RUN = {"verify.py": 3}  # whose 1 and 2 are verdicts on a model
NOBODY_READS = 141  # what a shell says of a program that a closed pipe ended


def _end(message):
    print(message, file=sys.stderr)
    sys.exit(CANNOT_RUN.get(SCRIPT, 1))


if sys.version_info < (3, 10):  # noqa: UP036
    _end(f"{SCRIPT}: Python {sys.version.split()[0]} is too old, 3.10 or later is needed; run: uv run {SCRIPT}")
for needed in ("torch", "numpy", "rich", "filelock"):
    if importlib.util.find_spec(needed) is None:
        _end(f"{SCRIPT}: {sys.executable} has no {needed}; run: uv run {SCRIPT} (uv itself: pip install uv)")


def _reader_gone():
    """Whether nobody reads our output any more (`| head`): then what is left of it goes nowhere, without a word."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no output at all, or none with a number
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if any(event & select.POLLERR for _, event in output.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False


def _last_words():
    """What Python itself would write out after this, with a complaint where nobody reads it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(NOBODY_READS)
    except (AttributeError, OSError, ValueError):  # no output at all, a full disk: Python says so
        pass


def _ended(kind, error, trace):
    """Ctrl-C is an end like others, and so is a full disk or a folder that cannot be written to: one line."""
    if issubclass(kind, BrokenPipeError) and _reader_gone():
        sys.exit(NOBODY_READS)
    if issubclass(kind, KeyboardInterrupt):
        print(f"{SCRIPT}: interrupted", file=sys.stderr)
        sys.exit(130)
    if issubclass(kind, OSError) and not os.environ.get("AUTOKERNEL_TRACEBACK"):
        print(f"{SCRIPT}: {error}; AUTOKERNEL_TRACEBACK=1 in the environment shows where", file=sys.stderr)
        sys.exit(CANNOT_RUN.get(SCRIPT, 2))
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _ended
atexit.register(_last_words)


def count(text):
    """An option's number of something: 0 or more."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def tolerance(text):
    """An option's finite number, 0 or more."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number, 0 or more")


class Parser(argparse.ArgumentParser):
    """An argument parser whose description is a script's docstring as it stands, and whose complaints are one line."""

    def __init__(self, description=None, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **options)

    def error(self, message):
        wrong = [word.split("=")[0] for word in message.rpartition(": ")[2].split() if word.startswith("--")]
        known = list(self._option_string_actions)
        near = [found for word in wrong for found in difflib.get_close_matches(word, known, 2, 0.7)]
        meant = f" (did you mean {' or '.join(near)}?)" if near and message.startswith("unrecognized") else ""
        see = f"uv run {SCRIPT}{self.prog.partition('.py')[2]} --help"
        self.exit(CANNOT_RUN.get(SCRIPT, 2), f"{SCRIPT}: {message}{meant}; see: {see}\n")
