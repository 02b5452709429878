"""What a kernel can see of the judge's code in its own process: nothing here leads to anything else."""

from __future__ import annotations

Failure = type("Failure", (list,), {})  # [the exception]; a class without functions


def outcome(function, args, kwargs):
    """What a function returns, or the exception that it raises as a value."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - SystemExit from a kernel is an answer too
        return Failure([error])


def prepare_interpreter() -> None:
    """Make Triton's interpreter do what hardware does, and autotuned kernels run in it.

    It truncates float32 to bfloat16, hardware rounds to nearest. Autotuning finds nothing to time: the first
    configuration is taken.
    """
    import numpy
    import torch
    from triton import language
    from triton.runtime import autotuner, interpreter

    original = interpreter._convert_float

    def convert(data, input_dtype, output_dtype, rounding_mode):
        if input_dtype == language.float32 and output_dtype == language.bfloat16:
            values = torch.from_numpy(numpy.array(data, copy=True)).view(torch.float32)
            return values.to(torch.bfloat16).view(torch.int16).numpy().view(numpy.uint16)
        return original(data, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert
    autotuner.Autotuner._bench = lambda self, *args, config, **options: [0.0, 0.0, 0.0]
