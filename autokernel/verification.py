"""The whole model with kernels against the model as it is: the same outputs? faster? What verify.py prints.

Faster means: in the same launch mode, calls of both in turns, the median of paired ratios above 1 by more than its 95 %
interval. What is right stands in outputs.py.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autokernel import profiling, sites
from autokernel.apply import Applied, CallFault, Choice, Kernel, Kernels, Route, VerifyError, mapped
from autokernel.compare import TOLERANCES, compare, same_bits
from autokernel.graph import flops
from autokernel.models import Loaded
from autokernel.outputs import Oracle, Snapshot, difference, inexact, named
from autokernel.targets import read_targets, shown_size
from autokernel.timing import Ratio

SCHEMA = 1
FASTER, NOT_FASTER, INCORRECT, COULD_NOT_RUN = range(4)
COMPILED: dict[str, dict[str, Any]] = {  # CUDA graphs are ours to capture
    "torch.compile": {}, "max-autotune": {"mode": "max-autotune-no-cudagraphs"}}  # fmt: skip
IN_A_GRAPH = " in a CUDA graph"
PAIRS, SECONDS = (7, 40), 1.0  # timed pairs of calls of a comparison


@dataclass(frozen=True)
class Options:
    """verify.py's options; pairs and warmup: 0 is automatic."""

    everything: bool = False
    starters: bool = False
    diagnose: bool = False
    compiled: bool = True
    max_autotune: bool = False
    graph: bool = True
    warmup: int = 3
    timed: int = 0
    atol: float | None = None
    rtol: float | None = None


# ---- time -----------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two calls timed in turns: seconds of PyTorch's and of ours, by the wall's clock and, on a GPU, the device's."""

    theirs: list[float]
    ours: list[float]
    device_theirs: list[float]
    device_ours: list[float]

    @property
    def ratio(self) -> Ratio:
        """How many times faster ours is."""
        return Ratio.of(self.theirs, self.ours)

    @property
    def faster(self) -> bool:
        return self.ratio.value - self.ratio.spread > 1


def paired(theirs: Callable, ours: Callable, device: torch.device, warmup: int = 3, timed: int = 0) -> Pair:
    """Time two calls in turns, the order reversed every time.

    Device time is between two events behind a wait that hides the launches: what the GPU needs when it never starves.
    """
    on_gpu, both = device.type == "cuda", (theirs, ours)
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    def wall(call: Callable) -> float:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - start

    def on_device(call: Callable, host: float) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(1.2 * host * 2e9))  # about 2 GHz: longer on a slower clock, which does no harm
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    once = [min(wall(call) for _ in range(max(1, warmup))) for call in both]
    count = timed or (max(PAIRS[0], min(PAIRS[1], int(SECONDS / sum(once)))) if on_gpu else 1)
    walls: tuple[list[float], list[float]] = ([], [])
    devices: tuple[list[float], list[float]] = ([], [])
    for turn in range(count):
        for which in (0, 1) if turn % 2 else (1, 0):
            walls[which].append(wall(both[which]))
    for turn in range(min(count, 10) if on_gpu else 0):
        for which in (0, 1) if turn % 2 else (1, 0):
            devices[which].append(on_device(both[which], once[which]))
    return Pair(*walls, *devices)


def in_graph(call: Callable) -> Callable:
    """A call as a CUDA graph that gives what the call gave, in the same memory each time."""
    made = {}

    def once() -> None:
        made["out"] = call()

    replay = profiling.cuda_graph(once)

    def run() -> Any:
        replay()
        return made["out"]

    return run


# ---- one verification -----------------------------------------------------------------------------------------------


class Verification:
    """A model as it is and with kernels. `run` does all; the model is afterwards what it was."""

    def __init__(self, loaded: Loaded, kernels: Kernels, options: Options, progress: Callable[[str], None]):
        self.loaded, self.kernels, self.options, self.progress = loaded, kernels, options, progress
        self.on_gpu = loaded.device.type == "cuda"
        self.notes = [*loaded.notes, *kernels.notes]
        self.snapshot = Snapshot(loaded.model, (loaded.args, loaded.kwargs))
        self.applied = Applied(loaded.model, kernels, True, not options.starters, progress, self._interpretable)
        self.ours = copy.copy(loaded.model)  # the same modules, parameters and hooks
        self.ours.forward = self.applied.forward  # type: ignore[method-assign]
        self.rows: dict[str, dict[str, Any]] = {}  # key of sites -> what is said of them
        self.total_us: float | None = None  # device time of a forward pass
        self.estimate: float | None = None

    def run(self) -> dict[str, Any]:
        """The record of workspace/verify.json. Raises VerifyError, and what a kernel or the model raises."""
        devices = [self.loaded.device] if self.loaded.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            try:
                self._originals()
                self._put_in()
                values = self._diagnosis() if self.options.diagnose else self._measured()
            finally:
                self.applied.remove()
                self.snapshot.restore()
        if damaged := self.snapshot.damaged():
            fault = f"a kernel wrote to the parameter {damaged[0]}, and to {len(damaged) - 1} others"
            values |= {"status": INCORRECT, "fault": fault, "headline": f"INCORRECT: {fault}"}
        return {**self._about(), **values, "rows": list(self.rows.values()), "notes": self.notes}

    def _about(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.loaded.device) if self.on_gpu else "cpu"
        return {
            "schema": SCHEMA, "model": self.loaded.name, "inputs": self.loaded.inputs,
            "dtype": str(self.loaded.dtype).removeprefix("torch."), "device": name, "torch": torch.__version__,
            "kernels": "starters" if self.options.starters else "kept",
        }  # fmt: skip

    # ---- what is right ---------------------------------------------------------------------------------------------

    def _outcome(self, call: Callable, model: torch.nn.Module | None = None, inputs: Any = None, seed: int = 0):
        """Every tensor that a call gives, and the buffers and inputs that it writes to, from the same state and seed.

        model, inputs: what the call runs, where that is not the original on its inputs.
        """
        self.snapshot.restore()
        torch.manual_seed(seed)
        found = {n: t.detach().clone() for n, t in named(call())}
        held = {f"buffer {n}": t for n, t in (model or self.loaded.model).named_buffers()}
        held |= {f"input {n}": t for n, t in named(inputs or (self.loaded.args, self.loaded.kwargs))}
        return found | {n: held[n].detach().clone() for n in self.written}

    def _originals(self) -> None:
        self.progress("running the original")
        self.written: list[str] = []
        self._outcome(self.loaded)
        self.written = self.snapshot.written()
        original = self._outcome(self.loaded)
        floats = [t for t in original.values() if inexact(t) and t.numel()]
        if not original:
            raise VerifyError(f"{self.loaded.name} gives no tensor: nothing to compare")
        if floats and not any(t.isfinite().any() for t in floats):
            raise VerifyError(f"every output of {self.loaded.name} is NaN or infinite: nothing to compare; try another "
                              "--dtype, other weights or other inputs")  # fmt: skip
        again, other = self._outcome(self.loaded), self._outcome(self.loaded, seed=1)
        for name, tensor in original.items():
            gap = difference(again[name], tensor, tensor) if again[name].shape == tensor.shape else None
            if gap is None or gap.rms > TOLERANCES.get(self.loaded.dtype, 0.0):
                off = "another shape" if gap is None else f"off by {gap.rms:.1e} of the rms"
                raise VerifyError(f"{self.loaded.name} gives other outputs from the same inputs, state and seed "
                                  f"({name}: {off}): nothing compares with that; make it deterministic")  # fmt: skip
        self.random = any(not same_bits(other[n], t) for n, t in original.items() if other[n].shape == t.shape)
        atol, rtol = self.options.atol, self.options.rtol
        self.oracle = Oracle(original, self._reference(original), self.loaded.dtype, atol, rtol)
        if self.random:
            self.notes.append("the model draws random numbers (dropout in train mode?): compared with the same seed, "
                              "and in eager mode only")  # fmt: skip

    def _reference(self, original: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs of the original in a wider dtype, or the original's own where that cannot be run."""
        wide = torch.float64 if self.loaded.dtype == torch.float32 else torch.float32
        self.progress(f"running the original in {wide}")

        def widened(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_complex():
                return tensor.to(wide.to_complex())
            return tensor.to(wide) if tensor.is_floating_point() else tensor

        try:
            self.snapshot.restore()
            model: torch.nn.Module = copy.deepcopy(self.loaded.model)._apply(widened)
            args, kwargs = mapped((self.loaded.args, self.loaded.kwargs), widened)
            found = self._outcome(lambda: model(*args, **kwargs), model, (args, kwargs))
            if any(n not in found or found[n].shape != t.shape for n, t in original.items()):
                raise ValueError("it gives other outputs there")
            floats = [n for n, t in original.items() if inexact(t)]
            if (off := max((difference(original[n], found[n], original[n]).rms for n in floats), default=0.0)) <= 0.1:
                return found
            if not self.random and self.options.atol is None and self.options.rtol is None:
                raise VerifyError(f"{self.loaded.name} in {str(wide)[6:]} is another computation: its outputs are "
                                  f"{off:.0%} of their rms away (a branch on a value?), so nothing says how exact a "
                                  "kernel must be; give --atol and --rtol, or other inputs")  # fmt: skip
            raise ValueError("it draws other random numbers there" if self.random else "another computation")
        except VerifyError:
            raise
        except Exception as error:  # a model may refuse another dtype in its own way
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            self.notes.append(f"no run in {str(wide)[6:]} ({why}): compared with the original in its own dtype")
            return original

    # ---- which kernels ---------------------------------------------------------------------------------------------

    def _ours(self) -> Any:
        return self.loaded.call(self.ours)

    def _put_in(self) -> None:
        """Capture the model, put kernels in, and decide which of them are worth it."""
        self.progress("finding sites")
        self.snapshot.restore()
        self._ours()
        self.choice: Choice = {s.key: self._first(s) for s in self.applied.served}
        for route in self.applied.routes.values():
            if route.sites:
                self.rows[route.key] = self._row(route)
        self._require(self.choice)
        if self.on_gpu:
            self._in_place()
        faults = {name: fault for (_, name), fault in self.applied.failed.items()}
        self.notes += [f"left out: {fault}" for fault in faults.values()]

    def _interpretable(self, served: list[sites.Site]) -> None:
        work = sum(s.flops for s in served)
        if self.loaded.device.type == "cpu" and work > profiling.INTERPRETED_FLOPS:
            raise VerifyError(f"{work:.1e} FLOPs of kernels take too long in Triton's interpreter (limit "
                              f"{profiling.INTERPRETED_FLOPS:.0e}): give a smaller --input-shape, or take a smaller "
                              "model: models/tiny.py")  # fmt: skip

    def _first(self, site: sites.Site) -> Kernel:
        return self.applied.usable(self.applied.routes[site.key])[0]

    def _require(self, choice: Choice) -> None:
        if not choice:
            reasons = [r.reason for r in self.applied.routes.values() if r.sites and r.reason]
            reasons += list(self.applied.failed.values())
            near = [r for r in reasons if "shape" in r] or reasons  # a kernel for the operator, but for another call
            why = max(set(near), key=near.count) if near else "no site of our operators was found in it"
            advice = "see where its time goes with: uv run profile.py"
            if near and "shape" in why:
                own = {k.name for k in self.kernels.kernels if k.key}
                made = [f"{t.name} ({shown_size(t.size)})" for t in read_targets() if t.name in own]
                advice = (f"kernels serve the shapes that they were extracted and checked for: {', '.join(made)}; give "
                          "that --input-shape, or run uv run profile.py at this one and uv run extract.py")
            raise VerifyError(f"no call of {self.loaded.name} reaches a kernel: {why}; {advice}")

    def _row(self, route: Route) -> dict[str, Any]:
        places = route.sites or route.inner
        first = places[0]
        return {
            "op": first.op, "where": profiling.places([s.module for s in places]),
            "shape": profiling.shown_shape(first), "dtype": first.dtype, "calls": len(places),
            **_facts(self.choice.get(route.key)), "used": route.key in self.choice, "why": route.reason,
            "pytorch_us": None, "ours_us": None, "contribution": None,
        }  # fmt: skip

    def _in_place(self) -> None:
        """Device time of each kernel at its sites in the model, and of the original there; keep what is faster."""
        self.progress("timing each kernel in its place")
        theirs, self.total_us = self._traced({g: profiling.instrumented(g) for g in self.applied.modules})
        best: dict[str, tuple[float, Kernel]] = {}
        tried: set[tuple[str, str]] = set()
        while todo := self._untried(best, tried):
            tried |= {(key, kernel.name) for key, kernel in todo.items()}
            self.applied.choose(todo)
            labels = {s: f"site {i}" for i, s in enumerate(self.applied.served)}
            ours, _ = self._traced({g: sites.replace(g, {s: _ranged(labels[s], todo[s.key]) for s in m.served})
                                    for g, m in self.applied.modules.items()})  # fmt: skip
            for key in {s.key for s in labels}:
                us = sum(ours.get(labels[s], 0.0) for s in labels if s.key == key)
                before = sum(theirs.get(label, 0.0) for s in labels if s.key == key for label in _labels(s))
                if us and (key not in best or us < best[key][0]):
                    best[key] = us, todo[key]
                    self._row_of(key).update(pytorch_us=before, ours_us=us, **_facts(todo[key]))
        self._decide(best)

    def _decide(self, best: Mapping[str, tuple[float, Kernel]]) -> None:
        """Leave PyTorch's own where it is faster. best: microseconds a forward pass, and of which kernel."""
        everything = self.options.everything
        self.choice = {k: kernel for k, (us, kernel) in best.items() if everything or us < self.rows[k]["pytorch_us"]}
        for key, row in self.rows.items():
            row["used"] = key in self.choice
            row["why"] = "slower than PyTorch here" if key in best and not row["used"] else row["why"]
        if not self.choice:
            raise VerifyError("every kernel is slower than PyTorch's operator in its place (--all puts them in all the "
                              "same); measure them one by one with: uv run bench.py")  # fmt: skip
        self.applied.choose(self.choice)
        used = [self.rows[s] for s in {s.key for s in self.applied.served}]
        gain = sum(r["pytorch_us"] - r["ours_us"] for r in used)
        assert self.total_us is not None
        self.estimate = self.total_us / (self.total_us - gain)

    def _row_of(self, key: str) -> dict[str, Any]:
        return self.rows.setdefault(key, self._row(self.applied.routes[key]))

    def _untried(self, best: Mapping[str, tuple[float, Kernel]], tried: set[tuple[str, str]]) -> dict[str, Kernel]:
        """The next kernel of each key; inside of a larger site once that is known to stay PyTorch's."""
        def still(route: Route) -> list[Kernel]:
            return [k for k in self.applied.usable(route) if (route.key, k.name) not in tried]

        def stays(key: str) -> bool:
            won = key in best and (self.options.everything or best[key][0] < self.rows[key]["pytorch_us"])
            return not won and not still(self.applied.routes[key])

        open_ = [r for r in self.applied.routes.values() if still(r)]
        open_ = [r for r in open_ if r.sites or all(s.inside and stays(s.inside.key) for s in r.inner)]
        return {r.key: still(r)[0] for r in open_}

    def _traced(self, runs: dict[Any, Callable]) -> tuple[dict[str, float], float]:
        """Device microseconds of a forward pass by range, and in all, with graphs that run so."""
        kept = self.applied.modules
        self.applied.modules = {g: dataclasses.replace(kept[g], run=run) for g, run in runs.items()}
        try:
            activity = profiling.traced(self._ours, self.loaded.device)
        finally:
            self.applied.modules = kept
        return {label: a.us for label, a in activity.items()}, sum(a.us for a in activity.values())

    # ---- how fast --------------------------------------------------------------------------------------------------

    def _modes(self) -> list[tuple[str, str]]:
        """(how the calls are made, which of COMPILED or "")."""
        compilers = ["torch.compile"] * self.options.compiled + ["max-autotune"] * self.options.max_autotune
        modes = [("eager", "")] + [(name, name) for name in compilers]
        graphs = [(name + IN_A_GRAPH, kind) for name, kind in modes] if self.on_gpu and self.options.graph else []
        return sorted([*modes, *graphs], key=lambda mode: bool(mode[1]))

    def _call(self, mode: tuple[str, str], choice: Choice | None) -> Callable[[], Any]:
        """One forward pass in a mode, warm; None: of PyTorch's own."""
        name, kind = mode
        loaded = self.loaded
        if choice is not None:
            self.applied.choose(choice)
        forward: Callable = loaded.model if choice is None else self.ours
        forward = torch.compile(forward, **COMPILED[kind]) if kind else forward
        modules = self.applied.modules

        def call() -> Any:
            self.applied.modules = modules
            return forward(*loaded.args, **loaded.kwargs)

        call()
        return in_graph(call) if name.endswith(IN_A_GRAPH) else call

    def _measured(self) -> dict[str, Any]:
        """Every mode: is ours right, and how fast are both?"""
        modes, faults, rows, language = {}, {}, [], {}
        for mode in self._modes():
            self.progress(f"verifying: {mode[0]}")
            try:
                self.snapshot.restore()
                modes[mode[0]], fault, outputs = self._mode(mode)
            except CallFault:
                raise
            except Exception as error:  # compilers and capture fail in their own ways
                self.notes.append(f"{mode[0]}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            if fault:
                faults[mode[0]] = fault
            if mode[0] == "eager":
                rows, language = self.oracle.judge(outputs)[1], self.oracle.language(outputs, self.loaded.model)
        if "eager" not in modes:
            raise VerifyError(self.notes[-1])
        values = {"modes": modes, "outputs": rows, **language, "estimate": self.estimate, "promise": self._promise()}
        return {**values, **self._headline(modes, faults)}

    def _mode(self, mode: tuple[str, str]) -> tuple[dict[str, Any], str, dict[str, torch.Tensor]]:
        theirs = self._call(mode, None)
        candidates = [self.choice]
        if mode[1] and self.on_gpu and not self.options.everything:  # Inductor fuses what is no product: leave it that
            products = {s.key for s in self.applied.served if any(map(flops, s.nodes))}
            candidates.append({k: v for k, v in self.choice.items() if k in products})
        tried = [self._against(mode, theirs, choice) for choice in candidates[: 1 + (candidates[-1] != self.choice)]]
        if not mode[1] and self.on_gpu:
            tried += self._without_losers(mode, theirs, tried[0])
        pair, choice, ours = max(tried, key=lambda t: t[0].ratio.value)
        outputs = self._outcome(ours)
        exact = not self.random or mode[0] == "eager"
        fault = self.oracle.judge(outputs)[0] if exact else ""
        ratio = pair.ratio
        pays = not self.on_gpu or self.options.everything or ratio.value + ratio.spread >= 1
        values = {"pytorch_ms": 1e3 * statistics.median(pair.theirs), "ours_ms": 1e3 * statistics.median(pair.ours),
                  "speedup": ratio.value, "spread": ratio.spread, "pairs": len(pair.ours), "faster": pair.faster,
                  "used": [f"{k.name} {self.rows[n]['shape']}" for n, k in choice.items()] if pays else []}  # fmt: skip
        if mode[0] == "eager" and self.on_gpu:  # what skipping the modules' Python gives, without any kernel
            values["captured_alone"] = self._against(mode, theirs, {})[0].ratio.value
        if pair.device_ours:
            values |= {"pytorch_device_ms": 1e3 * statistics.median(pair.device_theirs),
                       "ours_device_ms": 1e3 * statistics.median(pair.device_ours),
                       "pytorch_peak_mb": self._peak(theirs), "ours_peak_mb": self._peak(ours)}  # fmt: skip
        return values, fault, outputs

    def _against(self, mode: tuple[str, str], theirs: Callable, choice: Choice) -> tuple[Pair, Choice, Callable]:
        ours = self._call(mode, choice)
        return self._paired(theirs, ours), choice, ours

    def _paired(self, theirs: Callable, ours: Callable) -> Pair:
        warmup = self.options.warmup if self.on_gpu else 1  # the interpreter's times mean nothing
        return paired(theirs, ours, self.loaded.device, warmup, self.options.timed)

    def _without_losers(self, mode, theirs: Callable, all_in: tuple[Pair, Choice, Callable]):
        """Leave each kernel out: its contribution, and another choice without those that the mode is faster without."""
        _, choice, ours = all_in
        losers = set()
        for key in choice if len(choice) > 1 else ():
            without = self._call(mode, {k: v for k, v in choice.items() if k != key})
            ratio = self._paired(without, ours).ratio
            self.rows[key]["contribution"] = ratio.value
            self.rows[key]["contribution_spread"], self.rows[key]["contribution_mode"] = ratio.spread, mode[0]
            losers |= {key} if ratio.value + ratio.spread < 1 and not self.options.everything else set()
        rest = {k: v for k, v in choice.items() if k not in losers}
        return [self._against(mode, theirs, rest)] if losers and rest else []

    def _peak(self, call: Callable) -> float:
        torch.cuda.reset_peak_memory_stats(self.loaded.device)
        call()
        return torch.cuda.max_memory_allocated(self.loaded.device) / 2**20

    # ---- what it means ---------------------------------------------------------------------------------------------

    def _promise(self) -> float | None:
        """Amdahl's law with the judge's speedups and the profile's shares; None for starters."""
        kept = [(k.share, k.speedup) for k in self.choice.values() if k.share and k.speedup]
        return 1 / (1 - sum(share * (1 - 1 / speedup) for share, speedup in kept)) if kept else None

    def _headline(self, modes: dict[str, dict[str, Any]], faults: dict[str, str]) -> dict[str, Any]:
        dtype = str(self.loaded.dtype).removeprefix("torch.")
        what = f"{self.loaded.name} {self.loaded.inputs} ({dtype})"
        used = {name: m for name, m in modes.items() if m["used"]}
        if faults:
            mode, fault = next(iter(faults.items()))
            return {"status": INCORRECT, "correct": False, "fault": f"{mode}: {fault}",
                    "headline": f"{what}: INCORRECT in {mode}: {fault}"}  # fmt: skip
        if not self.on_gpu:
            return {"status": NOT_FASTER, "correct": True, "why": [],
                    "headline": f"{what}: correct; not measured, as there is no GPU"}  # fmt: skip
        if not used:
            raise VerifyError("no kernel pays in any launch mode: the model is fastest with PyTorch's own (--all keeps "
                              "them in all the same)")  # fmt: skip
        mode = min(used, key=lambda name: used[name]["ours_ms"])
        best = min(modes, key=lambda name: modes[name]["pytorch_ms"])
        m, rival = used[mode], modes[best]["pytorch_ms"] / used[mode]["ours_ms"]
        beside = f"; PyTorch's fastest mode is {best}, {modes[best]['pytorch_ms']:.4g} ms: {rival:.2f}x against that"
        text = (f"{what}: {m['speedup']:.3f}x +-{m['spread']:.3f} in {mode}, {m['pytorch_ms']:.4g} -> "
                f"{m['ours_ms']:.4g} ms")  # fmt: skip
        return {"status": FASTER if m["faster"] else NOT_FASTER, "correct": True, "mode": mode, "speedup": m["speedup"],
                "pytorch_best_mode": best, "best_against_best": rival, "why": self._why(mode, m),
                "headline": text + beside * (best != mode)}  # fmt: skip

    def _why(self, mode: str, m: dict[str, Any]) -> list[str]:
        """Why the measurement is not what the estimates say."""
        found = []
        busy = m["ours_device_ms"] / m["ours_ms"]
        if busy < 0.8:
            found.append(f"launch-bound: the GPU works {100 * busy:.0f} % of the time; a CUDA graph hides launches")
        if "captured_alone" in m:
            found.append(f"capture: the captured graph without any kernel is {m['captured_alone']:.2f}x here")
        outer = {k for k, route in self.applied.routes.items() if route.sites}
        left = [r for k, r in self.rows.items() if k in outer and not r["used"]]
        if left:  # what lies inside of one of these is part of its time already
            parts = [r for k, r in self.rows.items() if k not in outer and r["used"]]
            us = sum(r["pytorch_us"] or 0.0 for r in left) - sum(r["pytorch_us"] for r in parts)
            share = us / self.total_us if self.total_us else 0.0
            found.append(f"fallback: {sum(r['calls'] for r in left)} calls of {len(left)} targets stay PyTorch's "
                         f"(those measured: {100 * share:.0f} % of the time)")  # fmt: skip
        if (promise := self._promise()) and self.estimate and abs(promise / self.estimate - 1) > 0.03:
            found.append("memory: in the model the inputs may lie in the L2 cache, in the judge's timing they never do")
        return found


    # ---- who is at fault -------------------------------------------------------------------------------------------

    def _diagnosis(self) -> dict[str, Any]:
        """Each kernel alone; for one that makes the model wrong the sites at which it does, by bisection."""
        found = []
        for key in self.choice:
            self.progress(f"alone: {self.choice[key].name}")
            own = [s for s in self.applied.served if s.key == key]
            fault = self._fault(own)
            self.rows[key]["alone"] = fault or "right"
            found += [self._culprit(self._bisected(own), fault)] if fault else []
        if not found and (fault := self._fault(self.applied.served)):
            found = [self._culprit(self._bisected(self.applied.served), fault)]
        text = found[0]["text"] if found else "every kernel is right, alone and with the others; not timed"
        return {"status": INCORRECT if found else NOT_FASTER, "correct": not found, "culprits": found,
                "headline": f"{self.loaded.name}: {text}"}  # fmt: skip

    def _fault(self, chosen: list[sites.Site], wrap: Callable = lambda site, function: function) -> str:
        """What is wrong with the model when kernels serve just these sites."""
        kept = self.applied.modules
        put = {s: wrap(s, self.choice[s.key].function) for s in chosen}
        runs = {g: sites.replace(g, {s: f for s, f in put.items() if s.graph is g}) for g in kept}
        self.applied.modules = {g: dataclasses.replace(kept[g], run=run) for g, run in runs.items()}
        try:
            return self.oracle.judge(self._outcome(self._ours))[0]
        finally:
            self.applied.modules = kept

    def _bisected(self, chosen: list[sites.Site]) -> list[sites.Site]:
        """Few of these sites that make the model wrong: one, or several that do so only together."""
        while len(chosen) > 1:
            halves = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
            wrong = next((half for half in halves if self._fault(half)), None)
            if wrong is None:
                break
            chosen = wrong
        return chosen

    def _culprit(self, chosen: list[sites.Site], fault: str) -> dict[str, Any]:
        """The first of these sites whose kernel gives another tensor than the operator, on the same arguments."""
        first: list[tuple[sites.Site, str]] = []

        def compared(site: sites.Site, function: Callable) -> Callable:
            def call(**arguments: Any) -> torch.Tensor:
                out, spec = function(**arguments), site.spec
                double = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                          for n, t in arguments.items()}  # fmt: skip
                usual = (spec.yardstick or spec.baseline)(**arguments)
                verdict = compare(out, spec.reference(**double), usual, depth=spec.depth(site.size),
                                  factor=spec.tolerance, rms_factor=spec.rms_factor)  # fmt: skip
                if not verdict.ok and not first:
                    first.append((site, verdict.reason))
                return out

            return call

        self._fault(chosen, compared)
        site, reason = first[0] if first else (chosen[0], "its result is right: it changes something else")
        kernel = self.choice[site.key].name
        text = (f"{kernel} is at fault in {site.module or 'the model'} ({profiling.shown_shape(site)}), tensor "
                f"{site.output.name}: {reason}")  # fmt: skip
        return {"kernel": kernel, "module": site.module, "tensor": site.output.name, "reason": reason,
                "sites": [s.module for s in chosen], "model": fault, "text": text}  # fmt: skip


def _facts(kernel: Kernel | None) -> dict[str, str | None]:
    return {"kernel": kernel.name if kernel else None, "sha256": kernel.source.sha256 if kernel else None}


def _labels(site: sites.Site) -> list[str]:
    assert site.graph.module is not None
    places = {n: i for i, n in enumerate(site.graph.module.graph.nodes)}
    return [f"{site.graph.index}.{places[n]}" for n in site.nodes]


def _ranged(label: str, kernel: Kernel) -> Callable:
    function = kernel.function

    def call(**arguments: Any) -> torch.Tensor:
        with profiling.linked(label):
            return function(**arguments)

    return call

