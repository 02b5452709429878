"""Where a model's time goes, by site and real shape: what profile.py prints.

The captured graph runs node by node under the profiler, each node in a range of its own. A kernel's launch lies inside
of exactly one range, so every kernel event is counted once, and the parts sum to the total. On a CPU the outermost
operator events take the place of kernels.
"""

from __future__ import annotations

import bisect
import json
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from autokernel import gpu
from autokernel.graph import VIEWS, Capture, Graph, View, execute, flops, interpret, module_path, name, shape, value
from autokernel.models import Loaded
from autokernel.sites import Found, Site, described, find

RANGE = "autokernel::"
FORWARD = RANGE + "forward"
MAX_FORWARDS = 5  # measured under the profiler, fewer where they take longer than SECONDS together
SECONDS = 2.0


# ---- the profiler's events ------------------------------------------------------------------------------------------


@dataclass
class Activity:
    """What ran inside of one range in one forward (their mean): microseconds, launches, microseconds by kernel."""

    us: float = 0.0
    launches: float = 0.0
    kernels: Counter = field(default_factory=Counter)

    def add(self, event: dict[str, Any], weight: float) -> None:
        self.us += event["dur"] * weight
        self.launches += weight
        self.kernels[event["name"]] += event["dur"] * weight


def attribute(events: list[dict[str, Any]], on_gpu: bool) -> dict[str, Activity]:
    """Chrome-trace events -> range label -> activity of one forward: the mean over those named FORWARD.

    A device event belongs to the range that its launch lies in; what lies in a forward but in no node's range is keyed
    "outside <operator> <shapes>". Each event is counted once.
    """
    spans = [e for e in events if e.get("ph") == "X"]
    ranges = _Intervals(e for e in spans if e.get("cat") == "user_annotation" and e["name"].startswith(RANGE))
    operators = _Intervals(e for e in spans if e.get("cat") == "cpu_op" and "::" in e["name"])  # no compiler's regions
    forwards = sum(e.get("cat") == "user_annotation" and e["name"] == FORWARD for e in spans)
    found: dict[str, Activity] = defaultdict(Activity)
    for event, at in _device_events(spans) if on_gpu else ((e, e) for e in operators.outermost):
        around = [e["name"] for e in ranges.around(at)]
        if FORWARD in around:
            node = next((label for label in around if label != FORWARD), "")
            found[node.removeprefix(RANGE) or _outside(operators.around(at), event)].add(event, 1 / forwards)
    return dict(found)


def _device_events(spans: list[dict]) -> list[tuple[dict, dict]]:
    """(kernel, copy or fill; a host event that stands for its launch), each device event once.

    That is the operator which the profiler links it to, stamped by the same clock as our ranges; where there is none (a
    kernel started from Python) it is the launch itself.
    """
    launches, operators = {}, {}
    for event in spans:
        args = event.get("args", {})
        if event.get("cat") in ("cuda_runtime", "cuda_driver", "hip_runtime") and "correlation" in args:
            launches[args["correlation"]] = event
        elif event.get("cat") in ("cpu_op", "user_annotation") and args.get("External id"):
            operators[args["External id"]] = event
    found = []
    for event in spans:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            args = event.get("args", {})
            host = operators.get(args.get("External id")) or launches.get(args.get("correlation"))
            found.append((event, host or event))
    return found


def _outside(operators: list[dict], event: dict) -> str:
    if not operators:
        return f"outside {event['name'][:60]}"
    return f"outside {operators[0]['name']} {operators[0].get('args', {}).get('Input Dims', '')}"


class _Intervals:
    """Properly nested host intervals of each thread: which ones are around a point in time?"""

    def __init__(self, events):
        self.threads: dict[Any, list[dict]] = defaultdict(list)
        for event in events:
            self.threads[event["pid"], event["tid"]].append(event)
        self.starts: dict[Any, list[float]] = {}
        self.parents: dict[int, dict | None] = {}
        self.outermost: list[dict] = []
        for thread, own in self.threads.items():
            own.sort(key=lambda e: (e["ts"], -e["dur"]))
            self.starts[thread] = [e["ts"] for e in own]
            open_: list[dict] = []
            for event in own:
                while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"]:
                    open_.pop()
                self.parents[id(event)] = open_[-1] if open_ else None
                if not open_:
                    self.outermost.append(event)
                open_.append(event)

    def around(self, at: dict) -> list[dict]:
        """Intervals that contain the start of an event, the outermost first."""
        thread, moment = (at["pid"], at["tid"]), at["ts"]
        index = bisect.bisect_right(self.starts.get(thread, []), moment) - 1
        event = self.threads[thread][index] if index >= 0 else None
        found = []
        while event is not None:
            if event["ts"] + event["dur"] > moment or event["ts"] == moment:
                found.append(event)
            event = self.parents[id(event)]
        return found[::-1]


def traced(call: Callable[[], Any], device: torch.device, keep: Path | None = None) -> dict[str, Activity]:
    """Run some forwards under the profiler. keep: where to leave the Chrome trace."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        if on_gpu:
            call()  # the profiler's own start falls on the first kernels
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(MAX_FORWARDS):
            with record_function(FORWARD):
                call()
            if on_gpu:
                torch.cuda.synchronize(device)
            if time.perf_counter() - start > SECONDS:
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
        model = torch.compile(loaded.model)
        calls["torch.compile"] = lambda: _no_grad(model, loaded)
    found, notes = {}, []
    for mode, call in calls.items():
        progress(f"timing {mode}")
        try:
            call()
            found[mode] = wall_ms(call, loaded.device)
            if loaded.device.type == "cuda":
                found[f"{mode} in a CUDA graph"] = wall_ms(cuda_graph(call), loaded.device)
        except Exception as error:  # compilers and capture fail in their own ways; the profile goes on
            notes.append(f"{mode}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
            if loaded.device.type == "cuda":
                torch.cuda.synchronize(loaded.device)
    return found, notes


def _no_grad(model, loaded: Loaded) -> Any:
    with torch.no_grad():
        return model(*loaded.args, **loaded.kwargs)


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
    as_is = traced(loaded, loaded.device, trace)
    as_is_ms = sum(a.us for a in as_is.values()) / 1e3
    progress("capturing")
    capture = Capture(loaded.model)
    capture.keep_inputs = True
    run = lambda: _no_grad(capture, loaded)  # noqa: E731
    run()
    found = find(capture, progress)
    capture.keep_inputs = False
    progress("timing each site")
    calls = _calls_per_forward(capture, run)
    for graph in capture.graphs:
        graph.run = instrumented(graph)
    activity = traced(run, loaded.device)
    for graph in capture.graphs:
        graph.run = None
    capture.release()
    notes = [*loaded.notes, *notes, *_capture_notes(capture)]
    return _assembled(loaded, capture, found, activity, calls, modes, as_is_ms, notes)


def _calls_per_forward(capture: Capture, run: Callable[[], Any]) -> dict[int, int]:
    before = [g.calls for g in capture.graphs]
    run()
    return {g.index: g.calls - n for g, n in zip(capture.graphs, before, strict=False)}


def instrumented(graph: Graph) -> Callable:
    """The graph with every node in a range of its own: `traced` labels it "<graph>.<place of the node>"."""
    labels = {node: f"{RANGE}{graph.index}.{i}" for i, node in enumerate(graph.module.graph.nodes)}

    def call(node, env):
        with record_function(labels[node]):
            return execute(node, env, graph.module)

    return lambda *inputs: interpret(graph.module, inputs, call)


def _capture_notes(capture: Capture) -> list[str]:
    notes = [f"graph {g.index} could not be lowered ({g.problem}): no sites in it" for g in capture.graphs if g.problem]
    if capture.problem:
        notes.append(f"torch.compile failed on a part, which runs outside of the graphs: {capture.problem}")
    if not capture.graphs:
        notes.append("torch.compile captured no graph: everything below is by operator only, nothing can be extracted")
    elif len(capture.graphs) > 1:
        notes.append(f"{len(capture.graphs)} graphs: the model breaks torch.compile")
    return notes + [f"graph break: {reason}" for reason in capture.breaks]


def _assembled(loaded, capture, found: Found, activity, calls, modes, as_is_ms, notes) -> Profile:
    total_us = sum(a.us for a in activity.values())
    owners = {n: site for site in reversed(found.sites) for n in site.nodes}
    owners |= {n: site for site in found.sites for n in site.work}
    by_site: dict[Site, Activity] = defaultdict(Activity)
    rest: dict[tuple, tuple[Activity, list]] = defaultdict(lambda: (Activity(), []))
    for label, node in _labelled(capture):
        spent = activity.get(label, Activity())
        if node in owners:
            _merge(by_site[owners[node]], spent)
        elif spent.us:
            _merge(rest[_kind(node)][0], spent)
            rest[_kind(node)][1].append(node)
    for label, spent in activity.items():
        if label.startswith("outside "):
            op, _, dimensions = label.removeprefix("outside ").partition(" ")
            _merge(rest[op, dimensions, ""][0], spent)
    device = gpu.detect(loaded.device.index or 0) if loaded.device.type == "cuda" else None
    model_flops = sum(flops(n) * calls.get(g.index, 0) for g, n in _nodes(capture))
    in_sites = sum(flops(n) * calls.get(s.graph.index, 0) for s in found.sites for n in s.nodes)
    total_ms = total_us / 1e3
    if device and as_is_ms and abs(total_ms / as_is_ms - 1) > 0.05:
        notes.append(f"captured, the model takes {total_ms:.4g} ms, as it is {as_is_ms:.4g} ms: it runs other kernels")
    values = {
        "model": loaded.name,
        "inputs": loaded.inputs,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "device": device.name if device else "cpu",
        "total_ms": total_ms,
        "as_is_ms": as_is_ms,
        "modes_ms": modes,
        "graphs": len(capture.graphs),
        "flops": model_flops,
        "flops_in_sites": in_sites / model_flops if model_flops else None,
        "time_in_sites": sum(a.us for a in by_site.values()) / total_us if total_us else None,
        "notes": notes,
    }
    targets = _targets(by_site, found, calls, total_us, device)
    return Profile(values, targets, _others(rest, found, calls, capture, total_us))


def _nodes(capture: Capture):
    return [(g, n) for g in capture.graphs if g.module is not None for n in g.module.graph.nodes]


def _labelled(capture: Capture):
    for graph in capture.graphs:
        for i, node in enumerate(graph.module.graph.nodes):
            yield f"{graph.index}.{i}", node


def _merge(into: Activity, other: Activity) -> None:
    into.us += other.us
    into.launches += other.launches
    into.kernels += other.kernels


def _kind(node) -> tuple[str, str, str]:
    if name(node) in VIEWS:
        return ("views", "", "")
    dtype = str(value(node).dtype).removeprefix("torch.") if value(node) is not None else ""
    inputs = ", ".join(sizes(shape(n)) for n in node.all_input_nodes if shape(n)) or sizes(shape(node))
    return (f"aten::{name(node)}" if name(node) else str(node.target), inputs, dtype)


def sizes(dimensions) -> str:
    return "x".join(map(str, dimensions))


# ---- rows -----------------------------------------------------------------------------------------------------------


def _targets(by_site, found: Found, calls, total_us, device) -> list[dict[str, Any]]:
    groups: dict[str, list[Site]] = defaultdict(list)
    for site in found.sites:
        groups[site.key].append(site)
    rows = [_target(sites, by_site, found, calls, total_us, device) for sites in groups.values()]
    rows.sort(key=lambda row: -row["ms"])
    cumulative = 0.0
    for rank, row in enumerate(rows, 1):
        cumulative += row["share"]
        row |= {"rank": rank, "cumulative": cumulative}
    return rows


def _target(sites: list[Site], by_site, found: Found, calls, total_us, device) -> dict[str, Any]:
    first, us = sites[0], sum(by_site[s].us for s in sites)
    count = sum(calls.get(s.graph.index, 0) for s in sites)
    kernels = sum((by_site[s].kernels for s in sites), Counter())
    row = {
        "rank": 0,
        "op": first.op,
        "where": places([s.module for s in sites]),
        "shape": shown_shape(first),
        "dtype": first.dtype,
        "calls": count,
        "ms": us / 1e3,
        "share": us / total_us if total_us else 0.0,
        "cumulative": 0.0,
        **_roof(first, us / count if count else 0.0, count, total_us, device),
        "launches": sum(by_site[s].launches for s in sites),
        "kernels": {k: us / 1e3 for k, us in kernels.most_common(5)},
        "flops": first.flops,
        "bytes": first.bytes,
        "args": {n: _argument(first, n) for n in first.tensors},
        "scalars": first.scalars,
        "conditional": any(s.conditional for s in sites),
        "inner": sorted({s.op for s in found.inner if s.inside in sites}),
        "reference": first.reference,
        "reference_sha256": first.reference_sha256,
        "sites": [_site(s, by_site, calls) for s in sites],
    }
    return row


def _site(site: Site, by_site, calls) -> dict[str, Any]:
    leaves = {a: site.graph.origin.get(v.node, ("", ""))[1] for a, v in site.match.args.items() if isinstance(v, View)}
    return {
        "module": site.module,
        "graph": site.graph.index,
        "output": site.output.name,
        "calls": calls.get(site.graph.index, 0),
        "ms": by_site[site].us / 1e3,
        "weights": {a: n for a, n in leaves.items() if n},
        "reference_sha256": site.reference_sha256,
    }


def _argument(site: Site, argument: str) -> dict[str, Any]:
    tensor, given = site.tensors[argument], site.match.args[argument]
    values = described(tensor)
    return values if isinstance(given, View) else {**values, "filled": given}


def _roof(site: Site, us_a_call: float, count: int, total_us: float, device) -> dict[str, Any]:
    """bound, pct_roofline, and at_most: how much faster the whole model gets with this target at its floor."""
    spec = device.spec if device else None
    calibration = gpu.load_calibration(device) if device else None
    if not us_a_call:
        return {"bound": None, "pct_roofline": None, "at_most": None}
    tf32 = bool(torch.backends.cuda.matmul.allow_tf32)
    roof = gpu.roofline(site.flops, site.bytes, us_a_call * 1e-6, site.dtype, spec, calibration, tf32)
    percent = roof.pct_peak_compute if roof.bottleneck == "compute" else roof.pct_peak_bandwidth
    gain = us_a_call * count * (1 - min(percent or 0.0, 100.0) / 100)
    at_most = total_us / (total_us - gain) if total_us > gain * (1 + 1e-9) else None
    return {"bound": roof.bottleneck, "pct_roofline": percent, "at_most": at_most}


def shown_shape(site: Site) -> str:
    """Different shapes of the arguments with two axes or more; `t` marks a transposed matrix."""
    words = []
    for tensor in site.tensors.values():
        dimensions, strides = tensor.shape, tensor.stride()
        turned = len(strides) == 2 and strides[0] == 1 and dimensions[0] > 1 and dimensions[1] > 1
        word = sizes(dimensions) + ("t" if turned else "")
        if (len(dimensions) > 1 or not words) and word not in words:
            words.append(word)
    return " ".join(words)


def places(modules: list[str]) -> str:
    """`blocks.*.attention.wq` for twelve layers; several places as the first one and how many more."""
    distinct = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", m) for m in modules))
    if len(modules) == 1:
        return modules[0] or "(model)"
    return (distinct[0] or "(model)") + (f" +{len(distinct) - 1}" if len(distinct) > 1 else "")


def _others(rest, found: Found, calls, capture, total_us) -> list[dict[str, Any]]:
    graph_of = {n: g for g, n in _nodes(capture)}
    rows = []
    for (op, dimensions, dtype), (spent, nodes) in rest.items():
        reasons = Counter(found.refused[n] for n in nodes if n in found.refused)
        rows.append({
            "op": op,
            "shape": dimensions,
            "dtype": dtype,
            "where": places([module_path(n) for n in nodes]) if nodes else "outside of the graphs",
            "calls": sum(calls.get(graph_of[n].index, 0) for n in nodes) or None,
            "ms": spent.us / 1e3,
            "share": spent.us / total_us if total_us else 0.0,
            "flops": sum(flops(n) for n in nodes),
            "reason": reasons.most_common(1)[0][0] if reasons else "",
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["ms"])


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
