"""A KernelBench problem before the judge: the problem as an operator spec, KernelBench's own protocol, one record.

What is KernelBench's: seed 42 before both constructors, train mode, no gradients, torch.allclose with its tolerance for
the precision, 5 trials with new inputs. What is the judge's: a process of its own for the kernel, fresh inputs in every
call, timed ones included, seeds from operating-system entropy, the physical floor, timing in pairs. The reference runs
here, and only after the kernel has answered. Integer inputs keep their dtype; KernelBench's evaluation would cast them.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autokernel.compare import TOLERANCES, Comparison, compare, same_bits
from autokernel.footprint import Footprint, known_footprint, memory_fault, shrunk_code
from autokernel.integrity import Harness
from autokernel.judge import START_SECONDS, Bench, Limits, ask_once, call_fault, value_fault
from autokernel.kernelbench import FAST, KERNEL_TYPE, TOLERANCE, TRIALS, Problem
from autokernel.modelcall import ModelCall, build, named, tensors_of
from autokernel.process import Launcher
from autokernel.records import RunRecord
from autokernel.run import HarnessFailure, Options, UsageError, _Session, recorded
from autokernel.spec import DTYPES, Arg, Case, OpSpec, TensorSpec, strides_of
from autokernel.worker import Layout, Worker

SEED = 42  # KernelBench's: before the constructors
MOST_TIMED = 100  # KernelBench's scripts; slow problems take fewer, see timing.py
STAGES = ("correctness_trials", "determinism")
LARGEST_SHARED = 2 << 30  # bytes of weights that are handed over; larger ones come from the seed alone
LONG_S = 60.0  # beyond that, a run without a GPU says beforehand how long it takes
_CHUNK = 1 << 26
# the key block, in order
KEYS = (
    "kernel_type", "problem", "name", "backend", "device", "gpu_name", "precision", "source_sha256", "problem_sha256",
    *STAGES, "correctness", "reason", "official_check", "weak_problem", "deterministic", "atol", "rtol", "n_trials",
    "repetitions", "latency_us", "pytorch_latency_us", "compile_latency_us", "speedup_vs_pytorch",
    "speedup_vs_compile", "speedup_vs_best", *(f"fast_{p}" for p in FAST), "noise_pct", "keep_above_pct", "launch_us",
    "throughput_tflops", "bandwidth_gb_s", "flops", "bytes", "peak_vram_mb", "compile_seconds", "vendor_library",
    "review", "shrunk", "harness", "quick", "bench_time_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class ProblemOptions(Options):
    """What a run on a problem may be asked for; the fields are bench_kb.py's options.

    n_timed: 0 is the judge's choice. atol, rtol: None is KernelBench's. shrink: reduce the problem's sizes.
    """

    correctness_only: bool = False
    n_trials: int = TRIALS
    n_timed: int = 0
    atol: float | None = None
    rtol: float | None = None
    precision: str = "fp32"
    shrink: bool = False


class Reference:
    """A problem's Model on a device, built as KernelBench builds it, and inputs for it."""

    def __init__(self, path: Path, precision: str, device: torch.device):
        self.device, self.dtype, self.path = device, DTYPES[precision], path
        self.module = load_module(path)
        torch.manual_seed(SEED)
        init = list(getattr(self.module, "get_init_inputs", list)())
        template, _ = named(self._inputs())
        self.package = {"seed": SEED, "precision": self.dtype, "init": init, "tensors": {}, "template": template,
                        "stateful": True}  # fmt: skip
        tensors: dict[str, torch.Tensor] = {}

        def first(*args: Any) -> Any:
            model = self.module.Model(*args)
            tensors.update((n, t.detach().clone()) for n, t in tensors_of(model).items())
            return model

        self.call = build(first, self.package, device)
        if sum(t.nbytes for t in tensors.values()) <= LARGEST_SHARED:
            self.package["tensors"] = tensors
        self.package["init"] = init if plain(init) else None

    def _inputs(self) -> list:
        """get_inputs() on the device where it can be made there, with a seed nobody knows."""
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))
        try:
            with torch.device(self.device):
                return list(self.module.get_inputs())
        except (RuntimeError, TypeError):
            return list(self.module.get_inputs())

    def draw(self) -> dict[str, torch.Tensor]:
        """Fresh inputs by name, floats in the precision."""
        _, tensors = named(self._inputs())
        return {n: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}

    def __call__(self, tensors: dict[str, torch.Tensor], seed: int, call: ModelCall | None = None, reset=True) -> tuple:
        call = call or self.call
        with torch.no_grad():
            if reset:
                call.reset()
            torch.manual_seed(seed)
            return call(**tensors)

    def in_double(self, tensors: dict[str, torch.Tensor], seed: int, ref: tuple) -> tuple:
        """The same in float64; `ref` itself, widened, where the model has no such form or draws other numbers there."""
        wide = tuple(r.double() if r.is_floating_point() else r for r in ref)
        try:
            if not hasattr(self, "doubled"):
                model = copy.deepcopy(self.call.owner).double()
                state = {n: s.double() if s.is_floating_point() else s for n, s in self.call.state.items()}
                self.doubled = ModelCall(model, model, self.package["template"], state)
            out = self({n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}, seed, self.doubled)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, copy.Error):
            return wide
        same = len(out) == len(wide) and all(a.shape == b.shape and _near(a, b) for a, b in zip(out, wide, strict=True))
        return out if same else wide


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results are one up to a rounding, as a whole."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    both = a.isfinite() & b.isfinite()
    error, size = (torch.where(both, t, 0.0).double().norm() for t in (a - b, b))
    return bool(error <= 0.05 * size)


def load_module(path: Path) -> Any:
    """Import a problem by path. Raises HarnessFailure with its own error: it is the reference, not a kernel."""
    spec = importlib.util.spec_from_file_location(f"kernelbench_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - anybody's code
        raise HarnessFailure(f"the problem cannot be loaded: {type(error).__name__}: {error}") from None
    return module


def plain(value: Any) -> bool:
    """Whether a value can be handed to another process as data."""
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    if isinstance(value, dict):
        return all(map(plain, value.values()))
    return value is None or type(value) in (int, float, bool, str, torch.Tensor, torch.dtype, torch.Size)


# ---- the spec and the bench ------------------------------------------------------------------------------------------


class ProblemSpec(OpSpec):
    """A problem as an operator: one shape, the inputs and outputs that the reference was seen to have."""

    def tensors(self, case: Case) -> dict[str, TensorSpec]:
        return dict(self.shapes["problem"]["inputs"])

    def outputs(self, case: Case) -> tuple[TensorSpec, ...]:
        return self.shapes["problem"]["outputs"]


def problem_spec(name: str, reference: Reference, inputs: dict, outputs: tuple, flops: float) -> ProblemSpec:
    def described(key: str, t: torch.Tensor) -> TensorSpec:
        return TensorSpec(key, tuple(t.shape), strides_of(tuple(t.shape), "contiguous")[0], t.dtype)

    size = {"inputs": {n: described(n, t) for n, t in inputs.items()},
            "outputs": tuple(described(f"out{i}", t) for i, t in enumerate(outputs))}  # fmt: skip
    depth = max(1.0, flops / (2 * max(1, sum(t.numel() for t in outputs))))
    call: Any = reference.call
    return ProblemSpec(
        name, {n: Arg(()) for n in inputs}, call, call, "Model", {"problem": size}, {}, {}, {},
        lambda size, scalars: flops, (), {}, lambda size: depth, timed=("problem",),
        primary="problem", least_flops=False,
    )  # fmt: skip


class ProblemBench(Bench):
    """The judge's bench with a problem on it: draws with get_inputs, compares as KernelBench does."""

    stages = STAGES
    seeded = True

    def __init__(self, problem: Problem, options: ProblemOptions, device: torch.device, launcher: Launcher, flops=0.0):
        self.path, self.package = launcher.run_dir / "problem.py", launcher.run_dir / "model.pt"
        self.path.write_text(problem.code)
        tolerance = TOLERANCE[options.precision]
        self.atol = tolerance if options.atol is None else options.atol
        self.rtol = tolerance if options.rtol is None else options.rtol
        self.official, self.deterministic, self.draws = True, True, 0
        try:
            self.reference = Reference(self.path, options.precision, device)
            inputs, outputs = self._probe()
        except torch.OutOfMemoryError:
            raise HarnessFailure("this GPU has not enough memory for the problem's own Model") from None
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise HarnessFailure(f"the problem's own Model fails: {type(error).__name__}: {_line(error)}") from None
        spec = problem_spec(f"kb-{problem.sha256[:24]}-{options.precision}", self.reference, inputs, outputs, flops)
        super().__init__(spec, device, launcher, options.allow_tf32)
        if options.n_timed or options.quick or self.on_gpu:
            fewest = options.n_timed or (3 if options.quick else 12)
            self.repetitions = (fewest, options.n_timed or (3 if options.quick else MOST_TIMED))
        torch.save(self.reference.package, self.package)

    def _probe(self) -> tuple[dict[str, torch.Tensor], tuple]:
        """Call the reference, and learn what copies of it must be allowed. Returns inputs and outputs."""
        reference, inputs, seed = self.reference, self.reference.draw(), 1
        given, anew = ({n: t.clone() for n, t in inputs.items()} for _ in range(2))
        outs = reference(given, seed)
        if not outs or not all(isinstance(o, torch.Tensor) for o in outs):
            raise TypeError("it returns something else than tensors")
        kept = tuple(o.clone() for o in outs)
        self.mutating = any(not _same(given[n], t) for n, t in inputs.items())
        again = reference(anew, seed, reset=False)
        # a tenth of the tolerance: what atomics leave to chance is far less, what a state changes is not
        stateful = any(self._mismatch(b, a, self.atol / 10, self.rtol / 10) for a, b in zip(kept, again, strict=True))
        if not stateful:
            reference.call.state.clear()
        reference.package["stateful"] = stateful
        held = {o.untyped_storage().data_ptr() for o in outs}
        others = [*given.values(), *tensors_of(reference.call.owner).values(), *again]
        self.aliasing = stateful or any(t.untyped_storage().data_ptr() in held for t in others)
        del outs, again, given, anew, others
        self.weak = self._weak(list(inputs.values()), kept, reference(reference.draw(), seed))
        if reference.device.type == "cuda":
            torch.cuda.empty_cache()  # the children need it
        return inputs, kept

    def _weak(self, inputs: list[torch.Tensor], outs: tuple, other: tuple) -> list[str]:
        """What needs no computing and yet passes KernelBench's check."""
        fakes = {"zeros": map(torch.zeros_like, outs), "a constant": map(_mean, other), "another answer": other}
        for name, t in enumerate(inputs):
            if len(outs) == 1 and t.shape == outs[0].shape and t.dtype == outs[0].dtype:
                fakes[f"input {name} itself"] = [t]
        return [n for n, fake in fakes.items() if not any(map(self._mismatch, fake, outs))]

    # ---- what the judge asks --------------------------------------------------------------------------------------

    def draw(self, case: Case, layout: Layout) -> torch.Tensor:
        private, drawn = self.blank(layout), self.reference.draw()
        # where a copy of the input would do (ReLU of numbers that are never negative), every second draw at least is of
        # another kind: centred and wider
        self.draws += 1
        chosen = self.draws % 2 == 0 or random.SystemRandom().random() < 0.3
        spread = chosen and any("itself" in fake for fake in self.weak)
        for name, view in layout.views(private).items():
            if drawn[name].shape != view.shape:
                raise HarnessFailure(f"get_inputs() gives other shapes in every call: {tuple(drawn[name].shape)}")
            view.copy_(drawn.pop(name))
            if spread and view.is_floating_point():
                view.sub_(view.mean()).mul_(random.SystemRandom().uniform(4, 8))
        return private

    def judged(self, case: Case, layout: Layout, private: torch.Tensor, *outs: torch.Tensor) -> Comparison:
        """KernelBench's check against the reference; where that fails, against its float64 form, as PyTorch itself may
        have computed in TF32. A weak problem's outputs must also be right at their own scale."""
        tensors, seed = layout.views(private), self.seed_of(private) or 0
        given = {n: t.clone() for n, t in tensors.items()} if self.mutating else tensors
        ref = self.reference(given, seed)
        by_scale = any("itself" not in fake for fake in self.weak)
        for number, (out, want) in enumerate(zip(outs, ref, strict=True)):
            fault, floating = self._mismatch(out, want), out.dtype in TOLERANCES
            if floating and (fault or (by_scale and not self._near_by_scale(out, want))):
                fault = self._in_double(out, number, tensors, seed, ref, bool(fault), by_scale) or ""
            if fault:
                return Comparison(False, f"output {number}: {fault}" if len(outs) > 1 else fault, math.inf, math.inf)
        return Comparison(True, "", 0.0, 0.0)

    def _near_by_scale(self, out: torch.Tensor, want: torch.Tensor) -> bool:
        """Whether an output is the reference's within the tolerance of its spread, a few roundings beside.

        Needs no float64 form of a large problem: what fails here is looked at by that.
        """
        atol = self.atol * float(want.std(correction=0)) if want.isfinite().all() else 0.0
        return not self._mismatch(out, want, atol, TOLERANCES[out.dtype])

    def _in_double(self, out, number: int, tensors, seed: int, ref: tuple, official: bool, by_scale: bool) -> str:
        """What is wrong with an output beside the float64 form. official: KernelBench's own check has refused it."""
        try:
            wide = self.reference.in_double(tensors, seed, ref)[number]
        except torch.OutOfMemoryError:
            return (self._mismatch(out, ref[number]) or "not right at its own scale") + " (no memory for float64)"
        finally:
            if self.on_gpu:
                torch.cuda.empty_cache()
        if official:
            if fault := self._mismatch(out, wide.to(out.dtype)):
                return self._mismatch(out, ref[number]) or fault
            self.official = False
        factor = max(1.0, self.rtol / TOLERANCES[out.dtype])
        return compare(out, wide, ref[number], depth=self.spec.depth({}), factor=factor).reason if by_scale else ""

    def roughly(
        self, case: Case, layout: Layout, private: torch.Tensor, usual: float, *outs: torch.Tensor
    ) -> Comparison:
        return self.judged(case, layout, private, *outs)

    def _mismatch(self, out: torch.Tensor, want: torch.Tensor, atol: float = -1.0, rtol: float = -1.0) -> str:
        """What torch.allclose(want, out) would refuse; NaNs are equal where the reference has them."""
        wrong, first, at = 0, -1, 0
        atol, rtol = (self.atol, self.rtol) if atol < 0 else (atol, rtol)
        for got, ref in zip(out.flatten().split(_CHUNK), want.flatten().split(_CHUNK), strict=True):
            off = ~torch.isclose(got, ref, rtol=rtol, atol=atol, equal_nan=True)
            count = int(off.sum())
            if count and not wrong:
                first = at + int(off.to(torch.uint8).argmax())
            wrong, at = wrong + count, at + got.numel()
        if not wrong:
            return ""
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), want.shape))
        got, ref = out.flatten()[first].item(), want.flatten()[first].item()
        limit = f"{atol:.0e} + {rtol:.0e} * |reference|"
        return f"{wrong} of {want.numel()} elements off by more than {limit}; at {where}: {got:.6g}, expected {ref:.6g}"

    def fault_of(self, worker: Worker, case: Case, limits: Limits, replies: list[dict], declared: bool) -> str:
        """A trial; or the same inputs twice and others between: right every time, and whether it is the same bits."""
        if case.stage != "determinism":
            return call_fault(self, worker, case, limits, replies)
        layout = self.layout(case)
        private, seen = self.draw(case, layout), []
        for content in (private, self.draw(case, layout), private):
            reply, fault = ask_once(self, worker, case, content, limits)
            replies.append(reply)
            if fault := fault or value_fault(self, worker, case, content):
                return fault
            seen.append(worker.outputs())
        self.deterministic = all(map(same_bits, seen[0], seen[2]))
        return ""

    def model(self) -> dict[str, Any]:
        return {"model": str(self.package), "problem": str(self.path), "aliasing": self.aliasing,
                "mutating": self.mutating}  # fmt: skip

    def load_baseline(self, worker: Worker, compiled: bool) -> None:
        worker.share(self.flush_bytes, START_SECONDS)
        worker.ask("load", START_SECONDS, compile=compiled, **self.model())


def _mean(t: torch.Tensor) -> torch.Tensor:
    return torch.full_like(t, t.mean(dtype=torch.float64).item())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and (torch.equal(a, b) or same_bits(a, b))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# ---- one run ---------------------------------------------------------------------------------------------------------


class ProblemSession(_Session):
    """The steps of one run on a problem."""

    options: ProblemOptions

    def __init__(self, problem: Problem, found: Footprint, *shared: Any):
        super().__init__(*shared)
        self.problem, self.found, self.dtype = problem, found, self.options.precision

    def bench(self, launcher: Launcher) -> Bench:
        self.opened = ProblemBench(self.problem, self.options, self.device, launcher, self.found.flops)
        self.spec = self.opened.spec
        return self.opened

    def cases(self, bench: Bench) -> tuple[list[Case], list[Case], list[str]]:
        size = {n: t.shape for n, t in self.spec.shapes["problem"]["inputs"].items()}
        case = Case("problem", "timing", size, self.options.precision)
        trials = [replace(case, stage="correctness_trials")] * (1 if self.options.quick else self.options.n_trials)
        cases = trials + [replace(case, stage="determinism")] * (not self.options.quick)
        return cases, [] if self.options.correctness_only else [case], []

    def _compile_ahead(self, bench: Bench, candidate: Worker, cases: list[Case]) -> None:
        """Nothing: one shape is compiled by its first call."""

    def run(self, launcher: Launcher) -> dict[str, Any]:
        values = super().run(launcher)
        bench = self.opened
        known: dict[str, Any] = {"atol": bench.atol, "rtol": bench.rtol, "n_trials": self.options.n_trials}
        known["weak_problem"] = f"yes ({', '.join(bench.weak)} would pass)" if bench.weak else "no"
        if values["correctness"] == "PASS":
            known["official_check"] = "PASS" if bench.official else "FAIL (right by float64; PyTorch itself is not)"
            known["deterministic"] = None if self.options.quick else bench.deterministic
        return values | known


def processes(options: ProblemOptions) -> int:
    """How many children a run has."""
    return 1 if options.correctness_only else 2 + options.compile_baseline + bool(options.best)


def judge_problem(
    problem: Problem, options: ProblemOptions, launcher: Launcher, progress: Callable[[str], None] = lambda text: None,
    harness: Harness | None = None, say: Callable[[str], None] = lambda text: None,
    spent: float = 0.0,
) -> RunRecord:  # fmt: skip
    """Judge options.kernel on a problem. Returns a record, as `run` does, and writes nothing.

    say: hears beforehand how long a long run on a CPU takes. spent: seconds that the caller has waited already.
    Raises UsageError for a problem too large for the device, HarnessFailure when its own Model fails.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        if options.shrink:
            problem = replace(problem, code=shrunk_code(problem.code, options.precision))
        found = known_footprint(problem.code, options.precision)
    except Exception as error:  # noqa: BLE001 - anybody's code
        remedy = "; try: uv sync --extra kernelbench --extra models" * isinstance(error, ModuleNotFoundError)
        raise HarnessFailure(f"problem {problem.key}: {type(error).__name__}: {_line(error)}{remedy}") from None
    if fault := memory_fault(found, processes(options), device):
        raise UsageError(f"{problem.key}: {fault}{hint(options, device)}")
    calls = 2 * (options.n_trials + 6) + (not options.correctness_only) * 6 * processes(options)
    if device.type == "cpu" and (seconds := found.cpu_seconds * calls) > LONG_S:
        gib = found.needed(processes(options)) / 2**30
        say(f"about {seconds / 60:.0f} minutes and {gib:.1f} GiB on this CPU; --shrink makes the problem small")
    values = dict.fromkeys(KEYS) | dict.fromkeys(STAGES, "not run")
    values |= {"kernel_type": KERNEL_TYPE, "target": problem.key, "problem": problem.key, "name": problem.name}
    values |= {"problem_sha256": problem.sha256, "precision": options.precision, "shrunk": options.shrink}

    def session(source: Any, best: Any, device: torch.device, digest: str) -> ProblemSession:
        return ProblemSession(problem, found, source, best, device, options, None, progress, digest)

    record = recorded(options, launcher, harness, values, KERNEL_TYPE, session, spent)
    record.values |= fast(record.values)
    return record


def hint(options: ProblemOptions, device: torch.device) -> str:
    """What would make a problem fit."""
    if device.type == "cpu":
        return "; --shrink makes the problem small"
    asked = {"--compile-baseline": options.compile_baseline, "the best": options.best}
    less = [name for name, on in asked.items() if on]
    if less:
        return f"; try without {' and '.join(less)}"
    return "; try --correctness-only" * (not options.correctness_only)


def fast(values: dict[str, Any]) -> dict[str, Any]:
    """fast_p of one problem: whether the kernel is right and more than p times as fast as PyTorch."""
    speedup, right = values.get("speedup_vs_pytorch"), values["correctness"] == "PASS"
    known = not right or speedup is not None
    found: dict[str, Any] = {f"fast_{p}": bool(right and speedup and speedup > p) if known else None for p in FAST}
    if right and (compiled := values.get("speedup_vs_compile")):
        found["compile_latency_us"] = values["latency_us"] * compiled
    return found | {"repetitions": next((row["repetitions"] for row in values.get("sizes") or []), None)}
