"""Pairs of CTAs that share an operand meet before they load it: no bit depends on who meets whom, or on who is late."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from calls import calls_of
from flaws import names, plant
from test_forward import columns, inputs_of
from training_cases import least_pool

from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem
from megamoe.launch import meetings
from megamoe.launch.meetings import Meet
from megamoe.testing.compare import same_bits

CTAS = 8
# Runs of four to five blocks, an odd number of columns in gemm1, a last tile of gemm2 that is not full.
TOKENS = [700, 380]


def problem_of(precision: str) -> Problem:
    return Problem(272, 272, 4, 2, ep_size=2, max_tokens=700, precision=precision)


@cache
def without_meetings(precision: str) -> list[torch.Tensor]:
    problem = problem_of(precision)
    inputs, weights = inputs_of(problem, TOKENS)
    return Emulation(problem, num_ctas=CTAS).forward_all(calls_of(*columns(inputs), weights))


def came(emulation: Emulation) -> torch.Tensor:
    return torch.cat([emulation.region(r, "came").flatten() for r in range(2)])


@pytest.mark.parametrize(
    "precision", ["bf16", "fp8", pytest.param("fp8_channel", marks=pytest.mark.slow)]
)
def test_bits_do_not_depend_on_meetings(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    problem = problem_of(precision)
    inputs, weights = inputs_of(problem, TOKENS)
    call = (*columns(inputs), weights)
    expected = without_meetings(precision)
    small = least_pool(problem) + 512
    # The last number: of launches, of which a second finds the counts of the first.
    for many, seed, pool, launches in (
        *((4, 1, None, 2), (3, 2, None, 1), (3, 5, small, 2), (40, 6, small, 1)),
    ):
        meet = Meet(many, mean_rows=1)
        monkeypatch.setattr(meetings, "chosen", lambda *_, meet=meet: meet)
        emulation = Emulation(problem, num_ctas=CTAS - 2 * (seed == 2), pool_rows=pool)
        for _ in range(launches):
            ys = emulation.forward_all(calls_of(*call), seed=seed)
            place = f"{meet}, seed {seed}, pool {pool}"
            assert all(same_bits(y, e) for y, e in zip(ys, expected, strict=True)), place
            assert came(emulation).any(), f"nobody met: {place}"


def test_training_meets_and_saves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(problem_of("bf16"), num_experts=2)
    inputs, weights = inputs_of(problem, [TOKENS[0] // 2, TOKENS[1] // 2])
    calls = calls_of(*columns(inputs), weights)
    dys = [torch.randn_like(i.x) for i in inputs]

    def step(emulation: Emulation, seed: int) -> list[torch.Tensor]:
        ys, states = emulation.train_all(calls, seed=seed)
        gradients = emulation.backward_all(calls, dys, states, seed=seed)
        return [*ys, *(g for found in gradients for g in found if g is not None)]

    expected = step(Emulation(problem, num_ctas=4), 0)
    monkeypatch.setattr(meetings, "chosen", lambda *_: Meet(mean_rows=1))
    found = step(Emulation(problem, num_ctas=CTAS), 3)
    assert all(same_bits(f, e) for f, e in zip(found, expected, strict=True))


def test_few_rows_meet_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "chosen", lambda *_: Meet(mean_rows=100_000))
    problem = problem_of("bf16")
    inputs, weights = inputs_of(problem, TOKENS)
    emulation = Emulation(problem, num_ctas=CTAS)
    emulation.forward_all(calls_of(*columns(inputs), weights))
    assert not came(emulation).any()


@pytest.mark.parametrize("seed", range(1, 4))
def test_pairs_that_come_to_the_door_late_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    problem = problem_of("bf16")
    inputs, weights = inputs_of(problem, TOKENS)
    monkeypatch.setattr(meetings, "chosen", lambda *_: Meet(mean_rows=1))
    emulation = Emulation(problem, num_ctas=CTAS, join_ns=1)
    ys = emulation.forward_all(calls_of(*columns(inputs), weights), seed=seed)
    assert all(map(same_bits, ys, without_meetings("bf16")))
    for rank in range(2):
        pairs = int(emulation.region(rank, "members")) & 0xFF
        assert int(emulation.region(rank, "came").max()) <= pairs


# A meeting as patient as that is over in no time, in emulated ns, unless it counts a pair that does not come.
PATIENT = Meet(many=3, cycles=1 << 20, mean_rows=1)
FLAWS = {
    "counts a pair too many": (
        "schedule/order.h",
        "    return {begin, end - begin};",
        "    return {begin, end - begin + 1};",
    ),
    "counts units without a tile": (
        "schedule/order.h",
        "return run.size / 2 * tiles + (run.size % 2 == 1 ? units_of(tiles) : 0);",
        "return run.size * units_of(tiles);",
    ),
    "counts are left from the pass before": (
        "rows/plan.cuh",
        "args.meet.came[int64_t{first} * units + i] = 0;",
        "args.meet.came[int64_t{first} * units + i] += 0;",
    ),
}


def longest_ns(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return emulated ns of the longest of two launches, in which all pairs come and wait for each other."""
    monkeypatch.setattr(meetings, "chosen", lambda *_: PATIENT)
    problem = problem_of("bf16")
    emulation, longest = Emulation(problem, num_ctas=CTAS, profile=True), 0
    inputs, weights = inputs_of(problem, TOKENS)
    for _ in range(2):
        emulation.forward_all(calls_of(*columns(inputs), weights))
        start, end = 2, 3  # csrc/megamoe/cta/profile.cuh
        marks = torch.cat(emulation.profiles)
        longest = max(longest, int(marks[:, end].max() - marks[:, start].min()))
        counts = came(emulation)
        assert int(counts.max()) <= CTAS // 2, "pairs of another launch are counted"
    return longest


def test_whoever_is_counted_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest_ns(monkeypatch) < PATIENT.cycles


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_flaws_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flaw: str) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        test_whoever_is_counted_comes(monkeypatch)
