"""CUDA C++ in seconds: compile a source of plain CUDA with nvcc, call its `extern "C"` launchers on torch tensors.

    module = compile_cuda(CUDA_SRC, defines={"BLOCK": 256})      # 1-3 s; a cached source: a few ms
    module.rmsnorm_f16(x, weight, out, n_rows, n_cols, eps)      # checked, on torch's current stream
    module.resources      # {"rmsnorm<__half, 256>": {"registers": 32, "spill_bytes": 0, "stack_bytes": 0, "smem_bytes": 128}}

Launchers. Every function *defined* in the source with C linkage is one, read from its own declaration:

    extern "C" int rmsnorm_f16(const __half* x, const __half* weight /* optional */, __half* out,
                               long long n_rows, long long n_cols, float eps, cudaStream_t stream) { ... }

- It is written out in full at file scope (a macro that expands to a launcher is not seen), in `extern "C"` or in an
  `extern "C" { }` block. It returns a cudaError_t, as `int` or `cudaError_t` (0 is success), or `void`.
- A pointer parameter takes a CUDA tensor of the pointee's dtype: __half/half, __nv_bfloat16, float, double, bool,
  signed/unsigned char, short, int, long long and the <cstdint> names; `void*` takes any dtype. A `using`, `typedef`, `#define`
  or an entry of `defines` may name the type. All tensors of a call are on one device.
- Tensors must be contiguous, unless the parameter carries the comment `/* strided */` (pass the strides as integers). The
  comment `/* optional */` lets None through, as a null pointer.
- Integers (int, long long, size_t, ...) are range-checked, `float`, `double` and `bool` converted. `cudaStream_t`, the last
  parameter, is not passed by the caller: it is torch's current stream on the tensors' device.
- After the launcher, cudaGetLastError is asked too, so that a launch refused by CUDA is never silent.

Errors: CudaCompilerMissing (no nvcc: how to get it), CudaCompileError (the compiler's messages with the lines of
CUDA_SRC), CudaArgumentError (which argument, what it is, what is wanted), CudaLaunchError (the launcher and CUDA's text).

The cache ($AUTOKERNEL_CACHE/cuda, else $XDG_CACHE_HOME/autokernel/cuda, else ~/.cache/autokernel/cuda) is keyed by source, defines, flags,
target and compiler version, and safe to share: one process compiles a source, the others wait for it. Files that the source
includes from elsewhere are not part of the key. CUTLASS/CuTe headers are found through CUTLASS_PATH, CUTLASS_HOME or the pip package nvidia-cutlass.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import keyword
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

DEFAULT_TOOLKIT = Path("/usr/local/cuda")
DEFAULT_ARCH = "sm_90a"      # the target where no GPU is present: compiled to be checked, not run
COMPILE_TIMEOUT_S = 300
BASE_FLAGS = ("-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v",
              "-Xlinker", "--no-undefined", "-cudart", "static")


class CudaError(RuntimeError):
    """Base of everything this module raises about a CUDA source or its launchers."""


class CudaCompilerMissing(CudaError):
    """No nvcc (or no host C++ compiler behind it) on this machine."""


class CudaCompileError(CudaError):
    """The source does not compile, or declares a launcher that cannot be called; the text carries lines of CUDA_SRC."""


class CudaArgumentError(CudaError, TypeError):
    """A launcher was called with a tensor or number that its declaration does not take."""


class CudaLaunchError(CudaError):
    """A launcher returned a CUDA error: `launcher`, `code` (cudaError_t) and CUDA's own text."""

    def __init__(self, launcher: str, code: int, text: str):
        earlier = " (raised by this kernel or an earlier one; the process must be restarted)" if 700 <= code < 720 else ""
        super().__init__(f"launcher {launcher}: CUDA error {code}: {text}{earlier}")
        self.launcher, self.code = launcher, code


# ---------------------------------------------------------------------------------------------- declarations

POINTEES = {"void": None, "__half": "float16", "half": "float16", "__nv_bfloat16": "bfloat16", "nv_bfloat16": "bfloat16",
            "float": "float32", "double": "float64", "bool": "bool", "char": "int8", "signed char": "int8", "int8_t": "int8",
            "unsigned char": "uint8", "uint8_t": "uint8", "short": "int16", "int16_t": "int16", "int": "int32", "int32_t": "int32",
            "long": "int64", "long long": "int64", "int64_t": "int64", "__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2"}
SCALARS = {"int": "i", "int32_t": "i", "unsigned": "I", "unsigned int": "I", "uint32_t": "I", "long": "q", "long long": "q", "int64_t": "q",
           "size_t": "Q", "unsigned long long": "Q", "uint64_t": "Q", "float": "f", "double": "d", "bool": "?"}


@dataclass(frozen=True)
class Param:
    """One parameter of a launcher. `code` is its struct format: P pointer, i I q Q integers, f d floats, ? bool, S stream."""

    name: str
    ctype: str                  # as written, without qualifiers and comments: "__half*", "long long"
    code: str
    dtype: str | None = None    # torch dtype name of a pointer; None: any
    const: bool = False         # a pointer that the launcher only reads
    strided: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Launcher:
    """A C-linkage function of the source: its name, return type, parameters in order and line."""

    name: str
    returns: str
    params: tuple[Param, ...]
    line: int

    @property
    def arguments(self) -> tuple[Param, ...]:
        """What the Python caller passes: every parameter but the stream."""
        return tuple(p for p in self.params if p.code != "S")


def _blank(source: str, comments_only: bool = False) -> str:
    """The source with comments (and the inside of literals) replaced by spaces: same length, same line breaks."""
    token = re.compile(r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"(?P<d>[^\s()\\"]{0,16})\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)

    def blank(match: re.Match) -> str:
        text = match.group()
        if text == '"C"' or (comments_only and not text.startswith("/")):
            return text
        return re.sub(r"[^\n]", " ", text)

    return token.sub(blank, source)


def _aliases(code: str, defines: Mapping[str, object]) -> dict[str, str]:
    """Names that the source gives to types: using, typedef, #define, and the caller's defines."""
    found = {name: str(value) for name, value in defines.items()}
    for pattern in (r"\busing\s+(\w+)\s*=\s*([\w\s]+);", r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([\w \t]+)$"):
        found.update((name, " ".join(value.split())) for name, value in re.findall(pattern, code, re.M))
    found.update((name, " ".join(value.split())) for value, name in re.findall(r"\btypedef\s+([\w\s]+?)\s+(\w+)\s*;", code))
    return found


def _param(text: str, marks: set[str], aliases: Mapping[str, str], where: str) -> Param:
    pieces = re.fullmatch(r"(?P<type>[\w\s]+?)(?P<stars>[\s*]*)(?P<restrict>\b__restrict__\b|\b__restrict\b)?\s*\b(?P<name>\w+)",
                          " ".join(re.sub(r"(?<=\*)\s*const\b", "", text).split()))
    if pieces is None:
        raise CudaCompileError(f"{where}: parameter '{' '.join(text.split())}' is not understood; use pointers, integers, floats, bool and cudaStream_t")
    words = pieces["type"].split()
    base = " ".join(w for w in words if w not in ("const", "volatile", "struct"))
    stars = pieces["stars"].count("*")
    for _ in range(8):                                    # an alias may name another alias
        if base in POINTEES or base in SCALARS or base not in aliases:
            break
        base = aliases[base]
    shown = base + "*" * stars
    if stars == 0 and base == "cudaStream_t":
        return Param(pieces["name"], shown, "S")
    if stars == 0 and base in SCALARS:
        return Param(pieces["name"], shown, SCALARS[base])
    if stars == 1 and base in POINTEES:
        return Param(pieces["name"], shown, "P", POINTEES[base], "const" in words, "strided" in marks, "optional" in marks)
    raise CudaCompileError(f"{where}: parameter '{pieces['name']}' has type '{shown}', which no argument converts to; known: pointers to "
                           f"{', '.join(POINTEES)}; {', '.join(SCALARS)}; cudaStream_t")


def _split(code: str, raw: str) -> list[tuple[str, set[str]]]:
    """Each parameter of a list, with the markers in its comments; in `int* x,  // optional` the marker is still x's."""
    pieces, start = [], 0
    for comma in [m.start() for m in re.finditer(",", code)] + [len(code)]:
        rest_of_line = re.compile(r",[^\S\n]*(?=\n)").match(code, comma)
        end = rest_of_line.end() if rest_of_line else comma + 1
        comments = re.findall(r"(?:/\*|//)\s*((?:(?:strided|optional)\b[,\s]*)+)", raw[start:end])
        if code[start:comma].strip() not in ("", "void"):
            pieces.append((code[start:comma], set(re.findall(r"\w+", " ".join(comments)))))
        start = end
    return pieces


def parse_launchers(source: str, defines: Mapping[str, object] | None = None) -> dict[str, Launcher]:
    """The functions that `source` defines with C linkage, by name, from the text alone.

    Raises CudaCompileError, with the line, where a parameter's type is unknown or the stream is not last."""
    code = _blank(source)
    aliases = _aliases(code, defines or {})
    definition = re.compile(r"\b(?P<returns>int|void|cudaError_t)\s+(?P<name>\w+)\s*\((?P<params>[^(){};]*)\)\s*\{")
    spans = []
    for linkage in re.finditer(r'\bextern\s*"C"\s*', code):
        if code[linkage.end():linkage.end() + 1] == "{":
            depth, end = 0, linkage.end()
            while end < len(code):
                depth += {"{": 1, "}": -1}.get(code[end], 0)
                end += 1
                if depth == 0:
                    break
            spans += [m for m in definition.finditer(code, linkage.end() + 1, end)
                      if code.count("{", linkage.end() + 1, m.start()) == code.count("}", linkage.end() + 1, m.start())]
        else:
            spans += [m for m in [re.compile(r"(?:__host__\s+|inline\s+)*" + definition.pattern).match(code, linkage.end())] if m]
    launchers: dict[str, Launcher] = {}
    for found in spans:
        line = source.count("\n", 0, found.start("name")) + 1
        where = f"CUDA_SRC line {line}, launcher {found['name']}"
        params = [_param(piece, marks, aliases, where) for piece, marks in _split(found["params"], source[slice(*found.span("params"))])]
        if "S" in [p.code for p in params[:-1]]:
            raise CudaCompileError(f"{where}: cudaStream_t must be the last parameter")
        launchers.setdefault(found["name"], Launcher(found["name"], found["returns"], tuple(params), line))
    return launchers


# ------------------------------------------------------------------------------------------------- toolchain

@dataclass(frozen=True)
class Toolchain:
    """An nvcc with its version text, and the library folders of its toolkit."""

    nvcc: str
    version: str
    library_dirs: tuple[str, ...]


def find_nvcc() -> Toolchain:
    """nvcc from CUDA_HOME or CUDA_PATH, PATH, the pip package nvidia-cuda-nvcc, or /usr/local/cuda; else CudaCompilerMissing."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    spec = importlib.util.find_spec("nvidia")
    wheels = [home for folder in (spec.submodule_search_locations or () if spec else ()) for home in sorted(Path(folder).glob("cu[0-9]*"), reverse=True)]
    candidates = [home / "bin/nvcc" for home in homes] + ([Path(on_path)] if on_path else [])
    candidates += [home / "bin/nvcc" for home in [*wheels, DEFAULT_TOOLKIT]]
    nvcc = next((str(path) for path in candidates if os.access(path, os.X_OK)), None)
    if nvcc is None:
        raise CudaCompilerMissing("nvcc not found in CUDA_HOME, CUDA_PATH, PATH, the pip package nvidia-cuda-nvcc or /usr/local/cuda; "
                                  "get it with: uv sync --extra cuda   (or set CUDA_HOME to a CUDA toolkit)")
    if shutil.which("g++") is None and not os.environ.get("NVCC_CCBIN"):
        raise CudaCompilerMissing(f"{nvcc} needs a host C++ compiler and g++ is not in PATH; install g++ or set NVCC_CCBIN")
    return _toolchain(nvcc)


@functools.lru_cache
def _toolchain(nvcc: str) -> Toolchain:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise CudaCompilerMissing(f"{nvcc} --version fails: {(done.stderr or done.stdout).strip()[-200:]}")
    root = Path(nvcc).resolve().parent.parent
    return Toolchain(nvcc, done.stdout.strip(), tuple(str(root / d) for d in ("lib64", "lib") if (root / d).is_dir()))


def cuda_arch() -> str:
    """The architecture-specific target of the current GPU ("sm_90a", "sm_89"), or sm_90a where there is none."""
    if not torch.cuda.is_available():
        return DEFAULT_ARCH
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")    # wgmma, setmaxnreg, tcgen05 exist in the 'a' targets only


def cache_dir() -> Path:
    """Where compiled sources are kept."""
    base = os.environ.get("AUTOKERNEL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autokernel"
    return Path(base) / "cuda"


def cutlass_flags(source: str) -> list[str]:
    """Include options for a source that includes CUTLASS or CuTe headers; none when they are not installed."""
    if not re.search(r"^\s*#\s*include\s*[<\"](?:cutlass|cute)/", source, re.M):
        return []
    homes = [Path(os.environ[name]) for name in ("CUTLASS_PATH", "CUTLASS_HOME") if os.environ.get(name)]
    spec = importlib.util.find_spec("cutlass_library")       # of the pip package nvidia-cutlass
    homes += [Path(folder) / "source" for folder in (spec.submodule_search_locations or () if spec else ())]
    return [f"-I{home / sub}" for home in homes[:1] for sub in ("include", "tools/util/include")]


# ----------------------------------------------------------------------------------------------- diagnostics

_MESSAGE = re.compile(r"^(?P<file>[^\s(:][^(:]*?)(?:\((?P<l1>\d+)\)|:(?P<l2>\d+)(?::\d+)?): (?P<level>[a-z ]*error|warning)(?: #[\w-]+)?: (?P<text>.*)$")
_TOOL = re.compile(r"^(?P<tool>ptxas|nvcc|nvlink|cicc)\b(?:.*, line (?P<ptx>\d+);)?[^:]*?(?P<level>fatal|error|warning)\s*: (?P<text>.*)$")
_LINK = re.compile(r"(undefined reference to .*|multiple definition of .*)$")


def format_messages(output: str, source: str, level: str = "error", ptx: str = "") -> list[str]:
    """The compiler's messages of one level ("error" or "warning"), each with its line of CUDA_SRC and three lines of context.

    Instantiation backtraces, overload candidates, command lines and temporary paths are left out. A message from inside a
    header names the header and the line of CUDA_SRC that led there; one from ptxas is mapped through the .loc of `ptx`."""
    lines, messages, raw = source.splitlines(), [], output.splitlines()
    for i, text in enumerate(raw):
        found, tool, link = _MESSAGE.match(text), _TOOL.match(text), _LINK.search(text)
        if found and level in found["level"]:
            details = []                          # "argument types are: (int, int)" and the like follow, deeply indented
            for more in raw[i + 1:i + 4]:
                if not re.match(r" {12}\S", more) or "detected during" in more:
                    break
                details.append(more.strip())
            line, file = int(found["l1"] or found["l2"]), Path(found["file"]).name
            place = f"CUDA_SRC line {line}"
            if file != "CUDA_SRC":
                led = re.search(r"at line (\d+) of CUDA_SRC", "\n".join(raw[i:i + 40]))
                place, line = f"{file} line {line}", int(led[1]) if led else 0
            messages.append("; ".join([f"{place}: {found['level']}: {found['text']}", *details]) + _context(lines, line))
        elif tool and level in tool["level"].replace("fatal", "error") and "due to errors" not in tool["text"]:
            line = _ptx_line(ptx, int(tool["ptx"])) if tool["ptx"] else 0
            place = f"CUDA_SRC line {line} ({tool['tool']})" if line else tool["tool"]
            text = re.sub(r"\b_Z\w+", lambda m: demangle(m.group()), tool["text"].strip())
            messages.append(f"{place}: {tool['level']}: {text}" + _context(lines, line))
        elif link and level == "error":
            messages.append(f"linker: error: {link[1]}")
    return list(dict.fromkeys(messages))


def _context(lines: list[str], line: int) -> str:
    """The line before, the line itself (marked) and the line after."""
    shown = [n for n in (line - 1, line, line + 1) if line and 1 <= n <= len(lines)]
    return "".join(f"\n  {'>' if n == line else ' '} {n:4d} | {lines[n - 1].rstrip()}" for n in shown)


def _ptx_line(ptx: str, number: int) -> int:
    """The line of CUDA_SRC that line `number` of the PTX was generated from; 0 where it is not known."""
    own = re.search(r'^\s*\.file\s+(\d+)\s+"[^"]*CUDA_SRC"', ptx, re.M)
    before = re.findall(rf"^\s*\.loc\s+{own[1]}\s+(\d+)", "\n".join(ptx.splitlines()[:number]), re.M) if own else []
    return int(before[-1]) if before else 0


def demangle(symbol: str) -> str:
    """A kernel's name without return type and parameters: `_Z1kI6__halfEvPKT_` is `k<__half>`."""
    try:
        cxx = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return symbol
    cxx.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = cxx(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return symbol
    name = ctypes.string_at(text).decode().replace("(anonymous namespace)::", "")
    depth, end = 0, len(name)
    for i, char in enumerate(name):               # the parameter list is the first parenthesis outside <...>
        depth += {"<": 1, ">": -1}.get(char, 0)
        if char == "(" and depth == 0:
            end = i
            break
    name = re.sub(r"\((?:int|long|unsigned int|unsigned long|bool)\)", "", name[:end])    # k<(int)4> is k<4>
    depth, start = 0, 0
    for i, char in enumerate(name):               # a template's return type comes first: "void k<4>"
        depth += {"<": 1, ">": -1}.get(char, 0)
        if char == " " and depth == 0:
            start = i + 1
    return name[start:]


def parse_resources(output: str) -> dict[str, dict[str, int]]:
    """Per kernel, from `ptxas -v`: registers a thread, spill_bytes (stores and loads), stack_bytes, static smem_bytes a block."""
    kernels: dict[str, dict[str, int]] = {}
    for symbol, body in re.findall(r"Compiling entry function '(\w+)'[^\n]*\n(.*?)(?=Compiling entry function|\Z)", output, re.S):
        def number(pattern: str, text: str = body) -> int:
            return sum(int(value) for value in re.findall(pattern, text))
        kernels[demangle(symbol)] = {
            "registers": number(r"Used (\d+) registers"), "spill_bytes": number(r"(\d+) bytes spill (?:stores|loads)"),
            "stack_bytes": number(r"(\d+) bytes stack frame"), "smem_bytes": number(r"(\d+) bytes smem")}
    return kernels


def triton_resources(compiled: object) -> dict[str, int | None]:
    """The same figures of a compiled Triton kernel (what `kernel[grid](...)` returns). Triton counts spills as 4-byte words of local
    memory; registers and spills are known once the kernel is loaded on a device, None before."""
    registers, spills = getattr(compiled, "n_regs", None), getattr(compiled, "n_spills", None)
    return {"registers": registers, "spill_bytes": None if spills is None else 4 * spills,
            "smem_bytes": getattr(getattr(compiled, "metadata", None), "shared", None)}


# --------------------------------------------------------------------------------------------------- compile

@dataclass(frozen=True)
class CudaModule:
    """A compiled source. Its launchers are attributes: `module.rmsnorm_f16(x, ...)`."""

    library: Path
    arch: str
    launchers: dict[str, Launcher]
    resources: dict[str, dict[str, int]]      # per kernel, see parse_resources
    warnings: list[str]                       # the compiler's, with line and context
    cached: bool                              # True: nothing was compiled
    compile_seconds: float                    # of this call, waiting for another process included

    def __getattr__(self, name: str) -> Callable[..., None]:
        known = ", ".join(self.__dict__.get("launchers", ())) or "none"
        raise AttributeError(f'the CUDA source has no extern "C" launcher {name!r}; it has: {known}')


def compile_cuda(source: str, *, arch: str | None = None, defines: Mapping[str, int | float | str] | None = None,
                 flags: Sequence[str] = (), host_tensors: bool = False) -> CudaModule:
    """Compile `source` (or take it from the cache) and load it; the module docstring has the conventions.

    arch: "sm_90a", "sm_89", ...; default: the GPU present. defines: preprocessor definitions, `CONFIG` as it stands (True is 1).
    flags: further nvcc options. host_tensors: let launchers take CPU tensors (for launchers that run on the host: tests).
    Raises CudaCompilerMissing or CudaCompileError."""
    start = time.perf_counter()
    defines = {name: int(value) if isinstance(value, bool) else value for name, value in (defines or {}).items()}
    launchers, toolchain, arch = parse_launchers(source, defines), find_nvcc(), arch or cuda_arch()
    text = f'#line 1 "CUDA_SRC"\n{source}\n' + _glue(launchers)
    command = [toolchain.nvcc, f"-gencode=arch=compute_{arch[3:]},code={arch}", *BASE_FLAGS, *flags, *cutlass_flags(source),
               *(f"-D{name}={value}" for name, value in sorted(defines.items()))]
    key = hashlib.sha256("\0".join([text, toolchain.version, *command[1:]]).encode()).hexdigest()[:32]
    folder = cache_dir() / key[:2] / key
    library, record = folder / "kernel.so", folder / "kernel.json"
    cached = record.exists()                      # written last: where it is, the library is whole
    if not cached:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):           # released by the system if its holder dies
            cached = record.exists()
            if not cached:
                _compile(command + [f"-L{d}" for d in toolchain.library_dirs], text, source, library, record)
    report = json.loads(record.read_text())
    module = CudaModule(library, arch, launchers, report["resources"], report["warnings"], cached, time.perf_counter() - start)
    handle = ctypes.CDLL(str(library))
    handle.ak_error_string.restype = ctypes.c_char_p
    for launcher in launchers.values():
        module.__dict__[launcher.name] = _bind(launcher, handle, host_tensors)
    return module


def _compile(command: list[str], text: str, source: str, library: Path, record: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="tmp.") as work:
        (Path(work) / "kernel.cu").write_text(text)
        done = subprocess.run([*command, "--keep", f"--keep-dir={work}", "-o", "kernel.so", "kernel.cu"], cwd=work, text=True, errors="replace",
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMPILE_TIMEOUT_S)
        if done.returncode:
            ptx = next(Path(work).glob("*.ptx"), None)
            messages = format_messages(done.stdout, source, "error", ptx.read_text() if ptx else "")
            rest = done.stdout.replace(work, "").strip().splitlines()[-5:]
            raise CudaCompileError("CUDA_SRC does not compile:\n" + "\n".join(messages or rest or [f"nvcc ended with status {done.returncode}"]))
        report = {"resources": parse_resources(done.stdout), "warnings": format_messages(done.stdout, source, "warning")}
        (Path(work) / "kernel.json").write_text(json.dumps(report))
        os.replace(Path(work) / "kernel.so", library)
        os.replace(Path(work) / "kernel.json", record)


# ------------------------------------------------------------------------------------------------- launchers

def _glue(launchers: Mapping[str, Launcher]) -> str:
    """C entry points that take one packed struct (device, stream, arguments): a call then costs ctypes one conversion instead
    of one per argument (0.3 us against 1.0 us at ten arguments). device < 0 marks a call on the host."""
    parts = ['#line 1 "launcher glue"', "#include <cuda_runtime.h>",
             'extern "C" const char* ak_error_string(int code) { return cudaGetErrorString((cudaError_t)code); }']
    for launcher in launchers.values():
        fields = "".join(f" {'const ' * p.const}{p.ctype} {p.name};" for p in launcher.arguments)
        call = f"{launcher.name}({', '.join('a->ak_stream' if p.code == 'S' else 'a->' + p.name for p in launcher.params)})"
        parts.append(f"""struct ak_args_{launcher.name} {{ cudaStream_t ak_stream; int ak_device;{fields} }};
extern "C" int ak_call_{launcher.name}(const ak_args_{launcher.name}* a) {{
    int before = -1, code = 0;
    if (a->ak_device >= 0) {{
        code = (int)cudaGetDevice(&before);
        if (code == 0 && before != a->ak_device) code = (int)cudaSetDevice(a->ak_device);
        if (code) return code;
        cudaGetLastError();
    }}
    {f'{call};' if launcher.returns == 'void' else f'code = (int){call};'}
    if (a->ak_device >= 0) {{
        int last = (int)cudaGetLastError();
        if (code == 0) code = last;
        if (before != a->ak_device) cudaSetDevice(before);
    }}
    return code;
}}""")
    return "\n".join(parts) + "\n"


def _bind(launcher: Launcher, handle: ctypes.CDLL, host_tensors: bool) -> Callable[..., None]:
    """The Python function of one launcher, generated from its declaration: a few attribute reads per tensor and one call."""
    names = {p: p.name + "_" * keyword.iskeyword(p.name) for p in launcher.arguments}
    device, checks, values = "", [], []
    for p, name in names.items():
        if p.code != "P":
            values.append(name)
            continue
        tests = [f"{name}.dtype is ak_torch.{p.dtype}"] if p.dtype else []
        tests += [] if p.strided else [f"{name}.is_contiguous()"]
        if device or p.optional:
            tests.append(f"{name}.get_device() == ak_device")
        else:
            device = f"{name}.get_device()"       # -1 on the CPU
        if tests:
            checks.append(f"({name} is None or {' and '.join(tests)})" if p.optional else " and ".join(tests))
        values.append(f"(0 if {name} is None else {name}.data_ptr())" if p.optional else f"{name}.data_ptr()")
    stream = "ak_stream(ak_device)" + (" if ak_device >= 0 else 0" if host_tensors else "")
    code = f"""def {launcher.name}({', '.join(names.values())}):
    try:
        ak_device = {device or 'ak_torch.cuda.current_device()'}
        ak_code = None
        if {' and '.join(checks + ([] if host_tensors else ['ak_device >= 0'])) or 'True'}:
            ak_code = ak_call(ak_pack({', '.join([stream, 'ak_device', *values])}))
    except (AttributeError, TypeError, OverflowError, ak_struct_error):
        ak_code = None
    if ak_code is None:
        raise ak_explain(({''.join(name + ', ' for name in names.values())}))
    if ak_code:
        raise ak_failed(ak_code)
"""
    call = handle[f"ak_call_{launcher.name}"]
    call.argtypes = [ctypes.c_char_p]
    scope = {"ak_torch": torch, "ak_call": call, "ak_pack": struct.Struct("Pi" + "".join(p.code for p in launcher.arguments)).pack,
             "ak_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None), "ak_struct_error": struct.error,
             "ak_explain": functools.partial(_explain, launcher, host_tensors),
             "ak_failed": lambda code: CudaLaunchError(launcher.name, code, handle.ak_error_string(code).decode())}
    exec(compile(code, f"<launcher {launcher.name}>", "exec"), scope)
    function = scope[launcher.name]
    function.__doc__ = f"{launcher.name}({', '.join(f'{p.ctype} {p.name}' for p in launcher.arguments)}), CUDA_SRC line {launcher.line}"
    return function


def _explain(launcher: Launcher, host_tensors: bool, values: tuple) -> CudaArgumentError:
    """Which argument a launcher refuses, and why: found only after a call has been refused."""
    device = None
    for p, value in zip(launcher.arguments, values, strict=True):
        problem = ""
        if p.code != "P":
            try:
                struct.pack(p.code, value)
            except (struct.error, TypeError, OverflowError) as error:
                problem = f"is {value!r}, wanted {p.ctype} ({error})"
        elif value is None and p.optional:
            continue
        elif not isinstance(value, torch.Tensor):
            problem = f"is {type(value).__name__}, wanted a tensor" + ("" if value is not None else " (mark it /* optional */ to allow None)")
        elif not (value.is_cuda or host_tensors):
            problem = f"is on {value.device}, wanted a CUDA tensor"
        elif device is not None and value.device != device:
            problem = f"is on {value.device}, the tensors before it on {device}"
        elif p.dtype and value.dtype is not getattr(torch, p.dtype):
            problem = f"is {value.dtype}, wanted torch.{p.dtype} for {p.ctype}"
        elif not (p.strided or value.is_contiguous()):
            problem = (f"is not contiguous: shape {tuple(value.shape)}, strides {value.stride()}; call .contiguous(), or mark the parameter "
                       f"/* strided */ and pass its strides")
        else:
            device = value.device
        if problem:
            return CudaArgumentError(f"launcher {launcher.name}: argument {p.name} {problem}")
    return CudaArgumentError(f"launcher {launcher.name}: arguments refused: {', '.join(type(v).__name__ for v in values)}")
