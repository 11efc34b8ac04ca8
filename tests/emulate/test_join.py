"""Launches that take the SMs that are free: pairs of CTAs that come when the door is closed leave, and change no bit.

Fibers run in any order and the first pair waits for next to nothing here, so that many pairs come late; or it waits for
next to nothing for the peers, so that half of the pairs have to do.
"""

import pytest
import torch
from calls import calls_of
from test_backward_faults import FOREIGN, PROBLEM, assert_no_numbers, numbers, two_calls  # noqa: F401
from test_forward import columns, inputs_of
from training_cases import check

from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem
from megamoe.core.errors import RankMismatch
from megamoe.testing.compare import same_bits

CTAS, SEEDS, TOKENS = 8, range(1, 9), [40, 0, 70]


def problem_of(precision):
    return Problem(144, 144, 7, 3, ep_size=3, max_tokens=70, precision=precision)


def members(emulation):
    """CTAs that took part in the last launch, by rank."""
    return [
        2 * (int(emulation.region(r, "members")) & 0xFF) for r in range(emulation.problem.ep_size)
    ]


def left_as_found(emulation):
    cells = ("joined", "exit_ticket", "arrivals", "ids_ticket", "x_ticket")
    return all(int(emulation.region(r, c)) == 0 for r in range(3) for c in cells)


# Who comes late does not depend on precisions.
@pytest.mark.parametrize(
    ("precision", "patience"),
    [("bf16", {"join_ns": 1}), ("fp8", {"join_ns": 10**6, "peers_ns": 1})],
    ids=["for pairs", "for peers"],
)
def test_late_pairs_change_no_bit(precision, patience):
    problem = problem_of(precision)
    inputs, weights = inputs_of(problem, TOKENS)
    call = (*columns(inputs), weights)
    expected = Emulation(problem, num_ctas=CTAS).forward_all(calls_of(*call))
    emulation, seen = Emulation(problem, num_ctas=CTAS, **patience), set()
    # Launches of one window: each finds what the pairs that left the last one left behind.
    for seed in SEEDS:
        ys = emulation.forward_all(calls_of(*call), seed=seed)
        assert all(same_bits(y, e) for y, e in zip(ys, expected, strict=True)), seed
        assert left_as_found(emulation)
        seen |= set(members(emulation))
    if "peers_ns" in patience:
        fewer = seen - {CTAS}
        assert CTAS in seen, "no rank saw all peers"
        assert fewer, "no rank missed a peer"
        assert max(fewer) <= CTAS // 2, "a rank that missed a peer kept more than half"
    else:
        assert min(seen) < CTAS, "no pair was late"
    assert min(seen) >= 2


def test_all_take_part_where_the_first_is_patient():
    problem = problem_of("bf16")
    inputs, weights = inputs_of(problem, TOKENS)
    emulation = Emulation(problem, num_ctas=CTAS, join_ns=10**6)
    for seed in SEEDS[:4]:
        emulation.forward_all(calls_of(*columns(inputs), weights), seed=seed)
        assert members(emulation) == [CTAS] * 3


def test_steps_that_train_with_late_pairs():
    problem = problem_of("bf16")
    inputs, weights = inputs_of(problem, TOKENS)
    calls = calls_of(*columns(inputs), weights)
    dys = [torch.randn_like(call.x) for call in calls]

    def step(emulation, seed):
        ys, states = emulation.train_all(calls, seed=seed)
        gradients = emulation.backward_all(calls, dys, states, seed=seed)
        return [*ys, *(g for found in gradients for g in found if g is not None)]

    expected = step(Emulation(problem, num_ctas=CTAS), 0)
    emulation, seen = Emulation(problem, num_ctas=CTAS, join_ns=1), set()
    for seed in SEEDS[:3]:
        found = step(emulation, seed)
        assert all(same_bits(f, e) for f, e in zip(found, expected, strict=True)), seed
        assert left_as_found(emulation)
        seen |= set(members(emulation))
    assert min(seen) < CTAS, "no pair was late"


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_launches_that_are_given_up_with_late_pairs(seed, numbers):  # noqa: F811
    emulation = Emulation(PROBLEM, num_ctas=CTAS, join_ns=1)
    calls, states = two_calls(emulation)
    with pytest.raises(RankMismatch, match=FOREIGN):
        calls[0].backward(emulation, [states[0][0], states[1][1]], seed=seed)
    assert_no_numbers(emulation)
    emulation.reset()
    check(emulation, calls[0], seed=seed)
