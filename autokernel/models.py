"""Any PyTorch model, ready to run: built from a file, a package or a config, with inputs found from the model itself.

What a model takes is read off what it does, never off its name: token ids are drawn below the number of rows of the
embedding that they index, the rank of --input-shape and the first layer decide the rest, and a trial run confirms it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import math
import sys
import textwrap
import traceback
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autokernel import spec
from autokernel.spec import dtype_name

DTYPES = spec.DTYPES | {dtype_name(dtype): dtype for dtype in spec.DTYPES.values()}
SEED = 0
PRINTED = 20  # different lines of a model's own that are shown
ALLOWED = "a tensor, a tuple or list of forward's arguments, or a dict of keyword inputs"
HINT = f"describe them with --inputs FILE.py:function, which returns {ALLOWED}"


class ModelError(ValueError):
    """A model that cannot be built or run; one line with the cause and what to try next."""


@dataclass
class Loaded:
    """A model in eval mode on its device, and one set of inputs. Calling it runs one forward pass without gradients."""

    model: nn.Module
    name: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    notes: list[str] = field(default_factory=list)

    def __call__(self) -> Any:
        return self.call(self.model)

    def call(self, model: Callable[..., Any]) -> Any:
        """One forward pass of another form of the model: compiled, captured. Raises ModelError where it would exit."""
        try:
            with torch.no_grad():
                return model(*self.args, **self.kwargs)
        except SystemExit as error:
            raise ModelError(f"{self.name} ends the process in its forward pass: sys.exit({error.code!r})") from None

    @property
    def dtype(self) -> torch.dtype:
        return model_dtype(self.model)

    @property
    def inputs(self) -> str:
        """The tensor inputs, for people: `ids int64 [1, 512]`."""
        named = {f"{i}": a for i, a in enumerate(self.args)} | self.kwargs
        tensors = {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}
        return ", ".join(f"{'' if k.isdigit() else k + ' '}{dtype_name(t.dtype)} {list(t.shape)}"
                         for k, t in tensors.items())  # fmt: skip


class Printed(io.StringIO):
    """Stands in for stdout while a model runs, many times: each line that it prints goes to stderr once."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        self._rest = ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            if line not in self.lines and len(self.lines) < PRINTED:
                print(line, file=sys.stderr)
            self.lines[line] += 1
        return len(text)

    def notes(self) -> list[str]:
        if self._rest:
            self.write("\n")
        said = f"the model printed {self.lines.total()} lines: each different one once on stderr, {PRINTED} at most"
        return [said] if self.lines else []


# ---- command line ---------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which model to load; `load` reads them."""
    p = parser.add_argument_group("model")
    p.add_argument("--model", type=Path, metavar="FILE", help="Python file that defines the model")
    p.add_argument("--module", metavar="NAME", help="installed package that defines it: transformers, ...")
    p.add_argument("--class-name", metavar="NAME", help="class, or a function that builds the model")
    p.add_argument("--pretrained", metavar="ID_OR_FOLDER", help="weights, given to the class's from_pretrained")
    p.add_argument("--config", type=Path, metavar="JSON_OR_FOLDER", help="build from a config, with random weights")
    p.add_argument("--input-shape", type=_shape, metavar="N,N", help="shape of the input: 1,512 or 8,3,224,224")
    p.add_argument("--inputs", metavar="FILE:FUNC", help="function that returns the inputs: a tensor, tuple or dict")
    p.add_argument("--dtype", default="", choices=list(DTYPES), metavar="NAME",
                   help="float16, bfloat16 or float32 (default: float16 on a GPU, float32 on a CPU)")  # fmt: skip
    p.add_argument("--device", default="", metavar="NAME", help="cuda, cuda:1 or cpu (default: the first GPU)")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in text.replace("x", ",").strip("[]()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like 1,512") from None
    if min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every size must be at least 1")
    return shape


def load(options: argparse.Namespace) -> Loaded:
    """Build the model that the options name, and its inputs; a trial run has succeeded when this returns.

    Raises ModelError.
    """
    device = _device(options.device)
    dtype = DTYPES[options.dtype] if options.dtype else torch.float16 if device.type == "cuda" else torch.float32
    if bool(options.model) == bool(options.module):
        raise ModelError("name the model with either --model FILE or --module PACKAGE, and --class-name")
    source = load_file(options.model) if options.model else _import(options.module)
    factory = _find_class(source, options.class_name, options.model)
    model = _build(factory, source, dtype, device, options)
    loaded = Loaded(model, (type(model) if inspect.isclass(factory) else factory).__name__, device=device)
    loaded.notes += _still_training(model)
    what, hook = _hook(options.inputs, source, model)
    if hook and not options.input_shape:
        with _explained(what, hint=f"; it must return {ALLOWED}"):
            loaded.args, loaded.kwargs = _normalised(hook(), device, model_dtype(model))
        with _explained(f"{loaded.name} with the given inputs ({loaded.inputs or 'no tensor'})", "make them smaller"):
            loaded()
    else:
        find_inputs(loaded, options.input_shape)
        loaded.notes += [f"--input-shape was given: --inputs {options.inputs} is not used"] if options.inputs else []
    return loaded


def _device(name: str) -> torch.device:
    """Raises ModelError for what is no device here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ", ".join([*(f"cuda:{i}" for i in range(count)), "cpu"])
    try:
        device = torch.device(name or ("cuda" if count else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count):
        return device
    raise ModelError(f"--device {name}: no such device here{'' if count else ', there is no GPU'}; allowed: {known}")


def _hook(inputs: str | None, source: ModuleType, model: nn.Module) -> tuple[str, Callable[[], Any] | None]:
    """(what gives the inputs, the function: of --inputs, else example_inputs of the file or the model)."""
    if not inputs:
        return "example_inputs", getattr(source, "example_inputs", None) or getattr(model, "example_inputs", None)
    file, _, function = inputs.rpartition(":")
    if not file:
        raise ModelError(f"--inputs {inputs}: write FILE.py:function")
    hook = getattr(load_file(Path(file)), function, None)
    if not callable(hook):
        raise ModelError(f"--inputs: {file} has no function {function!r}")
    return f"--inputs {inputs}", hook


def as_json(options: argparse.Namespace) -> dict[str, Any]:
    """The model options as plain values, so that verify.py can load the same model: `from_json` reads them back."""
    names = ("model", "module", "class_name", "pretrained", "config", "input_shape", "inputs", "dtype", "device")
    values = {n: getattr(options, n) for n in names}
    return {n: str(v.resolve()) if isinstance(v, Path) else v for n, v in values.items()}


def from_json(values: dict[str, Any]) -> argparse.Namespace:
    paths = {n: Path(values[n]) if values.get(n) else None for n in ("model", "config")}
    return argparse.Namespace(**{**values, **paths, "input_shape": tuple(values.get("input_shape") or ()) or None})


# ---- finding the class ----------------------------------------------------------------------------------------------


def load_file(path: Path) -> ModuleType:
    """Import a Python file as users import it: siblings, package-relative imports and dataclasses work.

    Raises ModelError with the cause and the line.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    root, name = path.parent, path.stem
    while (root / "__init__.py").exists():
        name, root = f"{root.name}.{name}", root.parent
    if str(root) not in sys.path:
        sys.path.append(str(root))  # last: a user's file never shadows a package that we need
    unique = f"autokernel_user_{abs(hash(str(path)))}_{name}"
    with _explained(str(path)):
        if "." in name:
            return importlib.import_module(name)
        if unique not in sys.modules:
            found = importlib.util.spec_from_file_location(unique, path)
            assert found is not None and found.loader is not None
            sys.modules[unique] = importlib.util.module_from_spec(found)
            try:
                found.loader.exec_module(sys.modules[unique])
            except BaseException:
                del sys.modules[unique]
                raise
        return sys.modules[unique]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = "; install it with: uv sync --extra models" if name.split(".")[0] == "transformers" else ""
        raise ModelError(f"--module {name}: {error}{hint}") from None


def _find_class(source: ModuleType, name: str | None, file: Path | None) -> Callable[..., nn.Module]:
    own = [k for k, v in vars(source).items() if file and inspect.isclass(v) and issubclass(v, nn.Module)
           and v.__module__ == source.__name__]  # fmt: skip
    if not name and len(own) == 1:
        name = own[0]
    known = f"; it defines {', '.join(own)}" if own else ""
    if not name:
        raise ModelError(f"name the class with --class-name{known}")
    found = getattr(source, name, None)
    if not callable(found):
        raise ModelError(f"{file or source.__name__} has no class or function {name!r}{known}")
    return found


def _build(
    factory: Any, source: ModuleType, dtype: torch.dtype, device: torch.device, options: argparse.Namespace
) -> nn.Module:
    torch.manual_seed(SEED)
    bare = hasattr(factory, "from_pretrained") and not (options.pretrained or options.config)
    hint = "; give --pretrained ID_OR_FOLDER, or --config JSON_OR_FOLDER for random weights" if bare else ""
    with _explained(f"building {factory.__name__}", f"{device} is too small for it", hint):
        if options.pretrained:
            model = factory.from_pretrained(options.pretrained, dtype=dtype).to(device)
        elif options.config and hasattr(factory, "from_pretrained"):
            model = _from_config(factory, options.config, dtype, device)
        else:
            kwargs = json.loads(options.config.read_text()) if options.config else getattr(source, "model_kwargs", None)
            model = _construct(factory, kwargs or _default_arguments(factory), dtype, device)
        return model.eval()


def _construct(factory: Any, kwargs: dict[str, Any], dtype: torch.dtype, device: torch.device) -> nn.Module:
    try:
        with torch.device(device):  # drawing 7 billion weights takes minutes on a CPU, a second on a GPU
            model = factory(**kwargs)
    except Exception:  # it mixes devices by itself, or does not fit in float32: half precision may
        if device.type == "cpu":
            raise
        torch.cuda.empty_cache()
        model = factory(**kwargs)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{factory.__name__} gave a {type(model).__name__}, expected a torch.nn.Module")
    # as Module.to(dtype) does, except that complex tensors keep their imaginary part
    return model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t).to(device)


def _from_config(factory: Any, path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A transformers class from config.json or a folder that holds one, with random weights. No network."""
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    values = json.loads(file.read_text())
    if model_type := values.pop("model_type", None):
        config = AutoConfig.for_model(model_type, **values)
    elif getattr(factory, "config_class", None):
        config = factory.config_class(**values)
    else:
        raise ModelError(f"{file}: no model_type, which {factory.__name__} needs")
    make = factory.from_config if hasattr(factory, "from_config") else factory._from_config
    with torch.device(device):
        return make(config, dtype=dtype)


def _default_arguments(factory: Any) -> dict[str, Any]:
    """Arguments for required parameters whose annotation can be built without arguments, like a config dataclass."""
    try:
        parameters = inspect.signature(factory).parameters.values()
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (TypeError, ValueError, NameError):
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    try:
        if plain := {hints[name] for name in missing} & {int, float, str, bool}:
            raise TypeError(plain)
        return {name: hints[name]() for name in missing}
    except (KeyError, TypeError):
        raise ModelError(f"{factory.__name__} needs {', '.join(missing)}: set model_kwargs = {{{missing[0]!r}: ...}} "
                         "in the file, or give them as --config FILE.json") from None  # fmt: skip


# ---- inputs ---------------------------------------------------------------------------------------------------------


class _Tokens(TorchFunctionMode):
    """Watches embeddings during a trial run: which one takes the ids, and whether every index lies inside."""

    def __init__(self, ids: torch.Tensor | None):
        super().__init__()
        self.ids = ids
        self.own = self.likely = 0  # rows of the table that the ids index, for sure and likely

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            index = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if isinstance(index, torch.Tensor) and index.numel():
                self._note(index, weight.shape[0])
                if int(index.max()) >= weight.shape[0]:  # on a GPU this would be an assert that ends the process
                    raise _TooLong(weight.shape[0], int(index.max()))
        return func(*args, **kwargs)

    def _note(self, index: torch.Tensor, rows: int) -> None:
        if self.ids is None:
            return
        if index.untyped_storage().data_ptr() == self.ids.untyped_storage().data_ptr():
            self.own = self.own or rows
        elif index.numel() == self.ids.numel() and not index.any():  # a copy of the ids, which are all zero
            self.likely = self.likely or rows


class _TooLong(Exception):
    """A position beyond a table of positions."""

    def __init__(self, rows: int, index: int):
        super().__init__(f"index {index} is beyond an embedding of {rows} rows: give a shorter --input-shape")
        self.rows = rows


def find_inputs(loaded: Loaded, shape: tuple[int, ...] | None) -> None:
    """Set inputs that the model accepts, of the given shape or of a usual one. Raises ModelError: what was tried."""
    model, failures = loaded.model, defaultdict[str, list[str]](list)  # cause -> what was tried
    name, extra = _parameters(model)
    for kind in _kinds(model, name, shape):
        asked = shape or _usual_shape(model, kind)
        try:
            loaded.args, loaded.kwargs = _make(loaded, kind, asked, name, extra)
            return
        except _TooLong as error:
            if shape or len(asked) < 2:
                raise ModelError(f"{loaded.name} with ids {list(asked)}: {error}") from None
            loaded.args, loaded.kwargs = _make(loaded, kind, (*asked[:-1], error.rows), name, extra)
            return
        except torch.OutOfMemoryError:
            raise _too_large(loaded, asked, partial(_make, loaded, kind, name=name, extra=extra)) from None
        except Exception as error:
            failures[_cause(error)].append(f"{kind} {list(asked)}")
    tried = "; ".join(f"{', '.join(kinds)}: {cause}" for cause, kinds in failures.items())
    if shape:
        raise ModelError(f"--input-shape {','.join(map(str, shape))} does not fit {loaded.name} ({tried}); "
                         f"{_longest(model)}give another, or {HINT}")  # fmt: skip
    raise ModelError(f"{loaded.name} cannot run on one tensor ({tried}); give --input-shape, or {HINT}")


def _longest(model: nn.Module) -> str:
    length = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return f"it has {length} positions: " if isinstance(length, int) else ""


def _make(
    loaded: Loaded, kind: str, shape: tuple[int, ...], name: str | None, extra: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Inputs of one kind after a successful trial: (args, kwargs)."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = kind == "token ids"
    if tokens:
        tensor = torch.zeros(shape, dtype=torch.int64)  # index 0 exists in every vocabulary
    else:
        tensor = torch.randn(shape, generator=generator).to(model_dtype(loaded.model))
    tensor = tensor.to(loaded.device)
    extra = {k: tensor if v is ... else v for k, v in extra.items()}
    args, kwargs = ((tensor,), extra) if name is None else ((), {name: tensor, **extra})
    with _Tokens(tensor if tokens else None) as seen, torch.no_grad():
        replace(loaded, args=args, kwargs=kwargs)()
    if tokens:
        if not (seen.own or seen.likely):
            raise ModelError("no embedding takes the ids")
        tensor.copy_(torch.randint(0, seen.own or seen.likely, shape, generator=generator))
    return args, kwargs


def _parameters(model: nn.Module) -> tuple[str | None, dict[str, Any]]:
    """(keyword of the input, or None for positional; further keywords). `...` stands for the input tensor itself."""
    parameters = inspect.signature(model.forward).parameters
    required = [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(required) > 1:
        raise ModelError(f"forward needs {len(required)} arguments ({', '.join(required)}): {HINT}")
    name = getattr(model, "main_input_name", None)
    if name not in parameters and not (name and any(p.kind is p.VAR_KEYWORD for p in parameters.values())):
        first = next(iter(parameters.values()), None)
        name = first.name if first is not None and first.kind is first.KEYWORD_ONLY else None
    config = getattr(model, "config", None)
    extra: dict[str, Any] = {}
    if "use_cache" in parameters or getattr(config, "use_cache", False):
        extra["use_cache"] = False  # one forward pass is measured: filling a cache nobody reads is not part of it
    if getattr(config, "is_encoder_decoder", False):
        extra["decoder_input_ids"] = ...
    return name, extra


def _kinds(model: nn.Module, name: str | None, shape: tuple[int, ...] | None) -> list[str]:
    """What to try, likeliest first."""
    first = next((m for m in model.modules() if isinstance(m, (nn.Embedding, *_SHAPED))), None)
    tokens_first = name == "input_ids" or (name is None and isinstance(first, nn.Embedding))
    if (shape and len(shape) > 2) or name == "pixel_values":
        tokens_first = False
    return ["token ids", "floats"] if tokens_first else ["floats", "token ids"]


_SHAPED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def _usual_shape(model: nn.Module, kind: str) -> tuple[int, ...]:
    config = getattr(model, "config", None)
    if kind == "token ids":
        return (1, min(512, getattr(config, "max_position_embeddings", None) or 512))
    layer = next((m for m in model.modules() if isinstance(m, _SHAPED)), None)
    if isinstance(layer, nn.Linear):
        return (8, layer.in_features)
    if isinstance(layer, nn.Conv1d):
        return (1, layer.in_channels, 1024)
    size = getattr(config, "image_size", None) or 224
    size = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    channels = layer.in_channels if layer is not None else 3
    return (1, channels, 16, *size) if isinstance(layer, nn.Conv3d) else (1, channels, *size)


def _normalised(given: Any, device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    """What a hook returned -> (args, kwargs), moved to the device and floats cast to the model's dtype.

    Raises TypeError for what is neither a tensor nor a tuple, list or dict.
    """
    move = partial(pytree.tree_map_only, torch.Tensor, lambda t: t.to(device, dtype if t.is_floating_point() else None))
    if hasattr(given, "keys"):  # a dict, or a tokenizer's BatchEncoding
        return (), move({k: given[k] for k in given.keys()})
    if isinstance(given, (list, tuple)):
        return tuple(move(given)), {}
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"it returned {textwrap.shorten(repr(given), 60, placeholder=' ...')}, "
                        f"a {type(given).__name__}")  # fmt: skip
    return (move(given),), {}


# ---- what can go wrong ----------------------------------------------------------------------------------------------


def model_dtype(model: nn.Module) -> torch.dtype:
    """dtype of the first floating-point parameter, float32 if there is none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _still_training(model: nn.Module) -> list[str]:
    active = [n for n, m in model.named_modules() if m.training and not list(m.children())]
    if not active:
        return []
    return [f"{len(active)} modules stay in train mode after eval() (first: {active[0]}): dropout there is random"]


def _too_large(loaded: Loaded, shape: tuple[int, ...], attempt: Callable[[tuple[int, ...]], Any]) -> ModelError:
    """The error for a shape that does not fit, with the largest halved one that does."""
    smaller = list(shape)
    while math.prod(smaller[:2]) > 1:
        axis = 0 if smaller[0] > 1 else 1
        if axis == 1 and len(smaller) != 2:
            break  # only a batch, or a number of tokens, can shrink
        smaller[axis] //= 2
        torch.cuda.empty_cache()
        try:
            attempt(tuple(smaller))
        except torch.OutOfMemoryError:
            continue
        fits = ",".join(map(str, smaller))
        return ModelError(f"{loaded.name} runs out of memory at {list(shape)}; this fits: --input-shape {fits}")
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters()) / 2**30
    return ModelError(f"{loaded.name} runs out of memory even at {smaller}: its weights alone take {weights:.1f} GiB")


@contextlib.contextmanager
def _explained(what: str, too_large: str = "", hint: str = "") -> Iterator[None]:
    """Any error as a ModelError: one line with the cause."""
    try:
        yield
    except ModelError:
        raise
    except torch.OutOfMemoryError:
        raise ModelError(f"{what} runs out of memory: {too_large}") from None
    except (Exception, SystemExit) as error:  # a file that calls sys.exit() is no reason to end without a word
        raise ModelError(f"{what}: {_cause(error)}{hint}") from error


def _cause(error: BaseException) -> str:
    """One line: the exception, and the deepest line outside of PyTorch that raised it."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "torch" not in Path(f.filename).parts]
    frames = [f for f in frames if Path(f.filename).resolve() != Path(__file__).resolve() and f.filename[0] != "<"]
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:296] + ' ...'}{where}"
