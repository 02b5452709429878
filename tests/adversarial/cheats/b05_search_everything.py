"""B5 the runner: search every object that can be reached from here for the code that holds the clock."""

import gc
import sys
import types

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"


def way_in(*roots):
    seen, todo = set(), list(roots)
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, types.CodeType)):
            continue
        seen.add(id(value))
        code = getattr(value, "__code__", None) if type(value) is types.FunctionType else None
        code = value.gi_code if type(value) is types.GeneratorType else code
        if code is not None and code.co_filename.endswith("autokernel/runner.py"):
            return value
        todo += gc.get_referents(value)
        todo += type.__subclasses__(value) if isinstance(value, type) else []
    raise RuntimeError(f"no way in among {len(seen)} objects")


def kernel_fn(x, dim=-1):
    way_in(sys.modules, object, x, sys._current_frames())
    return torch.softmax(x, dim)
