"""KernelBench problems: where they come from, the starter kernel made of one, and the folder that each one has.

A problem is a Python file with a class Model, get_inputs() and usually get_init_inputs(). Fetched ones lie in the
cache, one folder a level. What belongs to a problem lies in workspace/kb/<level>/<id>/: problem.py and problem.json (as
they were when the work began), kernel.py (the working copy while another problem is active), best.py and history.tsv.
The active problem is named in workspace/active, as every target is: "kb/<level>/<id>".
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autokernel.paths import atomic_write, cache_dir, read_object, repo_root, shared, target_folder, workspace

HUB = "ScalingIntelligence/KernelBench"
LEVELS = ("1", "2", "3", "4", "custom")
KERNEL_TYPE = "kernelbench"
TRIALS = 5  # KernelBench's scripts
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-2}  # KernelBench's: absolute and relative
FAST = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)  # fast_p: right, and more than p times as fast as PyTorch
FETCH = "uv run kernelbench/bridge.py fetch"
SETUP = "uv run kernelbench/bridge.py setup --level {} --problem {}"
SOURCES = f"{FETCH} --repo CLONE (of github.com/{HUB}) or --file PROBLEM.py"
HISTORY = ("started", "correctness", "latency_us", "pytorch_latency_us", "speedup_vs_pytorch", "speedup_vs_compile",
           "speedup_vs_best", "precision", "weak_problem", "best", "source_sha256", "run_id", "reason")  # fmt: skip
GIVEN = ("get_inputs", "get_init_inputs")  # the judge's, never the kernel's


class ProblemError(ValueError):
    """A problem that cannot be had or used; one line with the next command."""


@dataclass(frozen=True)
class Problem:
    """One problem. level: "1" to "4" or "custom"; code: its source; source: where that came from."""

    level: str
    id: int
    name: str
    code: str
    source: str = ""

    @property
    def key(self) -> str:
        """Its name as a target: what stands in workspace/active and in the ledger."""
        return f"kb/{self.level}/{self.id}"

    @property
    def folder(self) -> Path:
        return target_folder(self.key)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.code.encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """What problem.json says."""
        return {"level": self.level, "id": self.id, "name": self.name, "source": self.source, "sha256": self.sha256}


# ---- fetching --------------------------------------------------------------------------------------------------------


def store() -> Path:
    """The fetched problems: <level>/<id>_<name>.py, and <level>/source.json on where they are from."""
    return cache_dir() / "kernelbench"


def fetch_hub(revision: str = "") -> dict[str, int]:
    """Fetch every level from the Hugging Face Hub. Returns level -> number of problems.

    revision: a commit of the dataset; by default the one that was fetched here before, else what `main` is now, which
    is then kept. Raises ProblemError.
    """
    revision = revision or _source("1").get("revision", "")
    try:
        from datasets import load_dataset
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ProblemError(f"{error.name} is missing: uv sync --extra kernelbench; or use {SOURCES}") from None
    http: Any = HfHubHTTPError.__mro__[1]  # the HTTP library's own error: which one depends on the release
    try:
        commit = str(HfApi().dataset_info(HUB, revision=revision or "main").sha)
        splits = load_dataset(HUB, revision=commit)
        levels = {split.rpartition("_")[2]: [dict(row) for row in rows] for split, rows in splits.items()}
    except (OSError, ValueError, KeyError, RuntimeError, http) as error:
        text = " ".join(str(error).split())[:120] or type(error).__name__
        raise ProblemError(f"nothing from the Hugging Face Hub ({text}); other sources: {SOURCES}") from None
    found = {}
    for level, rows in levels.items():
        files = {f"{row['problem_id']}_{_bare(row['name'])}.py": row["code"] for row in rows}
        found[level] = _keep(level, files, {"source": f"hub:{HUB}", "revision": commit})
    return found


def fetch_folder(folder: Path) -> dict[str, int]:
    """Take the problems of a local clone (its root, or a folder with level1, level2, ...). Raises ProblemError."""
    base = next((b for b in (folder / "KernelBench", folder) if any(b.glob("level*/*.py"))), None)
    if base is None:
        raise ProblemError(f"{folder} has no level*/*.py; give --repo the root of a clone of github.com/{HUB}")
    commit = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    found = {}
    for place in sorted(base.glob("level*")):
        files = {p.name: p.read_text() for p in place.glob("*.py") if p.name[0].isdigit()}
        if files:
            origin = {"source": str(folder.resolve()), "revision": commit}
            found[place.name.removeprefix("level")] = _keep(place.name.removeprefix("level"), files, origin)
    return found


def fetch_file(path: Path) -> Problem:
    """Take one file as a problem of the level "custom". Raises ProblemError when it is none."""
    try:
        code = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(f"{path}: {error}; give --file a KernelBench problem (a Python file)") from None
    starter(code, str(path))  # so a file that is no problem is refused now
    known = list_problems("custom") if (store() / "custom").is_dir() else []
    if same := next((p for p in known if p.code == code), None):
        return same
    number = max((p.id for p in known), default=0) + 1
    name = f"{number}_{_bare(path.name)}.py"
    _keep("custom", {f"{p.id}_{p.name}.py": p.code for p in known} | {name: code}, {"source": "files"})
    return load_problem("custom", number)


def _bare(name: str) -> str:
    """"19_ReLU.py" -> "ReLU"."""
    return re.sub(r"\W", "_", re.sub(r"^\d+_", "", name.removesuffix(".py")))


def _keep(level: str, files: dict[str, str], origin: dict[str, str]) -> int:
    """Replace the stored problems of a level, all at once."""
    store().mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{level}-", dir=store()))
    for name, code in files.items():
        (building / name).write_text(code)
    (building / "source.json").write_text(json.dumps(origin))
    building.chmod(0o755)
    if (store() / level).exists():
        old = building.with_name(building.name + "-old")
        (store() / level).rename(old)
        shutil.rmtree(old, ignore_errors=True)
    building.rename(store() / level)
    return len(files)


def _source(level: str) -> dict[str, str]:
    try:
        return json.loads((store() / level / "source.json").read_text())
    except (OSError, ValueError):
        return {}


def list_problems(level: str) -> list[Problem]:
    """The fetched problems of a level, by id. Raises ProblemError when the level is unknown or was not fetched."""
    level = str(level)
    if level not in LEVELS:
        raise ProblemError(f"unknown level {level!r}; known: {', '.join(LEVELS)}")
    origin = " @ ".join(v for v in (_source(level).get("source"), _source(level).get("revision")) if v)
    paths = {int(p.name.split("_")[0]): p for p in (store() / level).glob("[0-9]*.py")}
    if not paths:
        raise ProblemError(f"level {level} was not fetched yet: {FETCH}; other sources: {SOURCES}")
    return [Problem(level, n, _bare(paths[n].name), paths[n].read_text(), origin) for n in sorted(paths)]


def select(level: str, text: str = "") -> list[Problem]:
    """The problems of a level that "1-20,33" names ("": all), as their folders have them. Raises ProblemError."""
    known = {p.id: p for p in list_problems(level)}
    wanted: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        if not (found := re.fullmatch(r"(\d+)(?:-(\d+))?", part)):
            raise ProblemError(f"--problems {text}: {part!r} is neither a number nor a range; e.g. 1-20,33")
        first, last = int(found[1]), int(found[2] or found[1])
        if bad := [n for n in (first, last) if n not in known] or [first] * (first > last):
            here = f"level {level} has {min(known)} to {max(known)}"
            raise ProblemError(f"--problems {text}: {part!r} names no problem {bad[0]}; {here}")
        wanted += [n for n in known if first <= n <= last]
    return [load_problem(level, n) for n in sorted(set(wanted) or known)]


def load_problem(level: str, number: int) -> Problem:
    """A problem as its folder has it, else as it was fetched. Raises ProblemError."""
    folder = target_folder(f"kb/{level}/{number}")
    if (folder / "problem.json").exists():
        return read_problem(folder)
    fetched = list_problems(level)
    found = next((p for p in fetched if p.id == number), None)
    if found is None:
        raise ProblemError(f"level {level} has no problem {number}; it has {fetched[0].id} to {fetched[-1].id}")
    return found


def read_problem(folder: Path) -> Problem:
    """The problem of a folder. Raises ProblemError when it is not the one that the folder was made for."""
    try:
        facts = read_object(folder / "problem.json")
        code = (folder / "problem.py").read_text()
        found = Problem(facts["level"], facts["id"], facts["name"], code, facts["source"])
        if found.sha256 != facts["sha256"]:
            raise ValueError("problem.py is not the file that was set up")
        return found
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ProblemError(f"{folder}: {error}; move the folder away and set the problem up again") from None


def active_problem() -> Problem:
    """The problem that kernel.py is for. Raises ProblemError when there is none."""
    pointer = workspace() / "active"
    name = pointer.read_text().strip() if pointer.exists() else ""
    if not name.startswith("kb/"):
        raise ProblemError(f"no KernelBench problem is active: {SETUP.format(1, 1)}")
    return read_problem(target_folder(name))


# ---- the starter -----------------------------------------------------------------------------------------------------


class _Renamed(ast.NodeTransformer):
    """Model -> ModelNew, wherever it is named."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = "ModelNew" if node.name == "Model" else node.name
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = "ModelNew" if node.id == "Model" else node.id
        return node


def starter(code: str, who: str, backend: str = "triton") -> str:
    """A kernel.py whose ModelNew is a rewritten copy of a problem's Model. Raises ProblemError."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise ProblemError(f"{who}: the problem is not Python ({error})") from None
    names = {n for node in tree.body for n in bound(node)}
    if missing := {"Model", "get_inputs"} - names:
        raise ProblemError(f"{who}: the problem defines no {' and no '.join(sorted(missing))}")
    body, gone = [], set(GIVEN)
    for node in tree.body:
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        runs = not isinstance(node, (ast.ClassDef, ast.FunctionDef))  # when the file is imported
        if bound(node) & set(GIVEN) or (runs and used & (gone | {"__name__"})):
            gone |= bound(node)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            body.append(node)
    future = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    rest = ast.Module([n for n in body if n not in future], type_ignores=[])
    text = ast.unparse(ast.fix_missing_locations(_Renamed().visit(rest)))
    kind = "Triton kernels (@triton.jit)" if backend == "triton" else "CUDA C++ kernels (autokernel.cuda.compile_cuda)"
    lines = [
        f'"""KernelBench {who}: PyTorch\'s own operators, as in the problem. Right, and no faster.',
        "",
        f"Replace what ModelNew.forward calls by {kind}. Parameters that keep their names and shapes get the",
        'reference\'s values; inputs and constructor arguments come from the problem, whatever this file says.\n"""',
        "",
        *map(ast.unparse, future),
        f'KERNEL_TYPE = "{KERNEL_TYPE}"',
        f'BACKEND = "{backend}"',
        "",
        text,
    ]
    return "\n".join(lines) + "\n"


def bound(node: ast.stmt) -> set[str]:
    """Names that a statement of a module binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {a.asname or a.name.split(".")[0] for a in node.names}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


# ---- one problem at a time -------------------------------------------------------------------------------------------


def setup(problem: Problem, backend: str = "triton", fresh: bool = False) -> list[str]:
    """Make a problem the active one, with its working copy, its best kernel or a starter as kernel.py. Returns remarks.

    A kernel.py with work in it goes first to the folder of the problem that it belongs to. fresh: begin at a starter.
    """
    begin = starter(problem.code, f"{problem.level}/{problem.id} {problem.name}", backend).encode()
    remarks = put_away()
    folder, current = problem.folder, repo_root() / "kernel.py"
    keep_problem(problem)
    earlier = [] if fresh else [folder / "kernel.py", folder / "best.py"]
    found = next((p for p in earlier if p.exists()), None)
    remarks.append(f"kernel.py is {found.name} of {folder}" if found else f"kernel.py is a {backend} starter")
    atomic_write(current, found.read_bytes() if found else begin)
    atomic_write(workspace() / "active", f"{problem.key}\n".encode())
    return remarks


def keep_problem(problem: Problem) -> None:
    """Write problem.py and problem.json, which then stay what the problem's history was measured on."""
    if not (problem.folder / "problem.json").exists():
        atomic_write(problem.folder / "problem.py", problem.code.encode())
        atomic_write(problem.folder / "problem.json", (json.dumps(problem.facts, indent=1) + "\n").encode())


def plan(problems: list[Problem], backend: str) -> str:
    """Make problems the targets of the night, beside those that are already. Returns what was done.

    What was best on a problem so far becomes the kernel its work begins with. Raises ProblemError where a model is
    planned here, OSError.
    """
    path = shared() / "plan.json"
    old = read_object(path) if path.exists() else {"targets": []}
    if others := [t["name"] for t in old["targets"] if not t["name"].startswith("kb/")]:
        raise ProblemError(f"{path} plans a model ({', '.join(others[:3])}); move it away: mv {path} {path}.model, "
                           "or work in a clone of its own")  # fmt: skip
    targets = {t["name"]: t for t in old["targets"]}
    for problem in (p for p in problems if p.key not in targets):
        source = starter(problem.code, f"{problem.level}/{problem.id} {problem.name}", backend).encode()
        keep_problem(problem)
        if (best := problem.folder / "best.py").exists():
            source = best.read_bytes()
            _replace(problem.folder / "kernel.py", source)
        elif not (problem.folder / "kernel.py").exists():
            atomic_write(problem.folder / "kernel.py", source)
        targets[problem.key] = {"name": problem.key, "op": KERNEL_TYPE, "shape": problem.name, "dtype": "float32",
                                "share": 1.0, "where": f"problem {problem.id} of level {problem.level}"}  # fmt: skip
    ranked = sorted(targets.values(), key=lambda t: (t["name"].split("/")[1], int(t["name"].split("/")[2])))
    values = {"schema": 1, "model": "KernelBench", "inputs": f"{len(ranked)} problems", "dtype": "fp32",
              "targets": ranked}  # fmt: skip
    atomic_write(path, (json.dumps(values, indent=1) + "\n").encode())
    return f"{len(ranked)} problems are targets, {len(ranked) - len(old['targets'])} of them new"


def planned(problem: Problem) -> bool:
    """Whether the problem is a target of the night: then `orchestrate.py record` decides what its best kernel is."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return any(t["name"] == problem.key for t in read_object(shared() / "plan.json")["targets"])
    return False


def lenient(values: dict[str, Any]) -> str:
    """Why a run that passed was not the official one in fp32, or ""."""
    limit = TOLERANCE["fp32"]
    asked = {"--correctness-only": values.get("speedup_vs_pytorch") is None, "--shrink": values.get("shrunk"),
             "--precision": values.get("precision") != "fp32", "--n-trials": (values.get("n_trials") or 0) < TRIALS,
             "--atol": (values.get("atol") or 0) > limit, "--rtol": (values.get("rtol") or 0) > limit}  # fmt: skip
    return ", ".join(name for name, given in asked.items() if given)


def history(problem: Problem) -> list[dict[str, str]]:
    """The rows of a problem's history.tsv, oldest first."""
    file = problem.folder / "history.tsv"
    if not file.exists():
        return []
    head, *rows = file.read_text().splitlines() or [""]
    return [dict(zip(head.split("\t"), row.split("\t"), strict=False)) for row in rows]


def put_away() -> list[str]:
    """Save kernel.py to its problem's folder, or if it is of none, to workspace/unrecorded/, unless git has it."""
    current, pointer = repo_root() / "kernel.py", workspace() / "active"
    data = current.read_bytes() if current.exists() else b""
    name = pointer.read_text().strip() if pointer.exists() else ""
    if not data.strip():
        return []
    if name.startswith("kb/") and b"class ModelNew" in data or f'"{KERNEL_TYPE}"'.encode() in data:
        place = target_folder(name if name.startswith("kb/") else "kb/unknown") / "kernel.py"
    else:
        known = [p.read_bytes() for p in (repo_root() / "kernels").rglob("*.py")]
        command = ["git", "-C", str(repo_root()), "show", "HEAD:kernel.py"]
        with contextlib.suppress(OSError):
            known.append(subprocess.run(command, capture_output=True).stdout)
        if data in known:
            return []
        place = workspace() / "unrecorded" / f"kernel-{hashlib.sha256(data).hexdigest()[:12]}.py"
    _replace(place, data)
    return [f"the kernel.py that was here is saved as {place}"]


def _replace(place: Path, data: bytes) -> None:
    """Write a kernel; another one that was there stays beside it: nothing is lost, whoever wrote it."""
    old = place.read_bytes() if place.exists() else data
    if old != data:
        atomic_write(place.with_name(f"kernel-{hashlib.sha256(old).hexdigest()[:12]}.py"), old)
    atomic_write(place, data)


def note(problem: Problem, values: dict[str, Any], kernel: Path, keep_best: bool = True) -> bool:
    """Append a run to the problem's history, and keep the kernel as best.py if it is. Returns whether it is.

    Best: PASS of the whole problem by a clean harness, and the first, or quicker than the best in pairs beyond the
    spread of their ratio. keep_best: False where another tool decides what is kept.
    """
    source = kernel.read_bytes() if kernel.is_file() else b""
    whole = hashlib.sha256(source).hexdigest() == values["source_sha256"]  # or it was edited meanwhile
    whole = whole and values["correctness"] == "PASS" and not values["quick"] and not values["shrunk"]
    whole = whole and values["harness"] in ("clean", "no git") and values.get("speedup_vs_pytorch") is not None
    path, ratio = problem.folder / "best.py", values.get("speedup_vs_best")
    gained = ratio is not None and ratio - values["gain_spread_pct"] / 100 > 1
    best = bool(whole and keep_best and (gained or not path.exists()))
    if best:
        atomic_write(path, source)
    row = {**values, "best": "best" if best else ""}
    cells = ["" if row.get(k) is None else " ".join(str(row[k]).split())[:300] for k in HISTORY]
    file = problem.folder / "history.tsv"
    keep_problem(problem)
    with open(file, "a") as out:
        out.write("\t".join(HISTORY) + "\n" if out.tell() == 0 else "")
        out.write("\t".join(cells) + "\n")
    return best
