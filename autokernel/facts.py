"""What a call's tensors are like besides their values. Loaded by runner.py, run in steps of their own.

A kernel decides what its objects answer when they are asked. So they are asked by functions in C that were looked up
before a kernel was here, from frames that lead to nothing but this, and the runner gets the answers as plain data.
"""

import builtins

__builtins__ = dict(vars(builtins))  # as in runner.py

# ruff: noqa: E402
from functools import partial
from sys import getrefcount

FOREIGN_KEPT, FOREIGN_BYTES = 256, 1 << 28  # results in memory that is not PyTorch's: how many are kept, and how much


def observer(torch, device, arena: tuple[int, int], kept: list, changed):
    """(meet, look, holders, old): functions about inputs and results, and a list of the last results' bytes.

    arena: its first and last address. kept: takes what the kernel made, to be freed later. changed: names members of
    PyTorch's classes that are not what they were.
    """
    base, exact = torch._C.TensorBase, torch.Tensor
    get = {name: vars(base)[name].__get__ for name in ("dtype", "shape", "layout", "device", "requires_grad", "_base")}
    notes_of, name_of = vars(exact)["__dict__"].__get__, type.__dict__["__name__"].__get__
    storage_of, keys_of, text_of = base.untyped_storage, torch._C._dispatch_keys, torch._C.DispatchKeySet.__repr__
    pointer, count, resizable = (getattr(torch._C.StorageBase, n) for n in ("data_ptr", "nbytes", "resizable"))
    cover, blank = base.set_, partial(torch.empty, 0, dtype=torch.uint8, device=device)
    handle, use_count = vars(torch._C.StorageBase)["_cdata"].__get__, torch._C._storage_Use_Count
    with torch.inference_mode():
        made_there = torch.empty(1, device=device)
    # wrapped, lazily negated or functional tensors have the type of a plain one and other keys
    plain = {text_of(keys_of(t)) for t in (made_there, torch.empty(1, device=device))}
    met: dict = {}  # id of an input -> what it was like when it was made
    # of the last calls: (results, of each of them: first address, last address, storage, is it PyTorch's)
    history: list = []
    old: list = []

    def attributes(tensor) -> list[str]:
        """Names that were hung on a tensor; torch.compile keeps notes on the ones that it has seen."""
        names = [name if type(name) is str else "?" for name in list(notes_of(tensor))]
        return sorted(name for name in names if not name.startswith("_dynamo_"))

    def known(tensor) -> tuple:
        shape, strides = tuple(get["shape"](tensor)), base.stride(tensor)
        return base.data_ptr(tensor), shape, strides, get["dtype"](tensor), get["requires_grad"](tensor)

    def meet(tensor) -> None:
        met[id(tensor)] = known(tensor)

    def strided(out) -> bool:
        return type(out) is exact and get["layout"](out) is torch.strided and text_of(keys_of(out)) in plain

    def holders(outs: list, whole: int) -> list[list[int]]:
        """How many hold each result's memory: its storage, the tensor and its base, each counted by their owners.

        whole: how many hold what the call returned. Results may share one memory, or be one tensor.
        """
        rows, several = [], list(filter(strided, outs))
        shared = 4 * (len(several) - len({handle(storage_of(out)) for out in several}))
        for out in several:
            origin = get["_base"](out)
            storage = use_count(handle(storage_of(out))) - (origin is not None)
            counts = storage, getrefcount(out), getrefcount(origin) if origin is not None else 0
            rows.append([*[n - shared for n in counts], whole])
        return rows

    def memory(out) -> tuple:
        if not strided(out):
            return 0, 0, None, True
        storage = storage_of(out)
        return pointer(storage), pointer(storage) + count(storage), storage, resizable(storage)

    def bytes_of(out):
        """The memory that a result covers, of a storage that may be far larger."""
        shape, strides, size = get["shape"](out), base.stride(out), get["dtype"](out).itemsize
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        storage = storage_of(out)
        return cover(blank(), storage, base.data_ptr(out) - pointer(storage), (span * size,), (1,))

    def coverable(out) -> bool:
        return strided(out) and get["device"](out).type == device.type and base.numel(out) > 0

    def described(out, low: int, high: int) -> dict:
        """Facts about one result, for the judge to weigh."""
        if type(out) is not exact:
            return {"type": "an object of type " + "".join((name_of(type(out)), ""))}
        keys = text_of(keys_of(out))
        return {
            "type": "torch.Tensor",
            "dtype": str(get["dtype"](out)).removeprefix("torch."),
            "shape": [int(n) for n in get["shape"](out)],
            "device": get["device"](out).type,
            "layout": str(get["layout"](out)) if keys in plain else keys,
            "attributes": attributes(out),
            "requires_grad": get["requires_grad"](out),
            "aliases_input": bool(low < arena[1] and arena[0] < high and high > low),
            "aliases_previous": any(low < b and a < high and low < high for _, row in history for a, b, *_ in row),
        }

    def remember(outs: list, row: list) -> None:
        """Keep these results until after the next call, and longer where they may lie in a few buffers used in turn."""
        history.append((outs, row))
        ours = all(resizes for *_, resizes in row)
        while len(history) > 1 and (ours or len(history) > FOREIGN_KEPT or total() > FOREIGN_BYTES):
            kept.append(history.pop(0))

    def total() -> int:
        return sum(high - low for _, row in history for low, high, *_ in row)

    def look(inputs: dict, wants: list, outs: list) -> dict:
        """Facts about a call: "outs" as in `described`; "left": what it changed; "fits": can all be compared with
        wants, (dtype, shape, device) each; "old": are there results of an earlier call in `old`."""
        moved = [name for name, value in inputs.items() if known(value) != met[id(value)] or attributes(value)]
        left = [f"another {name}" for name in changed()] + [f"another tensor in place of {name}" for name in moved]
        old[:] = [bytes_of(out) for last, _ in history[-1:] for out in last if coverable(out)]
        row = [memory(out) for out in outs]
        said = [described(out, low, high) for out, (low, high, *_) in zip(outs, row, strict=True)]
        remember(outs, row)
        fits = len(outs) == len(wants) and all(map(strided, outs))
        fits = fits and [[one["dtype"], one["shape"], one["device"]] for one in said] == wants
        return {"outs": said, "left": left, "fits": fits, "old": bool(old)}

    return meet, look, holders, old
