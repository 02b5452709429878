"""What a sweep varies: ranges, CONFIG in a kernel's text, and which variants to try. Needs no PyTorch."""

from __future__ import annotations

import ast
import io
import itertools
import json
import math
import random
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Config = dict[str, Any]
ELITES = 6  # variants that the search breeds from
MOST_VALUES = 10_000  # of one name
EXPLORE = 0.15  # share of proposals drawn at random, so that a landscape of several valleys is not missed


class SpaceError(ValueError):
    """Ranges that cannot be swept; one line: what, the value, what is allowed."""


def constants(tree: ast.Module) -> dict[str, Any]:
    """Module-level names bound to literals."""
    found: dict[str, Any] = {}
    for name, value in _bindings(tree):
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            found.pop(name, None)  # bound anew to something else
    return found


def _bindings(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    found = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        found += [(t.id, value) for t in targets if isinstance(t, ast.Name) and isinstance(value, ast.expr)]
    return found


def tunables(data: bytes) -> Config:
    """CONFIG of a kernel's text. Raises SpaceError unless it is one flat literal dict."""
    try:
        found = constants(ast.parse(data)).get("CONFIG")
    except (SyntaxError, ValueError) as error:
        raise SpaceError(f"kernel.py:{getattr(error, 'lineno', None) or 1}: {error}") from None
    if not isinstance(found, dict) or not found or not all(isinstance(k, str) for k in found):
        raise SpaceError("kernel.py has no CONFIG to sweep; write its constants as a flat dict of literals, e.g. "
                         'CONFIG = {"BLOCK_M": 128, "num_warps": 8}, and read them from there')  # fmt: skip
    return found


def rewrite(data: bytes, values: Mapping[str, Any]) -> bytes:
    """A kernel's text with other values in CONFIG; every byte outside of the values that differ stays as it is."""
    old = tunables(data)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding)
    node = [value for name, value in _bindings(ast.parse(text)) if name == "CONFIG"][-1]
    assert isinstance(node, ast.Dict)
    lines = [line.encode() for line in re.findall(r"[^\r\n]*(?:\r\n|\n|\r|$)", text)]  # as ast counts lines and columns
    starts = [0, *itertools.accumulate(map(len, lines))]
    raw = b"".join(lines)
    places = {str(k.value): v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)}
    for name, place in sorted(places.items(), key=lambda item: (-item[1].lineno, -item[1].col_offset)):
        if name in values and (values[name] != old[name] or type(values[name]) is not type(old[name])):
            assert place.end_lineno is not None and place.end_col_offset is not None
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            new = values[name]
            new = json.dumps(new, ensure_ascii=False) if isinstance(new, str) else repr(new)
            raw = raw[:begin] + new.encode() + raw[end:]
    changed = raw.decode().encode(encoding)
    if tunables(changed) != {**old, **values}:
        raise SpaceError("kernel.py: CONFIG cannot be rewritten in place; give every name once, as a plain literal")
    return changed


# ---- ranges ---------------------------------------------------------------------------------------------------------


def parse(text: str, data: bytes) -> dict[str, list[Any]]:
    """The values of each swept name: "A=64,128 B=2..5", "auto" (the kernel's own SWEEP), or a JSON file's name.

    Raises SpaceError: a name that CONFIG lacks, no values, values of another type than CONFIG's.
    """
    config = tunables(data)
    if text.strip() == "auto":
        ranges = constants(ast.parse(data)).get("SWEEP")
        where = "SWEEP in kernel.py"
        if ranges is None:
            raise SpaceError('kernel.py declares no ranges; write e.g. SWEEP = {"BLOCK_M": [64, 128]} beside CONFIG, '
                             f'or give them: --sweep "{next(iter(config))}=..."; CONFIG has: {", ".join(config)}')
    elif text.strip().endswith(".json"):
        where = text.strip()
        try:
            ranges = json.loads(Path(where).read_text())
        except (OSError, ValueError) as error:
            raise SpaceError(f"{where}: {error}; it holds e.g. {{\"BLOCK_M\": [64, 128]}}") from None
    else:
        where, ranges = "--sweep", {}
        for word in text.split():
            name, equals, values = word.partition("=")
            if not equals:
                raise SpaceError(f"--sweep {word!r} is no range; write NAME=1,2,4 or NAME=2..5, or auto, or FILE.json")
            ranges[name] = [v for part in values.split(",") for v in _read(part, name, config)]
    if not isinstance(ranges, dict) or not ranges:
        raise SpaceError(f'{where} must be a dict of lists, e.g. {{"BLOCK_M": [64, 128]}}')
    return {name: _checked(where, name, values, config) for name, values in ranges.items()}


def _read(part: str, name: str, config: Config) -> list[Any]:
    """A value as it stands on the command line, in the type that CONFIG has: 128, 2..5, true, evict_first."""
    kind = type(config.get(name))
    if found := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", part):
        low, high = int(found[1]), int(found[2])
        if high - low > MOST_VALUES:
            raise SpaceError(f"--sweep {name}={part}: more than {MOST_VALUES} values; list those that differ in time")
        return list(range(low, high + 1))
    if kind is str:
        return [part]
    try:
        return [{"true": True, "false": False}[part.lower()] if kind is bool else ast.literal_eval(part)]
    except (ValueError, SyntaxError, KeyError):
        return [part]


def _checked(where: str, name: str, values: Any, config: Config) -> list[Any]:
    if name not in config:
        raise SpaceError(f"{where}: CONFIG has no {name!r}; it has: {', '.join(config)}")
    if not isinstance(values, (list, tuple)) or not values:
        raise SpaceError(f"{where}: {name} needs a list of values, not {values!r}")
    kind = type(config[name])
    if kind not in (bool, int, float, str, type(None)):
        raise SpaceError(f"{where}: {name} is {config[name]!r} in CONFIG; only numbers, strings and booleans are swept")
    for value in values:
        if type(value) is not kind and config[name] is not None and not (kind is float and type(value) is int):
            raise SpaceError(f"{where}: {name} is {kind.__name__} in CONFIG ({config[name]!r}), not {value!r}")
    return list(dict.fromkeys(values))


def ahead_of_sweep(kernel: Path, ranges: str, candidates: Path | None, most: int, processors: int) -> int:
    """How many children a sweep uses at first: one a variant or processor, and PyTorch's on a GPU."""
    if candidates:
        count = len(list(candidates.glob("*.py"))) + 1
    else:
        try:
            count = math.prod(map(len, parse(ranges, kernel.read_bytes()).values())) + 1
        except OSError as error:
            raise SpaceError(f"{kernel}: {error.strerror}; give a kernel file with --kernel FILE") from None
    return min(count, most, max(1, processors - 1)) + Path("/dev/nvidiactl").exists()


# ---- which variants -------------------------------------------------------------------------------------------------


@dataclass
class Search:
    """Which variants to try: the whole grid where the budget allows, else an evolution around the best so far.

    `propose` gives the next batch, `tell` its scores (smaller is better, infinite: failed). The same seed and scores
    give the same variants. The present CONFIG is the first of all.
    """

    space: Mapping[str, list[Any]]
    present: Config
    budget: int
    seed: int = 0
    batch: int = 16
    scores: dict[tuple, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.proposed: set[tuple] = set()
        self.size = math.prod(map(len, self.space.values()))
        outside = any(self.present[name] not in values for name, values in self.space.items())
        self.whole = self.size + outside <= self.budget

    def _key(self, config: Mapping[str, Any]) -> tuple:
        return tuple(config[name] for name in self.space)

    def tell(self, config: Config, score: float) -> None:
        self.scores[self._key(config)] = score

    def propose(self) -> list[Config]:
        """The next variants, as values of the swept names; empty once the budget is spent or nothing is left."""
        found: list[tuple] = [] if self.proposed else [self._key(self.present)]
        self.proposed.update(found)
        if self.whole:
            found += [key for key in itertools.product(*self.space.values()) if key not in self.proposed]
        else:
            room = min(self.batch, self.budget - len(self.proposed) + len(found))
            while len(found) < room and (key := self._next()) is not None:
                self.proposed.add(key)
                found.append(key)
        self.proposed.update(found)
        return [dict(zip(self.space, key, strict=True)) for key in found]

    def _next(self) -> tuple | None:
        """A variant not tried yet: a child of two good ones with one or two values moved, or any."""
        best = sorted((s, i, k) for i, (k, s) in enumerate(self.scores.items()) if math.isfinite(s))[:ELITES]
        for _ in range(60):
            if not best or self.dice.random() < EXPLORE:
                key = tuple(self.dice.choice(values) for values in self.space.values())
            else:
                one, other = (best[min(self.dice.randrange(len(best)) for _ in range(2))][2] for _ in range(2))
                mixed = [self.dice.choice(pair) for pair in zip(one, other, strict=True)]
                for _ in range(self.dice.choice((1, 1, 2))):
                    self._move(mixed)
                key = tuple(mixed)
            if key not in self.proposed:
                return key
        return next((k for k in itertools.product(*self.space.values()) if k not in self.proposed), None)

    def _move(self, key: list[Any]) -> None:
        """Another value at one place: mostly a neighbour in the order given, for block sizes have one."""
        at = self.dice.randrange(len(key))
        values = list(self.space.values())[at]
        if key[at] in values and self.dice.random() < 0.7:
            here = values.index(key[at])
            key[at] = self.dice.choice(values[max(0, here - 1) : here] + values[here + 1 : here + 2] or values)
        else:
            key[at] = self.dice.choice(values)
