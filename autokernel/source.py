"""What can be said about a kernel file without running it: is it one, for which operator, and what looks odd in it."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autokernel import ops
from autokernel.kernelbench import KERNEL_TYPE, bound
from autokernel.space import constants
from autokernel.spec import OpSpec

BACKENDS = ("triton", "cuda")
LONGEST = 8 << 20  # bytes of a kernel file
ANOTHER = "give one with --kernel FILE; the night's kernel.py comes back with: uv run orchestrate.py next"


class KernelError(ValueError):
    """A kernel file that cannot be judged; one line: where, what, what is allowed."""


class KernelUnreadable(KernelError):
    """There is no file to judge: no verdict on a kernel."""


@dataclass(frozen=True)
class KernelSource:
    """A kernel file, read once as bytes: what is judged is exactly this, whatever happens to the file meanwhile."""

    path: Path
    data: bytes = field(repr=False)
    kernel_type: str
    backend: str
    parameters: tuple[str, ...]
    nondeterministic: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def read_kernel(path: Path, expected_type: str | None = None) -> KernelSource:
    """Read and check a kernel file statically. Raises KernelError with the line, the fault and the known names."""
    try:
        if path.exists() and not path.is_file() or path.stat().st_size > LONGEST:  # a pipe or a device never ends
            raise KernelUnreadable(f"{path}: no regular file of at most {LONGEST >> 20} MB; {ANOTHER}")
        data = path.read_bytes()
    except OSError as error:
        raise KernelUnreadable(f"{path}: {error.strerror}; {ANOTHER}") from None
    try:
        tree = ast.parse(data, filename=str(path))
    except (RecursionError, MemoryError):
        raise KernelError(f"{path.name}:1: syntax error: nested too deeply") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise KernelError(f"{path.name}:{line}: syntax error: {getattr(error, 'msg', error)}") from None
    values = constants(tree)
    kind = values.get("KERNEL_TYPE")
    if expected_type == KERNEL_TYPE:
        return _model_source(path, data, tree, values)
    if kind is None:
        raise KernelError(f"{path.name}: no KERNEL_TYPE; write e.g. KERNEL_TYPE = \"matmul\"; known: {_known()}")
    if kind not in ops.names():
        raise KernelError(f"{path.name}: unknown KERNEL_TYPE {kind!r}; known: {_known()}")
    if expected_type and kind != expected_type:
        raise KernelError(f"{path.name}: KERNEL_TYPE is {kind!r}, the active target is a {expected_type!r}")
    return _kernel_source(path, data, kind, values, _signature(path, tree, ops.get(kind)))


def _kernel_source(path: Path, data: bytes, kind: str, values: dict[str, Any], parameters: tuple[str, ...]):
    backend, config = values.get("BACKEND", "triton"), values.get("CONFIG")
    if backend not in BACKENDS:
        raise KernelError(f"{path.name}: unknown BACKEND {backend!r}; known: {', '.join(BACKENDS)}")
    return KernelSource(
        path, data, kind, backend, parameters, values.get("DETERMINISTIC") is False,
        config if isinstance(config, dict) else {},
    )  # fmt: skip


def _model_source(path: Path, data: bytes, tree: ast.Module, values: dict[str, Any]) -> KernelSource:
    """A KernelBench solution, with or without our constants: it defines ModelNew."""
    kind = values.get("KERNEL_TYPE", KERNEL_TYPE)
    if kind != KERNEL_TYPE:
        raise KernelError(f"{path.name}: KERNEL_TYPE is {kind!r}, a KernelBench problem's is {KERNEL_TYPE!r}")
    if not any("ModelNew" in bound(node) for node in tree.body):
        raise KernelError(f"{path.name}: no class ModelNew; a starter has one: uv run kernelbench/bridge.py setup -h")
    return _kernel_source(path, data, kind, values, ())


def _known() -> str:
    return ", ".join(ops.names())


def _signature(path: Path, tree: ast.Module, spec: OpSpec) -> tuple[str, ...]:
    """Names that kernel_fn takes. It must take every required one, by its own name, and no other required one."""
    found = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == "kernel_fn"]
    wanted = ", ".join(n if d is ... else f"{n}={d!r}" for n, d in spec.parameters.items())
    if not found:
        raise KernelError(f"{path.name}: no function kernel_fn; define kernel_fn({wanted})")
    node = found[-1].args
    positional = [a.arg for a in (*node.posonlyargs, *node.args)]
    names = positional + [a.arg for a in node.kwonlyargs]
    defaulted = set(positional[len(positional) - len(node.defaults) :] if node.defaults else [])
    defaulted |= {a.arg for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d is not None}
    where = f"{path.name}:{found[-1].lineno}: kernel_fn"
    missing = [n for n in spec.required if n not in names]
    if missing:
        raise KernelError(f"{where} lacks the parameter {missing[0]!r}; the contract is kernel_fn({wanted})")
    strange = [n for n in names if n not in spec.parameters and n not in defaulted]
    if strange:
        raise KernelError(f"{where} has an unknown parameter {strange[0]!r}; the contract is kernel_fn({wanted})")
    if node.posonlyargs or isinstance(found[-1], ast.AsyncFunctionDef):
        raise KernelError(f"{where} must be a plain function that takes its parameters by name")
    return tuple(n for n in names if n in spec.parameters)
