"""What a call's tensors are like besides their values. Loaded by runner.py, run in steps of their own.

A kernel decides what its objects answer when they are asked. So they are asked by functions in C that were looked up
before a kernel was here, from frames that lead to nothing but this, and the runner gets the answers as plain data.
"""

import builtins

__builtins__ = dict(vars(builtins))  # as in runner.py

# ruff: noqa: E402
from sys import getrefcount

FOREIGN_KEPT, FOREIGN_BYTES = 256, 1 << 28  # results in memory that is not PyTorch's: how many are kept, and how much


def observer(torch, device, arena: tuple[int, int], kept: list, changed):
    """(meet, look, holders, old): functions about inputs and results, and a list that holds the last result's storage.

    arena: its first and last address. kept: takes what the kernel made, to be freed later. changed: names members of
    PyTorch's classes that are not what they were.
    """
    base, exact = torch._C.TensorBase, torch.Tensor
    get = {name: vars(base)[name].__get__ for name in ("dtype", "shape", "layout", "device", "requires_grad", "_base")}
    notes_of, name_of = vars(exact)["__dict__"].__get__, type.__dict__["__name__"].__get__
    storage_of, keys_of, text_of = base.untyped_storage, torch._C._dispatch_keys, torch._C.DispatchKeySet.__repr__
    pointer, count, resizable = (getattr(torch._C.StorageBase, n) for n in ("data_ptr", "nbytes", "resizable"))
    handle, use_count = vars(torch._C.StorageBase)["_cdata"].__get__, torch._C._storage_Use_Count
    with torch.inference_mode():
        made_there = torch.empty(1, device=device)
    # wrapped, lazily negated or functional tensors have the type of a plain one and other keys
    plain = {text_of(keys_of(t)) for t in (made_there, torch.empty(1, device=device))}
    met: dict = {}  # id of an input -> what it was like when it was made
    history: list = []  # results of the last calls: (result, first address, last address, storage, is it PyTorch's)
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

    def holders(tensor) -> list[int]:
        """How many hold a tensor's memory: its storage, the tensor and its base, each counted by their owners."""
        if type(tensor) is not exact or text_of(keys_of(tensor)) not in plain:
            return [0, 0, 0]
        origin = get["_base"](tensor)
        storage = use_count(handle(storage_of(tensor))) - (origin is not None)
        return [storage, getrefcount(tensor), getrefcount(origin) if origin is not None else 0]

    def describe(out) -> dict:
        """Facts about the returned object, for the judge to weigh; remembers it."""
        old[:] = [row[3] for row in history[-1:] if row[3] is not None and row[2] > row[1]]
        if type(out) is not exact:
            remember(out, None, 0, 0)
            return {"type": "an object of type " + "".join((name_of(type(out)), ""))}
        layout, keys = get["layout"](out), text_of(keys_of(out))
        storage = storage_of(out) if layout is torch.strided and keys in plain else None
        low = pointer(storage) if storage is not None else 0
        high = low + (count(storage) if storage is not None else 0)
        before = any(low < end and start < high and low < high for _, start, end, _, _ in history)
        remember(out, storage, low, high)
        return {
            "type": "torch.Tensor",
            "dtype": str(get["dtype"](out)).removeprefix("torch."),
            "shape": [int(n) for n in get["shape"](out)],
            "device": get["device"](out).type,
            "layout": str(layout) if keys in plain else keys,
            "attributes": attributes(out),
            "requires_grad": get["requires_grad"](out),
            "aliases_input": bool(low < arena[1] and arena[0] < high and high > low),
            "aliases_previous": before,
        }

    def remember(out, storage, low: int, high: int) -> None:
        """Keep this result until after the next call, and longer where it may lie in a few buffers used in turn."""
        history.append((out, low, high, storage, storage is None or resizable(storage)))
        while len(history) > 1 and (history[-1][4] or len(history) > FOREIGN_KEPT or total() > FOREIGN_BYTES):
            kept.append(history.pop(0))

    def total() -> int:
        return sum(high - low for _, low, high, _, _ in history)

    def look(inputs: dict, want: tuple, out) -> dict:
        """Facts about a call: "out" as in `describe`; "left": what it changed; "fits": can it be compared; "old": is
        there the result of an earlier call in `old`."""
        moved = [name for name, value in inputs.items() if known(value) != met[id(value)] or attributes(value)]
        left = [f"another {name}" for name in changed()] + [f"another tensor in place of {name}" for name in moved]
        said = describe(out)
        dtype, shape, device = want
        fits = said["type"] == "torch.Tensor" and said["layout"] == "torch.strided" and said["dtype"] == dtype
        fits = fits and said["shape"] == shape and said["device"] == device
        return {"out": said, "left": left, "fits": fits, "old": bool(old)}

    return meet, look, holders, old
