"""What a kernel's process must be like between calls, and how it is noticed that it is not. Loaded by runner.py.

Everything that is used while a kernel is here is looked up before, and is C where the kernel's code could be called.
"""

import builtins

__builtins__ = dict(vars(builtins))  # as in runner.py

# ruff: noqa: E402
import _signal
import _thread
import contextlib
import gc
import inspect
import json
import operator
import os
import sys
import time
from collections import OrderedDict
from functools import partial
from itertools import repeat
from sys import _getframe as getframe

inspect_file = inspect.__file__


def settings_of(torch) -> dict:
    """Process-wide settings of PyTorch by name, as functions in C: a change would reach the model around the kernel."""
    c = torch._C
    found = {
        "a torch function mode": c._len_torch_function_stack,
        "a torch dispatch mode": c._len_torch_dispatch_stack,
        "torch.set_default_dtype": torch.get_default_dtype,
        "torch.set_num_threads": torch.get_num_threads,
        "torch.set_grad_enabled": torch.is_grad_enabled,
        "torch.inference_mode": torch.is_inference_mode_enabled,
        "torch.autocast": torch.is_autocast_enabled,
        "torch.set_flush_denormal": partial(operator.mul, 5e-324, 1.0),
        "torch.use_deterministic_algorithms": c._get_deterministic_algorithms,
        "torch.backends.cudnn.benchmark": c._get_cudnn_benchmark,
        "torch.set_num_interop_threads": torch.get_num_interop_threads,
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled,
        "torch.manual_seed": torch.default_generator.initial_seed,
        "gc.set_threshold": gc.get_threshold,
    }
    flags = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp", "mkldnn", "cudnn", "nnpack")
    for name, getter in ((f"torch.backends {flag}", getattr(c, f"_get_{flag}_enabled", None)) for flag in flags):
        if getter:
            found[name] = getter
    hooks = tuple(v for v in vars(torch.nn.modules.module).values() if type(v) is OrderedDict)
    found["a hook on every module"] = partial(operator.countOf, hooks, {})
    for kind in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation"):
        if getter := getattr(c, f"_get_cublas_allow_{kind}", None):
            found[f"torch.backends.cuda.matmul.allow_{kind}"] = getter
    if precision := getattr(c, "_get_fp32_precision_getter", None):
        for place in (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul")):
            found[f"float32 precision of {' '.join(place)} (allow_tf32)"] = partial(precision, *place)
    else:
        found["allow_tf32"] = c._get_cublas_allow_tf32
    return found


def settings_of_gpu() -> dict:
    """Callbacks that PyTorch would call as the device's events are recorded."""
    from torch.cuda import _gpu_trace

    lists = tuple(v.callback_list for v in vars(_gpu_trace).values() if hasattr(v, "callback_list"))
    return {"a callback at events of the GPU": partial(operator.countOf, lists, [])}


def watch(torch, settings: dict):
    """What follows every run of a kernel's code, in C: it looks up and takes away what would run that code from ours.

    Returns (steps after any wait, steps after a run, steps directly after a kernel's call, a function that reads from
    the results of the latter two what was left behind). Values that could be the kernel's own objects are compared by
    identity, which runs no code of theirs.
    """
    from torch._C._dynamo.eval_frame import set_eval_frame

    signals = [n for n in range(1, _signal.NSIG) if n not in (9, 19, 32, 33) and _signal.getsignal(n) is not None]
    handlers, threads = [_signal.getsignal(n) for n in signals], _thread._count()
    sets = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
    raw, invoke = torch._C.DispatchKeySet.raw_repr, operator.methodcaller("__call__")
    names, getters = list(settings), list(settings.values())
    saved = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
    modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack, gc.isenabled
    unset = {"none": "ieee"}  # a precision that was never set, and one that was put back
    before, keys = [unset.get(value, value) for value in (getter() for getter in getters)], [raw(f()) for f in sets]
    tools, events, listen = monitors()
    clear = [partial(sys.setprofile, None), partial(sys.settrace, None), partial(set_eval_frame, None)]
    look = [partial(_signal.setitimer, 0, 0), partial(list, gc.callbacks), sys.getprofile, sys.gettrace, *clear]
    look += [gc.callbacks.clear, gc.disable, *getters]
    set_handler, own = _signal.signal, partial(sys.setswitchinterval, 1e5)
    say = partial(os.write, 2, b"\nRunningThreadError: kernel.py left a thread running\n")
    end = partial(list, map(invoke, (say, partial(os._exit, 1))))
    count, known = _thread._count, {threads: list}.get
    yielded = partial(os.access, "/", 0)  # a function that lets go of the interpreter

    def alone() -> list:
        """Let threads that wait for the interpreter show themselves; a living one ends the process."""
        # own: from now on no thread may ask this one to stand aside before it waits of itself
        return [own, yielded, partial(list, map(invoke, map(known, map(invoke, (count,)), (end,))))]

    def after() -> list:
        signalled = partial(list, map(set_handler, signals, handlers))
        listening = partial(list, map(listen, tools, events, repeat(None)))
        unhooked = partial(list, map(operator.is_, map(invoke, (saved,)), (None,)))
        return [*alone(), signalled, listening, partial(list, map(raw, map(invoke, sets))), unhooked, *look]

    def at_once() -> list:
        """What would run other code, or put it off, in the steps that follow: it may take itself away later."""
        return [partial(list, map(invoke, modes)), partial(list, map(raw, map(invoke, sets)))]

    def left_behind(results: list, was_on: bool = True, modes_then=(0, 0, False), keys_then=keys) -> list[str]:
        found_handlers, listeners, sets_now, unhooked, timer, callbacks, *hooks = results[3:11]
        frames, values = results[13], [unset.get(value, value) for value in results[16:]]
        found = [name for name, value, old in zip(names, values, before, strict=True) if value != old]
        found += ["a signal handler"] * any(a is not b for a, b in zip(found_handlers, handlers, strict=True))
        found += ["an interval timer"] * (timer != (0.0, 0.0))
        found += ["dispatch keys"] * (sets_now != keys or keys_then != keys)
        found += ["a mode entered"] * (list(modes_then) != [0, 0, False]) + ["gc.disable"] * (not was_on)
        found += ["a hook on saved tensors"] * (unhooked != [True])
        found += ["a profile or trace hook"] * any(hook is not None for hook in (*hooks, *listeners))
        found += ["a hook on the evaluation of frames"] * (frames is not None)
        return found + ["a callback of the garbage collector"] * bool(len(callbacks))

    return alone, after, at_once, left_behind


def changed_in(owners: dict, new_too: bool = True):
    """A function that names the members of modules and types that are not what they are now, or are new."""
    seal = [(name, vars(owner), [(k, v) for k, v in vars(owner).items() if f"{name}.{k}" != "torch.manual_seed"])
            for name, owner in owners.items()]  # fmt: skip
    if not new_too:
        seal = [(n, space, [(k, v) for k, v in members if callable(v) or k.startswith("_global_")])
                for n, space, members in seal]  # fmt: skip

    def changed() -> list[str]:
        found = []
        for name, space, members in seal:
            if any(type(key) is not str for key in list(space)):  # whose comparisons are somebody's code
                found.append(f"{name}: names")
                continue
            found += [f"{name}.{key}" for key, value in members if space.get(key) is not value]
            if new_too and len(space) > len(members):
                found += [f"{name}.{key}" for key in space.keys() - dict(members).keys()]
        return found

    return changed


def monitors() -> tuple:
    """Tools and events of sys.monitoring (Python 3.12) side by side, and the function that takes callbacks away."""
    if not hasattr(sys, "monitoring"):
        return (), (), None
    listen, single = sys.monitoring.register_callback, lambda n: n and not n & (n - 1)
    events = [n for n in vars(sys.monitoring.events).values() if isinstance(n, int) and single(n)]
    pairs = []
    for pair in ((tool, event) for tool in range(6) for event in events):
        with contextlib.suppress(ValueError):  # some events have no callback of their own
            listen(*pair, None)
            pairs.append(pair)
    return [tool for tool, _ in pairs], [event for _, event in pairs], listen


def hide() -> list[str]:
    """No list of the garbage collector shows what is here now, nor what will be here when it is asked for.

    Returns a list that will name what kernel.py itself does to look further than its arguments.
    """
    freeze, append, seen, asking = gc.freeze, list.append, [], []
    names = {
        "gc.get_objects": "a look at all objects (gc.get_objects)", "sys.addaudithook": "an audit hook",
        "gc.get_referrers": "a look at all objects (gc.get_referrers)", "sys._getframe": "a look at its callers",
        "object.__getattr__": "a look at its callers",
    }  # fmt: skip

    def guard(event, args):
        if event not in names or asking or (event == "object.__getattr__" and args[1] != "tb_frame"):
            return
        append(asking, True)  # getframe is an event too
        caller = getframe(1)
        asking.clear()
        while caller is not None and caller.f_code.co_filename == inspect_file:
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename.endswith("/kernel.py") and len(seen) < 5:
            append(seen, names[event])
        if event == "gc.get_objects" or event == "gc.get_referrers":
            freeze()
        elif event == "sys.addaudithook":
            raise PermissionError  # so none is added, a library's neither

    gc.collect()
    freeze()
    sys.addaudithook(guard)
    return seen


def watched(torch) -> dict:
    """What a careless or hostile kernel might replace, by name. torch.compile changes torch.manual_seed itself."""
    return {
        "builtins": builtins, "time": time, "json": json, "os": os, "gc": gc, "sys": sys, "operator": operator,
        "__main__": sys.modules["__main__"], "torch": torch, "torch.nn.functional": torch.nn.functional,
        "torch.nn.modules.module": torch.nn.modules.module, "torch._C._nn": torch._C._nn,
        "torch.testing": torch.testing, "torch.cuda": torch.cuda, "torch.cuda.Event": torch.cuda.Event,
        "torch.cuda.Stream": torch.cuda.Stream,
    }  # fmt: skip


def operators_of(dump):
    """A function that says what implements the operators which move the judge's data here, and models' usual ones."""
    names = ["copy_", "bitwise_xor.Scalar_out", "mul.out", "equal", "as_strided", "view", "narrow", "sum.IntList_out"]
    names += ["fill_.Scalar", "nan_to_num", "empty.memory_format", "clone", "_to_copy", "cat", "index.Tensor", "gather"]
    names += ["mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "embedding", "gelu", "relu", "silu"]
    names += ["sigmoid", "tanh", "exp", "rsqrt", "pow.Tensor_Scalar", "add.Tensor", "sub.Tensor", "mul.Tensor"]
    names += ["div.Tensor", "mean.dim", "softmax.int", "_softmax", "_log_softmax", "layer_norm", "native_layer_norm"]
    names += ["rms_norm", "native_group_norm", "native_batch_norm", "native_dropout", "nll_loss_forward"]
    names += ["scaled_dot_product_attention"]
    keys = ("CPU", "CUDA", "Composite", "Autograd", "ADInplaceOrView", "BackendSelect")

    def operators() -> dict[str, list[str]]:
        return {n: [line for line in dump(f"aten::{n}").splitlines() if line.startswith(keys)] for n in names}

    return operators
