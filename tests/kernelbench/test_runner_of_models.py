"""What a model may try in the runner: several outputs, its own state, modelcall.py below it on the stack."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_kernelbench import children, judged, named  # noqa: E402, F401

from autokernel import kernelbench as kb  # noqa: E402
from autokernel.judge import Limits  # noqa: E402
from autokernel.kbjudge import ProblemBench, ProblemOptions  # noqa: E402
from autokernel.process import launcher  # noqa: E402
from autokernel.source import read_kernel  # noqa: E402
from autokernel.spec import Case  # noqa: E402
from autokernel.timing import Timing, _launched  # noqa: E402

# `look` ends the process if the runner is below; compiled under another file's name, so that nobody sees who looks
LOOK = '''
import torch
import torch.nn as nn

SOURCE = """
import os
import sys

def look(*_, **__):
    frame = sys._getframe(1)
    while frame is not None:
        if hasattr(frame.f_locals.get("self"), "clock"):
            os._exit(7)
        frame = frame.f_back

def model_call():
    frame = sys._getframe(1)
    while type(frame.f_locals.get("self")).__name__ != "ModelCall":
        frame = frame.f_back
    return frame.f_locals["self"]
"""
space = {}
exec(compile(SOURCE, "elsewhere.py", "exec"), space)
look, model_call = space["look"], space["model_call"]


class Outs(tuple):
    def __iter__(self):
        look()
        return super().__iter__()


class Looks:
    """In place of a method: looks whenever it is looked up."""

    def __init__(self, method):
        self.method = method

    def __get__(self, call, _):
        look()
        return lambda *a, **k: (look(), self.method(call, *a, **k))[1]
'''
GRU = LOOK + """

class ModelNew(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.gru = nn.GRU(sizes[0], sizes[1], 2, bidirectional=True)
        self.kept = []

    def replaced(self, given):
        # from the next call on, ModelCall gives back what `given` makes of the two outputs
        type(model_call()).__call__ = lambda call, **tensors: given(call.model.gru(*tensors.values()))

    def keep(self, given):
        self.kept = [*self.kept[-1:], given]
        return given

    def forward(self, x, h0):
        o, h = self.gru(x, h0)
        LINE
        return o, h
"""
CHEATS = {
    "one_output_kept": ("self.keep(h)", "a reference to its output"),
    "both_kept_in_their_tuple": ("self.replaced(self.keep)", "a reference to its output"),
    "a_tuple_that_looks": ("self.replaced(Outs)", "0 outputs"),
    "a_list": ("self.replaced(list)", "0 outputs"),
    "an_output_that_looks": ("h.untyped_storage = look", "output 1: output is not a plain tensor"),
    "an_output_of_another_type": ("h = nn.Parameter(h)", "output 1: kernel.py returned an object of type Parameter"),
    "an_output_is_an_input": ("h0.copy_(h); h = h0", "output 1: output shares memory with an input"),
    "an_output_on_its_way": ("import threading; threading.Timer(0.05, h.zero_).start()", "left a thread running"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_two_outputs_are_each_looked_at(name, judged):  # noqa: F811
    line, said = CHEATS[name]
    values = judged(named("gru_bidirectional"), GRU.replace("LINE", line))
    assert values["correctness"] in ("FAIL", "CRASH") and said in values["reason"], values["reason"]


@pytest.mark.parametrize("returned", ["return [o, h]", "return o, (h,)", "return {'o': o, 'h': h}"])
def test_two_outputs_in_another_container(returned, judged):  # noqa: F811
    values = judged(named("gru_bidirectional"), GRU.replace("LINE", f"look()\n        {returned}"))
    assert values["correctness"] == "PASS", values["reason"]


def test_the_runner_is_not_below_what_brings_a_state_back(judged):  # noqa: F811
    code = named("keeps_its_state").code
    rnn = LOOK + kb.starter(code, "x").replace("self.hidden = torch.tanh", "self.trap(); self.hidden = torch.tanh")
    rnn = rnn.replace("    def forward(", """    def trap(self):
        call = type(model_call())
        if not isinstance(vars(call)["reset"], Looks):
            call.reset = Looks(vars(call)["reset"])

    def forward(""")
    values = judged(named("keeps_its_state"), rnn)
    assert values["correctness"] == "PASS", values["reason"]


@pytest.mark.parametrize("part", ["gru_bidirectional", "keeps_its_state", "changes_its_input", "dropout", "view_of"])
def test_one_of_many_calls_back_to_back_is_right(part, tmp_path):
    """What a GPU run takes for launch_us, here on a CPU."""
    what, path = named(part), tmp_path / "kernel.py"
    path.write_text(kb.starter(what.code, what.key))
    with launcher() as launched:
        bench = ProblemBench(what, ProblemOptions(path), torch.device("cpu"), launched)
        size = {n: t.shape for n, t in bench.spec.shapes["problem"]["inputs"].items()}
        timing = Timing.of(bench, Case("problem", "timing", size, "fp32"), ["candidate"])
        worker = bench.open_kernel(read_kernel(path, kb.KERNEL_TYPE), [timing.case])
        bench.load_kernel(worker, Limits())
        assert _launched(bench, timing, worker, Limits()) == ""
        assert 0 < timing.launch_seconds < 1
        worker.close()
