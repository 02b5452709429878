"""B5 the runner: the class that carries exceptions to it learns to look around when it is opened."""


KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"

# under another file's name, so that nobody sees who looks
SOURCE = """
import sys

def slow_the_clock(frame=None):
    frame = frame or sys._getframe(1)
    while frame is not None:
        runner = frame.f_locals.get("self")
        if hasattr(runner, "clock"):
            real, runner.slow = runner.clock, getattr(runner, "slow", False)
            runner.clock = real if runner.slow else lambda: real() / 10
            runner.slow = True
            return True
        frame = frame.f_back
    return False
"""
space = {}
exec(compile(SOURCE, "elsewhere.py", "exec"), space)
slow_the_clock = space["slow_the_clock"]


def walker():
    """A generator's frame, taken early: whenever the generator runs, it shows who is below."""
    while True:
        yield
        slow_the_clock(frames[0])


generator, frames = walker(), []
frames.append(generator.gi_frame)
next(generator)


# as above
SEARCH = """
import sys

def shared():
    frame = sys._getframe(1)
    while "Failure" not in frame.f_globals:
        frame = frame.f_back
    return frame.f_globals["Failure"]
"""
exec(compile(SEARCH, "elsewhere.py", "exec"), space)


def opened(failure, at):
    next(generator)
    return list(failure)[at]


def kernel_fn(x, dim=-1):
    space["shared"]().__getitem__ = opened
    raise ValueError("look into me")
