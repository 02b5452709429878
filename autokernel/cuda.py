"""CUDA C++ in seconds: compile plain CUDA with nvcc, call its `extern "C"` launchers on torch tensors.

    module = compile_cuda(CUDA_SRC, defines=CONFIG)  # a new source: 1 to 4 s; a cached one: some milliseconds
    module.rmsnorm_f16(x, weight, out, n_rows, n_cols, eps)  # checked, on torch's current stream
    module.resources["rmsnorm<__half, 4>"]  # {"registers": 40, "spill_bytes": 0, "stack_bytes": 0, "smem_bytes": 160}

Launchers. Every function that the source *defines* with C linkage is one, read from its own declaration:

    extern "C" int rmsnorm_f16(const __half* x, const __half* weight /* optional */, __half* out,
                               long long n_rows, long long n_cols, float eps, cudaStream_t stream) { ... }

- It is written out at file scope (one that a macro expands to is not seen), after `extern "C"` or in a block
  `extern "C" { }`, and returns a cudaError_t, as `int` or `cudaError_t` (0 is success), or `void`.
- A pointer takes a CUDA tensor of the pointee's dtype: __half/half, __nv_bfloat16, float, double, bool, signed and
  unsigned char, short, int, long long and their <cstdint> names; `void*` takes any. `using`, `typedef`, `#define` or an
  entry of `defines` may name the type. All tensors of a call are on one device.
- Tensors must be contiguous, unless the parameter carries the comment `/* strided */` (pass the strides as integers).
  The comment `/* optional */` lets None through, as a null pointer.
- Integers are range-checked; floats and bool are converted. `cudaStream_t`, the last parameter, is not passed by the
  caller: it is torch's current stream on the tensors' device, which is made current for the call.
- cudaGetLastError is asked after each launcher, so a launch that CUDA refuses is never silent.

Errors: CudaCompilerMissing (no nvcc, and how to get it), CudaCompileError (the compiler's messages with lines of
CUDA_SRC), CudaArgumentError (which argument, what it is, what is wanted), CudaLaunchError (the launcher, CUDA's text).

The cache ($AUTOKERNEL_CACHE/cuda, else $XDG_CACHE_HOME/autokernel/cuda, else ~/.cache/autokernel/cuda) is keyed by
source, defines, flags, target and compiler version, and safe to share: one process compiles a source, the others wait.
What the source includes from elsewhere is not part of the key. CUTLASS and CuTe headers are found through CUTLASS_PATH,
CUTLASS_HOME or the pip package nvidia-cutlass.
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
from typing import Any

import torch
from filelock import FileLock

from autokernel.cuda_source import (
    CudaCompileError,
    CudaError,
    Launcher,
    Param,
    format_messages,
    parse_launchers,
    parse_resources,
    triton_resources,
)
from autokernel.paths import cache_dir

__all__ = [
    "CudaArgumentError", "CudaCompileError", "CudaCompilerMissing", "CudaError", "CudaLaunchError", "CudaModule",
    "Launcher", "Param", "compile_cuda", "cuda_arch", "find_nvcc", "loaded_modules", "parse_launchers",
    "triton_resources",
]  # fmt: skip

DEFAULT_TOOLKIT = Path("/usr/local/cuda")
DEFAULT_ARCH = "sm_90a"  # the target where no GPU is present: compiled to be checked, not run
COMPILE_TIMEOUT_S = 300
# The static runtime works beside whatever version torch brought: both use the device's primary context.
# Without -fno-gnu-unique, a static variable in a template is shared by all sources that one process loads.
FLAGS = (
    "-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-cudart", "static",
    "-shared", "-Xcompiler", "-fPIC,-fno-gnu-unique", "-Xlinker", "--no-undefined",
)  # fmt: skip


class CudaCompilerMissing(CudaError):
    """No nvcc, or no host C++ compiler behind it, on this machine."""


class CudaArgumentError(CudaError, TypeError):
    """A launcher was called with a tensor or number that its declaration does not take."""


class CudaLaunchError(CudaError):
    """A launcher's CUDA error: `launcher`, `code` (cudaError_t) and CUDA's own text."""

    def __init__(self, launcher: str, code: int, text: str):
        lasting = (
            " (by this kernel or an earlier one; this process can no longer use the GPU)" if 700 <= code < 720 else ""
        )
        super().__init__(f"launcher {launcher}: CUDA error {code}: {text}{lasting}")
        self.launcher, self.code = launcher, code


# ---- toolchain -------------------------------------------------------------------------------------------------------


def find_nvcc() -> str:
    """nvcc of CUDA_HOME or CUDA_PATH, PATH, pip's nvidia-cuda-nvcc or /usr/local/cuda; else CudaCompilerMissing."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    wheels = [home for folder in _package("nvidia") for home in sorted(folder.glob("cu[0-9]*"), reverse=True)]
    candidates = [str(home / "bin/nvcc") for home in homes] + [shutil.which("nvcc") or ""]
    candidates += [str(home / "bin/nvcc") for home in [*wheels, DEFAULT_TOOLKIT]]
    nvcc = next((path for path in candidates if path and os.access(path, os.X_OK)), None)
    if nvcc is None:
        raise CudaCompilerMissing(
            "nvcc not found in CUDA_HOME, CUDA_PATH, PATH, the pip package nvidia-cuda-nvcc or /usr/local/cuda; "
            "get it with: uv sync --extra cuda   (or set CUDA_HOME to a CUDA toolkit)"
        )
    if shutil.which("g++") is None and not os.environ.get("NVCC_CCBIN"):
        raise CudaCompilerMissing(
            f"{nvcc} needs a host C++ compiler and g++ is not in PATH; install g++ or set NVCC_CCBIN"
        )
    return nvcc


def _package(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


@functools.lru_cache
def _version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise CudaCompilerMissing(f"{nvcc} --version fails: {(done.stderr or done.stdout).strip()[-200:]}")
    return done.stdout.strip()


def cuda_arch() -> str:
    """The target of the current GPU ("sm_90a", "sm_89"), or sm_90a where there is none."""
    if not torch.cuda.is_available():
        return DEFAULT_ARCH
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")  # wgmma, setmaxnreg, tcgen05: 'a' targets only


def _cutlass(source: str) -> list[str]:
    """Include options for a source that includes CUTLASS or CuTe headers; none where they are not installed."""
    if not re.search(r"^\s*#\s*include\s*[<\"](?:cutlass|cute)/", source, re.M):
        return []
    homes = [Path(os.environ[name]) for name in ("CUTLASS_PATH", "CUTLASS_HOME") if os.environ.get(name)]
    homes += [folder / "source" for folder in _package("cutlass_library")]
    return [f"-I{home / sub}" for home in homes[:1] for sub in ("include", "tools/util/include")]


# ---- compile ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaModule:
    """A compiled source. Its launchers are attributes: `module.rmsnorm_f16(x, ...)`."""

    library: Path
    arch: str
    launchers: dict[str, Launcher]
    resources: dict[str, dict[str, int]]  # per kernel: registers, spill_bytes, stack_bytes, static smem_bytes
    warnings: list[str]  # the compiler's, with line and context
    cached: bool  # nothing was compiled
    compile_seconds: float  # of this call, waiting for another process included

    def __getattr__(self, name: str) -> Callable[..., None]:
        known = ", ".join(self.__dict__.get("launchers", ())) or "none"
        raise AttributeError(f'the CUDA source has no extern "C" launcher {name!r}; it has: {known}')


_loaded: list[CudaModule] = []


def loaded_modules() -> list[CudaModule]:
    """What this process has compiled or taken from the cache so far."""
    return list(_loaded)


def compile_cuda(
    source: str,
    *,
    arch: str | None = None,
    defines: Mapping[str, int | float | str] | None = None,
    flags: Sequence[str] = (),
    host_tensors: bool = False,
) -> CudaModule:
    """Compile `source` (or take it from the cache) and load it; see the module's docstring.

    arch: "sm_90a", "sm_89", ...; default: the GPU present. defines: preprocessor definitions; a CONFIG as it stands
    (True is 1). flags: further nvcc options. host_tensors: let launchers that compute on the CPU take CPU tensors.
    Raises CudaCompilerMissing or CudaCompileError."""
    start = time.perf_counter()
    defines = {name: int(value) if isinstance(value, bool) else value for name, value in (defines or {}).items()}
    launchers, nvcc, arch = parse_launchers(source, defines), find_nvcc(), arch or cuda_arch()
    text = f'#line 1 "CUDA_SRC"\n{source}\n' + glue(launchers)
    options = [f"-gencode=arch=compute_{arch[3:]},code={arch}", *FLAGS, *flags, *_cutlass(source)]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    key = hashlib.sha256("\0".join([text, _version(nvcc), *options]).encode()).hexdigest()[:32]
    folder = cache_dir() / "cuda" / key[:2] / key
    library, record = folder / "kernel.so", folder / "kernel.json"
    cached = record.exists()  # written last: where it is, the library is whole
    if not cached:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):  # the system releases it when its holder dies
            cached = record.exists()
            if not cached:
                _compile([nvcc, *options], text, source, folder)
    report = json.loads(record.read_text())
    handle = ctypes.CDLL(str(library))
    handle.ak_error_string.restype = ctypes.c_char_p
    seconds = time.perf_counter() - start
    module = CudaModule(library, arch, launchers, report["resources"], report["warnings"], cached, seconds)
    for launcher in launchers.values():
        module.__dict__[launcher.name] = bind(launcher, handle, host_tensors)
    _loaded.append(module)
    return module


def _compile(command: list[str], text: str, source: str, folder: Path) -> None:
    """Write kernel.so and kernel.json into `folder`, each whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="tmp.") as name:
        work = Path(name)
        (work / "kernel.cu").write_text(text)
        command = [
            *command,
            "--keep",
            f"--keep-dir={work}",
            "-o",
            "kernel.so",
            "kernel.cu",
        ]  # the PTX explains ptxas errors
        try:
            done = subprocess.run(
                command, cwd=work, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CudaCompileError(f"CUDA_SRC: nvcc took more than {COMPILE_TIMEOUT_S} s and was stopped") from None
        if done.returncode:
            ptx = next(work.glob("*.ptx"), None)
            messages = format_messages(done.stdout, source, "error", ptx.read_text() if ptx else "")
            last = done.stdout.replace(name, "").strip().splitlines()[-5:] or [
                f"nvcc ended with status {done.returncode}"
            ]
            raise CudaCompileError("CUDA_SRC does not compile:\n" + "\n".join(messages or last))
        report = {
            "resources": parse_resources(done.stdout),
            "warnings": format_messages(done.stdout, source, "warning"),
        }
        (work / "kernel.json").write_text(json.dumps(report))
        os.replace(work / "kernel.so", folder / "kernel.so")
        os.replace(work / "kernel.json", folder / "kernel.json")


# ---- launchers -------------------------------------------------------------------------------------------------------


def glue(launchers: Mapping[str, Launcher]) -> str:
    """C entry points that take one packed struct (stream, device, arguments) and make the device current.

    One struct instead of one argument each: ctypes then converts once (0.3 us instead of 1.0 us at ten arguments).
    device < 0 marks a call on CPU tensors. No error is left from an earlier call: each asks for the last one."""
    parts = [
        '#line 1 "launcher glue"\n#include <cuda_runtime.h>',
        'extern "C" const char* ak_error_string(int code) { return cudaGetErrorString((cudaError_t)code); }',
    ]
    for launcher in launchers.values():
        fields = "".join(f" {'const ' * p.const}{p.ctype} {p.name};" for p in launcher.arguments)
        values = ", ".join("a->ak_stream" if p.code == "S" else f"a->{p.name}" for p in launcher.params)
        call = f"{launcher.name}({values})"
        parts.append(f"""struct ak_args_{launcher.name} {{ cudaStream_t ak_stream; int ak_device;{fields} }};
extern "C" int ak_call_{launcher.name}(const ak_args_{launcher.name}* a) {{
    int before = -1, code = 0;
    if (a->ak_device >= 0) {{
        code = (int)cudaGetDevice(&before);
        if (code == 0 && before != a->ak_device) code = (int)cudaSetDevice(a->ak_device);
        if (code) return cudaGetLastError(), code;
    }}
    {f"{call};" if launcher.returns == "void" else f"code = (int){call};"}
    if (a->ak_device >= 0) {{
        int last = (int)cudaGetLastError();
        if (code == 0) code = last;
        if (before != a->ak_device) cudaSetDevice(before);
    }}
    return code;
}}""")
    return "\n".join(parts) + "\n"


def bind(launcher: Launcher, handle: ctypes.CDLL, host_tensors: bool = False) -> Callable[..., None]:
    """The Python function of one launcher, generated from its declaration: few attribute reads, one call."""
    names = {p: p.name + "_" * keyword.iskeyword(p.name) for p in launcher.arguments}
    device, checks, values = "", [], []
    for p, name in names.items():
        if p.code != "P":
            values.append(name)
            continue
        tests = [f"{name}.dtype is ak_{p.dtype}"] * bool(p.dtype) + [f"{name}.is_contiguous()"] * (not p.strided)
        if device or p.optional:
            tests.append(f"{name}.get_device() == ak_device")
        else:
            device = f"{name}.get_device()"  # -1 on the CPU
        if tests:
            checks.append(f"({name} is None or {' and '.join(tests)})" if p.optional else " and ".join(tests))
        values.append(f"(0 if {name} is None else {name}.data_ptr())" if p.optional else f"{name}.data_ptr()")
    checks += [] if host_tensors else ["ak_device >= 0"]
    stream = "ak_stream(ak_device)" + " if ak_device >= 0 else 0" * host_tensors
    code = f"""def {launcher.name}({", ".join(names.values())}):
    ak_code = None
    try:
        ak_device = {device or "ak_current_device()"}
        if {" and ".join(checks) or "True"}:
            ak_code = ak_call(ak_pack({", ".join([stream, "ak_device", *values])}))
    except (AttributeError, TypeError, OverflowError, ak_struct_error):
        pass
    if ak_code is None:
        raise ak_refused(({"".join(name + ", " for name in names.values())}))
    if ak_code:
        raise ak_failed(ak_code)
"""
    call = handle[f"ak_call_{launcher.name}"]
    call.argtypes = [ctypes.c_char_p]
    scope: dict[str, Any] = {
        **{f"ak_{p.dtype}": getattr(torch, p.dtype) for p in launcher.arguments if p.dtype},
        "ak_current_device": torch.cuda.current_device,
        "ak_call": call,
        "ak_pack": struct.Struct("Pi" + "".join(p.code for p in launcher.arguments)).pack,  # native: as C lays it out
        "ak_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),  # not there in a torch without CUDA
        "ak_struct_error": struct.error,
        "ak_refused": lambda values: CudaArgumentError(
            f"launcher {launcher.name}: {_why(launcher, host_tensors, values)}"
        ),
        "ak_failed": lambda code: CudaLaunchError(launcher.name, code, handle.ak_error_string(code).decode()),
    }
    exec(compile(code, f"<launcher {launcher.name}>", "exec"), scope)
    return scope[launcher.name]


def _why(launcher: Launcher, host_tensors: bool, values: tuple) -> str:
    """Which argument was refused, and why: looked for only after the refusal."""
    device = None
    for p, value in zip(launcher.arguments, values, strict=True):
        if p.code != "P":
            try:
                struct.pack(p.code, value)
            except (struct.error, TypeError, OverflowError) as error:
                return f"argument {p.name} is {value!r}, wanted {p.ctype} ({error})"
        elif not isinstance(value, torch.Tensor):
            if not (value is None and p.optional):
                hint = " (mark the parameter /* optional */ to allow None)" if value is None else ""
                return f"argument {p.name} is {type(value).__name__}, wanted a tensor{hint}"
        elif not (value.is_cuda or host_tensors):
            return f"argument {p.name} is on {value.device}, wanted a CUDA tensor"
        elif device is not None and value.device != device:
            return f"argument {p.name} is on {value.device}, the tensors before it on {device}"
        elif p.dtype and value.dtype is not getattr(torch, p.dtype):
            return f"argument {p.name} is {value.dtype}, wanted torch.{p.dtype} for {p.ctype}"
        elif not (p.strided or value.is_contiguous()):
            layout = f"shape {tuple(value.shape)}, strides {value.stride()}"
            return f"argument {p.name} is not contiguous ({layout}); call .contiguous(), or mark it /* strided */"
        else:
            device = value.device
    return f"arguments refused: {', '.join(type(v).__name__ for v in values)}"
