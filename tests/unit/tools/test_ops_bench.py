"""tools/ops_bench.py: its contenders compute the same thing, and where it does not run."""

import argparse
import importlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from megamoe.testing.compare import compare

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture(scope="module")
def ops_bench():
    with mock.patch.object(sys, "path", [str(TOOLS), *sys.path]):
        return importlib.import_module("ops_bench")


def flat(found):
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [t.flatten(1) for t in found if t.dim() > 1]


def test_contenders_agree(ops_bench, monkeypatch):
    monkeypatch.setattr(ops_bench, "DEVICE", "cpu")
    torch.manual_seed(0)
    sizes = {"experts_of_family": 2, "rows": 24, "k": 64, "n": 32}
    oss = {"experts": 3, "tokens": 20, "size": 32, "no_bias": False, "compile": False}
    args, names = argparse.Namespace(**sizes, **oss), []
    for make in ops_bench.CASES.values():
        for case in make(args):
            ours, theirs = (flat(case.calls[name]()) for name in ("megamoe", "torch"))
            for a, b in zip(ours, theirs, strict=False):  # ours may return what it saves, too
                assert compare(a, b).relative < 2e-2, case.name
            names.append(case.name)
    family = [n + a for a in ("swiglu", "geglu", "srelu") for n in ("", "d")]
    assert names == [*family, "wgrad", "gpt-oss forward", "gpt-oss step"]


def test_a_figure_is_the_median_of_its_samples(ops_bench, monkeypatch):
    planted = {"megamoe": [10, 90, 20, 80, 30], "torch": [50, 990, 40, 400, 60]}
    calls = {name: (lambda us=us: us) for name, us in planted.items()}
    monkeypatch.setattr(ops_bench, "timed", lambda call, mode, flush: call().pop(0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    case = ops_bench.Case("case", 3e9, calls)
    args = argparse.Namespace(samples=5, clock=False)
    ours, theirs = ops_bench.measure(case, "cool", args, None)
    assert (ours.us, theirs.us) == (30, 60)
    assert (ours.tflops, theirs.tflops) == (100, 50)
    assert (ours.speedup, theirs.speedup) == (2, 1)


def test_without_a_gpu_there_is_nothing_to_time(ops_bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ops_bench.py", "--only", "swiglu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        ops_bench.main()
    assert "needs a Hopper GPU" in capsys.readouterr().err
