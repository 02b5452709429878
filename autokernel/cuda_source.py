"""What the text of a CUDA source and of its compiler's output says: launchers, messages, resources of the kernels.

Text in, values out: no compiler, no GPU and no torch. `autokernel.cuda` has the conventions for launchers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# pointee -> torch dtype; None takes any
POINTEES = {
    "void": None, "__half": "float16", "half": "float16", "__nv_bfloat16": "bfloat16", "nv_bfloat16": "bfloat16",
    "float": "float32", "double": "float64", "bool": "bool", "char": "int8", "signed char": "int8", "int8_t": "int8",
    "unsigned char": "uint8", "uint8_t": "uint8", "short": "int16", "int16_t": "int16", "int": "int32",
    "int32_t": "int32", "long": "int64", "long long": "int64", "int64_t": "int64", "__nv_fp8_e4m3": "float8_e4m3fn",
    "__nv_fp8_e5m2": "float8_e5m2",
}  # fmt: skip
# scalar -> format letter of Python's struct module
SCALARS = {
    "int": "i", "int32_t": "i", "unsigned": "I", "unsigned int": "I", "uint32_t": "I", "long": "q", "long long": "q",
    "int64_t": "q", "size_t": "Q", "unsigned long long": "Q", "uint64_t": "Q", "float": "f", "double": "d", "bool": "?",
}  # fmt: skip


class CudaError(RuntimeError):
    """Base of everything that is raised about a CUDA source or its launchers."""


class CudaCompileError(CudaError):
    """The source does not compile, or declares a launcher that cannot be called; the text carries lines of CUDA_SRC."""


# ---- launchers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """One parameter of a launcher. `code`: P pointer, i I q Q integers, f d floats, ? bool, S the stream."""

    name: str
    ctype: str  # "__half*", "long long": aliases resolved, without qualifiers
    code: str
    dtype: str | None = None  # torch dtype name of a pointer; None takes any
    const: bool = False  # a pointer that the launcher only reads
    strided: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Launcher:
    """A function that the source defines with C linkage."""

    name: str
    returns: str  # "int", "cudaError_t" or "void"
    params: tuple[Param, ...]
    line: int

    @property
    def arguments(self) -> tuple[Param, ...]:
        """What a Python caller passes: every parameter but the stream."""
        return tuple(p for p in self.params if p.code != "S")


def parse_launchers(source: str, defines: Mapping[str, object] | None = None) -> dict[str, Launcher]:
    """The functions that `source` defines with C linkage, by name.

    defines: preprocessor definitions given on the command line; one may name a type. Raises CudaCompileError, with the
    line, where a parameter's type is unknown or the stream is not last."""
    code = _without_comments(source)
    aliases = _aliases(code, defines or {})
    launchers: dict[str, Launcher] = {}
    for found in _definitions(code):
        line = source.count("\n", 0, found.start("name")) + 1
        where = f"CUDA_SRC line {line}, launcher {found['name']}"
        pieces = _split(found["params"], source[slice(*found.span("params"))])
        params = tuple(_param(text, marks, aliases, where) for text, marks in pieces)
        if any(p.code == "S" for p in params[:-1]):
            raise CudaCompileError(f"{where}: cudaStream_t must be the last parameter")
        launchers.setdefault(found["name"], Launcher(found["name"], found["returns"], params, line))
    return launchers


_SKIPPED = re.compile(
    r"//(?:\\\n|[^\n])*|/\*.*?\*/"  # comments
    r'|R"(?P<d>[^\s()\\"]{0,16})\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'',  # literals
    re.S,
)


def _without_comments(source: str) -> str:
    """The source with comments and literals (but "C") blanked: same length, same line breaks."""
    return _SKIPPED.sub(lambda m: m.group() if m.group() == '"C"' else re.sub(r"[^\n]", " ", m.group()), source)


def _definitions(code: str) -> Iterator[re.Match]:
    definition = re.compile(
        r"(?:(?:__host__|inline)\s+)*(?P<returns>\b(?:int|void|cudaError_t))\s+(?P<name>\w+)\s*"
        r"\((?P<params>[^(){};]*)\)\s*\{"
    )
    for linkage in re.finditer(r'\bextern\s*"C"\s*', code):
        begin = linkage.end()
        if not code.startswith("{", begin):
            found = definition.match(code, begin)
            yield from [found] if found else []
            continue
        depth = 0
        for brace in re.finditer(r"[{}]", code[begin:]):  # an `extern "C" { }` block: its functions are at depth 1
            at = begin + brace.start()
            if depth == 1 and brace.group() == "{":
                head = max(code.rfind(c, begin, at) for c in "{};") + 1
                found = definition.search(code, head, at + 1)
                yield from [found] if found else []
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                break


def _aliases(code: str, defines: Mapping[str, object]) -> dict[str, str]:
    """Names given to types: by the caller's defines, using, #define and typedef."""
    pairs = [(name, str(value)) for name, value in defines.items()]
    pairs += re.findall(r"\busing\s+(\w+)\s*=\s*([\w\s]+);", code)
    pairs += re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([\w \t]+)$", code, re.M)
    pairs += [(name, value) for value, name in re.findall(r"\btypedef\s+([\w\s]+?)\s+(\w+)\s*;", code)]
    return {name: " ".join(value.split()) for name, value in pairs}


def _split(code: str, raw: str) -> list[tuple[str, set[str]]]:
    """Each parameter of a list with the markers in its comments; in `int* x,  // optional` the marker is still x's."""
    pieces, start = [], 0
    for comma in [m.start() for m in re.finditer(",", code)] + [len(code)]:
        rest_of_line = re.compile(r",[^\S\n]*(?=\n)").match(code, comma)
        end = rest_of_line.end() if rest_of_line else comma + 1
        comments = re.findall(r"(?:/\*|//)\s*((?:(?:strided|optional)\b[,\s]*)+)", raw[start:end])
        if code[start:comma].strip() not in ("", "void"):
            pieces.append((code[start:comma], set(re.findall(r"\w+", " ".join(comments)))))
        start = end
    return pieces


def _param(text: str, marks: set[str], aliases: Mapping[str, str], where: str) -> Param:
    text = " ".join(text.split())
    found = re.fullmatch(
        r"(?P<type>[\w\s]+?)(?P<stars>[\s*]*)(?:\b__restrict(?:__)?\b)?\s*\b(?P<name>\w+)",
        re.sub(r"(?<=\*)\s*const\b", "", text),
    )
    if found is None:
        raise CudaCompileError(f"{where}: parameter '{text}' is not understood; use pointers, numbers and cudaStream_t")
    words = [w for w in found["type"].split() if w not in ("volatile", "struct")]
    base, stars = " ".join(w for w in words if w != "const"), found["stars"].count("*")
    for _ in range(8):  # an alias may name another alias
        if base in POINTEES or base in SCALARS or base not in aliases:
            break
        base = aliases[base]
    name, shown = found["name"], base + "*" * stars
    if stars == 0 and (base in SCALARS or base == "cudaStream_t"):
        return Param(name, shown, SCALARS.get(base, "S"))
    if stars == 1 and base in POINTEES:
        return Param(name, shown, "P", POINTEES[base], "const" in words, "strided" in marks, "optional" in marks)
    known = f"pointers to {', '.join(POINTEES)}; {', '.join(SCALARS)}; cudaStream_t"
    raise CudaCompileError(
        f"{where}: parameter {name} has type '{shown}', which no argument converts to; known: {known}"
    )


# ---- messages --------------------------------------------------------------------------------------------------------

_MESSAGE = re.compile(
    r"^(?P<file>[^\s(:][^(:]*?)(?:\((?P<l1>\d+)\)|:(?P<l2>\d+)(?::\d+)?): "
    r"(?P<level>[a-z ]*error|warning)(?: #[\w-]+)?: (?P<text>.*)$"
)
_TOOL = re.compile(
    r"^(?P<tool>ptxas|nvcc|nvlink|cicc)\b(?:.*, line (?P<ptx>\d+);)?[^:]*?"
    r"(?P<level>fatal|error|warning)\s*: (?P<text>.*)$"
)
_LINK = re.compile(r"(undefined reference to .*|multiple definition of .*)$")


def format_messages(output: str, source: str, level: str = "error", ptx: str = "") -> list[str]:
    """The compiler's messages of one level ("error" or "warning"), each with three lines of CUDA_SRC around its own.

    Instantiation backtraces, overload candidates, command lines and temporary paths are left out. A message from inside
    a header names the header and shows the line of CUDA_SRC that led there; one from ptxas goes through the .loc of
    `ptx`."""
    lines, messages, raw = source.splitlines(), [], output.splitlines()
    for i, text in enumerate(raw):
        found, tool, link = _MESSAGE.match(text), _TOOL.match(text), _LINK.search(text)
        if found and level in found["level"]:
            line, file = int(found["l1"] or found["l2"]), Path(found["file"]).name
            place = f"CUDA_SRC line {line}" if file == "CUDA_SRC" else f"{file} line {line}"
            if file != "CUDA_SRC":
                led = re.search(r"at line (\d+) of CUDA_SRC", "\n".join(raw[i : i + 40]))
                line = int(led[1]) if led else 0
            message = "; ".join([f"{place}: {found['level']}: {found['text']}", *_details(raw[i + 1 : i + 4])])
            messages.append(message + _context(lines, line))
        elif tool and level in tool["level"].replace("fatal", "error") and "due to errors" not in tool["text"]:
            line = _ptx_line(ptx, int(tool["ptx"])) if tool["ptx"] else 0
            place = f"CUDA_SRC line {line} ({tool['tool']})" if line else tool["tool"]
            said = re.sub(r"\b_Z\w+", lambda m: demangle(m.group()), tool["text"].strip())
            messages.append(f"{place}: {tool['level']}: {said}" + _context(lines, line))
        elif link and level == "error":
            messages.append(f"linker: error: {link[1]}")
    return list(dict.fromkeys(messages))


def _details(following: list[str]) -> list[str]:
    """ "argument types are: (int, int)" and the like: deeply indented lines right after a message."""
    found = []
    for text in following:
        if not re.match(r" {12}\S", text) or "detected during" in text:
            break
        found.append(text.strip())
    return found


def _context(lines: list[str], line: int) -> str:
    """The line before, the line itself (marked) and the line after."""
    shown = [n for n in (line - 1, line, line + 1) if line and 1 <= n <= len(lines)]
    return "".join(f"\n  {'>' if n == line else ' '} {n:4d} | {lines[n - 1].rstrip()}" for n in shown)


def _ptx_line(ptx: str, number: int) -> int:
    """The line of CUDA_SRC that line `number` of the PTX was generated from; 0 where it is not known."""
    own = re.search(r'^\s*\.file\s+(\d+)\s+"[^"]*CUDA_SRC"', ptx, re.M)
    before = "\n".join(ptx.splitlines()[:number])
    places = re.findall(rf"^\s*\.loc\s+{own[1]}\s+(\d+)", before, re.M) if own else []
    return int(places[-1]) if places else 0


# ---- resources -------------------------------------------------------------------------------------------------------


def parse_resources(output: str) -> dict[str, dict[str, int]]:
    """Per kernel, from `ptxas -v`: registers a thread, bytes of spills (stores and loads), stack, static smem."""
    kernels, section = {}, r"Compiling entry function '(\w+)'[^\n]*\n(.*?)(?=Compiling entry function|\Z)"
    patterns = {
        "registers": r"Used (\d+) registers",
        "spill_bytes": r"(\d+) bytes spill (?:stores|loads)",
        "stack_bytes": r"(\d+) bytes stack frame",
        "smem_bytes": r"(\d+) bytes smem",
    }
    for symbol, body in re.findall(section, output, re.S):  # what it calls without inlining follows, and counts
        kernels[demangle(symbol)] = {key: sum(map(int, re.findall(p, body))) for key, p in patterns.items()}
    return kernels


def triton_resources(compiled: object) -> dict[str, int | None]:
    """The same figures of a compiled Triton kernel (what `kernel[grid](...)` returns).

    Triton counts spills in 4-byte words of local memory. Registers and spills are None until the kernel is loaded on a
    device. smem_bytes is static and dynamic shared memory together."""
    spills = getattr(compiled, "n_spills", None)
    return {
        "registers": getattr(compiled, "n_regs", None),
        "spill_bytes": None if spills is None else 4 * spills,
        "smem_bytes": getattr(getattr(compiled, "metadata", None), "shared", None),
    }


def demangle(symbol: str) -> str:
    """A kernel's name without return type and parameters: `_Z1kI6__halfLi4EEvPKT_` is `k<__half, 4>`."""
    try:
        cxx = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return symbol
    cxx.restype = ctypes.c_void_p
    address = cxx(symbol.encode(), None, None, ctypes.byref(ctypes.c_int()))
    if not address:
        return symbol
    text = ctypes.string_at(address).decode().replace("(anonymous namespace)::", "")
    text = re.sub(r"\((?:unsigned )?(?:int|long|short|char|bool)\)(?=\d)", "", text)  # k<(int)4> is k<4>
    depth, start = 0, 0
    for i, char in enumerate(text):
        depth += {"<": 1, ">": -1}.get(char, 0)
        if depth == 0 and char == " ":  # what came before was the return type: "void k<4>(float*)"
            start = i + 1
        if depth == 0 and char == "(":  # the parameters
            return text[start:i]
    return text[start:]
