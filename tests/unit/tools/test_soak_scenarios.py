"""tools/soak.py without a GPU: its long scenarios run to their end over the oracle, and other bits are a verdict.

Streams and sleeps do nothing; a graph replays by making the captured call, or step, again.
"""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.ranks import Rank
from bench.soak import calls, layer, nccl, training
from megamoe import Problem
from megamoe.backends.reference import ReferenceBackend

SMALL = Problem(32, 32, 4, 2, max_tokens=12)


class Backend(ReferenceBackend):
    """The oracle with what scenarios ask of the kernel's backend besides."""

    share, calls, wrong_from = SimpleNamespace(join_ns=1), 0, sys.maxsize

    def __init__(self, problem, group, **options):
        super().__init__(problem, None)

    def forward(self, call, keep=False):
        if call.out is not None:
            Graph.call = lambda: self.forward(call, keep)
        y, state = super().forward(call._replace(out=None), keep)
        Backend.calls += 1
        if Backend.calls >= Backend.wrong_from and y.numel():
            y.view(torch.int16)[0, 0] ^= 1
        return y if call.out is None else call.out.copy_(y), state

    def num_ctas(self):
        return 132


class Graph:
    call = None  # what a replay makes

    def replay(self):
        Graph.call()

    def reset(self):
        pass


def capture(graph, **options):
    """Be torch.cuda.graph: a training step is the caller's `step`."""
    Graph.call = sys._getframe(1).f_locals.get("step", Graph.call)
    return nullcontext()


@pytest.fixture
def stage(alone, monkeypatch):
    """Return (module, name of a scenario, first forward with other bits) -> its Outcome."""
    cuda = {"Stream": lambda device: None, "stream": lambda stream: nullcontext()}
    cuda |= {"CUDAGraph": Graph, "graph": capture}
    cuda |= dict.fromkeys(("synchronize", "_sleep", "empty_cache"), lambda *given: None)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False, **cuda))
    window = SimpleNamespace(check=lambda: None, close=lambda: None)
    for module in (layer, training):
        monkeypatch.setattr(module, "MegaBackend", Backend)
    monkeypatch.setattr(training, "Window", lambda *given, **options: window)
    for module in (calls, nccl, training):
        problem_of = lambda me, precision="bf16": replace(SMALL, precision=precision)  # noqa: E731
        monkeypatch.setattr(module, "problem_of", problem_of)
    args = argparse.Namespace(calls=20, replays=8, steps=8, precision=["bf16", "fp8"])
    args.weight_gradients = ["bf16", "e4m3"]

    def run(module, name, wrong_from=sys.maxsize):
        Backend.calls, Backend.wrong_from = 0, wrong_from
        return getattr(module, name)(Rank(0, 1, torch.device("cpu")), args)

    return run


SCENARIOS = [
    (calls, "calls", "20 calls of 16 inputs a precision in "),
    (calls, "graph", "8 replays a precision in "),
    (nccl, "nccl", "20 calls beside 20 all-gathers, 132..132 CTAs, in "),
    (training, "train", "2 x 8 steps a precision, 8 launches each, in "),
    (training, "train_graph", "8 steps eager, 8 replays a precision in "),
    (nccl, "train_nccl", "2 x 20 steps beside 81 all-gathers, 0 of which the host waited for, "),
]


@pytest.mark.parametrize(("module", "name", "text"), SCENARIOS)
def test_a_right_layer_passes_and_other_bits_are_a_verdict(stage, module, name, text):
    out = stage(module, name)
    assert out.failures == []
    assert out.text.startswith(text)
    wrong = stage(module, name, wrong_from=22)
    assert any("bits" in failure for failure in wrong.failures), wrong.text
