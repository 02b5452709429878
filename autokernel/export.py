"""From a kernel file to a complete Hugging Face `kernels` project: sources, tests, card and builds that load.

`export` makes it whole in a temporary folder, validates it (the loader's own checks, a load in a fresh process, values
against the formula) and only then moves it into place. What the project says was measured comes from the judge's record
of exactly these bytes; a kernel without one is refused. `autokernel.hub` uploads.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import json
import keyword
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

import torch

from autokernel import ops, paths, process
from autokernel.compare import TOLERANCES
from autokernel.export_cuda import TORCH_TARGET, CudaSource, build_library, read_cuda, stable_variant
from autokernel.kernelbench import KERNEL_TYPE
from autokernel.night import KEPT
from autokernel.records import Ledger
from autokernel.source import KernelSource, read_kernel
from autokernel.spec import DTYPES, STAGES, Case, OpSpec, dtype_name
from autokernel.targets import read_target

BACKENDS = ("cuda", "rocm", "cpu")  # of a Triton build; cpu is Triton's interpreter: to rehearse without a GPU
LANGUAGES = {"triton": "Triton", "cuda": "CUDA C++"}
ANNOTATIONS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "float | None"}
MAX_ELEMENTS = {False: 1 << 15, True: 1 << 22}  # of a test case: in Triton's interpreter, on a GPU
VALIDATION_SECONDS = 900
VERSIONS = 999_999
TAKEN = {"torch", "triton", "kernels", *sys.stdlib_module_names}  # module names that a project would hide
# the software licences among the ids that the Hub knows (huggingface.co/docs/hub/repositories-licenses)
LICENSES = (
    "afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 cc0-1.0 "
    "cc-by-4.0 cc-by-sa-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 ecl-2.0 epl-1.0 epl-2.0 eupl-1.1 eupl-1.2 gpl gpl-2.0 gpl-3.0 "
    "isc lgpl lgpl-2.1 lgpl-3.0 lppl-1.3c mit mpl-2.0 ms-pl ncsa osl-3.0 postgresql unlicense wtfpl zlib unknown other"
).split()


class ExportError(ValueError):
    """What cannot be exported, in one line with the remedy."""


@dataclass(frozen=True)
class Project:
    """What the user chose. Raises ExportError for what the loader or the Hub would refuse."""

    name: str
    repo_id: str = ""
    version: int = 1
    license: str = "mit"
    backends: tuple[str, ...] = ("cuda",)
    force: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", self.name) or len(self.name) > 80 or "--" in self.name:
            suggestion = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-0123456789")[:80]
            suggestion = suggestion if len(suggestion) > 1 else "my-kernel"
            raise ExportError(f"--name {self.name!r}: at least two characters, at most 80: small letters, digits, "
                              f"single dashes, a letter first, no dash at the end; for example: --name {suggestion}")
        if self.python_name in TAKEN or keyword.iskeyword(self.python_name):
            raise ExportError(f"--name {self.name!r}: Python has that word or module already; for example: --name "
                              f"my-{self.name}")  # fmt: skip
        if self.repo_id and (why := _repo_id_objection(self.repo_id)):
            raise ExportError(f"--repo-id {self.repo_id!r}: {why}; for example: user/{self.name}")
        if not 1 <= self.version <= VERSIONS:
            raise ExportError(f"--version {self.version}: versions count from 1 to {VERSIONS}")
        if self.license not in LICENSES:
            raise ExportError(f"--license {self.license!r} is none that the Hub knows; one of: {', '.join(LICENSES)}")
        if unknown := [b for b in self.backends or [""] if b not in BACKENDS]:
            raise ExportError(f"--backends {unknown[0]!r}: one or more of {','.join(BACKENDS)}")

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def shown_repo(self) -> str:
        return self.repo_id or f"USER/{self.name}"


def _repo_id_objection(repo_id: str) -> str:
    if repo_id.count("/") != 1:
        return "USER/NAME is wanted"
    if repo_id.startswith("USER/"):
        return "USER stands for your name on the Hub"
    with contextlib.suppress(ImportError):
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            return " ".join(str(error).split()).rstrip(".")
    return ""


# ---- which kernel, and what the judge said of it --------------------------------------------------------------------


def kept() -> dict[str, Path]:
    """Target -> the source of its best kernel so far, in order of rank."""
    ledger = Ledger()
    rows = (row for row in ledger.rows() if row.decision in KEPT and row.kernel_type != KERNEL_TYPE)
    best = {row.target: row for row in rows if row.target}
    ranked = sorted(best, key=lambda t: (int(head) if (head := t.partition("_")[0]).isdigit() else 0, t))
    return {target: ledger.attempt(best[target].experiment or 0) / "kernel.py" for target in ranked}


def verdict(source: KernelSource, workspace: Path | None = None, target: str = "") -> tuple[dict[str, Any], str]:
    """(the judge's best record of exactly this source, on a target if one is given, or {}; why it does not count)."""
    folder = workspace or paths.workspace()
    places = [folder / "last_run.json", *((workspace or paths.shared()) / "experiments").glob("*/record.json")]
    mine: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for place in places:
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = paths.read_object(place)
            same = record["source_sha256"] == source.sha256 and target in ("", record.get("target"))
            (mine if same else others).append(record | {"started": record["started"]})
    mine.sort(key=lambda r: (not _objection(r), r.get("device") == "cuda", len(r.get("sizes") or ()), r["started"]))
    judge = f"judge it with: uv run bench.py --kernel {shlex.quote(str(source.path))}"
    if mine:
        objection = _objection(mine[-1])
        return mine[-1], f"{objection}; {judge}" if objection else ""
    with contextlib.suppress(OSError):
        for line in reversed((folder / "runs.jsonl").read_text().splitlines()):
            with contextlib.suppress(ValueError, LookupError, TypeError):  # half a line of a run that was killed
                run = json.loads(line)
                if run["source_sha256"] == source.sha256:
                    what = f"{run['outcome']}, {run['started']}"
                    return {}, f"its record ({what}) was overwritten by a later run; {judge}"
    passed = [r for r in others if r.get("kernel_type") == source.kernel_type and not _objection(r)]
    if passed:
        last = max(passed, key=lambda r: r["started"])
        return {}, f"it differs from the one that passed (sha256 {last['source_sha256'][:12]}); {judge}"
    return {}, f"it was never judged; {judge}"


def _objection(record: Mapping[str, Any]) -> str:
    if record.get("outcome") != "PASS":
        return f"its verdict is {record.get('outcome')}: {record.get('reason')}"
    if record.get("quick"):
        return "it was judged with --quick only"
    return "the judge's own files had been changed" if record.get("harness") == "dirty" else ""


# ---- what a folder holds ---------------------------------------------------------------------------------------------


def read_general(path: Path) -> dict[str, Any]:
    """The [general] table of a build.toml. Raises ExportError where that cannot be read."""
    import tomlkit  # of the package `kernels`

    try:
        return dict(tomlkit.parse(path.read_text("utf-8")).unwrap()["general"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ExportError(f"{path} is no project's build.toml ({' '.join(why.split())}); export anew, with another "
                          "--output") from None  # fmt: skip


def difference(project: Project, folder: Path, sha256: str = "") -> str:
    """In what an exported folder is another project than this one (of the kernel with this hash), or ""."""
    _loader()
    general, cuda = read_general(folder / "build.toml"), folder / cuda_path(project.python_name)
    asked = {"name": project.name, "version": project.version, "license": project.license}
    asked |= {} if cuda.exists() else {"backends": list(project.backends)}
    there = (general.get("hub") or {}).get("repo-id")
    if project.repo_id and there not in (None, project.repo_id):
        return f"--repo-id {there}, not {project.repo_id}"
    for key, value in asked.items():
        if general.get(key) != value:
            shown = [",".join(v) if isinstance(v, list) else v for v in (general.get(key), value)]
            return f"--{key} {shown[0]}, not {shown[1]}"
    kernel = folder / "torch-ext" / project.python_name / "kernel.py"
    if sha256 and kernel.exists():
        head = cuda.read_text(errors="replace").partition("\n")[0] if cuda.exists() else ""
        own = head.rpartition(" ")[2].rstrip(".") if head else hashlib.sha256(kernel.read_bytes()).hexdigest()
        return "" if own == sha256 else f"another kernel (sha256 {own[:12]}, not {sha256[:12]})"
    return "" if kernel.exists() else f"no {kernel.relative_to(folder)}"


def fingerprint(work: Path, project: str, version: int) -> str:
    """A hash of a build's sources, part of its id."""
    python = project.replace("-", "_")
    package, binding = work / "torch-ext" / python, work / "torch-ext/torch_binding.cpp"
    found = [*sorted(package.rglob("*")), work / cuda_path(python), binding]
    digest = hashlib.sha256(f"{project} {version}".encode())
    for file in (f for f in found if f.is_file() and "__pycache__" not in f.parts):
        digest.update(b"\0%s\0" % str(file.relative_to(work)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


# ---- the project's files ---------------------------------------------------------------------------------------------


def template(file: str, **values: Any) -> str:
    text = (Path(__file__).parent / "export_templates" / file).read_text()
    return Template(text).substitute(values) if file.endswith(".in") else text


def narrowed(spec: OpSpec, accepted: tuple[str, ...]) -> OpSpec:
    """The operator with only those optional parameters that the kernel takes: the others were never judged."""
    args = {n: a for n, a in spec.args.items() if not a.optional or n in accepted}
    return replace(spec, args=args, scalars={n: v for n, v in spec.scalars.items() if n in accepted})


def package(project: Project, source: KernelSource, spec: OpSpec, cuda: CudaSource | None) -> dict[str, str]:
    """The Python package, without the parts that differ from build to build: file name -> text."""
    first = next(iter(spec.args))
    tensors = {n: "Tensor | None" if a.optional else "Tensor" for n, a in spec.args.items()}
    kinds = {**tensors, **{n: ANNOTATIONS[type(v)] for n, v in spec.scalars.items()}}
    defaults = {n: "" if d is ... else f" = {d!r}" for n, d in spec.parameters.items()}
    layers = layers_source(project, spec)
    values = dict(
        op=spec.name, first=first, reference=spec.reference.__name__, schema=spec.schema().replace('"', '\\"'),
        names=", ".join(spec.parameters), tensors=", ".join(spec.args),
        absent=" or ".join(f"{n} is None" for n in spec.required),
        optional=repr(tuple(n for n, a in spec.args.items() if a.optional)),
        keywords=", ".join(f"{n}={n}" for n in spec.parameters),
        signature=", ".join(f"{n}: {kinds[n]}{d}" for n, d in defaults.items()),
        parameters=", ".join(n + d.replace(" ", "") for n, d in defaults.items()),
        axes=repr({n: a.axes for n, a in spec.args.items()}),
        dtypes=f"({', '.join(str(DTYPES[d]) for d in spec.dtypes)},)", dtype_names=_dtype_names(spec),
        fixed="{" + ", ".join(f'"{n}": torch.{a.dtype}' for n, a in spec.args.items() if a.dtype != "float") + "}",
        devices='("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)' if cuda is None
        else '("cuda",)',
        doc=_doc(spec), out_shape=_out_shape(spec), check_dim=_check_dim(spec, first),
        out_dtype="" if spec.out_dtype == "float" else f", dtype=torch.{spec.out_dtype}",
    )  # fmt: skip
    files = {
        "__init__.py": template(
            "init.py.in", op=spec.name, summary=_doc(spec).splitlines()[0], call=_call(spec),
            language=LANGUAGES[source.backend], import_layers="from . import layers\n" * bool(layers),
            all=f'"{spec.name}"' + ', "layers"' * bool(layers),
        ),
        "op.py": template("op.py.in", **values),
        "kernel.py": cuda.python if cuda else source.data.decode(),
        "reference.py": reference_source(spec),
    }  # fmt: skip
    if cuda:
        files["op.py"] = files["op.py"].replace("import os\n", "", 1)
        files["_cuda.py"] = template("cuda.py.in", defines=repr(cuda.defines))
    return files | ({"layers.py": _without_code(layers)} if layers else {})


def _without_code(layers: str) -> str:
    """The docstring's first line alone: its code names a repository, and builds do not change when that is known."""
    head, code = layers.split('"""', 2)[1:]
    return f'"""{head.splitlines()[0]}"""{code}'


def layers_source(project: Project, spec: OpSpec) -> str:
    """What transformers can take of the operator, or ""; its docstring holds code for the card."""
    name = f"layers/{spec.name}.py.in"
    there = (Path(__file__).parent / "export_templates" / name).exists()
    return template(name, repo_id=project.shown_repo, version=project.version) if there else ""


def _dtype_names(spec: OpSpec) -> str:
    return ", ".join(dtype_name(DTYPES[d]) for d in spec.dtypes)


def _doc(spec: OpSpec) -> str:
    """The formula's docstring, without the terms of optional arguments that the kernel does not take."""
    text = inspect.cleandoc(spec.reference.__doc__ or spec.name).replace("\n", "\n    ")
    for name in inspect.signature(spec.reference).parameters:
        text = text if name in spec.parameters else re.sub(rf" [-+*/] {name}\b( \([^)]*\))?", "", text)
    return text


def _call(spec: OpSpec) -> str:
    shown = [n if d is ... else f"{n}={d!r}" for n, d in spec.parameters.items()]
    return f"{spec.name}({', '.join(shown)})"


def _out_shape(spec: OpSpec) -> str:
    if callable(spec.out):  # a rule that axes do not express: ask the formula
        return f"reference({', '.join(spec.parameters)}).shape"
    parts = []
    for axis in spec.out:
        name, _, part = axis.lstrip("*").partition("/")
        parts.append("*" * (axis[0] == "*") + f'sizes["{name}"]' + f" // {part}" * bool(part))
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def _check_dim(spec: OpSpec, first: str) -> str:
    """A dimension out of range is not every kernel's business."""
    if "dim" not in spec.scalars:
        return ""
    return (f"    if not -{first}.dim() <= dim < max({first}.dim(), 1):\n"
            f'        raise ValueError(f"{spec.name}: dim is {{dim}}, {first} has {{{first}.dim()}} dimensions")\n')


def reference_source(spec: OpSpec) -> str:
    """The formula that the kernel was judged by, with what its module defines for it."""
    text = inspect.getsource(sys.modules[spec.reference.__module__])
    wanted, kept = {spec.reference.__name__}, []
    for node in reversed(ast.parse(text).body):  # what a name needs is defined before it
        names = {getattr(t, "id", None) for t in getattr(node, "targets", ())} | {getattr(node, "name", None)}
        names |= {(a.asname or a.name).partition(".")[0] for a in getattr(node, "names", ())}
        if names & wanted:
            wanted |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            kept.append(ast.get_source_segment(text, node) or "")
    head = '"""The formula in plain PyTorch; the judge of AutoKernel runs it in float64."""'
    return "\n\n".join([head, *reversed(kept)]) + "\n"


def test_cases(spec: OpSpec, accepted: tuple[str, ...], on_gpu: bool) -> list[str]:
    """Odd sizes, views and options with ordinary content, as lines of the test file: the first in every dtype."""
    groups: dict[str, list[Case]] = {}
    for case in spec.cases(on_gpu, set(accepted), random.Random(0)):
        tensors = spec.tensors(case).values()
        elements = sum(t.span for t in tensors) + spec.output(case).span
        small = all(t.nbytes for t in tensors) and elements <= MAX_ELEMENTS[on_gpu]
        small = small and spec.flops(case.size, spec.scalars) <= 64 * MAX_ELEMENTS[on_gpu]
        if small and case.stage in ("shape_sweep", "edge_cases"):
            groups.setdefault(case.label.replace(case.dtype, "", 1), []).append(case)
    chosen = [group if i == 0 else [group[i % len(group)]] for i, group in enumerate(groups.values())]
    return [_case_line(spec, case) for group in chosen for case in group]


def _draws(spec: OpSpec, case: Case) -> str:
    parts = []
    for name, tensor in spec.tensors(case).items():
        arg = spec.args[name]
        scale = arg.scale(case.size) if callable(arg.scale) else arg.scale
        scale = case.size[arg.below] if arg.draw == "index" else round(scale, 6)
        parts.append(f'"{name}": ({tensor.shape}, {tensor.strides}, {tensor.offset}, "{arg.draw}", {scale})')
    return "{" + ", ".join(parts) + "}"


def _case_line(spec: OpSpec, case: Case) -> str:
    dtype = DTYPES[case.dtype]
    out = torch.float32 if spec.out_dtype == "float32" else dtype
    grown = max(1.0, (spec.depth(case.size) / 512) ** 0.5) if out == torch.float32 else 1.0
    tolerance = 2 * TOLERANCES[out] * spec.tolerance * grown  # the judge's, with room for content it did not draw
    return f'    ({_draws(spec, case)}, {dict(case.scalars)}, "{dtype_name(dtype)}", {tolerance:.1e}),'


def project_files(project: Project, source: KernelSource, spec: OpSpec, cuda: CudaSource | None) -> dict[str, str]:
    """All files of the project but the builds, and the card, which tells of them."""
    python, timed = project.python_name, [plain_case(spec, spec.shapes, name) for name in spec.timed]
    common = dict(
        name=project.name, op=spec.name, repo_id=project.shown_repo, version=project.version,
        draw=template("draw.py.in"), reference=spec.reference.__name__,
    )  # fmt: skip
    files = {f"torch-ext/{python}/{n}": text for n, text in package(project, source, spec, cuda).items()}
    files |= {
        "build.toml": build_toml(project, source, cuda),
        "flake.nix": template("flake.nix"),
        f"tests/test_{python}.py": template(
            "test.py.in", **common, test_file=f"test_{python}.py", first=next(iter(spec.args)),
            last=[n for n, a in spec.args.items() if not a.optional][-1],
            needs="" if cuda is None else "A CUDA build is loaded there, not run.",
            interpretable='os.environ.get("TRITON_INTERPRET") == "1"' if cuda is None else "False",
            cases="\n".join(test_cases(spec, source.parameters, False)),
            gpu_cases="\n".join(f"    {line}" for line in test_cases(spec, source.parameters, True)),
        ),
        "benchmarks/benchmark.py": template(
            "benchmark.py.in", **common, baseline=spec.baseline_name,
            sizes="\n".join(f'    "{case.name}": {_draws(spec, case)},' for case in timed),
        ),
    }  # fmt: skip
    if cuda:
        files |= {cuda_path(project.python_name): cuda.text, "torch-ext/torch_binding.cpp": cuda.binding}
    return files


def plain_case(spec: OpSpec, shapes: Mapping[str, Any], name: str) -> Case:
    """A named size without optional tensors."""
    return Case(name, "", shapes[name], "fp16", omit=tuple(n for n, a in spec.args.items() if a.optional))


def cuda_path(python_name: str) -> str:
    return f"{python_name}_cuda/{python_name}.cu"


def build_toml(project: Project, source: KernelSource, cuda: CudaSource | None) -> str:
    """build.toml, edition 5: what kernel-builder makes the remaining variants from."""
    backends = ["cuda"] if cuda else list(project.backends)
    lines = ["[general]", f'name = "{project.name}"', f"version = {project.version}", "edition = 5",
             f'license = "{project.license}"', f"backends = {json.dumps(backends)}"]  # fmt: skip
    if project.repo_id:
        lines += ["", "[general.hub]", f'repo-id = "{project.repo_id}"']
    if cuda is None:
        return "\n".join([*lines, "", "[torch-noarch]", ""])
    lines += ["", "[torch]", 'src = ["torch-ext/torch_binding.cpp"]', "", "[torch.stable-abi]", 'cuda = "2.11"']
    lines += ["", f"[kernel.{project.python_name}]", 'backend = "cuda"', 'depends = ["torch"]',
              f'src = ["{cuda_path(project.python_name)}"]', f'cuda-capabilities = ["{cuda.capability}"]',
              f"cuda-flags = {json.dumps(cuda.flags)}", ""]  # fmt: skip
    return "\n".join(lines)


# ---- the card ----------------------------------------------------------------------------------------------------


def card(
    project: Project, source: KernelSource, spec: OpSpec, record: Mapping[str, Any], refusal: str,
    states: Mapping[str, str], cuda: CudaSource | None = None,
) -> str:  # fmt: skip
    """CARD.md: how to use it, what was measured, by whom, and what it does not do; states: build -> its test."""
    python = project.python_name
    layers = ""
    if source_of_layers := layers_source(project, spec):
        head, _, code = (ast.get_docstring(ast.parse(source_of_layers)) or "").partition("\n\n")
        layers = f"\n## In transformers\n\n{head}\n\n```python\n{textwrap.dedent(code)}\n```\n"
    forced = f"\n> **Not accepted by the judge**: {refusal.partition(';')[0]}. Exported with `--force`.\n"
    return template(
        "card.md.in", name=project.name, license=project.license, backend=source.backend, version=project.version,
        repo_id=project.shown_repo, language=LANGUAGES[source.backend], mark=forced * bool(refusal),
        made="exported" if refusal or not record else "judged and exported",
        summary=f"`{spec.name}`: {_doc(spec).splitlines()[0]}", call=_call(spec), dtype_names=_dtype_names(spec),
        example=_example(spec), layers=layers, measured=_measured(record, spec), verdict=_verdict(source, record),
        limits="\n".join(f"- {line}" for line in _limits(source, spec, record, states, cuda)),
        test_file=f"test_{python}.py", no_gpu=template("nogpu.md.in", repo_id=project.shown_repo,
        version=project.version) * ("torch-cpu" in states),
        variants=", ".join(f"`{v}` ({state})" for v, state in states.items()) or "none",
        other_builds="kernel-builder makes the others: `nix run .#build-and-copy -L`."
        if source.backend == "cuda" else "Triton compiles at the first call of a shape.",
    )  # fmt: skip


def _example(spec: OpSpec) -> str:
    """A call at the operator's smallest size, as text that runs."""
    case, lines = plain_case(spec, spec.cpu_shapes, "small"), []
    for name, tensor in spec.tensors(case).items():
        arg = spec.args[name]
        if arg.draw == "index":
            lines.append(f'{name} = torch.randint({case.size[arg.below]}, {tensor.shape}, device="cuda")')
        else:
            lines.append(f'{name} = torch.randn({tensor.shape}, dtype=torch.float16, device="cuda")')
    return "\n".join([*lines, f"out = kernel.{spec.name}({', '.join(spec.tensors(case))})"])


def _timed(record: Mapping[str, Any]) -> bool:
    return bool(record.get("sizes")) and record.get("device") == "cuda"


def _measured(record: Mapping[str, Any], spec: OpSpec) -> str:
    if not _timed(record):
        why = "the judge had no GPU" if record.get("device") != "cuda" else "the kernel did not get that far"
        return f"Nothing: {why if record else 'the judge did not run'}, so there are no times."
    rows = [f"| size | dtype | µs | speedup vs {spec.baseline_name} | vs torch.compile |", "|---|---|---|---|---|"]
    for size in record["sizes"]:
        axes = ", ".join(f"{k} {v}" for k, v in size["axes"].items())
        compiled = size.get("speedup_vs_compile")
        spread = 100 * (size.get("speedup_vs_pytorch_spread") or 0)
        rows.append(f"| {size['size']}: {axes} | {size['dtype']} | {size['latency_us']:.4g} "
                    f"| {size['speedup_vs_pytorch']:.2f}x ± {spread:.1f} % "
                    f"| {f'{compiled:.2f}x' if compiled else 'not measured'} |")  # fmt: skip
    where = f"{record['gpu_name']}, PyTorch {record.get('torch')}, {str(record['started'])[:10]}"
    return f"{where}; cold L2 cache, launch hidden, paired with PyTorch on the same inputs.\n\n" + "\n".join(rows)


def _verdict(source: KernelSource, record: Mapping[str, Any]) -> str:
    lines = {"kernel (sha256)": f"`{source.sha256}`", "verdict": record.get("outcome", "never judged")}
    if record:
        elsewhere = "a CPU, in Triton's interpreter" if source.backend == "triton" else "no GPU: it did not run"
        stages = [f"{name.replace('_', ' ')} {record[name]}" for name in STAGES if record.get(name)]
        lines |= {"stages": "; ".join(stages), "judged on": record.get("gpu_name") or elsewhere,
                  "harness (sha256)": f"`{record.get('harness_sha256')}`, {record.get('harness')}",
                  "date": record.get("started")}  # fmt: skip
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in lines.items())])


def _limits(
    source: KernelSource, spec: OpSpec, record: Mapping[str, Any], states: Mapping[str, str], cuda: CudaSource | None
) -> list[str]:
    whole = ops.get(source.kernel_type)
    left_out = [n for n in whole.optional_names() if n not in source.parameters]
    lines = ["Inference only: the backward pass raises NotImplementedError.",
             f"dtypes {_dtype_names(spec)}; all arguments of one dtype, on one device."]  # fmt: skip
    if _timed(record):
        lines.append("Times hold for the sizes and the GPU above; elsewhere measure with `kernels benchmark`.")
    lines += [f"Not there, as the kernel does not take it: `{', '.join(left_out)}`."] * bool(left_out)
    lines += ["Results may differ in the last bits from run to run (DETERMINISTIC = False)."] * source.nondeterministic
    vendor = record.get("vendor_calls") or []
    lines += [f"Calls a vendor library: {', '.join(vendor[:3])}."] * bool(vendor)
    if record and record.get("device") != "cuda" and source.backend == "triton":
        lines.append("Judged in Triton's interpreter on a CPU only.")
    if cuda:
        lines += [_needs(variant, cuda) for variant in states]
    lines += [f"The build {v} was never run." for v, state in states.items() if state.startswith("not run")]
    return lines


def _needs(variant: str, cuda: CudaSource) -> str:
    toolkit = re.sub(r".*-cu(\d+)(\d)-.*", r"\1.\2", variant)
    return (f"`{variant}` is compiled for GPUs of compute capability {cuda.capability} with CUDA {toolkit}; loads in "
            f"PyTorch {'.'.join(map(str, TORCH_TARGET))} or later of the same CUDA major version and no earlier minor, "
            "and needs the C library of the machine that made it, or a later one.")  # fmt: skip


# ---- builds, validation, and all of it ------------------------------------------------------------------------------


def read_source(path: Path, target: str = "") -> KernelSource:
    """Read and check a kernel file for export. Raises ExportError for imports that the Hub's loader cannot give it."""
    expected = read_target(paths.shared() / "targets" / target).spec.name if target else None
    source = read_kernel(path, expected)
    try:
        source.data.decode()
    except UnicodeDecodeError as error:
        raise ExportError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8, judge and export that") from None
    allowed = {"torch", "triton"} | sys.stdlib_module_names
    imports = [n for n in ast.walk(ast.parse(source.data)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    for node in imports:
        for name in [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or "."]:
            ours = source.backend == "cuda" and name == "autokernel.cuda"
            if name.partition(".")[0] not in allowed and not ours:
                raise ExportError(f"{path}:{node.lineno}: imports {name}; a kernel from the Hub has torch, triton and "
                                  "the standard library")  # fmt: skip
    return source


def admit(project: Project, source: KernelSource, output: Path) -> tuple[dict[str, Any], str]:
    """The judge's record, and why it is none to rely on; raises ExportError where an export would be refused."""
    if output.exists() or output.is_symlink():
        raise ExportError(f"{output} exists already; choose another --name or --output, or remove it")
    record, refusal = verdict(source)
    if refusal and not project.force:
        raise ExportError(f"{source.path.name} is refused: {refusal}, or export it with --force, which marks the card")
    return record, refusal


def export(project: Project, source: KernelSource, output: Path, progress=lambda text: None) -> dict[str, Any]:
    """Make the project in `output`, which must not exist. Returns what was made; raises ExportError and leaves nothing.

    {"folder", "variants", "refusal", "validated": variant -> "passed" or why it was not run, "note"}.
    """
    output = output.absolute()  # its own tests run in it
    record, refusal = admit(project, source, output)
    _loader()
    cuda = read_cuda(source, cuda_path(project.python_name)) if source.backend == "cuda" else None
    output.parent.mkdir(parents=True, exist_ok=True)
    _clean(output)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.{os.getpid()}.") as temporary:
        work = Path(temporary) / project.name
        variants, note = [f"torch-{b}" for b in project.backends], ""
        if cuda:
            variant, note = stable_variant()
            variants = [variant] if variant else []
        spec = narrowed(ops.get(source.kernel_type), source.parameters)
        files = project_files(project, source, spec, cuda)
        for name, text in files.items():
            paths.atomic_write(work / name, text.encode())
        for variant in variants:
            progress(f"building {variant}")
            build(project, work, variant, cuda)
        progress("validating")
        validated = validate(work, progress)
        text = card(project, source, spec, record, refusal, validated, cuda)
        paths.atomic_write(work / "CARD.md", text.encode())
        work.rename(output)
    return {"folder": output, "variants": variants, "refusal": refusal, "validated": validated, "note": note}


def _clean(output: Path) -> None:
    """Remove what exports of this project left behind that were killed."""
    for old in output.parent.glob(f".{output.name}.*"):
        owner = re.fullmatch(r"(\d{1,9})\.\w+", old.name.removeprefix(f".{output.name}."))
        with contextlib.suppress(PermissionError):
            try:
                os.kill(int(owner[1]), 0) if owner else None
            except ProcessLookupError:
                shutil.rmtree(old, ignore_errors=True)


def build(project: Project, work: Path, variant: str, cuda: CudaSource | None) -> None:
    """build/<variant>: the package, its namespace, metadata.json and, for CUDA, the compiled library."""
    from kernels._rust import Digest, DigestAlgorithm

    backend = "cuda" if cuda else variant.removeprefix("torch-")
    folder, package_folder = work / "build" / variant, work / "torch-ext" / project.python_name
    shutil.copytree(package_folder, folder)
    # two kernels with one id would be one module
    own_id = f"_{project.python_name}_{backend}_{fingerprint(work, project.name, project.version)}"
    (folder / "_ops.py").write_text(_namespace(own_id, bool(cuda)))
    target: dict[str, Any] = {"type": backend}
    if cuda:
        build_library(work, cuda, cuda_path(project.python_name), own_id, folder / f"{own_id}.abi3.so")
        target["archs"] = [cuda.capability]
    values = {"name": project.name, "id": own_id, "version": project.version, "license": project.license,
              "python-depends": [], "backend": target}  # fmt: skip
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, folder)
    values["digest"] = {"algorithm": "sha256", "files": digest.files}
    (folder / "metadata.json").write_text(json.dumps(values, indent=1) + "\n")


def _namespace(identity: str, compiled: bool) -> str:
    """_ops.py: the operators' namespace, of this build alone; a compiled library fills it when it is loaded."""
    load = [f'ctypes.CDLL(str(Path(__file__).with_name("{identity}.abi3.so")))'] if compiled else []
    return "\n".join([*["import ctypes", "from pathlib import Path", ""] * compiled, "import torch", "", *load,
                      f"ops = torch.ops.{identity}", "", "", "def add_op_namespace_prefix(name):",
                      f'    return f"{identity}::{{name}}"', ""])  # fmt: skip


def _loader():
    try:
        import kernels._rust

        return kernels._rust
    except ImportError:
        raise ExportError("the Hub's package `kernels` is not installed; get it with: uv sync --extra hub") from None


def validate(work: Path, progress=lambda text: None) -> dict[str, str]:
    """Check a project with the loader's own validators and its tests in a fresh process, variant by variant.

    Returns variant -> "passed", or "not run: ..." where this machine cannot run it. Raises ExportError."""
    loader, found = _loader(), {}
    try:
        loader.Build.open(work)
        for folder in sorted((work / "build").glob("*/")):
            metadata = loader.Metadata.read_from_file(folder / "metadata.json")
            if metadata.digest is None:
                raise ValueError(f"{folder.name}/metadata.json has no digest")
            metadata.digest.validate(loader.Digest.hash_variant(metadata.digest.algorithm, folder))
            if metadata.id.rpartition("_")[2] != fingerprint(work, str(metadata.name), metadata.version):
                raise ValueError(f"{folder.name} was not built from the sources beside it: they were changed, or it "
                                 "is kernel-builder's, which uploads itself")  # fmt: skip
            progress(f"testing {folder.name}")
            found[folder.name] = _run_tests(work, folder)
    except (OSError, ValueError, RuntimeError, loader.DigestValidationError) as error:
        why = " ".join(str(error).split())[:300]
        if isinstance(error, ExportError):
            raise
        raise ExportError(f"{work.name} is not valid: {why}; export it again, with another --output") from None
    return found


def _run_tests(work: Path, folder: Path) -> str:
    """The project's own tests on one build, in a process of its own."""
    on_gpu, compiled = torch.cuda.is_available(), any(folder.glob("*.so"))
    interpreted = not on_gpu or folder.name == "torch-cpu"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted and not compiled else {}
    if interpreted and on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    tests = next((work / "tests").glob("test_*.py"), None)
    if tests is None:
        raise ExportError(f"{work / 'tests'} has no test_*.py: put it back, or export again with another --output")
    command = [sys.executable, str(tests), str(folder)]
    try:
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, errors="replace",
                              timeout=VALIDATION_SECONDS, preexec_fn=process._die_with_parent)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ExportError(f"{folder.name}: its tests took more than {VALIDATION_SECONDS} s") from None
    if done.returncode:
        raise ExportError(f"{folder.name} fails its own tests: {_last_error(done)}")
    if compiled and not on_gpu:
        return "not run: no GPU here"
    here = " on an NVIDIA GPU" if folder.name == "torch-rocm" and torch.version.hip is None else ""
    return "passed in Triton's interpreter" if interpreted else f"passed{here}"


def _last_error(done: subprocess.CompletedProcess) -> str:
    """The line of a failed process that says most: its last error, else its last words, else the signal it died of."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return (errors or lines or [ended])[-1][:300] if done.returncode > 0 else ended
