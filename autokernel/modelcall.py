"""A model as a function of named tensors that returns a tuple of tensors, built as KernelBench's own evaluation does.

The judge, the baseline's process and a kernel's process all build theirs here: the same seed before the constructor,
then the reference's values wherever a parameter, buffer or tensor attribute has the same name and shape, then the
device and the precision. A kernel can see this module's frames: nothing here leads to anything of the judge.
"""

from __future__ import annotations

from typing import Any

import torch


class ModelCall:
    """model: an nn.Module, or what torch.compile made of it. template: forward's arguments, see `named`.

    state: tensors that a call changes and the next one reads; `reset` puts them back.
    """

    def __init__(self, model: Any, owner: torch.nn.Module, template: Any, state: dict[str, torch.Tensor]):
        self.model, self.owner, self.template, self.state = model, owner, template, state

    def __call__(self, **tensors: torch.Tensor) -> tuple:
        return flat(self.model(*rebuilt(self.template, tensors)))

    def reset(self) -> None:
        for name, value in self.state.items():
            place, _, last = name.rpartition(".")
            module = self.owner.get_submodule(place)
            if last in module._buffers:
                module._buffers[last] = value.clone()
            elif last in vars(module):
                setattr(module, last, value.clone())


def build(cls: Any, package: dict, device: Any, compiled: str = "") -> ModelCall:
    """Construct a model. compiled: a mode of torch.compile, or "".

    package: init (the constructor's arguments), seed, precision (a dtype), tensors (the reference's, on the CPU),
    template (see `named`), stateful (whether a call changes what the next one reads).
    """
    dtype = package["precision"]
    init = [v.to(device, dtype if v.is_floating_point() else v.dtype) if torch.is_tensor(v) else v
            for v in package["init"]]  # fmt: skip
    with torch.no_grad():
        torch.manual_seed(package["seed"])
        model = cls(*init)
        own = tensors_of(model)
        for name, value in package["tensors"].items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
        model = model.to(device=device, dtype=dtype)
    parameters = dict(model.named_parameters())
    kept = {n: t.detach().clone() for n, t in tensors_of(model).items() if n not in parameters}
    call = torch.compile(model, mode=compiled, dynamic=False) if compiled else model
    return ModelCall(call, model, package["template"], kept if package["stateful"] else {})


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain tensor attributes by their qualified names."""
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{place}.{name}" if place else name] = value
    return found


def named(inputs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(template, tensors): nested arguments with {"tensor": name} in place of each tensor, and the tensors by name."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = f"x{len(tensors)}"
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, dict):
            return {k: walk(v) for k, v in value.items()}
        return type(value)(walk(v) for v in value) if isinstance(value, (list, tuple)) else value

    return walk(list(inputs)), tensors


def rebuilt(template: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `named`."""
    if isinstance(template, dict):
        if template.keys() == {"tensor"}:
            return tensors[template["tensor"]]
        return {k: rebuilt(v, tensors) for k, v in template.items()}
    if isinstance(template, (list, tuple)):
        return type(template)(rebuilt(v, tensors) for v in template)
    return template


def flat(out: Any) -> tuple:
    """The leaves of what a model returned, None left out."""
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, dict):
        out = tuple(out.values())
    if isinstance(out, (list, tuple)):
        return tuple(leaf for part in out for leaf in flat(part))
    return () if out is None else (out,)
