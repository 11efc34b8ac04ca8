"""The judge of training calls passes the oracle's own numbers, and finds what is planted beside them."""

from __future__ import annotations

import pytest
import torch
from training_cases import Call, judge, pretend

from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem

SMALL = {
    "hidden": 144,
    "intermediate": 80,
    "num_experts": 5,
    "top_k": 3,
    "ep_size": 2,
    "max_tokens": 70,
}


def _bump(values: torch.Tensor) -> None:
    """Move an element by far more than rounding."""
    flat = values.view(-1)
    flat[flat.abs().argmax()] *= 1.25


# what -> how it is spoiled on rank 1
FAULTS = {
    "header": lambda e, s, g: e.ranks[1].plan.train_state["header"].view(s[1])[1].zero_(),
    "tokens of rank 0": lambda e, s, g: e.ranks[1].plan.train_state["tokens"].view(s[1])[0].zero_(),
    "gate_up": lambda e, s, g: _bump_gu(e, s[1]),
    **{
        name: (lambda e, s, g, name=name: _bump_region(e, name))
        for name in ("dy_rows", "x_rows", "row_weight", "dgu", "hs", "dx_rows")
    },
    "d_s": lambda e, s, g: e.region(1, "d_s")[0, 0].add_(8.0),
    "partials": lambda e, s, g: e.region(0, "window_partials")[1].zero_(),
    "x_rows: rows of zeros": lambda e, s, g: e.region(1, "x_rows")[63].fill_(1e-8),
    "dx": lambda e, s, g: _bump(g[1][0]),
    "d_topk_weights": lambda e, s, g: _bump(g[1][1]),
    "dw13": lambda e, s, g: _bump(g[1][2]),
    "dw2": lambda e, s, g: _bump(g[1][3]),
    "db13": lambda e, s, g: _bump(g[1][4]),
    "db2": lambda e, s, g: _bump(g[1][5]),
}


def _bump_region(emulation: Emulation, name: str) -> None:
    region = emulation.region(1, name)
    values = region.nan_to_num(0)
    values[1:] = 0  # row 0 is of the first expert
    at = values.view(-1).abs().argmax()
    region.view(-1)[at] *= 1.25


def _bump_gu(emulation: Emulation, state: torch.Tensor) -> None:
    gu = emulation.ranks[1].plan.train_state["gu"].view(state)
    _bump(gu[0])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_judge_passes_the_oracle_and_finds_planted_faults(precision: str) -> None:
    problem = Problem(**SMALL, precision=precision, bias=True)
    emulation = Emulation(problem)
    call = Call.make(problem, [70, 33], routing="dropped")
    judge(emulation, call, *pretend(emulation, call))
    for name, spoil in FAULTS.items():
        states, grads = pretend(emulation, call)
        grads = [[None if g is None else g.clone() for g in of_rank] for of_rank in grads]
        spoil(emulation, states, grads)
        with pytest.raises(AssertionError, match=f"FAIL.*{name}"):
            judge(emulation, call, states, grads)
