"""tools/ops_bench.py: its contenders compute the same thing, and where it does not run."""

import argparse
import sys
from dataclasses import replace

import pytest
import torch
from programs import tool

from bench import ops, timing
from megamoe.testing.compare import compare
from megamoe.testing.shapes import SHAPES


def flat(found):
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [t.flatten(1) for t in found if t.dim() > 1]


def test_contenders_agree(monkeypatch):
    monkeypatch.setattr(ops, "DEVICE", "cpu")
    small = {"hidden": 64, "intermediate": 48, "num_experts": 8}
    monkeypatch.setattr(ops, "SHAPES", {n: replace(s, **small) for n, s in SHAPES.items()})
    monkeypatch.setattr(ops, "MODEL_ROWS", dict.fromkeys(ops.MODEL_ROWS, (24,)) | {"dsv3": (8, 24)})
    torch.manual_seed(0)
    sizes = {"experts_of_family": 2, "rows": 24, "k": 64, "n": 32}
    oss = {"experts": 3, "tokens": 20, "size": 32, "no_bias": False, "compile": False}
    args, names = argparse.Namespace(**sizes, **oss), []
    for make in ops.CASES.values():
        for case in make(args):
            ours, theirs = ([t.clone() for t in flat(c.timed(None))] for c in case.contenders)
            if case.name.endswith("+="):  # to one tensor, one after the other
                theirs = [last - first for last, first in zip(theirs, ours, strict=True)]
            for a, b in zip(ours, theirs, strict=False):  # ours may return what it saves, too
                assert compare(a, b).relative < 2e-2, case.name
            names.append(case.name)
    family = [n + a for a in ("swiglu", "geglu", "srelu") for n in ("", "d")]
    models = ("dsv3 8", "dsv3 24", "flash 24", "qwen3-235b 24", "qwen3-30b 24")
    dw = [f"wgrad-{m} dw{i}{a}" for m in models for i in ("13", "2") for a in ("", " +=")]
    assert names == [*family, "wgrad", "channel", *dw, "gpt-oss forward", "gpt-oss step"]


def test_a_figure_is_the_median_of_its_samples(monkeypatch):
    planted = {"megamoe": [10, 90, 20, 80, 30], "torch": [50, 990, 40, 400, 60]}
    calls = [timing.Contender(name, lambda _, us=us: us) for name, us in planted.items()]

    def stopwatch(on_gpu, call, *given):
        us = call(*given).pop(0)
        return lambda: us

    monkeypatch.setattr(timing, "stopwatch", stopwatch)
    timer = timing.Timer(torch.device("cpu"), samples=5)
    ours, theirs = ops.measure(ops.Case("case", 3e9, calls), "cool", timer, {"torch": 1980})
    assert (ours.clock_mhz, theirs.clock_mhz) == (0, 1980)
    assert (ours.us, theirs.us) == (30, 60)
    assert (ours.tflops, theirs.tflops) == (100, 50)
    assert (ours.speedup, theirs.speedup) == (2, 1)


def test_without_a_gpu_there_is_nothing_to_time(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ops_bench.py", "--only", "swiglu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tool("ops_bench").main()
    assert "needs a Hopper GPU" in capsys.readouterr().err
