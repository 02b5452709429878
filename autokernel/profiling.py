"""Where a model's time goes, by site and real shape: what profile.py prints.

The captured graph runs node by node under the profiler, each node in a range of its own. A kernel's launch lies inside
of exactly one range, so every kernel event is counted once, and the parts sum to the total. On a CPU the outermost
operator events take the place of kernels.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch.profiler import ProfilerActivity, record_function

from autokernel import gpu
from autokernel.graph import VIEWS, Capture, Graph, View, flops, module_path, name, one_line, shape, value
from autokernel.models import Loaded
from autokernel.sites import Found, Site, described, find
from autokernel.spec import dtype_name

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own notes would stand between the lines of a report

RANGE = "autokernel::"
FORWARD = RANGE + "forward"
MAX_FORWARDS = 5  # measured under the profiler; 3 where those take longer than SECONDS, fewer where far longer
SECONDS = 2.0
INTERPRETED_FLOPS = 5e8  # of kernels in one forward pass in Triton's interpreter: some minutes; verify.py's limit


# ---- the profiler's events ------------------------------------------------------------------------------------------


@dataclass
class Activity:
    """What ran inside of one range in one forward: launches, and microseconds by kernel."""

    launches: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)

    @property
    def us(self) -> float:
        return sum(self.kernels.values())

    def __iadd__(self, other: Activity) -> Activity:
        self.launches += other.launches
        self.kernels.update(other.kernels)
        return self


LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")


def attribute(events: list[dict[str, Any]], on_gpu: bool) -> dict[str, Activity]:
    """Chrome-trace events -> range label -> activity of one forward.

    Of the passes named FORWARD each range takes its middle one: what else runs on the machine disturbs single passes.
    A device event belongs to the range that its launch lies in; what lies in a forward but in no node's range is keyed
    "outside <operator> <shapes>". Each event is counted once.
    """
    spans = [e for e in events if e.get("ph") == "X"]
    parents = _parents([e for e in spans if e.get("cat") in ("cpu_op", "user_annotation", *LAUNCHES)])

    def around(event: dict) -> tuple[list[dict], list[dict]]:
        """(our ranges, operators) that an event lies in, itself included, the outermost first."""
        chain = [event]
        while (parent := parents.get(id(chain[0]))) is not None:
            chain.insert(0, parent)
        ranges = [e for e in chain if e.get("cat") not in LAUNCHES and e["name"].startswith(RANGE)]
        operators = [e for e in chain if e.get("cat") == "cpu_op" and "::" in e["name"]]  # no compiler's regions
        return ranges, [e for e in operators if not e["name"].startswith(RANGE)]

    outermost = [(e, e) for e in spans if not on_gpu and any(op is e for op in around(e)[1][:1])]
    forwards = [id(e) for e in spans if e.get("cat") == "user_annotation" and e["name"] == FORWARD]
    passes: dict[str, dict[int, Activity]] = defaultdict(lambda: {f: Activity() for f in forwards})
    for event, at in _device_events(spans) if on_gpu else outermost:
        ranges, operators = around(at)
        if (forward := next((id(e) for e in ranges if e["name"] == FORWARD), None)) is not None:
            label = next((e["name"] for e in ranges if e["name"] != FORWARD), "").removeprefix(RANGE)
            if not label and operators:
                label = f"outside {operators[0]['name']} {operators[0].get('args', {}).get('Input Dims', '')}"
            label = label or f"outside {event['name'][:60]}"
            passes[label][forward] += Activity(1, Counter({event["name"]: event["dur"]}))
    return {label: sorted(of.values(), key=lambda a: a.us)[(len(of) - 1) // 2] for label, of in passes.items()}


def _parents(spans: list[dict]) -> dict[int, dict | None]:
    """id of each host span -> the innermost span of its thread that it begins in."""
    parents: dict[int, dict | None] = {}
    threads: dict[Any, list[dict]] = defaultdict(list)
    for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        around = threads[event["pid"], event["tid"]]
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        parents[id(event)] = around[-1] if around else None
        if event["cat"] not in LAUNCHES:  # stamped by another clock: it may seem to outlast the range around it
            around.append(event)
    return parents


def _device_events(spans: list[dict]) -> list[tuple[dict, dict]]:
    """(kernel, copy or fill; a host event that stands for its launch), each device event once.

    That is the operator which the profiler links it to, stamped by the same clock as our ranges; where there is none (a
    kernel started from Python) it is the launch itself.
    """
    launches, operators, found = {}, {}, []
    for event in spans:
        args = event.get("args", {})
        if event.get("cat") in LAUNCHES and "correlation" in args:
            launches[args["correlation"]] = event
        elif event.get("cat") in ("cpu_op", "user_annotation") and args.get("External id"):
            operators[args["External id"]] = event
    for event in spans:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            args = event.get("args", {})
            host = operators.get(args.get("External id")) or launches.get(args.get("correlation"))
            found.append((event, host or event))
    return found


def linked(label: str) -> AbstractContextManager:
    """A range that the profiler takes for an operator: so it links kernels to it that Python code starts.

    A launch's own stamp comes from another clock, a few microseconds off, and a launch ends the range of a kernel.
    """
    return torch._C._profiler._RecordFunctionFast(RANGE + label)


def traced(call: Callable[[], Any], device: torch.device, keep: Path | None = None) -> dict[str, Activity]:
    """Run some forwards under the profiler; what `attribute` makes of them. keep: where to leave the Chrome trace."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        call()  # the profiler's own start falls on the first operators and kernels
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for done in range(1, MAX_FORWARDS + 1):
            with record_function(FORWARD):
                call()
            if on_gpu:
                torch.cuda.synchronize(device)
            if time.perf_counter() - start > SECONDS * (1 if done >= 3 else 5):
                break
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return attribute(events, on_gpu)


# ---- wall time ------------------------------------------------------------------------------------------------------


def wall_ms(call: Callable[[], Any], device: torch.device, seconds: float = 0.5) -> float:
    """Median milliseconds of one call, the device idle before and after."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < 30):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def cuda_graph(call: Callable[[], Any]) -> Callable[[], None]:
    """A call captured as a CUDA graph, ready to replay. Raises RuntimeError where the call cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def launch_modes(loaded: Loaded, compiled: bool, progress: Callable[[str], None]) -> tuple[dict[str, float], list[str]]:
    """Milliseconds of one forward by launch mode, and notes on modes that failed."""
    calls: dict[str, Callable[[], Any]] = {"eager": loaded}
    if compiled:
        calls["torch.compile"] = partial(loaded.call, torch.compile(loaded.model))
    found, notes = {}, []
    for mode, call in calls.items():
        progress(f"timing {mode}")
        try:
            call()
            found[mode] = wall_ms(call, loaded.device)
            if loaded.device.type == "cuda":
                found[f"{mode} in a CUDA graph"] = wall_ms(cuda_graph(call), loaded.device)
        except Exception as error:  # compilers and capture fail in their own ways; the profile goes on
            notes.append(f"{mode}: {one_line(error)}")
            if loaded.device.type == "cuda":
                torch.cuda.synchronize(loaded.device)
    return found, notes


# ---- the profile ----------------------------------------------------------------------------------------------------


@dataclass
class Profile:
    """Times are milliseconds of one forward. targets and other: rows sorted by time, as in workspace/profile.json."""

    values: dict[str, Any]
    targets: list[dict[str, Any]]
    other: list[dict[str, Any]]

    def record(self) -> dict[str, Any]:
        return {"schema": 1, **self.values, "targets": self.targets, "other": self.other}


def profile(
    loaded: Loaded,
    compile_baseline: bool = False,
    trace: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Capture, find and time. Raises what the model raises."""
    progress("timing the model as it is")
    loaded()
    modes, notes = launch_modes(loaded, compile_baseline, progress)
    as_is_ms = sum(a.us for a in traced(loaded, loaded.device, trace).values()) / 1e3
    progress("capturing")
    capture = Capture(loaded.model)
    run = partial(loaded.call, capture)
    capture.keep_inputs = True
    run()
    found = find(capture, progress)
    capture.keep_inputs = False
    progress("timing each site")
    before = Counter({g: g.calls for g in capture.graphs})
    run()
    calls = Counter({g: g.calls - before[g] for g in capture.graphs})
    for graph in capture.graphs:
        graph.run = instrumented(graph)
    activity = traced(run, loaded.device)
    for graph in capture.graphs:
        graph.run = None
    capture.release()
    device = gpu.detect(loaded.device.index or 0) if loaded.device.type == "cuda" else None
    books = _Books(capture, found, activity, calls, device)
    total_ms = books.total_us / 1e3
    notes = [*loaded.notes, *notes, *_capture_notes(capture), *_apart(total_ms, as_is_ms, modes, device is not None)]
    notes += [] if device or books.flops_in_sites <= INTERPRETED_FLOPS else [_too_large(books.flops_in_sites)]
    values = {
        "model": loaded.name,
        "inputs": loaded.inputs,
        "dtype": dtype_name(loaded.dtype),
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "device": device.name if device else "cpu",
        "total_ms": total_ms,
        "as_is_ms": as_is_ms,
        "modes_ms": modes,
        "graphs": len(capture.graphs),
        "flops": books.flops,
        "flops_in_sites": books.flops_in_sites / books.flops if books.flops else None,
        "time_in_sites": sum(a.us for a in books.sites.values()) / books.total_us if books.total_us else None,
        "notes": notes,
    }
    return Profile(values, books.targets(), books.others())


def _too_large(work: float) -> str:
    return (f"without a GPU verify.py will not run kernels for all of these sites in Triton's interpreter: {work:.1e} "
            f"FLOPs, the limit is {INTERPRETED_FLOPS:.0e}; give a smaller --input-shape, or take models/tiny.py")


def _apart(total_ms: float, as_is_ms: float, modes: dict[str, float], on_gpu: bool) -> list[str]:
    """Why the totals differ, where they do."""
    if on_gpu:
        differ = as_is_ms and abs(total_ms / as_is_ms - 1) > 0.05
        text = f"captured, the model takes {total_ms:.4g} ms, as it is {as_is_ms:.4g} ms: it runs other kernels"
        return [text] if differ else []
    known = [ms for ms in (total_ms, as_is_ms, modes.get("eager")) if ms]
    return ["the three times above are of separate passes: operator time under the profiler, operator by operator and "
            "as the model runs, and wall time without it; on a CPU they differ by its cost, by Python and by noise"
            ] if known and max(known) > 1.1 * min(known) else []  # fmt: skip


def instrumented(graph: Graph) -> Callable:
    """The graph with every operator in a range of its own: `traced` labels it "<graph>.<place of the node>"."""
    return _Instrumented(graph).run


class _Instrumented(fx.Interpreter):
    def __init__(self, graph: Graph):
        super().__init__(graph.module)
        self.labels = {node: f"{RANGE}{graph.index}.{i}" for i, node in enumerate(graph.module.graph.nodes)}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        with record_function(self.labels[n]):
            return super().run_node(n)


def _capture_notes(capture: Capture) -> list[str]:
    notes = [f"graph {g.index} could not be lowered ({g.problem}): no sites in it" for g in capture.graphs if g.problem]
    if capture.problem:
        notes.append(f"torch.compile failed on a part, which runs outside of the graphs: {capture.problem}")
    if not capture.graphs:
        notes.append("torch.compile captured no graph: everything below is by operator only, nothing can be extracted")
    elif len(capture.graphs) > 1:
        notes.append(f"{len(capture.graphs)} graphs: the model breaks torch.compile")
    return notes + [f"graph break: {reason}" for reason in capture.breaks]


# ---- rows -----------------------------------------------------------------------------------------------------------


class _Books:
    """One forward's activity, each range booked once: to its site, or to a kind of operator where there is none."""

    def __init__(
        self, capture: Capture, found: Found, activity: dict[str, Activity], calls: Counter[Graph],
        device: gpu.Device | None,
    ):  # fmt: skip
        self.found, self.calls, self.device = found, calls, device
        self.calibration = gpu.load_calibration(device) if device else None
        self.total_us = sum(a.us for a in activity.values())
        self.flops = self.flops_in_sites = 0.0
        self.sites: dict[Site, Activity] = defaultdict(Activity)
        self.rest: dict[tuple[str, str, str], Activity] = defaultdict(Activity)
        self.nodes: dict[tuple[str, str, str], list[tuple[Graph, fx.Node]]] = defaultdict(list)  # of `rest`
        owners = {n: site for site in reversed(found.sites) for n in site.nodes}
        owners |= {n: site for site in found.sites for n in site.work}
        for graph, i, node in ((g, i, n) for g in capture.graphs for i, n in enumerate(g.module.graph.nodes)):
            spent, site = activity.get(f"{graph.index}.{i}", Activity()), owners.get(node)
            self.flops += flops(node) * calls[graph]
            if site:
                self.flops_in_sites += flops(node) * calls[graph]
                self.sites[site] += spent
            elif spent.us:
                self.rest[_kind(node)] += spent
                self.nodes[_kind(node)].append((graph, node))
        for label, spent in activity.items():
            if label.startswith("outside "):
                op, _, dimensions = label.removeprefix("outside ").partition(" ")
                self.rest[op, dimensions, ""] += spent

    def share(self, us: float) -> float:
        return us / self.total_us if self.total_us else 0.0

    def targets(self) -> list[dict[str, Any]]:
        """One row for the sites of the same operator, shapes, dtype and layout."""
        groups: dict[str, list[Site]] = defaultdict(list)
        for site in self.found.sites:
            groups[site.key].append(site)
        rows = sorted(map(self._target, groups.values()), key=lambda row: -row["ms"])
        for rank, row in enumerate(rows, 1):
            row |= {"rank": rank, "cumulative": sum(r["share"] for r in rows[:rank])}
        return rows

    def _target(self, sites: list[Site]) -> dict[str, Any]:
        first, spent, count = sites[0], Activity(), sum(self.calls[s.graph] for s in sites)
        for site in sites:
            spent += self.sites[site]
        return {
            "rank": 0,
            "op": first.op,
            "where": places([s.module for s in sites]),
            "shape": shown_shape(first),
            "dtype": first.dtype,
            "calls": count,
            "ms": spent.us / 1e3,
            "share": self.share(spent.us),
            "cumulative": 0.0,
            **self._roof(first, spent.us, count),
            "launches": spent.launches,
            "kernels": {kernel: us / 1e3 for kernel, us in spent.kernels.most_common(5)},
            "flops": first.flops,
            "bytes": first.bytes,
            "args": {n: _argument(first, n) for n in first.tensors},
            "scalars": first.scalars,
            "conditional": any(s.conditional for s in sites),
            "inner": sorted({s.op for s in self.found.inner if s.inside in sites}),
            "reference": first.reference,
            "reference_sha256": first.reference_sha256,
            "sites": [self._site(s) for s in sites],
        }

    def _site(self, site: Site) -> dict[str, Any]:
        views = {argument: v for argument, v in site.match.args.items() if isinstance(v, View)}
        return {
            "module": site.module,
            "graph": site.graph.index,
            "output": site.output.name,
            "calls": self.calls[site.graph],
            "ms": self.sites[site].us / 1e3,
            "weights": {a: site.graph.origin[v.node][1] for a, v in views.items() if v.node in site.graph.origin},
            "reference_sha256": site.reference_sha256,
        }

    def _roof(self, site: Site, us: float, count: int) -> dict[str, Any]:
        """bound, pct_roofline, and at_most: how much faster the whole model gets with this target at its floor."""
        if not us or not count:
            return {"bound": None, "pct_roofline": None, "at_most": None}
        spec, tf32 = self.device.spec if self.device else None, bool(torch.backends.cuda.matmul.allow_tf32)
        roof = gpu.roofline(site.flops, site.bytes, us / count * 1e-6, site.dtype, spec, self.calibration, tf32)
        gain = us * (1 - min(roof.pct_peak or 0.0, 100.0) / 100)
        at_most = self.total_us / (self.total_us - gain) if self.total_us > gain * (1 + 1e-9) else None
        return {"bound": roof.bottleneck, "pct_roofline": roof.pct_peak, "at_most": at_most}

    def others(self) -> list[dict[str, Any]]:
        """One row for each kind of operator that is in no site."""
        rows = []
        for (op, dimensions, dtype), spent in self.rest.items():
            nodes = self.nodes[op, dimensions, dtype]
            reasons = Counter(self.found.refused[n] for _, n in nodes if n in self.found.refused)
            rows.append({
                "op": op,
                "shape": dimensions,
                "dtype": dtype,
                "where": places([module_path(n) for _, n in nodes]) if nodes else "outside of the graphs",
                "calls": sum(self.calls[graph] for graph, _ in nodes) or None,
                "ms": spent.us / 1e3,
                "share": self.share(spent.us),
                "flops": sum(flops(n) for _, n in nodes),
                "reason": reasons.most_common(1)[0][0] if reasons else "",
            })  # fmt: skip
        return sorted(rows, key=lambda row: -row["ms"])


def _kind(node: fx.Node) -> tuple[str, str, str]:
    if name(node) in VIEWS:
        return ("views", "", "")
    made = value(node)
    inputs = ", ".join(sizes(shape(n)) for n in node.all_input_nodes if shape(n)) or sizes(shape(node))
    operator = f"aten::{name(node)}" if name(node) else str(node.target)
    return operator, inputs, dtype_name(made.dtype) if made is not None else ""


def _argument(site: Site, argument: str) -> dict[str, Any]:
    tensor, given = site.tensors[argument], site.match.args[argument]
    values = described(tensor)
    return values if isinstance(given, View) else {**values, "filled": given}


def sizes(dimensions: Iterable[int]) -> str:
    return "x".join(map(str, dimensions))


def shown_shape(site: Site) -> str:
    """Different shapes of the arguments with two axes or more; `t` marks a transposed matrix."""
    words: list[str] = []
    for tensor in site.tensors.values():
        turned = tensor.ndim == 2 and tensor.stride(0) == 1 and min(tensor.shape) > 1
        word = sizes(tensor.shape) + "t" * turned
        if (tensor.ndim > 1 or not words) and word not in words:
            words.append(word)
    return " ".join(words)


def places(modules: list[str]) -> str:
    """`blocks.*.attention.wq` for twelve layers; several places as the first one and how many more."""
    distinct = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", m) for m in modules))
    if len(modules) == 1:
        return modules[0] or "(model)"
    return (distinct[0] or "(model)") + (f" +{len(distinct) - 1}" if len(distinct) > 1 else "")


def plot(profile: Profile, path: Path, top: int = 20) -> str:
    """Draw the largest targets, and what is in no site, as horizontal bars. Returns a line that says where."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(f"{r['op']}  {r['shape']}  x{r['calls']}", r["ms"], "tab:blue") for r in profile.targets[:top]]
    rows.append(("other", sum(r["ms"] for r in profile.other), "tab:gray"))
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.3 * len(rows)))
    axes.barh([r[0] for r in rows], [r[1] for r in rows], color=[r[2] for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms per forward")
    axes.set_title(f"{profile.values['model']} {profile.values['inputs']}: {profile.values['total_ms']:.4g} ms")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"plot: {path}"
