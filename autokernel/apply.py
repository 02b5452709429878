"""Kernels back in their model: which kernel serves which site, and a forward pass that calls them.

    with autokernel.load().apply(model):     # or, for good: autokernel.load().apply(model); .remove() takes them out
        model(ids)

The first call with inputs of a new shape captures the model, finds its sites and proves them. A kernel serves the sites
whose operator, shapes, strides, dtypes and scalars are those of the target it was checked for; whatever else the model
calls stays what it was. Calls are counted by route. Under torch.compile the kernels are custom operators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from autokernel import ops, paths, sites
from autokernel.exposed import prepare_interpreter
from autokernel.graph import Capture, Graph
from autokernel.sites import Site
from autokernel.source import BACKENDS, KernelError, KernelSource, read_kernel
from autokernel.targets import TargetError, read_target

UNSERVED = "no kernel for inputs of this shape"
OTHER_VALUES = "a mask or table is not what its sites were proven with: those stayed PyTorch's"
PARTED = "torch.compile found nothing to capture but the child modules: kernels from the next call on"
UNSERVED_SHAPES = 8  # so many input shapes without a kernel are looked into; others go to the original unseen
STARTERS = {"triton": "kernels", "cuda": "kernels/cuda"}
COMPILER_MARKS = ("_dynamo_", "_is_torch_compile")
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


class VerifyError(ValueError):
    """Why nothing could be verified; one line with the next command."""


class CallFault(Exception):
    """A kernel that raised, or gave something else than the operator gives, at a site of the model."""

    def __init__(self, kernel: Kernel, site: Site, fault: str):
        super().__init__(f"{kernel.name} at {site.module or 'the model'}: {fault}")
        self.place = site.key, kernel.name

    @classmethod
    def of(cls, kernel: Kernel, site: Site, error: BaseException) -> CallFault:
        return cls(kernel, site, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


# ---- kernels --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel file and what it may be called for.

    key: `Site.key` of its target, "" for a starter, which serves any site of its operator. share: of the model's time,
    when it was profiled. speedup: over PyTorch's operator, as the judge measured.
    """

    name: str
    source: KernelSource
    key: str = ""
    share: float | None = None
    speedup: float | None = None

    def refuses(self, site: Site) -> str:
        """Why it does not serve a site, or ""."""
        if site.op != self.source.kernel_type:
            return f"no kernel for {site.op}"
        if self.key not in ("", site.key):
            return "no kernel for this shape, dtype and layout"
        given = [*site.tensors, *(k for k, v in site.scalars.items() if v != site.spec.scalars[k])]
        missing = [n for n in given if n not in self.source.parameters]
        return f"{self.name} takes no {missing[0]}" if missing else ""

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        return _loaded(self.source.sha256, self.source.data)


@functools.cache
def _loaded(sha256: str, data: bytes) -> Callable[..., torch.Tensor]:
    """kernel_fn of exactly these bytes, whatever happens to the file that they were read from."""
    path = paths.cache_dir() / "kernels" / f"{sha256}.py"
    if not path.is_file() or path.read_bytes() != data:
        paths.atomic_write(path, data)
    name = f"autokernel_kernel_{sha256[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and Triton look it up there
    try:
        if os.environ.get("TRITON_INTERPRET") == "1":
            _prepare_interpreter()
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module.kernel_fn


_prepare_interpreter = functools.cache(prepare_interpreter)


def interpret_on_cpu(device: torch.device | str = "") -> None:
    """Have Triton run in its interpreter where there is no GPU; to be called before anything imports Triton.

    Raises KernelError when it is too late.
    """
    on_gpu = torch.cuda.is_available() and not str(device).startswith("cpu")
    if on_gpu or os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        raise KernelError("on a CPU Triton needs its interpreter, and it was imported without: set TRITON_INTERPRET=1 "
                          "in the environment, or call autokernel.load() before torch.compile")
    os.environ["TRITON_INTERPRET"] = "1"


def _slower(path: Path) -> set[str]:
    """sha256 of the kernels that a verification left out as slower than PyTorch."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        rows = paths.read_object(path)["rows"]
        return {r["sha256"] for r in rows if r["sha256"] and r["ours_us"] and not r["used"]}
    return set()


@dataclass(frozen=True)
class Kernels:
    """Kernels to put into models. notes: kernels of the workspace that are not among them, and why."""

    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def kept(cls, workspace: Path | str | None = None, verified: bool = False) -> Kernels:
        """The best kernel of each target, where the judge passed exactly that file on that target.

        verified: without those that verify.py last found slower than PyTorch in the model. Raises KernelError when
        there is none.
        """
        from autokernel.export import verdict

        folder, kernels, notes = Path(workspace or paths.workspace()), [], []
        slower = _slower(folder / "verify.json") if verified else set()
        for path in sorted((folder / "targets").glob("*_*/best.py")):
            name = path.parent.name
            try:
                target = read_target(path.parent)
                source = read_kernel(path, target.spec.name)
                record, objection = verdict(source, folder, name)
                if source.sha256 in slower:
                    objection = "slower than PyTorch in the model, as verify.py measured"
                if objection:
                    raise KernelError(objection)
                kernels.append(Kernel(name, source, target.key, target.share, record.get("speedup_vs_pytorch")))
            except (KernelError, TargetError) as error:
                notes.append(f"{name} is not used: {error}")
        if not kernels:
            why = f" ({notes[0]})" if notes else ""
            raise KernelError(f"{folder}: no kept kernel{why}; make one with uv run orchestrate.py run, or try the "
                              "starters: uv run verify.py --starters")  # fmt: skip
        return cls(tuple(kernels), tuple(notes))

    @classmethod
    def starters(cls, backends: tuple[str, ...] = BACKENDS) -> Kernels:
        """The untouched starters, each for every site of its operator."""
        found = [(op, b, paths.repo_root() / STARTERS[b] / f"{op}.py") for b in backends for op in ops.names()]
        return cls(tuple(Kernel(f"{op} ({b})", read_kernel(path, op)) for op, b, path in found if path.exists()))

    def apply(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Applied:
        """Have model(...) call the kernels, from now on or, as a context manager, until the end of the block.

        args, kwargs: an example call, made at once; without one the first call does its work. Inference only: with
        gradients, or under autocast, the model runs as it did. Raises KernelError when the model has kernels already.
        """
        if isinstance(getattr(model.__dict__.get("forward"), "__self__", None), Applied):
            raise KernelError("this model has kernels already: take them out with .remove() first")
        applied = Applied(model, self)
        applied.install()
        if args or kwargs:
            with torch.no_grad():
                model(*args, **kwargs)
        return applied


# ---- a model with kernels -------------------------------------------------------------------------------------------

Choice = Mapping[str, Kernel]  # key of sites -> what serves them


@dataclass(eq=False)
class Route:
    """The sites of one key in one model, and the kernels that could serve them.

    inner: sites inside of a larger one, served only where that is not. reason: why there is no candidate. calls: of
    kernels, so far. result: what the kernel gave last (shape, strides and dtype, on meta).
    """

    key: str
    candidates: list[Kernel]
    reason: str = ""
    sites: list[Site] = field(default_factory=list)
    inner: list[Site] = field(default_factory=list)
    calls: int = 0
    result: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Module:
    """A graph with kernels in, as it runs and as torch.compile sees it; the sites that they serve, in order."""

    run: Callable
    traced: Callable
    served: dict[Site, Kernel]
    guards: _Guards


class _Guards:
    """The graph's inputs that sites are proven for the values of: masks, tables, and what they are made from.

    saved: place among the graph's inputs -> what it was at the proof. given: those that a caller gives, which may hold
    anything at the next call; the others are the model's.
    """

    def __init__(self, saved: Mapping[int, Any], given: set[int]):
        self.saved, self.given = saved, given
        self.seen: dict[int, tuple[weakref.ref, int]] = {}
        self.on_gpu = torch.cuda.is_available()  # asked once: a forward pass is no place to count devices

    def hold(self, values: tuple) -> bool:
        """Whether they still have those values. Only tensors that are others or were written to are compared."""
        capturing = bool(self.saved) and self.on_gpu and torch.cuda.is_current_stream_capturing()
        if capturing and self.given:
            return False  # a replay would not look
        for place, then in self.saved.items():
            now = values[place]
            version = None if not isinstance(now, torch.Tensor) or now.is_inference() else now._version
            known = self.seen.get(place)
            if known and known[0]() is now and known[1] == version:
                continue
            if isinstance(now, torch.Tensor):
                if capturing or not torch.equal(now, then):
                    return False
                if version is not None:
                    self.seen[place] = weakref.ref(now), version
            elif now != then:
                return False
        return True


def _without_kernels(model: torch.nn.Module, before: Any) -> Applied:
    copied = Applied.__new__(Applied)
    copied.model, copied._before, copied.is_copy = model, before, True
    return copied


class Applied:
    """A model whose forward pass calls kernels: what `Kernels.apply` returns.

    verifying: look for sites without a kernel too, and keep what `choose` needs. strict: raise CallFault for a kernel
    that does not run in the model; else it is left out and `failed` says why. allow: raises for sites that kernels must
    not be called at, before they are.
    """

    is_copy = False  # of a model that had kernels: it runs the original's forward pass

    def __init__(
        self, model: torch.nn.Module, kernels: Kernels, verifying: bool = False, strict: bool = True,
        progress: Callable[[str], None] = lambda text: None, allow: Callable[[list[Site]], None] = lambda sites: None,
    ):  # fmt: skip
        self.model, self.kernels, self.progress, self.strict = model, kernels, progress, strict
        self.verifying, self.allow = verifying, allow
        self.original = model.forward
        self.capture = Capture(model, self.original, self._prepare, once=True)
        self.routes: dict[str, Route] = {}
        self.modules: dict[Graph, _Module] = {}
        self.failed: dict[tuple[str, str], str] = {}  # (key of sites, kernel) -> what went wrong
        self.originals: Counter[str] = Counter()  # forward passes without any kernel, by reason
        self._choice: Choice | None = None  # None: the first candidate of each route
        self._made: dict[tuple[Graph, frozenset], _Module] = {}
        self._fallbacks: dict[_Module, _Module] = {}
        self._saved: dict[Graph, dict[fx.Node, Any]] = {}  # inputs that claims were proven with
        self._displaced: set[Site] = set()  # their inputs lie otherwise once other kernels are in
        self._signatures: dict[Any, bool] = {}  # inputs seen -> do they reach a kernel?
        self._directs: list[_Direct] = []
        self._watched: list[tuple[Graph, tuple, Any]] | None = None
        self._outside = torch.compiler.disable(self.run)
        self._marks = _marks(model)
        self._before = model.__dict__.get("forward")

    def __reduce__(self) -> tuple:  # of a model that is copied or saved: its copy has no kernels
        return _without_kernels, (self.model, self._before)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def install(self) -> None:
        """Have the model itself call the kernels."""
        self.model.forward = self.forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave the model as it was."""
        self.capture.release()
        self.model.__dict__.pop("forward", None)
        if self._before is not None:
            self.model.__dict__["forward"] = self._before
        for owner, names in self._marks:  # what torch.compile leaves on modules and tensors
            for name in [n for n in owner.keys() - names if n.startswith(COMPILER_MARKS)]:
                del owner[name]

    @property
    def served(self) -> list[Site]:
        return [site for module in self.modules.values() for site in module.served]

    def usable(self, route: Route) -> list[Kernel]:
        return [k for k in route.candidates if (route.key, k.name) not in self.failed]

    def report(self) -> str:
        """What was called so far, one line a route."""
        lines = [f"{r.calls:>8}  {r.candidates[0].name}: {r.key}" for r in self.routes.values() if r.candidates]
        return "\n".join(lines + [f"{n:>8}  forward passes of the original: {w}" for w, n in self.originals.items()])

    # ---- a call ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass, with kernels."""
        if self.is_copy:
            forward = self._before or functools.partial(type(self.model).forward, self.model)
            return forward(*args, **kwargs)
        if not torch.compiler.is_dynamo_compiling():
            return self.run(args, kwargs)
        if not _why_original(self.model, args, kwargs):
            for direct in self._directs:
                if direct.fits(args, kwargs):
                    return direct(args, kwargs)
        return self._outside(args, kwargs)  # a first call, or a model of several graphs: a break, but the kernels run

    def run(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        why, signature = _why_original(self.model, args, kwargs), (_signature(args), _signature(kwargs))
        known = self._signatures.get(signature)
        if not why and known:
            return self.capture.again(*args, **kwargs)
        if not why and known is None and list(self._signatures.values()).count(False) < UNSERVED_SHAPES:
            return self._first(signature, args, kwargs)
        if why and not self.originals[why]:
            warnings.warn(f"no kernels: {why}", stacklevel=2)
        self.originals[why or UNSERVED] += 1
        return self.original(*args, **kwargs)

    def _first(self, signature: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """A call with inputs of a new shape: does it reach kernels, and is it one graph?"""
        before, calls = _identities(self.model), sum(g.calls for g in self.capture.graphs)
        watched: list[tuple[Graph, tuple, Any]] = []
        self._watched = watched
        try:
            result = self.capture(*args, **kwargs)
        finally:
            self._watched = None
        if self.capture.parted:  # only now are there graphs: the next call looks for kernels
            self.originals[PARTED] += 1
            return result
        self._signatures[signature] = any(self.modules[g].served for g, _, _ in watched)
        if not self._signatures[signature]:
            self.originals[UNSERVED] += 1
        once = len(watched) == 1 and sum(g.calls for g in self.capture.graphs) == calls + 1
        if once and self._signatures[signature] and before == _identities(self.model):
            with contextlib.suppress(_NotDirect):
                self._directs.append(_Direct(self, watched[0], args, kwargs, result))
        return result

    # ---- graphs ----------------------------------------------------------------------------------------------------

    def choose(self, choice: Choice) -> None:
        """Have these kernels serve these keys, and no others. Raises CallFault."""
        self._choice = choice
        self.modules = {graph: self._module(graph) for graph in self.modules}

    def _prepare(self, graph: Graph, inputs: tuple) -> None:
        """Find the sites of a new graph and put kernels in, tried on copies of what a graph might write to."""
        devices = {t.device for t in inputs if isinstance(t, torch.Tensor) and t.is_cuda}
        graph.inputs = _scratch(graph, inputs)
        try:
            with torch.random.fork_rng(list(devices)), torch.no_grad():
                self._find(graph)
                needed = {n for s in self._sites(graph) for n in s.guards}
                self._saved[graph] = {n: _kept(i) for n, i in zip(graph.origin, inputs, strict=True) if n in needed}
                self.modules[graph] = self._module(graph)
        except BaseException:
            for route in self.routes.values():
                route.sites = [s for s in route.sites if s.graph is not graph]
                route.inner = [s for s in route.inner if s.graph is not graph]
            raise
        finally:
            graph.inputs = graph.inputs if self.verifying else ()

        def run(*values: Any) -> Any:
            module = self.modules[graph]
            if not module.guards.hold(values):
                self.originals[OTHER_VALUES] += 1
                module = self._unguarded(graph)
            out = module.run(*values)
            if self._watched is not None:
                self._watched.append((graph, values, out))
            return out

        graph.run = run

    def _find(self, graph: Graph) -> None:
        def serve(site: Site) -> list[Kernel]:
            return [k for k in self.kernels.kernels if not k.refuses(site)]

        found = sites.find(self.capture, self.progress, [graph], lambda site: self.verifying or bool(serve(site)))
        for site in (*found.sites, *found.inner):
            if site.key not in self.routes:
                own = [k.refuses(site) for k in self.kernels.kernels if k.source.kernel_type == site.op]
                why = next((r for r in own if " takes no " in r), next(iter(own), f"no kernel for {site.op}"))
                self.routes[site.key] = Route(site.key, serve(site), "" if serve(site) else why)
            route = self.routes[site.key]
            (route.inner if site.inside else route.sites).append(site)

    def _module(self, graph: Graph) -> _Module:
        """The graph with the chosen kernels in, tried once."""
        choice = self._choice
        if choice is None:
            choice = {r.key: usable[0] for r in self.routes.values() if (usable := self.usable(r))}
        made = graph, frozenset((key, kernel.name) for key, kernel in choice.items())
        if made not in self._made:
            served = self._tried(graph, choice)
            self._made[made] = self._built(graph, {s: choice[s.key] for s in served})
        return self._made[made]

    def _built(self, graph: Graph, served: dict[Site, Kernel]) -> _Module:
        calls = {s: _counted(self.routes[s.key], kernel, s) for s, kernel in served.items()}
        places = {n: i for i, n in enumerate(graph.origin)}
        given = {places[n] for s in served for n in s.guards if graph.origin[n][0] == "input"}
        # torch.compile does not look at values: there the model's own may not change, the caller's may
        operators = {s: _operator(kernel, s, self.routes[s.key]) for s, kernel in served.items()
                     if not given & {places[n] for n in s.guards}}  # fmt: skip
        saved = {places[n]: self._saved[graph][n] for s in served for n in s.guards}
        return _Module(_quick(sites.replace(graph, calls)), sites.replace(graph, operators), served,
                       _Guards(saved, given))  # fmt: skip

    def _unguarded(self, graph: Graph) -> _Module:
        """The same without the sites that hold for certain values only."""
        full = self.modules[graph]
        if full not in self._fallbacks:
            served = {s: kernel for s, kernel in full.served.items() if not s.guards}
            self._fallbacks[full] = self._built(graph, served)
        return self._fallbacks[full]

    def _sites(self, graph: Graph) -> list[Site]:
        return [s for r in self.routes.values() for s in (*r.sites, *r.inner) if s.graph is graph]

    def _tried(self, graph: Graph, choice: Choice) -> list[Site]:
        """The sites that the choice can serve, in order, after one call of each kernel in its place."""
        moved: set[Site] = set()
        while True:
            served = self._disjoint(graph, choice)
            self.allow(served)
            calls = {s: _checked(choice[s.key], s, self.routes[s.key], moved) for s in served}
            try:
                with torch.no_grad():
                    sites.replace(graph, calls)(*graph.inputs)
                    if any(t.is_cuda for t in graph.inputs if isinstance(t, torch.Tensor)):
                        torch.cuda.synchronize()
            except CallFault as fault:
                if self.strict:
                    raise
                self.failed[fault.place] = str(fault)
                choice = {key: kernel for key, kernel in choice.items() if (key, kernel.name) != fault.place}
            if not moved - self._displaced and calls.keys() == set(self._disjoint(graph, choice)):
                return served
            self._displaced |= moved

    def _disjoint(self, graph: Graph, choice: Choice) -> list[Site]:
        """The sites of a graph with a kernel in the choice; of two that share work the larger one."""
        taken: set[fx.Node] = set()
        served = []
        mine = [s for s in self._sites(graph) if s.key in choice]
        for site in sorted(mine, key=lambda s: -len(s.work)):
            if site not in self._displaced and not taken & set(site.work):
                taken |= set(site.work)
                served.append(site)
        return sorted(served, key=lambda s: s.output)


# ---- kernels as a graph calls them ----------------------------------------------------------------------------------


def _quick(module: fx.GraphModule) -> Callable:
    """The module's forward, by PyTorch's own bindings: calling an operator through torch.ops takes longer to launch."""
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            name = node.target._schema.name.partition("::")[2]
            bindings = (getattr(place, name, None) for place in (torch, torch._C._nn, torch.Tensor))
            own = [b for b in bindings if callable(b) and not isinstance(b, FunctionType)]  # made from the same schema
            # but for losses, whose default is another there, and for lists with gaps, which they do not take
            gaps = any(isinstance(a, (list, tuple)) and None in a for a in node.args)
            other = gaps or any(a.name == "reduction" for a in node.target._schema.arguments)
            node.target = own[0] if own and not other else node.target
    module.recompile()
    return module.forward


def _counted(route: Route, kernel: Kernel, site: Site) -> Callable:
    function = kernel.function

    def call(**arguments: Any) -> torch.Tensor:
        route.calls += 1
        try:
            return function(**arguments)
        except Exception as error:
            raise CallFault.of(kernel, site, error) from error

    call.__name__ = site.op
    return call


def _kept(given: Any) -> Any:
    return given.detach().clone() if isinstance(given, torch.Tensor) else given


def _checked(kernel: Kernel, site: Site, route: Route, moved: set[Site]) -> Callable:
    """The kernel on trial: are the arguments what it was checked for, and is the result what the operator gives?

    Kernels before it may lay them out otherwise than the original: contiguous is what the judge checks of any kernel.
    """

    def call(**arguments: Any) -> torch.Tensor:
        given = [(arguments[n], t.stride()) for n, t in site.tensors.items()]
        if kernel.key and any(a.stride() != strides and not a.is_contiguous() for a, strides in given):
            moved.add(site)
            return site.spec.baseline(**arguments)
        try:
            out = kernel.function(**arguments)
        except (Exception, SystemExit) as error:
            raise CallFault.of(kernel, site, error) from error
        want = site.result
        if not isinstance(out, torch.Tensor) or (out.shape, out.dtype) != (want.shape, want.dtype):
            got = f"{out.dtype} {list(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
            raise CallFault(kernel, site, f"gives {got}, expected {want.dtype} {list(want.shape)}")
        route.result = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
        return out

    return call


def _operator(kernel: Kernel, site: Site, route: Route) -> Callable:
    """The kernel at sites of one key as a custom operator, which torch.compile takes as it is."""
    result, names = route.result, list(site.spec.parameters)
    assert result is not None
    digest = hashlib.sha256(f"{kernel.source.sha256} {route.key} {result.stride()}".encode()).hexdigest()[:16]
    name = f"autokernel::{site.op}_{digest}"
    if name not in _OPERATORS:
        exact = [torch.Tag.needs_exact_strides] if hasattr(torch.Tag, "needs_exact_strides") else []
        torch.library.define(name, site.spec.schema(), tags=[*exact, torch.Tag.pt2_compliant_tag])
        _OPERATORS[name] = route

        def run(*values: Any) -> torch.Tensor:  # the dispatcher leaves out trailing defaults
            _OPERATORS[name].calls += 1
            return kernel.function(**{n: v for n, v in zip(names, values, strict=False) if n in accepted})

        def fake(first: torch.Tensor, *values: Any) -> torch.Tensor:
            return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=first.device)

        accepted = set(kernel.source.parameters)
        torch.library.impl(name, "default", run)
        torch.library.register_fake(name, fake)
    _OPERATORS[name] = route
    return getattr(torch.ops.autokernel, name.partition("::")[2]).default


_OPERATORS: dict[str, Route] = {}  # whose calls an operator counts


def _scratch(graph: Graph, inputs: tuple) -> tuple:
    """The inputs of a graph with copies of all but the parameters: a forward pass may write to buffers."""
    kinds = [kind for kind, _ in graph.origin.values()]  # in the order of the inputs
    return tuple(
        t.clone() if isinstance(t, torch.Tensor) and kind != "parameter" else t
        for t, kind in zip(inputs, kinds, strict=True)
    )


# ---- when not -------------------------------------------------------------------------------------------------------


def _why_original(model: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Why a call is not for kernels, or ""."""
    if torch.is_grad_enabled():
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        if any(t.requires_grad for t in given) or any(p.requires_grad for p in model.parameters()):
            return "gradients are enabled: call the model under torch.no_grad()"
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "under autocast the sites' dtypes differ"
    return ""


def _signature(given: Any) -> Any:
    """What tells calls apart: shapes and dtypes of tensors, plain values, types of anything else."""
    if isinstance(given, torch.Tensor):
        return given.shape, given.dtype, given.device
    if isinstance(given, Mapping):
        return tuple((k, _signature(v)) for k, v in given.items())
    if isinstance(given, (list, tuple)):
        return tuple(map(_signature, given))
    return given if isinstance(given, CONSTANTS) else type(given)


def _identities(model: torch.nn.Module) -> tuple[int, ...]:
    """Which objects are a model's attributes, buffers and hooks; a forward pass may set one beside its graph."""
    held = [item for m in model.modules() for d in (m.__dict__, m._buffers) for item in d.items()]
    hooks = [h for m in model.modules() for d in (m._forward_hooks, m._forward_pre_hooks) for h in d.values()]
    return tuple(id(v) for name, v in held if not name.startswith(COMPILER_MARKS)) + tuple(map(id, hooks))


def _modes(model: torch.nn.Module) -> list[bool]:
    return [m.training for m in model.modules()]


def _marks(model: torch.nn.Module) -> list[tuple[dict, set[str]]]:
    owners = [m.__dict__ for m in model.modules()] + [t.__dict__ for t in (*model.parameters(), *model.buffers())]
    return [(owner, set(owner)) for owner in owners]


# ---- one graph as a function ----------------------------------------------------------------------------------------


class _NotDirect(Exception):
    """The forward pass is more than its graph."""


class _Slot:
    """Stands for a tensor in a result: its place among the graph's outputs and, behind them, the arguments."""

    def __init__(self, place: int):
        self.place = place


class _Direct:
    """A forward pass that is one graph, as a function without torch.compile's own machinery: it can be traced anew."""

    def __init__(self, applied: Applied, run: tuple[Graph, tuple, Any], args: tuple, kwargs: Mapping, result: Any):
        """run: the graph, its inputs and what it gave. Raises _NotDirect."""
        self.applied, self.modes = applied, _modes(applied.model)
        before = _identities(applied.model)

        def unchanged() -> bool:
            """Whether the model's attributes are still those objects, when torch.compile traces it."""
            return before == _identities(applied.model)

        # torch._dynamo.assume_constant_result, whose import would bring Triton before its interpreter can be asked for
        unchanged._dynamo_marked_constant = True  # type: ignore[attr-defined]
        self.unchanged = unchanged
        self.graph, inputs, outputs = run
        leaves, self.spec = pytree.tree_flatten((args, dict(kwargs)))
        self.leaves = [_described(leaf) for leaf in leaves]
        places = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        names = applied.capture.tensor_names()
        self.sources = [places[id(t)] if id(t) in places else names[id(t)][1].split(".") if id(t) in names else t
                        for t in inputs]  # fmt: skip
        slots = {id(t): _Slot(i) for i, t in reversed(list(enumerate((*outputs, *leaves))))}

        def slot(tensor: torch.Tensor) -> _Slot:
            if id(tensor) not in slots:
                raise _NotDirect
            return slots[id(tensor)]

        self.template = mapped(result, slot, torch.Tensor, constants_only=True)

    def fits(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        same = spec == self.spec and self.modes == _modes(self.applied.model) and self.unchanged()
        return same and all(_described(a) == b for a, b in zip(leaves, self.leaves, strict=True))

    def __call__(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        leaves = pytree.tree_flatten((args, dict(kwargs)))[0]
        values = []
        for source in self.sources:
            if isinstance(source, list):
                source = functools.reduce(getattr, source, self.applied.model)
            values.append(leaves[source] if isinstance(source, int) else source)
        found = (*self.applied.modules[self.graph].traced(*values), *leaves)
        return mapped(self.template, lambda slot: found[slot.place], _Slot)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return leaf


def mapped(given: Any, function: Callable[[Any], Any], kind: type = torch.Tensor, constants_only: bool = False) -> Any:
    """A nest of lists, tuples, dicts and dataclasses with a function applied to every leaf of a kind.

    constants_only: raise _NotDirect for a leaf that may hold tensors unseen.
    """
    if isinstance(given, kind):
        return function(given)
    again = functools.partial(mapped, function=function, kind=kind, constants_only=constants_only)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        values = {f.name: again(getattr(given, f.name)) for f in dataclasses.fields(given) if f.init}
        return type(given)(**values)
    if isinstance(given, dict):
        return type(given)(**{k: again(v) for k, v in given.items()}) if type(given) is not dict else {
            k: again(v) for k, v in given.items()}  # fmt: skip
    if isinstance(given, (list, tuple)):
        items = [again(v) for v in given]
        return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
    if constants_only and not isinstance(given, CONSTANTS):
        raise _NotDirect
    return given
