"""tools/train_packed.py, tiny and on a CPU: its cases train from nearly one start, and generate."""

import argparse
import csv

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")

from bench.hf import packed  # noqa: E402
from bench.ranks import Rank  # noqa: E402

RUN = {"backend": "staged", "cases": ["packed", "own"], "layers": 1, "steps": 2, "tokens": 16}
RUN |= {"sequences": 2, "attention": "eager", "checkpointing": True, "generate": [2], "length": 12}
RUN |= {"profile": False, "experts": None}


def test_cases(alone, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(packed, "shared_corpus", lambda: torch.arange(2048).mul(7).to(torch.uint8))
    path = tmp_path / "packed.csv"
    me = Rank(0, 1, torch.device("cpu"))
    assert packed.worker(me, argparse.Namespace(**RUN, curves=path)) == 0
    found = {}
    for row in csv.DictReader(path.read_text().splitlines()[1:]):
        found.setdefault(row["case"], {})[row["of"]] = float(row["value"])
    assert found.keys() == {"packed", "own"}
    for of in found.values():
        assert of["generated tokens/s, batch 2"] > 0
        assert of["tokens/s"] == pytest.approx(16e3 / of["ms of a step"], rel=0.1)
        assert 5 < of["first loss"] < 6  # ln(256) = 5.5
    steps = list(csv.DictReader((tmp_path / "packed-steps.csv").read_text().splitlines()[1:]))
    assert len(steps) == 2 * (packed.UNTIMED + RUN["steps"])
    assert "packed, trained" in capsys.readouterr().out
    # A case that fails leaves the others alone.
    monkeypatch.setitem(packed.PACKED, "packed", {"precision": "fp8"})
    args = argparse.Namespace(**RUN | {"steps": 0}, curves=None)
    assert packed.worker(me, args) == 1
    said = capsys.readouterr().out
    assert "FAIL: packed" in said
    assert "own, trained nothing" in said
