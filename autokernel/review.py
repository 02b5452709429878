"""What deserves a second look: odd constructs in a kernel file, and the vendor library behind a call. It never decides.

The scan reads the syntax tree, so comments and strings that are only text do not count; CUDA source is a string that
does. Each finding is (line, reason). A clean scan proves nothing, and a finding is no fault: it says where to look.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

MODULES = {
    "atexit", "builtins", "ctypes", "gc", "importlib", "inspect", "mmap", "multiprocessing", "pickle", "reference",
    "resource", "signal", "socket", "subprocess", "threading", "concurrent", "weakref", "statistics",
}  # fmt: skip
CALLS = {"exec", "eval", "compile", "__import__", "setattr", "delattr", "globals", "vars"}
ATTRIBUTES = {
    "_exit": "ends the process", "_getframe": "looks at the caller's variables", "_current_frames": "looks at frames",
    "__code__": "rewrites code", "__globals__": "reaches another module's names", "__closure__": "reaches a closure",
    "f_back": "looks at the caller's variables", "f_locals": "looks at the caller's variables",
    "modules": "looks into sys.modules", "settrace": "installs a hook", "setprofile": "installs a hook",
    "fork": "starts a process", "kill": "signals a process", "environ": "reads or changes the environment",
    "elapsed_time": "a clock of its own", "perf_counter": "a clock of its own", "_sleep": "waits on the device",
    "_version": "tells calls apart", "data_ptr": "an address may become a cache key",
    "set_stream": "changes the current stream", "allow_tf32": "changes a process-wide setting",
    "set_num_threads": "changes a process-wide setting", "set_default_dtype": "changes a process-wide setting",
    "set_float32_matmul_precision": "changes a process-wide setting", "_make_subclass": "makes a tensor subclass",
    "_profiler_enabled": "tells the look at library calls apart", "set_eval_frame": "installs a hook",
    "fp32_precision": "changes a process-wide setting", "set_flush_denormal": "changes a process-wide setting",
}  # fmt: skip
TEXTS = {
    r"/proc/|/dev/shm": "a path outside the kernel's folders",
    r"cudaStreamAttributeAccessPolicyWindow|cudaLimitPersistingL2CacheSize": "keeps data in L2 past the flush",
    r"cudaLaunchHostFunc|cudaStreamAddCallback": "runs host code from a stream",
    r"cudaEventElapsedTime|cuEventElapsedTime": "touches the clock",
    r"mprotect|PROT_EXEC|dlsym|LD_PRELOAD": "patches native code",
    r"cublas|cudnn|cusparse|at::(matmul|mm|bmm|linear|softmax|layer_norm)": "calls a vendor library",
    r"(?m)^\s*#\s*define\b.*##": "pastes tokens",
}


def scan(source: bytes) -> list[tuple[int, str]]:
    """Findings in a kernel file, by line. A file that does not parse has none: it fails elsewhere."""
    try:
        return sorted(set(_findings(ast.parse(source))))
    except (SyntaxError, ValueError):
        return []
    except (RecursionError, MemoryError):
        return [(1, "an expression nested too deeply to be looked at")]


def _findings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    containers = {t.id for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, (ast.Dict, ast.List))
                  for t in n.targets if isinstance(t, ast.Name)}  # fmt: skip
    checks = {id(found) for node in ast.walk(tree) for found in _alignment(node)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((line, f"imports {n}") for n in names if n.split(".")[0] in MODULES)
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES and id(node) not in checks:
            yield line, f".{node.attr}: {ATTRIBUTES[node.attr]}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield line, f"calls {node.func.id}()"
        elif isinstance(node, ast.ExceptHandler) and any(isinstance(n, ast.Return) for n in ast.walk(node)):
            yield line, "an except clause that returns: a silent fallback"
        elif isinstance(node, ast.ClassDef) and any("Tensor" in ast.unparse(b) for b in node.bases):
            yield line, "subclasses Tensor"
        elif isinstance(node, ast.FunctionDef) and node.name == "kernel_fn":
            yield from _remembering(node, containers)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((line, reason) for text, reason in TEXTS.items() if re.search(text, node.value))


def _alignment(node: ast.AST) -> Iterator[ast.AST]:
    """The addresses of `x.data_ptr() % 16` or of a difference: what is left of them is no key to a tensor."""
    match node:
        case ast.BinOp(left=left, op=ast.Mod(), right=ast.Constant(value=int(size))) if size <= 4096:
            terms = [left.left, left.right] if isinstance(left, ast.BinOp) else [left]
            called = [t.func for t in terms if isinstance(t, ast.Call)]
            yield from (f for f in called if isinstance(f, ast.Attribute) and f.attr == "data_ptr")


def _remembering(function: ast.FunctionDef, containers: set[str]) -> Iterator[tuple[int, str]]:
    """State that outlives a call: caches of compiled kernels and scratch are legal, caches of answers are not."""
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield node.lineno, f"kernel_fn assigns the global {', '.join(node.names)}"
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in containers:
                yield node.lineno, f"kernel_fn stores into the module's {node.value.id}"


# ---- vendor libraries -----------------------------------------------------------------------------------------------

# operators that allocate, copy or look at memory in another way, and compute nothing
PLAIN = re.compile(
    r"aten::(_?empty\w*|new_\w+|zeros\w*|ones\w*|full\w*|fill_?|zero_?|copy_?|_to_copy|to|clone|contiguous|detach_?|"
    r"alias|view\w*|_unsafe_view|_reshape\w*|reshape\w*|as_strided\w*|t|transpose_?|permute|expand\w*|slice|select|"
    r"squeeze_?|unsqueeze_?|split\w*|unbind|chunk|narrow|unfold|diagonal|flatten|unflatten|movedim|lift_fresh|"
    r"resize_|set_|arange|item|_local_scalar_dense|is_\w+|size|stride|numel|_conj|record_stream|"
    r"numpy_T|mT|broadcast_to|scalar_tensor|tensor|pin_memory|_pin_memory|equal|storage_offset|resolve_conj|resolve_neg)$"
)
LIBRARY_KERNELS = re.compile(
    r"cublas|cudnn|cutlass::|nvjet|xmma|gemvx?|gemmk?|splitKreduce|s\d+gemm|sgemm|hgemm|fmha|pytorch_flash|"
    r"at::native|at_cuda_detail|cub::|cusparse|implicit_convolve", re.I,
)  # fmt: skip
COPY_KERNELS = re.compile(r"copy|fill|FillFunctor|memset|memcpy|direct_copy", re.I)


def vendor_calls(operators: list[str], kernels: list[str]) -> list[str]:
    """Which of a call's PyTorch operators and device kernels are a library's arithmetic, not the kernel's own.

    Recognised by name, so a library's code under another name is not seen.
    """
    found = [name for name in operators if name.startswith("aten::") and not PLAIN.match(name)]
    return found + [k for k in kernels if LIBRARY_KERNELS.search(k) and not COPY_KERNELS.search(k)]
