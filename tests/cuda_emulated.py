"""Compiles a CUDA starter for the CPU (see cuda_emulator.h), so that its logic is tested where there is no GPU."""

import ctypes
import importlib.util
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

from autokernel import cuda

HERE = Path(__file__).parent
STARTERS = HERE.parent / "kernels" / "cuda"


def load(name: str):
    """The starter kernels/cuda/<name>.py as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"starter_cuda_{name}", STARTERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PTX = {"mbarrier.init": "mbarrier_init", "expect_tx": "expect", "try_wait": "try_wait", "st.async": "st_async"}


def emulated_ptx(source: str) -> str:
    """`asm volatile("... st.async ...", operands)` as a call of emu::st_async; a fence as nothing."""

    def operands(text: str) -> list[str]:
        found = []
        for start in [m.end() for m in re.finditer(r'"=?[a-z]"\(', text)]:
            depth = 1
            for end in range(start, len(text)):
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                if depth == 0:
                    break
            found.append(text[start:end])
        return found

    def call(match: re.Match) -> str:
        name = next((PTX[key] for key in PTX if key in match["text"]), None)
        return f"emu::{name}({', '.join(operands(match['operands']))});" if name else ";"

    return re.sub(r'asm volatile\((?P<text>(?:\s*"[^"]*")+)(?P<operands>.*?)\);\n', call, source, flags=re.S)


def emulate(starter, folder: Path, **config):
    """Make the starter run on CPU tensors, through an emulation of its kernels compiled by g++ into `folder`.

    config: other values for the keys that its CONFIG has."""
    defines = {key: config.get(key, value) for key, value in starter.CONFIG.items()}
    source = re.sub(
        r'asm\("ex2\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = exp2f(\2);", starter.CUDA_SRC
    )
    source = emulated_ptx(source.replace("__CUDA_ARCH__", "900"))
    dynamic = r"static thread_local \1 \2[(227 << 10) / sizeof(\1)];"  # as much as a Hopper block can have
    source = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", dynamic, source)
    launchers = cuda.parse_launchers(source, defines)
    text = f'#include "cuda_emulator.h"\n{source}\n{cuda.glue(launchers)}'
    (folder / "kernel.cpp").write_text(text)
    definitions = [f"-D{name}={value}" for name, value in defines.items()]
    # nvcc hands a .cpp to g++ as it is, with the toolkit's headers and runtime library
    subprocess.run(
        [
            cuda.find_nvcc(),
            "-O1",
            "-std=c++17",
            "-shared",
            "-Xcompiler",
            "-fPIC,-w,-fno-gnu-unique",
            f"-I{HERE}",
            *definitions,
            "kernel.cpp",
            "-o",
            "kernel.so",
        ],
        cwd=folder,
        check=True,
    )
    handle = ctypes.CDLL(str(folder / "kernel.so"))
    handle.ak_error_string.restype = ctypes.c_char_p
    module = SimpleNamespace(**{n: cuda.bind(launcher, handle, True) for n, launcher in launchers.items()})
    starter.compiled = lambda: module
    return starter
