"""A of blocks that are not full comes in boxes of 16 rows, with the bits of whole boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calls import calls_of
from flaws import SEEN, names, plant
from fp4_cases import spread_ids
from training_cases import Call, check, judge

from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem
from megamoe.testing import make_inputs, make_weights
from megamoe.testing.compare import same_bits

# of an expert: blocks of one to seven small boxes and full ones, alone and beside each other
ROWS = (1, 15, 16, 17, 32, 33, 64, 65, 80, 97, 112, 113, 128, 129, 144, 200, 0, 241)


def layer(precision: str, **changed: Any) -> list[torch.Tensor]:
    """Return y of a launch with ROWS."""
    tokens = sum(ROWS)
    problem = Problem(144, 272, len(ROWS), 1, max_tokens=tokens, precision=precision, **changed)
    inputs = make_inputs(problem, tokens)
    call = ([inputs.x], [spread_ids(ROWS)], [inputs.topk_weights], [make_weights(problem)])
    return Emulation(problem, num_ctas=4).forward_all(calls_of(*call))


NONE = (
    "gemm/operands.cuh",
    "if (T::Pool::padded && T::Gemm1::B::slot_scale_bytes == 0) return 0;",
    "return 0;",
)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bits_are_those_of_whole_boxes(
    precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = layer(precision)
    with monkeypatch.context() as patch:
        plant(NONE, patch, tmp_path / "none")
        expected = layer(precision)
    assert bool(found[0].any(1).all())
    assert all(map(same_bits, found, expected))


TALL = ("epilogue/wide.cuh", "tile.rows() > most_rows", "tile.rows() > 0")


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("relu2", True)])
def test_bits_of_the_wide_form_are_those_of_the_tall_one(
    activation: str, bias: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = layer("fp8", activation=activation, bias=bias)
    with monkeypatch.context() as patch:
        plant(TALL, patch, tmp_path / "tall")
        expected = layer("fp8", activation=activation, bias=bias)
    assert all(map(same_bits, found, expected))


WIDE_FLAWS = {
    "the second half's weights are the first's": (
        "gemm/wide.cuh",
        "desc_advance(a1, k)",
        "desc_advance(a0, k)",
    ),
    "rows past the sixteenth": ("epilogue/wide.cuh", "tile.rows() <= 16", "tile.rows() <= 17"),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(WIDE_FLAWS))
def test_a_flaw_of_the_wide_form_is_seen(
    flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(WIDE_FLAWS[flaw], monkeypatch, tmp_path / "flaw")
    with pytest.raises(SEEN):
        test_bits_of_the_wide_form_are_those_of_the_tall_one("swiglu", False, monkeypatch, tmp_path)


FLAWS = {
    "a box is missing": (
        "gemm/operands.cuh",
        "ceil_div(tile.rows(), small_box_rows)",
        "tile.rows() / small_box_rows",
    ),
    "rows of the other GEMM": (
        "gemm/operands.cuh",
        "small = &gemm.a_small;",
        "small = &gemm_of<T>(ctx.args, tile.gemm == GemmId::gemm2 ? GemmId::gemm1 : GemmId::gemm2).a_small;",
    ),
    "both CTAs load the same": ("gemm/load_slots.cuh", "both ? sharing.mine : 0,", "0,"),
    "scales of one box": (
        "gemm/load_slots.cuh",
        "small * small_box_rows * sizeof(float) :",
        "small_box_rows * sizeof(float) :",
    ),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_is_seen(flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path / "flaw")
    with pytest.raises(SEEN):
        test_bits_are_those_of_whole_boxes("fp8", monkeypatch, tmp_path)


def test_launches_that_train_need_the_zeros_of_whole_boxes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weight gradients read rows behind an expert's last: of what a slot held before, they are NaN or wrong."""
    problem = Problem(144, 80, 5, 3, max_tokens=70)
    call = Call.make(problem, [70])
    check(Emulation(problem), call)
    emulation = Emulation(problem)
    with monkeypatch.context() as patch:
        plant((*NONE[:2], "if (T::Pool::restored) return 0;"), patch, tmp_path / "flaw")
        _, states = call.forward(emulation)  # backward, whose pool is restored, has no small boxes
    found = call.backward(emulation, states)
    with pytest.raises(AssertionError):
        judge(emulation, call, states, found)
