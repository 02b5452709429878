import ctypes, importlib.util, re, subprocess, sys, tempfile
from pathlib import Path
from types import SimpleNamespace
ROOT = Path(__file__).resolve().parents[2]  # needs autokernel/cuda.py and tests/cuda_emulator.h
sys.path.insert(0, str(ROOT))
import torch
from autokernel import cuda
torch.set_num_threads(1)
torch.cuda.get_device_capability = lambda *a: (9, 0)

def body(src, name, new):
    """Replace the body of the function `name` (its definition)."""
    m = re.search(r"\b%s\(" % name, src)
    out, pos, n = [], 0, 0
    for m in re.finditer(r"(?:void|uint32_t|float)\s+%s\([^{};]*\)\s*\{" % name, src):
        depth, i = 1, m.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(src[i], 0); i += 1
        out += [src[pos:m.end()], " " + new + " "]; pos = i - 1; n += 1
    assert n, name
    return "".join(out) + src[pos:]

def convert(src):
    src = body(src, "smem_addr", "return emu::smem_addr(p);")
    src = body(src, "mbar_init", "emu::mbar_init(bar, count);")
    src = body(src, "mbar_expect_bytes", "emu::mbar_expect(bar, bytes);")
    src = body(src, "mbar_arrive", "emu::mbar_arrive(bar);")
    src = body(src, "mbar_wait", "emu::mbar_wait(bar, parity);")
    src = body(src, "wgmma_wait", "emu::wgmma_wait(N);")
    src = body(src, "pin", "")
    if "exp2_fast" in src: src = body(src, "exp2_fast", "return exp2f(x);")
    if "mma_scores" in src:
        src = src.replace('asm volatile("cp.async.bulk.tensor.4d', 'emu::tma(dst + c * rows * ROW, map, {c * 64, row, head, batch}, bar); //', 1)
        src = re.sub(r"//\.shared::cluster.*\n(?:.*\n)*?.*\"memory\"\);", "", src, count=1)
        src = re.sub(r"#define (SCORES128|SCORES64|VALUES64)\(TYPE\) asm(?:.*\\\n)*.*\n", "", src)
        src = src.replace("void mma_scores(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {", "void mma_scores(float (&d)[64], uint64_t a, uint64_t b, int accumulate) { emu::wgmma<T>(d, 128, nullptr, a, b, accumulate, 0); return;")
        src = src.replace("void mma_scores(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {", "void mma_scores(float (&d)[32], uint64_t a, uint64_t b, int accumulate) { emu::wgmma<T>(d, 64, nullptr, a, b, accumulate, 0); return;")
        src = src.replace("void mma_values(float (&d)[32], const uint32_t* a, uint64_t b) {", "void mma_values(float (&d)[32], const uint32_t* a, uint64_t b) { emu::wgmma<T>(d, 64, a, 0, b, 1, 1); return;")
        src = re.sub(r"if constexpr \(std::is_same<T, __half>::value\) (SCORES|VALUES).*\n", "\n", src)
        src = body(src, "wgmma_fence", ""); src = body(src, "wgmma_commit", "emu::commit();")
    else:
        src = body(src, "tma_load", "emu::tma(dst, map, {inner, outer}, bar);")
        src = body(src, "wgmma", "emu::wgmma<T>(d, 128, nullptr, a, b, accumulate, B_N_MAJOR);")
        src = re.sub(r'asm volatile\("wgmma.commit[^;]*;"[^;]*;', "emu::commit();", src)
    src = re.sub(r'asm volatile\("(?:setmaxnreg|fence\.|wgmma\.fence)[^;]*;"[^;]*;', "", src)
    src = re.sub(r"extern __shared__ (?:__align__\(16\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)(emu::dyn_raw + emu::DYN_AT);", src)
    src = re.sub(r"([\w:]+(?:<[^<>]*>)?)<<<(.*?)>>>\(", r"emu::bind(\1, \2)(", src)
    src = src.replace("__shared__ alignas(8) ", "__shared__ ")
    rest = re.findall(r".*asm.*", src)
    rest = [l for l in rest if "define" not in l and 'MMA_ASM' not in l and ': ACC' not in l and 'mma_async' not in l]
    assert not rest, rest
    return src

def load(op, **config):
    path = ROOT / "kernels" / "cuda" / f"{op}.py"
    spec = importlib.util.spec_from_file_location("s_" + op, path)
    m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
    defines = {**m.CONFIG, **config}
    launchers = cuda.parse_launchers(m.CUDA_SRC, defines)
    src = convert(m.CUDA_SRC)
    d = Path(tempfile.mkdtemp())
    (d / "kernel.cpp").write_text(f'#include "hopper_emulator.h"\n{src}\n{cuda.glue(launchers)}')
    subprocess.run([cuda.find_nvcc(), "-O2", "-std=c++17", "-shared", "-Xcompiler", "-fPIC,-w,-fno-strict-aliasing,-mf16c,-mavx2", f"-I{ROOT}/tests", f"-I{ROOT}/scratch/emulator", *[f"-D{k}={v}" for k, v in defines.items()], "kernel.cpp", "-o", "kernel.so"], cwd=d, check=True)
    h = ctypes.CDLL(str(d / "kernel.so")); h.ak_error_string.restype = ctypes.c_char_p
    lib = SimpleNamespace(**{n: cuda.bind(l, h, True) for n, l in launchers.items()})
    m.compiled = lambda: lib
    return m
