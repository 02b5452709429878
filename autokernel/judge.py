"""The judge: five stages of correctness for one kernel, asked of a child process, decided here.

It owns inputs, oracle, comparison and outcome, and never imports the kernel. See docs/trust.md for what that buys.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autokernel.compare import Comparison, compare, same_bits
from autokernel.inputs import fill, fresh_generator, perturb
from autokernel.process import Launcher, compilers, kernel_cache
from autokernel.source import KernelSource
from autokernel.spec import STAGES, Case, OpSpec, TensorSpec
from autokernel.worker import Layout, Worker, WorkerFailure, noise, strings

START_SECONDS = 180  # import torch, open the device; a cold disk takes a minute
OUT_OF_MEMORY = "no memory is left for the judge beside the kernel's process, which must not keep so much"


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds. A first call may compile; a timed one may not."""

    load: float = 60.0
    call: float = 60.0


@dataclass
class Stage:
    """What one stage found. outcome is one of records.OUTCOMES, or "not run" after an earlier failure."""

    name: str
    outcome: str = "not run"
    passed: int = 0
    total: int = 0
    failures: list[str] = field(default_factory=list)
    detail: str = ""

    @property
    def line(self) -> str:
        if self.outcome in ("PASS", "not run"):
            return f"PASS ({self.passed} cases)" if self.outcome == "PASS" else self.outcome
        first = self.failures[0] if self.failures else ""
        return f"{self.outcome} ({self.total - self.passed} of {self.total} cases): {first}"


class Bench:
    """A device, and everything drawn and measured on it. One per run; kernels come and go as Workers."""

    stages: tuple[str, ...] = STAGES
    seeded = False  # whether calls draw random numbers of their own
    aliasing = mutating = False  # whether the reference returns an input, or keeps its output; overwrites an input
    repetitions: tuple[int, int] | None = None  # fewest and most timed calls, where not timing.py's

    def __init__(self, spec: OpSpec, device: torch.device, launcher: Launcher | None = None, allow_tf32: bool = False):
        self.spec, self.device, self.launcher, self.allow_tf32 = spec, device, launcher, allow_tf32
        self.on_gpu = device.type == "cuda"
        self.generator = fresh_generator(device)  # of the content that was drawn last
        l2 = torch.cuda.get_device_properties(device).L2_cache_size if self.on_gpu else 0
        self.flush_bytes = max(3 * l2, 1 << 25) if self.on_gpu else 0

    # ---- cases -------------------------------------------------------------------------------------------------

    def layout(self, case: Case) -> Layout:
        return Layout.of(self.spec.tensors(case), *self.spec.outputs(case))

    def fits(self, case: Case) -> bool:
        """Whether a case and its float64 reference fit in the memory that is free, with room to spare."""
        if not self.on_gpu:
            return True
        elements = sum(t.span for t in self.spec.tensors(case).values()) + self.spec.output(case).span
        free, _ = torch.cuda.mem_get_info(self.device)
        return 8 * elements * 6 < 0.8 * free

    def blank(self, layout: Layout) -> torch.Tensor:
        """Noise as large as an input region."""
        private = torch.empty(layout.input_bytes, dtype=torch.uint8, device=self.device)
        noise(private, fresh_generator(self.device))
        return private

    def draw(self, case: Case, layout: Layout) -> torch.Tensor:
        """The judge's private copy of an input region: fresh content, noise between the tensors."""
        # each content from a seed of its own: what was seen of earlier ones says nothing about it
        private, self.generator = self.blank(layout), fresh_generator(self.device)
        fill(self.spec, case, layout.views(private), self.generator)
        return private

    def expected(self, case: Case, layout: Layout, private: torch.Tensor) -> torch.Tensor:
        """The oracle, in float64."""
        doubled = {n: t.double() if t.is_floating_point() else t for n, t in layout.views(private).items()}
        return self.spec.reference(**doubled, **case.scalars)

    def yardstick(self, case: Case, layout: Layout, private: torch.Tensor) -> torch.Tensor:
        """PyTorch's own result in the case's dtype, whose error bounds the kernel's."""
        tensors = layout.views(private)
        if not isinstance(case.layout, str):  # its error is the same, and no backend of it refuses contiguous inputs
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return (self.spec.yardstick or self.spec.baseline)(**tensors, **case.scalars)

    def seed_of(self, private: torch.Tensor) -> int | None:
        """The seed of the calls on these inputs: the first of the noise before them."""
        return int(private[:8].view(torch.int64)) >> 1 & (2**62 - 1) if self.seeded else None

    def judged(self, case: Case, layout: Layout, private: torch.Tensor, *outs: torch.Tensor) -> Comparison:
        """Compare one output with the oracle and the yardsticks, all computed here from the private inputs."""
        (out,), ref, perturbed = outs, self.expected(case, layout, private), None
        if case.stage == "numerical_stability":
            shaken = perturb(layout.views(private), self.generator)
            perturbed = self.spec.reference(**shaken, **case.scalars)
        return compare(
            out, ref, self.yardstick(case, layout, private).to(out.dtype), depth=self.spec.depth(case.size),
            factor=self.spec.tolerance, rms_factor=self.spec.rms_factor, perturbed=perturbed, exact=case.exact,
            allow_tf32=self.allow_tf32, by_element=self.spec.element_limit(case),
        )  # fmt: skip

    def roughly(
        self, case: Case, layout: Layout, private: torch.Tensor, usual: float, *outs: torch.Tensor
    ) -> Comparison:
        """A cheap check of the whole output: PyTorch's rounding is in the yardstick, so the tolerance is wider.

        usual: the rms error that PyTorch makes in this case.
        """
        torch_out = self.yardstick(case, layout, private)
        return compare(
            outs[0], torch_out.double(), depth=self.spec.depth(case.size), factor=4 * self.spec.tolerance,
            rms_factor=self.spec.rms_factor, allow_tf32=self.allow_tf32, usual=usual,
        )  # fmt: skip

    def random_wait(self) -> float:
        """Seconds of wait kernel before an untimed call: of the same kind as before timed ones."""
        return random.SystemRandom().uniform(3e-5, 1e-4)

    def fault_of(self, worker: Worker, case: Case, limits: Limits, replies: list[dict], declared: bool) -> str:
        """Ask one case of one stage; "" if right. declared: the kernel says that it is not deterministic."""
        if case.stage == "determinism":
            if not declared and (fault := determinism_fault(self, worker, case, limits, replies)):
                return fault
            return near_duplicate_fault(self, worker, case, limits, replies)
        return call_fault(self, worker, case, limits, replies)

    # ---- workers -----------------------------------------------------------------------------------------------

    def worker(self, cache: Path, cases: list[Case], under: tuple[str, ...] = ()) -> Worker:
        """A child with room for the largest of the cases."""
        assert self.launcher is not None  # a bench without one only draws and compares
        size = max(self.layout(case).total for case in cases)
        return Worker(self.launcher.take(under), self.device, cache, size)

    def open_kernel(self, source: KernelSource, cases: list[Case], under: tuple[str, ...] = ()) -> Worker:
        """A child with a private copy of the kernel's bytes. It is loaded by `load_kernel`."""
        worker = self.worker(kernel_cache(source.data), cases, under)
        (worker.folder / "kernel.py").write_bytes(source.data)
        return worker

    def load_kernel(self, worker: Worker, limits: Limits, confined: bool = True) -> float:
        """Have the child import its kernel; returns the seconds that took."""
        worker.share(self.flush_bytes, START_SECONDS, confined)
        began = time.perf_counter()
        worker.ask("load", limits.load, path=str(worker.folder / "kernel.py"), **self.model())
        return time.perf_counter() - began

    def load_baseline(self, worker: Worker, compiled: bool) -> None:
        worker.share(self.flush_bytes, START_SECONDS)
        worker.ask("load", START_SECONDS, op=self.spec.name, compile=compiled)

    def model(self) -> dict[str, Any]:
        """What a child must know besides the kernel's file to load it."""
        return {}

    def stage_fresh(self, worker: Worker, case: Case) -> Layout:
        """Stage content for a call whose output nobody will compare; returns the case's layout."""
        layout = self.layout(case)
        worker.stage(layout, self.draw(case, layout))
        return layout

    def compile_ahead(self, source: KernelSource, cases: list[Case], limits: Limits) -> None:
        """Call a new kernel on its cases in several children at once, to fill its compile cache. Nothing is judged.

        One child would compile a dozen variants one after the other; failures show again where they are judged.
        """
        parts = compilers()
        ordered = sorted(cases, key=lambda case: (case.dtype, case.stage, case.name))
        if parts < 2:
            return
        with ThreadPoolExecutor(parts) as pool:
            for part in range(parts):
                mine = ordered[part * len(ordered) // parts : (part + 1) * len(ordered) // parts]
                pool.submit(self._call_each, source, mine, limits)

    def _call_each(self, source: KernelSource, cases: list[Case], limits: Limits) -> None:
        worker = self.open_kernel(source, cases)
        try:
            self.load_kernel(worker, limits)
            for case in cases:
                worker.call(self.stage_fresh(worker, case), case.scalars, limits.call)
        except WorkerFailure:
            pass
        finally:
            worker.close()


# ---- one call -------------------------------------------------------------------------------------------------------


def reply_fault(reply: dict[str, Any], layout: Layout, device: str, aliasing: bool = False) -> str:
    """What is wrong with the object a kernel returned, before its values are looked at; "" if nothing."""
    outs = reply["outs"]
    if len(outs) != len(layout.outputs):
        return f"{len(outs)} outputs, expected {len(layout.outputs)}"
    for number, (out, want) in enumerate(zip(outs, layout.outputs, strict=True)):
        if fault := _output_fault(out, want, device, aliasing):
            return f"output {number}: {fault}" if len(outs) > 1 else fault
    if reply["late"]:
        return "output changed after the call had returned: work was left running"
    if left := strings(reply["left"]):
        return f"kernel.py does more than compute: {', '.join(left)[:300]}"
    return ""


def _output_fault(out: dict[str, Any], want: TensorSpec, device: str, aliasing: bool) -> str:
    if out["type"] != "torch.Tensor":
        return f"kernel.py returned {out['type']}, expected exactly torch.Tensor"
    dtype = str(want.dtype).removeprefix("torch.")
    if out["dtype"] != dtype:
        return f"output dtype {out['dtype']}, expected {dtype}"
    if tuple(out["shape"]) != want.shape:
        return f"output shape {tuple(out['shape'])}, expected {want.shape}"
    if out["layout"] != "torch.strided" or out["attributes"]:
        attributes = ", ".join(strings(out["attributes"])) or "none"
        return f"output is not a plain tensor (layout {out['layout']}, attributes: {attributes})"
    if out["aliases_input"] and not aliasing:
        return "output shares memory with an input"
    if out["aliases_previous"] and not aliasing:
        return "output shares memory with the previous call's output, which is still in use: allocate a new one"
    if out["requires_grad"]:
        return "output requires a gradient: work on detached tensors"
    return f"output on {out['device']}, expected {device}" if out["device"] != device else ""


def ask_once(
    bench: Bench, worker: Worker, case: Case, private: torch.Tensor, limits: Limits, wait: float | None = None
) -> tuple[dict[str, Any], str]:
    """Stage `private`, call the kernel, weigh what it returned but not its values. Returns the reply and the fault."""
    layout = bench.layout(case)
    worker.stage(layout, private)
    wait = bench.random_wait() if wait is None else wait
    reply = worker.call(layout, case.scalars, limits.call, wait, bench.seed_of(private))
    fault = reply_fault(reply, layout, bench.device.type, bench.aliasing)
    if not fault and not bench.mutating and not worker.inputs_untouched(layout, private):
        fault = "an input, or memory beside it, was overwritten"
    return reply, fault


def values_compared(bench: Bench, worker: Worker, case: Case, private: torch.Tensor) -> Comparison:
    """The last call's output against the right values, which are computed only now.

    So until the answer came, the right answer to these inputs existed nowhere; and the arena is looked at again after.
    """
    layout = bench.layout(case)
    result = bench.judged(case, layout, private, *worker.outputs())
    if result.ok and not worker.outputs_settled(layout):
        return replace(result, reason="output was written after the call had been answered: work was left running")
    return result


def value_fault(bench: Bench, worker: Worker, case: Case, private: torch.Tensor) -> str:
    """What is wrong with the values of the last call's outputs; "" if nothing."""
    return values_compared(bench, worker, case, private).reason


def call_fault(bench: Bench, worker: Worker, case: Case, limits: Limits, replies: list[dict]) -> str:
    """Run one case with fresh content; "" if right, else why not."""
    private = bench.draw(case, bench.layout(case))
    reply, fault = ask_once(bench, worker, case, private, limits)
    replies.append(reply)
    return fault or value_fault(bench, worker, case, private)


def determinism_fault(bench: Bench, worker: Worker, case: Case, limits: Limits, replies: list[dict]) -> str:
    """The same inputs three times, another call between: bit for bit the same, whatever memory held before."""
    layout = bench.layout(case)
    private, first = bench.draw(case, layout), None
    for content in (private, bench.draw(case, layout), private, private):
        reply, fault = ask_once(bench, worker, case, content, limits)
        replies.append(reply)
        if fault:
            return fault
        if content is private:
            (out,) = worker.outputs()
            if first is not None and not same_bits(first, out):
                differing = int((first != out).sum())
                return f"{differing} of {out.numel()} elements differ between two runs on the same inputs"
            first = out
    return ""


# ---- the five stages ------------------------------------------------------------------------------------------------


def near_duplicate_fault(bench: Bench, worker: Worker, case: Case, limits: Limits, replies: list[dict]) -> str:
    """Calls whose inputs differ in one random element, or in the order of two: each answer must follow."""
    layout = bench.layout(case)
    private = bench.draw(case, layout)
    for change in ("", "one element changed", "two elements swapped", "one element changed"):
        _nudge(layout.views(private), change)
        reply, fault = ask_once(bench, worker, case, private, limits)
        replies.append(reply)
        if fault := fault or value_fault(bench, worker, case, private):
            return f"after {change}: {fault}" if change else fault
    return ""


def _nudge(tensors: dict[str, torch.Tensor], change: str) -> None:
    """Change one random element of a random tensor, or swap two that differ."""
    dice = random.SystemRandom()
    target = dice.choice([t for t in tensors.values() if t.is_floating_point() and t.numel() > 1])
    pairs = [[tuple(dice.randrange(n) for n in target.shape) for _ in range(2)] for _ in range(8)]
    here, there = max(pairs, key=lambda pair: abs(float(target[pair[0]]) - float(target[pair[1]])))
    if change == "one element changed":
        target[here] = 8.0 + abs(target[here])
    elif change == "two elements swapped":
        target[here], target[there] = target[there].clone(), target[here].clone()


def run_stages(
    bench: Bench,
    worker: Worker,
    cases: list[Case],
    limits: Limits,
    declared_nondeterministic: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    after_smoke: Callable[[], None] = lambda: None,
) -> tuple[list[Stage], list[dict]]:
    """Ask the worker every case, stage by stage, and stop after the first stage that fails.

    Returns the five stages and the raw replies. Every case gets an answer or a failure: nothing is skipped.
    """
    stages = [Stage(name, total=sum(case.stage == name for case in cases)) for name in bench.stages]
    replies: list[dict] = []
    for stage in stages:
        stage.outcome = "PASS"
        for case in (c for c in cases if c.stage == stage.name):
            progress(f"{stage.name}: {case.label}")
            try:
                fault = bench.fault_of(worker, case, limits, replies, declared_nondeterministic)
                outcome = "FAIL"
            except WorkerFailure as failure:
                fault, outcome, stage.detail = str(failure), failure.outcome, failure.detail
            except torch.OutOfMemoryError:
                fault, outcome = OUT_OF_MEMORY, "CRASH"
            if fault:
                stage.outcome = outcome
                stage.failures.append(f"{case.label}: {fault}")
                if outcome != "FAIL":
                    break
            else:
                stage.passed += 1
        if stage.outcome != "PASS":
            break
        if stage is stages[0]:
            after_smoke()
    return stages, replies


def varied(bench: Bench, source: KernelSource, timed: list[Case]) -> list[Case]:
    """Drawn options and layouts at sizes that are timed: each value at the operator's main size, one at each other."""
    spec, accepts = bench.spec, set(source.parameters) - {n for n, a in bench.spec.args.items() if a.optional}
    found: list[Case] = []
    for case in timed:
        most = 99 if case.name == spec.primary else 1
        sizes = {case.name: lambda *_, size=case.size: size}
        for drawn in spec.drawn(sizes, (case.dtype,), accepts, random.SystemRandom(), bench.on_gpu, most=most):
            found.append(replace(drawn, name=case.name, omit=case.omit))
    return [case for case in found if bench.fits(case)]


def correctness_cases(
    bench: Bench, source: KernelSource, primary: list[Case], dtype: str
) -> tuple[list[Case], list[str]]:
    """The cases of a run, primary (target) ones first in the sweep; and the labels of those too large for this GPU."""
    accepts = set(source.parameters) & set(bench.spec.optional_names())
    cases = bench.spec.cases(bench.on_gpu, accepts, random.SystemRandom(), dtype)
    if primary:
        smoke = [replace(primary[0], stage="smoke_test")]
        cases = smoke + [c for c in cases if c.stage != "smoke_test"]
        cases[1:1] = [replace(case, stage="shape_sweep") for case in primary]
    kept = [case for case in cases if bench.fits(case)]
    return kept, [case.label for case in cases if case not in kept]
