"""What the kernel's parts promise to take: another shape of tile is another type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import calls_of

from megamoe.backends.emulate.backend import Emulation
from megamoe.backends.reference.layer import forward
from megamoe.core.config import Problem
from megamoe.jit.source import TILE, Variant
from megamoe.launch import layout
from megamoe.testing.compare import assert_close
from megamoe.testing.inputs import make_inputs, make_weights


def run(problem: Problem, tokens: int, seed: int = 0) -> tuple[Any, Any]:
    """Return (y of each rank, the oracle's)."""
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    inputs = [make_inputs(p, tokens) for p in ranks]
    weights = [make_weights(p, seed=1) for p in ranks]
    columns = [[getattr(i, name) for i in inputs] for name in ("x", "topk_ids", "topk_weights")]
    got = Emulation(problem).forward_all(calls_of(*columns, weights), seed=seed)
    return got, forward(problem, *columns, weights)["y"]


@pytest.mark.parametrize(
    ("precision", "activation"),
    [("bf16", "relu2"), pytest.param("fp8", "swiglu", marks=pytest.mark.slow)],
)
def test_tile_of_64_rows(monkeypatch: Any, precision: str, activation: str) -> None:
    """Blocks of 64 rows, four pipeline and two output slots change no bit: K is summed in the same order."""
    problem = Problem(
        272, 144, 5, 3, ep_size=2, max_tokens=90, precision=precision, activation=activation
    )
    tall, expected = run(problem, 90)
    source = Variant.source
    monkeypatch.setattr(
        Variant, "source", lambda self: source(self).replace(TILE, "TileShape<64, 128, 4, 2>")
    )
    monkeypatch.setattr(layout, "BLOCK_ROWS", 64)
    y, _ = run(problem, 90, seed=1)
    for a, b, wanted in zip(y, tall, expected, strict=True):
        assert torch.equal(a, b)
        assert_close(a, wanted, relative=4e-3, name="y")
