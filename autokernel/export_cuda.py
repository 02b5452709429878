"""CUDA kernels for the Hub: the source split from its Python, and a binding through PyTorch's stable ABI.

The launchers become operators `launch_<name>`, generated from their declarations (autokernel.cuda_source); the kernel's
Python side stays as it was judged, with `compile_cuda` taken from a module that returns those operators.
"""

from __future__ import annotations

import ast
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any
from unittest import mock

import torch

from autokernel.cuda import FLAGS, CudaCompilerMissing, cuda_arch, find_nvcc
from autokernel.cuda_source import CudaCompileError, Launcher, Param, parse_launchers
from autokernel.source import KernelError, KernelSource

TORCH_TARGET = (2, 11)  # the oldest PyTorch that a stable-ABI build loads in
# pointee's torch dtype -> ScalarType
SCALAR_TYPES = {
    "float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "bool": "Bool", "int8": "Char",
    "uint8": "Byte", "int16": "Short", "int32": "Int", "int64": "Long", "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
}  # fmt: skip
# as it was judged, but for what only reports, and with PyTorch's symbols found when it is loaded
COMPILE_FLAGS = [f for f in FLAGS if f not in ("-Xlinker", "--no-undefined", "-Xptxas", "-v", "-lineinfo")]


@dataclass(frozen=True)
class CudaSource:
    """A CUDA kernel taken apart: its Python side, the .cu text, the binding, and what the source is compiled with."""

    python: str
    text: str
    binding: str
    defines: dict[str, Any]
    flags: list[str]
    capability: str  # "9.0a"


def read_cuda(source: KernelSource, cu_path: str) -> CudaSource:
    """Take a kernel file apart. Runs its module level. Raises KernelError where it has no one source or no launcher."""
    name, tree = source.path.name, ast.parse(source.data)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n) == "compile_cuda"]
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "autokernel.cuda"]
    plain = [a for n in imports for a in n.names if a.name == "compile_cuda" and not a.asname]
    if len(calls) != 1 or len(plain) != sum(len(n.names) for n in imports) or len(imports) != 1:
        raise KernelError(f"{name}: an export wants one `from autokernel.cuda import compile_cuda` and one call of it; "
                          f"found {len(imports)} and {len(calls)}")  # fmt: skip
    values = _arguments(source, calls[0])
    defines = {k: int(v) if isinstance(v, bool) else v for k, v in (values.get("defines") or {}).items()}
    try:
        launchers = parse_launchers(values["source"], defines)
    except CudaCompileError as error:
        raise KernelError(f"{name}: {error}") from None
    if not launchers:
        raise KernelError(f'{name}: its CUDA source has no launcher; write one: extern "C" int NAME(..., cudaStream_t)')
    changes: dict[ast.stmt | ast.expr, str] = {imports[0]: "from ._cuda import compile_cuda"}
    names = [a.id for a in calls[0].args if isinstance(a, ast.Name)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            if any(isinstance(target, ast.Name) and target.id in names for target in node.targets):
                changes[node.value] = f'"compiled from {cu_path}"'
    head = [f"// The CUDA side of {name}, sha256 {source.sha256}."] + [f"#define {k} {v}" for k, v in defines.items()]
    return CudaSource(
        _replaced(source.data, changes), "\n".join(head) + f"\n{values['source']}", binding(launchers, cu_path),
        dict(values.get("defines") or {}), ["-Xcompiler", "-fno-gnu-unique", *(values.get("flags") or ())],
        re.sub(r"sm_(\d+)(\d)", r"\1.\2", cuda_arch()),
    )  # fmt: skip


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _arguments(source: KernelSource, call: ast.Call) -> dict[str, Any]:
    """What compile_cuda is called with, as the file's module level defines it."""
    given = dict(zip(("source",), call.args, strict=False)) | {k.arg or "**": k.value for k in call.keywords}
    if unknown := set(given) - {"source", "defines", "flags"}:
        raise KernelError(f"{source.path.name}:{call.lineno}: compile_cuda({unknown.pop()}=...) cannot be exported; "
                          "known: source, defines, flags")  # fmt: skip
    scope: dict[str, Any] = {"__name__": "exported_kernel", "__file__": str(source.path)}
    try:
        with mock.patch("autokernel.cuda.compile_cuda"):
            exec(compile(source.data, str(source.path), "exec"), scope)
        return {k: eval(compile(ast.Expression(v), str(source.path), "eval"), scope) for k, v in given.items()}
    except Exception as error:
        why = f"{type(error).__name__}: {error}; make them names of the module"
        raise KernelError(f"{source.path.name}:{call.lineno}: compile_cuda's arguments are known only in the call: "
                          f"{why}") from None  # fmt: skip


def _replaced(data: bytes, changes: dict[ast.stmt | ast.expr, str]) -> str:
    """The file's text with some nodes written anew."""
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, text in sorted(changes.items(), key=lambda c: -c[0].lineno):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        data = data[:begin] + text.encode() + data[end:]
    return data.decode()


# ---- the binding ---------------------------------------------------------------------------------------------------


def binding(launchers: dict[str, Launcher], cu_path: str) -> str:
    """torch_binding.cpp: one operator a launcher. Raises KernelError for one without a tensor."""
    text = (Path(__file__).parent / "export_templates" / "binding.cpp.in").read_text()
    return Template(text).substitute(
        source=cu_path,
        functions="".join(_function(launcher) for launcher in launchers.values()),
        definitions="\n".join(f'  m.def("{_schema(launcher)}");' for launcher in launchers.values()),
        implementations="\n".join(f'  m.impl("launch_{n}", TORCH_BOX(&launch_{n}));' for n in launchers),
    )


def _schema(launcher: Launcher) -> str:
    kinds, words = {"f": "float", "d": "float", "?": "bool"}, []
    for i, p in enumerate(launcher.arguments):
        kind = kinds.get(p.code, "int")
        if p.code == "P":
            kind = "Tensor" + ("" if p.const else f"(a{i}!)") + "?" * p.optional
        words.append(f"{kind} {p.name}_")  # no word of Python's or the schema's ends so
    return f"launch_{launcher.name}({', '.join(words)}) -> ()"


def _function(launcher: Launcher) -> str:
    first = next((p.name for p in launcher.arguments if p.code == "P" and not p.optional), None)
    if first is None:
        raise KernelError(f"launcher {launcher.name} takes no tensor: the device it runs on is not known")
    types = ", ".join("void*" if p.code in "PS" else p.ctype for p in launcher.params)
    takes = ", ".join(_parameter(p) for p in launcher.arguments)
    passes = ", ".join(_passed(p) for p in launcher.params)
    call = f"launchers::{launcher.name}({passes})"
    returns = "void" if launcher.returns == "void" else "int"
    return f"""namespace launchers {{ extern "C" {returns} {launcher.name}({types}); }}
void launch_{launcher.name}({takes}) {{
  const int32_t ak_device = device_of("{first}", arg_{first});
  const DeviceGuard ak_guard(ak_device);
  void* const ak_stream = stream_of(ak_device);
  {f"{call};" if returns == "void" else f"const int ak_code = {call};"}
  check("{launcher.name}", {"0" if returns == "void" else "ak_code"});
}}

"""


def _parameter(p: Param) -> str:
    """Prefixed, so that no name of the source hides one of the binding's."""
    if p.code == "P":
        return f"std::optional<Tensor> arg_{p.name}" if p.optional else f"const Tensor& arg_{p.name}"
    return f"{dict.fromkeys('fd', 'double').get(p.code, 'bool' if p.code == '?' else 'int64_t')} arg_{p.name}"


def _passed(p: Param) -> str:
    if p.code == "S":
        return "ak_stream"
    if p.code == "P":
        dtype = f"ScalarType::{SCALAR_TYPES[p.dtype]}" if p.dtype else "std::nullopt"
        return f'address("{p.name}", arg_{p.name}, ak_device, {dtype}, {str(p.strided).lower()})'
    if p.code in "fd?":
        return f"float(arg_{p.name})" if p.code == "f" else f"arg_{p.name}"
    return f'integer<{p.ctype}>("{p.name}", arg_{p.name})'


# ---- the build ----------------------------------------------------------------------------------------------------


def stable_variant() -> tuple[str, str]:
    """(name of the variant that this machine's nvcc builds for this PyTorch, or "", and why not)."""
    try:
        nvcc = find_nvcc()
    except CudaCompilerMissing as error:
        return "", f"no build: {error}; or let kernel-builder build it"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"release (\d+)\.(\d+)", version)
    own = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    cuda = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    if found is None or own < TORCH_TARGET:
        return "", f"no build: it takes nvcc and PyTorch 2.11 or later, here is PyTorch {torch.__version__}"
    if cuda and (found[1] != cuda[1] or int(found[2]) > int(cuda[2])):
        return "", (f"no build: nvcc is of CUDA {found[1]}.{found[2]}, PyTorch of {torch.version.cuda}, and the loader "
                    "takes the same major and no later minor; set CUDA_HOME to such a toolkit")  # fmt: skip
    machine = f"{platform.machine()}-{platform.system().lower()}"
    return f"torch-stable-abi{TORCH_TARGET[0]}{TORCH_TARGET[1]}-cu{found[1]}{found[2]}-{machine}", ""


def build_library(work: Path, cuda: CudaSource, source: str, identity: str, library: Path) -> None:
    """Compile source and binding into a library for this GPU (sm_90a where there is none). Raises KernelError.

    Paths are relative to the project: the library's messages name no folder of this machine."""
    home, arch = Path(torch.__file__).parent, cuda.capability.replace(".", "")
    # nvcc splits what it passes on where it has a blank or a comma
    named = [str(folder) for folder in (home / "include", work) if not re.search(r"[\s,]", str(folder))]
    command = [
        find_nvcc(), f"-gencode=arch=compute_{arch},code=sm_{arch}", *COMPILE_FLAGS, *cuda.flags,
        "-Xcompiler", "-fvisibility=hidden", f"-I{home / 'include'}", f"-DTORCH_EXTENSION_NAME={identity}",
        f"-DTORCH_TARGET_VERSION=0x{TORCH_TARGET[0]:02x}{TORCH_TARGET[1]:02x}000000000000",
        source, "torch-ext/torch_binding.cpp", "-o", str(library.relative_to(work)),
        *[word for folder in named for word in ("-Xcompiler", f"-fmacro-prefix-map={folder}/=")],
        "-Xlinker", f"-L{home / 'lib'},--no-as-needed,-ltorch",  # libtorch.so stands for its CPU and CUDA parts
    ]  # fmt: skip
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=900)
    if done.returncode:
        errors = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
        raise KernelError(f"{library.parent.name} does not compile: {(errors or ['no message'])[0][-300:]}")
