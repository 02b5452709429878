"""autokernel.cuda and the CUDA starters: declarations, messages, cache, launchers, and the kernels' logic on a CPU."""

import multiprocessing
import os
import signal
import stat
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cuda_emulated import STARTERS, emulate, load

from autokernel import cuda
from autokernel.cuda_source import (
    CudaCompileError,
    demangle,
    format_messages,
    parse_launchers,
    parse_resources,
    triton_resources,
)

try:
    NVCC = cuda.find_nvcc()
except cuda.CudaCompilerMissing:
    NVCC = ""


def needs_nvcc(test):
    return pytest.mark.nvcc(pytest.mark.skipif(not NVCC, reason="nvcc is not installed")(test))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(monkeypatch, shared_cache):
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(shared_cache))


# ---- declarations ----------------------------------------------------------------------------------------------------

DECLARATIONS = r"""
#include <cuda_fp16.h>
// extern "C" int in_a_comment(float* x) { }
/* extern "C" int in_another(float* x) { } */
const char* text = "extern \"C\" int in_a_string(float* x) {";
using scalar_t = __nv_bfloat16;
typedef unsigned char byte;
#define INDEX long long
template <typename T> __global__ void kernel(T* x) {}
extern "C" int declared_only(float* x);
extern "C" int first(const __half* __restrict__ x /* strided */, const half *bias,  // optional
                     float* const out, INDEX n, unsigned k, float eps, bool flag, cudaStream_t stream)
{
    if (n) { kernel<<<1, 1>>>(out); }
    return 0;
}
extern "C" {
static int helper_value = 3;
void second(scalar_t* x, byte const* mask /* optional, strided */, void* any, size_t n) { { } }
cudaError_t third() { return cudaSuccess; }
}
int not_a_launcher(int x) { return x; }
"""


def test_declarations():
    found = parse_launchers(DECLARATIONS)
    assert list(found) == ["first", "second", "third"]
    first, second, third = found.values()
    assert [(p.name, p.ctype, p.code, p.dtype) for p in first.params] == [
        ("x", "__half*", "P", "float16"), ("bias", "half*", "P", "float16"), ("out", "float*", "P", "float32"),
        ("n", "long long", "q", None), ("k", "unsigned", "I", None), ("eps", "float", "f", None),
        ("flag", "bool", "?", None), ("stream", "cudaStream_t", "S", None),
    ]  # fmt: skip
    assert [(p.const, p.strided, p.optional) for p in first.params[:3]] == [(1, 1, 0), (1, 0, 1), (0, 0, 0)]
    assert first.line == 11 and first.returns == "int" and len(first.arguments) == 7
    assert [(p.dtype, p.const, p.strided, p.optional) for p in second.params[:3]] == [
        ("bfloat16", False, False, False), ("uint8", True, True, True), (None, False, False, False),
    ]  # fmt: skip
    assert (second.returns, third.returns, third.params) == ("void", "cudaError_t", ())


def test_a_define_may_name_a_type():
    source = 'extern "C" void f(const SCALAR* x, cudaStream_t s) {}'
    assert parse_launchers(source, {"SCALAR": "double"})["f"].params[0].dtype == "float64"
    with pytest.raises(CudaCompileError, match="CUDA_SRC line 1, launcher f: parameter x has type 'SCALAR\\*'"):
        parse_launchers(source)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("cudaStream_t s, int n", "cudaStream_t must be the last"),
        ("float** x", "type 'float\\*\\*'"),
        ("dim3 grid", "type 'dim3'"),
        ("int", "'int' is not understood"),
        ("float x[3]", "not understood"),
    ],
)
def test_bad_declarations(params, message):
    with pytest.raises(CudaCompileError, match=f"line 2, launcher f: .*{message}"):
        parse_launchers(f'\nextern "C" int f({params}) {{ return 0; }}')


# ---- messages and resources, from recorded output --------------------------------------------------------------------

SOURCE = "int a;\nint b = c;\nint d;\nint e = f;\n"
OUTPUT = """CUDA_SRC(2): error: identifier "c" is undefined
  int b = c;
          ^

CUDA_SRC(4): error: no instance of overloaded function "g" matches the argument list
            argument types are: (__half, int)
  int e = f;
          ^
/usr/include/cuda_fp16.hpp(3447): note #3326-D: function "atomicAdd(__half *, __half)" does not match
/usr/include/c++/12/type_traits(2614): error: class "std::enable_if<false, int>" has no member "type"
      using enable_if_t = typename enable_if<_Cond, _Tp>::type;
          detected during instantiation of type "std::enable_if_t<false, int>" at line 4 of CUDA_SRC
CUDA_SRC(3): warning #177-D: variable "d" was declared but never referenced
ptxas /tmp/tmpxft_1_6_v.ptx, line 5; error   : Unknown modifier '.bar'
ptxas fatal   : Ptx assembly aborted due to errors
tmpxft.cudafe1.cpp:(.text+0x1a): undefined reference to `ext(int)'
nvcc fatal   : Unsupported gpu architecture 'sm_90b'
CUDA_SRC:1:10: fatal error: nothing.h: No such file or directory
3 errors detected in the compilation of "kernel.cu".
"""
PTX = '.file\t1 "/tmp/CUDA_SRC"\n.loc\t1 3 9\nmov;\n.loc\t2 99 9\nfoo.bar;\n.loc\t1 4 9\n'


def test_error_messages():
    found = format_messages(OUTPUT, SOURCE, "error", PTX)
    assert found == [
        'CUDA_SRC line 2: error: identifier "c" is undefined\n'
        "       1 | int a;\n  >    2 | int b = c;\n       3 | int d;",
        'CUDA_SRC line 4: error: no instance of overloaded function "g" matches the argument list; '
        "argument types are: (__half, int)\n       3 | int d;\n  >    4 | int e = f;",
        'type_traits line 2614: error: class "std::enable_if<false, int>" has no member "type"\n'
        "       3 | int d;\n  >    4 | int e = f;",
        "CUDA_SRC line 3 (ptxas): error: Unknown modifier '.bar'\n"
        "       2 | int b = c;\n  >    3 | int d;\n       4 | int e = f;",
        "linker: error: undefined reference to `ext(int)'",
        "nvcc: fatal: Unsupported gpu architecture 'sm_90b'",
        "CUDA_SRC line 1: fatal error: nothing.h: No such file or directory\n  >    1 | int a;\n       2 | int b = c;",
    ]


def test_warnings():
    (found,) = format_messages(OUTPUT, SOURCE, "warning")
    assert found.startswith('CUDA_SRC line 3: warning: variable "d" was declared') and found.count("\n") == 3


def test_resources():
    output = """ptxas info    : Compiling entry function '_Z1kI6__halfLi4EEvPKT_PS1_l' for 'sm_90a'
ptxas info    : Function properties for _Z1kI6__halfLi4EEvPKT_PS1_l
    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 24 bytes cumulative stack size, 128 bytes smem
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Used 10 registers, used 0 barriers
"""
    assert parse_resources(output) == {
        "k<__half, 4>": {"registers": 40, "spill_bytes": 24, "stack_bytes": 24, "smem_bytes": 128},
        "plain": {"registers": 10, "spill_bytes": 0, "stack_bytes": 0, "smem_bytes": 0},
    }


def test_demangle():
    assert demangle("_Z12softmax_rowsI13__nv_bfloat16Li0EEvPKT_PS1_xxxi") == "softmax_rows<__nv_bfloat16, 0>"
    assert demangle("_Z6rotateIfLi4ELb1EEvPKT_S2_S2_PS0_xxxixxx") == "rotate<float, 4, true>"
    assert demangle("plain") == "plain"


def test_triton_resources():
    compiled = SimpleNamespace(n_regs=32, n_spills=3, metadata=SimpleNamespace(shared=1024))
    assert triton_resources(compiled) == {"registers": 32, "spill_bytes": 12, "smem_bytes": 1024}
    assert triton_resources(object()) == {"registers": None, "spill_bytes": None, "smem_bytes": None}


# ---- the compiler, and where it is found -----------------------------------------------------------------------------


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without a CUDA compiler."""
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    executable(tmp_path / "host/g++", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path / "host"))
    monkeypatch.setattr(cuda, "DEFAULT_TOOLKIT", tmp_path / "nowhere")
    monkeypatch.setattr(cuda, "_package", lambda name: [tmp_path / "site" / name])
    return tmp_path


def test_no_compiler(bare):
    with pytest.raises(cuda.CudaCompilerMissing, match="nvcc not found in CUDA_HOME.*uv sync --extra cuda"):
        cuda.compile_cuda('extern "C" void f() {}')


def test_order_of_compilers(bare, monkeypatch):
    expected = []
    for place in ("nowhere/bin", "site/nvidia/cu13/bin", "path", "home/bin"):
        expected.append(str(executable(bare / place / "nvcc", "#!/bin/sh\n")))
        if place == "path":
            monkeypatch.setenv("PATH", f"{bare}/host:{bare}/path")
        if place == "home/bin":
            monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
        assert cuda.find_nvcc() == expected[-1]
    (bare / "host/g++").unlink()
    with pytest.raises(cuda.CudaCompilerMissing, match="g\\+\\+ is not in PATH"):
        cuda.find_nvcc()


def test_cutlass_headers(bare, monkeypatch):
    source = "#include <cute/tensor.hpp>\n"
    assert cuda._cutlass("int x;") == []
    assert cuda._cutlass(source)[0] == f"-I{bare}/site/cutlass_library/source/include"
    monkeypatch.setenv("CUTLASS_HOME", "/opt/cutlass")
    assert cuda._cutlass(source) == ["-I/opt/cutlass/include", "-I/opt/cutlass/tools/util/include"]


# ---- compile and cache -----------------------------------------------------------------------------------------------

HOST = r"""
#include <cuda_fp16.h>
__global__ void unused(float* x) { __shared__ float s[32]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[3]; }
extern "C" int add(const float* x, const float* y /* optional */, float* out /* strided */, long long n, int stride,
                   float c, bool flag, cudaStream_t stream) {
    if (n < 0) return cudaErrorInvalidValue;
    for (long long i = 0; i < n; i++) out[i * stride] = x[i] + (y ? y[i] : 0.f) + c * SCALE + flag;
    return 0;
}
extern "C" void halves(const __half* x, unsigned char* lambda, void* any) { *lambda = __half2float(*x) > 1.f; }
"""


@pytest.fixture(scope="session")
def host(shared_cache):
    os.environ["AUTOKERNEL_CACHE"] = str(shared_cache)
    return cuda.compile_cuda(HOST, defines={"SCALE": 2}, host_tensors=True)


def counting_nvcc(folder, before=""):
    """A CUDA_HOME whose nvcc notes each compile in folder/calls, after the shell command `before`."""
    script = f'#!/bin/sh\ncase "$*" in *kernel.cu*) echo x >> {folder}/calls; {before};; esac\nexec {NVCC} "$@"\n'
    executable(folder / "bin/nvcc", script)
    return str(folder)


def compile_in_child(home, cache):
    os.environ.update(CUDA_HOME=home, AUTOKERNEL_CACHE=cache)
    module = cuda.compile_cuda(HOST, defines={"SCALE": 1})
    os._exit(0 if module.resources["unused"]["smem_bytes"] == 128 else 1)


@needs_nvcc
def test_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", counting_nvcc(tmp_path))
    first, again = (cuda.compile_cuda(HOST, defines={"SCALE": 2}) for _ in range(2))
    assert (first.cached, again.cached) == (False, True) and again.compile_seconds < first.compile_seconds
    assert first.resources == again.resources and again.resources["unused"]["smem_bytes"] == 128
    for changed in ({"defines": {"SCALE": 3}}, {"arch": "sm_80"}, {"flags": ["-DOTHER"]}):
        options = {"defines": {"SCALE": 2}, **changed}
        assert not cuda.compile_cuda(HOST, **options).cached
    assert len((tmp_path / "calls").read_text().split()) == 4
    assert again in cuda.loaded_modules()
    assert not list(tmp_path.glob("cuda/*/*/tmp.*"))


@needs_nvcc
def test_two_processes_compile_once(tmp_path):
    home = counting_nvcc(tmp_path, "sleep 1")
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=compile_in_child, args=(home, str(tmp_path))) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    assert len((tmp_path / "calls").read_text().split()) == 1


@needs_nvcc
def test_a_killed_compile_leaves_nothing_locked(tmp_path, monkeypatch):
    home = counting_nvcc(tmp_path, "sleep 60")
    child = multiprocessing.get_context("fork").Process(target=compile_in_child, args=(home, str(tmp_path)))
    child.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path))
    assert not cuda.compile_cuda(HOST, defines={"SCALE": 1}).cached


@needs_nvcc
def test_a_source_that_does_not_compile(tmp_path):
    source = HOST.replace("x[1] = s[3]", "x[1] = s[3] + missing").replace("return 0;", "return 0").replace("SCALE", "1")
    with pytest.raises(CudaCompileError) as error:
        cuda.compile_cuda(source)
    text = str(error.value)
    assert (
        'CUDA_SRC line 3: error: identifier "missing" is undefined\n       2 | #include <cuda_fp16.h>\n  >    3 |'
        in text
    )
    assert 'error: expected a ";"' in text
    assert str(tmp_path.parent) not in text and "nvcc" not in text and "tmpxft" not in text


@needs_nvcc
def test_errors_below_the_front_end():
    with pytest.raises(CudaCompileError, match=r"CUDA_SRC line 2 \(ptxas\): error: .*'foo'\n       1 \| // a comment"):
        cuda.compile_cuda('// a comment\n__global__ void k(int* x) { asm("foo %0;" : "=r"(x[0])); }\n')
    with pytest.raises(CudaCompileError, match=r"linker: error: undefined reference to `other\(int\)'"):
        cuda.compile_cuda('void other(int);\nextern "C" void f(int n) { other(n); }')


# ---- launchers -------------------------------------------------------------------------------------------------------


@needs_nvcc
def test_values_and_conversions(host):
    x, out = torch.arange(4.0), torch.zeros(4, 2)
    host.add(x, x, out[:, 1], 4, 2, 0.5, True)
    assert out[:, 1].tolist() == [2, 4, 6, 8] and out[:, 0].tolist() == [0, 0, 0, 0]
    host.add(x=x, y=None, out=out, n=3, stride=1, c=1, flag=False)
    assert out.view(-1)[:3].tolist() == [2, 3, 4]
    flag = torch.zeros(1, dtype=torch.uint8)
    host.halves(x.half()[2:], lambda_=flag, any=x)  # `lambda` is a keyword of Python
    assert flag.item() == 1


@needs_nvcc
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4).half()}, "argument x is torch.float16, wanted torch.float32 for float\\*"),
        ({"x": torch.zeros(4, 2)[:, 0]}, "argument x is not contiguous \\(shape \\(4,\\), strides \\(2,\\)\\)"),
        ({"x": None}, "argument x is NoneType, wanted a tensor \\(mark the parameter /\\* optional \\*/"),
        ({"x": 3}, "argument x is int, wanted a tensor"),
        ({"n": 1.5}, "argument n is 1.5, wanted long long"),
        ({"n": "4"}, "argument n is '4', wanted long long"),
        ({"stride": 2**31}, "argument stride is 2147483648, wanted int .*2147483647"),
        ({"c": "a"}, "argument c is 'a', wanted float"),
    ],
)
def test_refused_arguments(host, change, message):
    good = {
        "x": torch.zeros(4),
        "y": torch.zeros(4),
        "out": torch.zeros(4),
        "n": 4,
        "stride": 1,
        "c": 1.0,
        "flag": True,
    }
    with pytest.raises(cuda.CudaArgumentError, match=f"launcher add: {message}"):
        host.add(**{**good, **change})


@needs_nvcc
def test_other_mistakes(host):
    x = torch.zeros(4)
    with pytest.raises(cuda.CudaLaunchError, match="launcher add: CUDA error 1: invalid argument") as error:
        host.add(x, x, x, -1, 1, 0.0, False)
    assert (error.value.launcher, error.value.code) == ("add", 1)
    with pytest.raises(TypeError, match=r"add\(\) missing 1 required positional argument: 'flag'"):
        host.add(x, x, x, 4, 1, 0.0)
    with pytest.raises(AttributeError, match="no extern \"C\" launcher 'sub'; it has: add, halves"):
        host.sub(x)
    on_gpu_only = cuda.compile_cuda(HOST, defines={"SCALE": 2})
    with pytest.raises(cuda.CudaArgumentError, match="argument x is on cpu, wanted a CUDA tensor"):
        on_gpu_only.add(x, x, x, 4, 1, 0.0, False)


@needs_nvcc
def test_a_call_is_cheap(host):
    x = torch.zeros(4)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            host.add(x, x, x, 1, 1, 0.0, False)
        best = min(best, (time.perf_counter() - start) * 1e3)
    assert best < 5, f"{best:.2f} us a call"


# ---- the starters ----------------------------------------------------------------------------------------------------

NAMES = sorted(path.stem for path in STARTERS.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_import_compiles_nothing(name, bare):
    starter = load(name)
    assert (starter.KERNEL_TYPE, starter.BACKEND) == (name, "cuda") and callable(starter.kernel_fn)
    assert all(isinstance(value, (int, float, str)) for value in starter.CONFIG.values())
    assert parse_launchers(starter.CUDA_SRC, starter.CONFIG)


@needs_nvcc
@pytest.mark.parametrize("name", NAMES)
def test_starters_compile_without_spills(name):
    starter = load(name)
    module = cuda.compile_cuda(starter.CUDA_SRC, defines=starter.CONFIG, arch="sm_90a")
    assert module.resources and not module.warnings
    assert {kernel: r["spill_bytes"] for kernel, r in module.resources.items() if r["spill_bytes"]} == {}


# Small blocks bring every regime (part of a warp, block, cluster, double registers, two reads) within 20,001 columns.
SMALL = {"MAX_THREADS": 64, "WIDE_THREADS": 64, "MAX_CLUSTER": 4, "THREADS": 64, "FILL": 32}


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    found = {}

    def get(name):
        if name not in found:
            found[name] = emulate(load(name), tmp_path_factory.mktemp(name), **SMALL)
        return found[name].kernel_fn

    return get


def rotary(x, cos, sin, interleaved=True):
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


EXPECTED = {
    "softmax": lambda x, dim=-1: torch.softmax(x, dim),
    "layernorm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "rmsnorm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
    "cross_entropy": F.cross_entropy,
    "rotary_embedding": rotary,
    "reduce": lambda x, dim=-1: x.sum(dim),
}
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2e-6}


def cut_out(x, pad, first):
    """x as rows of a wider tensor that is NaN elsewhere: reading beside a row would show."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + pad), float("nan"), dtype=x.dtype)
    return wide[..., first : first + x.shape[-1]].copy_(x)


def row_inputs(dtype):
    for shape in [(1, 1), (33, 3), (5, 1023), (9, 128), (2, 3, 5, 77), (3, 4097), (2, 9001), (2, 20001)]:
        x = torch.randn(shape).to(dtype)
        yield x
        if x.numel() < 15000:
            yield cut_out(x, 3, 1)
            yield cut_out(x, 16, 8)
            yield (x * 10 + 100).to(dtype)
            yield torch.full_like(x, 3.3)
    yield torch.randn(40, 24).to(dtype).t()
    yield (torch.rand(4, 2000) * 1.2e5 - 6e4).to(dtype)


def inputs(name, dtype):
    if name == "rotary_embedding":
        for shape in [
            (1, 1, 1, 2),
            (2, 3, 40, 64),
            (50, 64),
            (3, 50, 64),
            (1, 2, 33, 80),
            (2, 3, 17, 6),
            (2, 5, 7, 128),
        ]:
            x, angles = torch.randn(shape).to(dtype), torch.randn(shape[-2], shape[-1] // 2)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            heads = x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.ndim == 4 else x
            for view in (x, heads, cut_out(x, 16, 8), cut_out(x, 3, 1)):
                yield view, cos, sin
                yield view, cos, sin, False
        return
    for x in row_inputs(dtype):
        if name == "cross_entropy":
            logits = x.reshape(-1, x.shape[-1])
            targets = torch.randint(0, x.shape[-1], logits.shape[:1])
            yield logits, torch.where(torch.rand(targets.shape) < 0.2, -100, targets)
        elif name in ("softmax", "reduce"):
            for dim in range(x.ndim):
                few = dim == x.ndim - 1 or x.numel() < 15000
                if few and (name == "softmax" or x.double().sum(dim).abs().max() < 6e4):  # else fp16 overflows
                    yield x, dim
        else:
            w, b = torch.randn(x.shape[-1]).to(dtype), torch.randn(x.shape[-1]).to(dtype)
            yield (x, w, b) if name == "layernorm" else (x, w)


@needs_nvcc
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", EXPECTED)
def test_logic_on_a_cpu(name, dtype, emulated):
    torch.manual_seed(0)
    kernel_fn = emulated(name)
    for args in inputs(name, dtype):
        exact = EXPECTED[name](*(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args))
        out = kernel_fn(*args)
        where = f"{tuple(args[0].shape)} {args[0].stride()} {[a for a in args[1:] if not torch.is_tensor(a)]}"
        assert out.shape == exact.shape and out.is_contiguous(), where
        assert torch.equal(out.isnan(), exact.isnan()), where
        scale = exact.square().mean().sqrt() + exact.abs()
        # beside PyTorch's own error: denormal halves, and what is subtracted from a large mean, are lost to both
        theirs = (EXPECTED[name](*args).double() - exact).abs().max()
        bound = (1e-5 if name == "cross_entropy" else TOLERANCE[dtype]) * scale + theirs
        assert ((out.double() - exact).abs() <= bound).all() or exact.isnan().any(), where


@needs_nvcc
def test_softmax_of_infinities(emulated):
    inf = float("inf")
    x = torch.randn(6, 2000)
    x[0], x[1, ::2], x[2, 7], x[3, 9], x[4, :1999] = -inf, -inf, inf, float("nan"), -inf
    for got, want in (
        (emulated("softmax")(x), x.softmax(-1)),
        (emulated("softmax")(x.t().contiguous(), 0).t(), x.softmax(-1)),
    ):
        torch.testing.assert_close(got, want, equal_nan=True)


@needs_nvcc
def test_cross_entropy_of_odd_targets(emulated):
    kernel_fn, x = emulated("cross_entropy"), torch.randn(4, 1000)
    for targets in ([1, 5000, 3, 4], [1, -1, 2, 3], [-100] * 4):
        assert kernel_fn(x, torch.tensor(targets)).isnan()


# ---- on a GPU --------------------------------------------------------------------------------------------------------

BROKEN = r"""
__global__ void fill(float* x, float value) { x[threadIdx.x] = value; }
extern "C" void unchecked(float* x, float value, int smem, cudaStream_t stream) {
    fill<<<1, 32, smem, stream>>>(x, value);
}
"""


@pytest.mark.gpu
@needs_nvcc
def test_launches_on_a_gpu():
    module, x = cuda.compile_cuda(BROKEN), torch.zeros(32, device="cuda")
    with pytest.raises(cuda.CudaLaunchError, match="launcher unchecked: CUDA error 1: invalid argument"):
        module.unchecked(x, 1.0, 1 << 20)
    module.unchecked(x, 2.0, 128)
    assert (x == 2).all()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        module.unchecked(x, 3.0, 128)
    stream.synchronize()
    with torch.cuda.graph(graph):
        module.unchecked(x, 4.0, 128)
    assert (x == 3).all()
    graph.replay()
    assert (x == 4).all()


@pytest.mark.gpu
@needs_nvcc
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", EXPECTED)
def test_values_on_a_gpu(name, dtype):
    kernel_fn = load(name).kernel_fn
    for args in inputs(name, dtype):
        args = [a.cuda() if torch.is_tensor(a) else a for a in args]
        exact = EXPECTED[name](*(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args))
        out, again = kernel_fn(*args), kernel_fn(*args)
        scale = exact.square().mean().sqrt() + exact.abs()
        theirs = (EXPECTED[name](*args).double() - exact).abs().max()
        right = (out.double() - exact).abs() <= TOLERANCE[dtype] * scale + theirs
        assert (right | exact.isnan() & out.isnan()).all(), args[0].shape  # NaN: the mean of no targets at all
        assert torch.equal(out.nan_to_num(7.0), again.nan_to_num(7.0))
