"""Where does a model's time go? By site (one operator call of the model) and real shape.

Writes workspace/profile.json for extract.py and prints one row per target: sites of the same operator, shape, dtype and
layout. Times are device time of one forward pass on a GPU, CPU time on a CPU. Exit status 0, or 2 with one line on why
the model could not be profiled.

    uv run profile.py --model models/gpt2.py --class-name GPT2 --input-shape 1,1024 --dtype float16
    uv run profile.py --module transformers --class-name AutoModelForCausalLM --pretrained gpt2 --input-shape 1,512
    uv run profile.py --module transformers --class-name AutoModel --config config.json --compile-baseline --plot
"""

import sys

if __name__ == "profile":  # `import profile` means the standard module, which cProfile and torch.compile need
    import importlib.util
    import sysconfig

    _spec = importlib.util.spec_from_file_location("profile", f"{sysconfig.get_path('stdlib')}/profile.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules["profile"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["profile"])
else:
    import argparse
    import contextlib
    import json
    import logging
    import os
    import time
    from pathlib import Path

    from autokernel.cli import Parser  # isort: skip  (says what is missing before anything else misses it)
    import torch

    from autokernel import models, profiling, report, tables
    from autokernel.graph import one_line
    from autokernel.paths import atomic_write, shared, workspace


def parser() -> "argparse.ArgumentParser":
    p = Parser(__doc__)
    models.add_options(p)
    o = p.add_argument_group("output")
    o.add_argument("--top", type=int, default=25, metavar="N", help="rows to print (default: 25); the file has all")
    o.add_argument("--compile-baseline", action="store_true", help="time torch.compile too (minutes for a large model)")
    files = {
        "--export-trace": ("trace.json", "keep the Chrome/Perfetto trace of the model as it is"),
        "--memory-snapshot": ("memory_snapshot.pickle", "record allocations of one pass for pytorch.org/memory_viz"),
        "--torch-compile-log": ("torch_compile.log", "log graph breaks, recompiles and code of torch.compile"),
        "--plot": ("profile.png", "draw the targets as a bar chart"),
    }
    for option, (name, text) in files.items():
        o.add_argument(option, nargs="?", const=name, type=_output, metavar="FILE", help=text)
    o.add_argument("--json", action="store_true", help="print the record instead of the table")
    return p


def main() -> int:
    args, start, printed = parser().parse_args(), time.perf_counter(), models.Printed()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # graph breaks are notes of the report
    try:
        with report.progress() as progress, contextlib.redirect_stdout(printed):
            progress("building the model")
            loaded = models.load(args)
            extra = [_compile_log(args.torch_compile_log)] if args.torch_compile_log else []
            compiled = args.compile_baseline or args.torch_compile_log is not None
            found = profiling.profile(loaded, compiled, args.export_trace, progress)
            extra += [_memory_snapshot(loaded, args.memory_snapshot)] if args.memory_snapshot else []
    except models.ModelError as error:
        print(f"profile.py: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"profile.py: out of memory while profiling ({str(error).splitlines()[0]}); "
              "give a smaller --input-shape", file=sys.stderr)  # fmt: skip
        return 2
    except Exception as error:  # whatever a model raises in a later pass
        if os.environ.get("AUTOKERNEL_TRACEBACK"):
            raise
        print(f"profile.py: {one_line(error)}; AUTOKERNEL_TRACEBACK=1 in the environment shows where", file=sys.stderr)
        return 2
    extra += [profiling.plot(found, args.plot)] if args.plot else []
    extra += [f"trace: {args.export_trace}"] if args.export_trace else []
    found.values["notes"] += extra + printed.notes()
    found.values |= {"seconds": time.perf_counter() - start, "options": models.as_json(args)}
    path = shared() / "profile.json"
    atomic_write(path, (json.dumps(found.record(), indent=1) + "\n").encode())
    print(path.read_text() if args.json else tables.summary(found.record(), args.top))
    if not args.json:
        print(f"\nwritten in {found.values['seconds']:.1f} s: {path}")
        print("next: uv run extract.py --top 5" if found.targets else "there is nothing to extract")
    return 0


def _output(given: str) -> "Path":
    return Path(given) if "/" in given else workspace() / given


def _compile_log(path: "Path") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch._logging.set_logs(graph_breaks=True, recompiles=True, output_code=True)
    handler = logging.FileHandler(path, mode="w")
    for name in ("torch", "torch._dynamo", "torch._inductor"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    return f"torch.compile log: {path}"


def _memory_snapshot(loaded: "models.Loaded", path: "Path") -> str:
    if loaded.device.type != "cuda":
        return "--memory-snapshot needs a GPU: the CPU allocator records nothing"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    loaded()
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    return f"memory snapshot: {path} (open it at pytorch.org/memory_viz)"


if __name__ == "__main__":
    sys.exit(main())
