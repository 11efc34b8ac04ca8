"""Backward launches that must not give numbers: foreign, mixed-up and unfinished states, ranks that gave up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from training_cases import Call, adding_to, check, judge

from megamoe.backends.call import GradRequest, Needs
from megamoe.backends.emulate import emulation as emulator
from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem
from megamoe.core.errors import PeerFault, ProtocolTimeout, RankMismatch, WindowBroken
from megamoe.testing.compare import rounding_step

PROBLEM = Problem(64, 48, 4, 2, ep_size=2, max_tokens=32, bias=True)
FOREIGN = "was given a state|runs another configuration"


def two_calls(emulation: Emulation) -> tuple[list[Call], list[list[Tensor]]]:
    calls = [Call.make(PROBLEM, [20, 9], seed=seed) for seed in range(2)]
    return calls, [call.forward(emulation)[1] for call in calls]


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch must write holds numbers before, as a reused buffer would."""

    def ones(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.ones_like(tensor, dtype=dtype)

    monkeypatch.setattr(emulator, "nan_like", ones)


def assert_no_numbers(emulation: Emulation) -> None:
    for rank, tensors in enumerate(emulation.written):
        for i, tensor in enumerate(tensors):
            assert bool(tensor.isnan().all()), f"result {i} of rank {rank} has numbers"


def spoil_header(state: Tensor, word: int, value: int) -> None:
    plan = Emulation(PROBLEM).ranks[0].plan
    plan.train_state["header"].view(state)[word] = value


STATES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "never written": lambda s: [torch.full_like(t, 0xFF) for t in s],
    "zeros": lambda s: [torch.zeros_like(t) for t in s],
    "not complete": lambda s: spoil_header(s[0], 1, 0) or s,
    "of another pool": lambda s: spoil_header(s[0], 2, 128) or s,
    "of another epoch": lambda s: spoil_header(s[0], 0, 7) or s,
}


@pytest.mark.parametrize("what", list(STATES))
def test_a_state_that_no_forward_completed(what: str, numbers: None) -> None:
    emulation = Emulation(PROBLEM)
    calls, states = two_calls(emulation)
    given = STATES[what]([t.clone() for t in states[1]])
    with pytest.raises(RankMismatch, match=FOREIGN):
        calls[1].backward(emulation, given)
    assert_no_numbers(emulation)
    with pytest.raises(WindowBroken):
        calls[1].backward(emulation, states[1])
    emulation.reset()
    check(emulation, calls[0])


def test_ranks_at_other_microbatches(numbers: None) -> None:
    emulation = Emulation(PROBLEM)
    calls, states = two_calls(emulation)
    with pytest.raises(RankMismatch, match=FOREIGN):
        calls[0].backward(emulation, [states[0][0], states[1][1]])
    assert_no_numbers(emulation)


def test_a_rank_that_makes_weight_gradients_only(numbers: None) -> None:
    """Its partials would be rows of the launch before."""
    emulation = Emulation(PROBLEM)
    calls, states = two_calls(emulation)
    with pytest.raises(RankMismatch, match=FOREIGN):
        calls[0].backward(emulation, states[0], [GradRequest(), GradRequest(only_weights=True)])
    assert_no_numbers(emulation)


def test_the_state_of_another_layer(numbers: None) -> None:
    emulation = Emulation(PROBLEM)
    call = Call.make(PROBLEM, [20, 9])
    _, states = call.forward(emulation, layer=1)
    with pytest.raises(RankMismatch, match=FOREIGN):
        call.backward(emulation, states, layer=2)
    assert_no_numbers(emulation)
    emulation.reset()
    _, states = call.forward(emulation, layer=1)
    call.backward(emulation, states, layer=1)


def test_another_number_of_tokens(numbers: None) -> None:
    """x and dy of fewer tokens than the forward pass had: their rows would be read out of bounds."""
    emulation = Emulation(PROBLEM)
    call = Call.make(PROBLEM, [20, 9])
    _, states = call.forward(emulation)
    other = Call.make(PROBLEM, [19, 9])
    with pytest.raises(RankMismatch, match=FOREIGN):
        other.backward(emulation, states)
    assert_no_numbers(emulation)


def test_a_forward_that_failed_leaves_no_state(numbers: None) -> None:
    """Its memory held a good state before: a poisoned launch must not leave that as its own."""
    emulation = Emulation(PROBLEM, timeout_s=60)
    call = Call.make(PROBLEM, [20, 9])
    _, states = call.forward(emulation)
    emulation.region(1, "epoch")[0] = 5
    with pytest.raises(ProtocolTimeout, match="routes_ready"):
        call.forward(emulation, states=states)
    assert_no_numbers(emulation)
    emulation.reset()
    with pytest.raises(RankMismatch, match=FOREIGN):
        call.backward(emulation, states)
    assert_no_numbers(emulation)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_absent_rank_is_a_timeout_and_poisons_gradients(seed: int, numbers: None) -> None:
    emulation = Emulation(PROBLEM, timeout_s=60)
    call = Call.make(PROBLEM, [20, 9])
    _, states = call.forward(emulation)
    emulation.region(1, "epoch")[0] = 5
    with pytest.raises(ProtocolTimeout, match="routes_ready"):
        call.backward(emulation, states, seed=seed)
    assert_no_numbers(emulation)
    emulation.reset()
    check(emulation, call)


def test_sums_of_a_poisoned_launch_are_nan(numbers: None) -> None:
    """main_grad too: a sum that lacks a launch is a wrong number."""
    emulation = Emulation(PROBLEM, timeout_s=60)
    call = Call.make(PROBLEM, [20, 9])
    _, states = call.forward(emulation)
    emulation.region(1, "epoch")[0] = 5
    into = [{"w13": torch.ones_like(w.w13, dtype=torch.float32)} for w in call.masters]
    needs = Needs(w2=False, b13=False, b2=False)
    with pytest.raises(ProtocolTimeout):
        call.backward(emulation, states, [GradRequest(needs, sums) for sums in into])
    assert all(bool(tensors["w13"].isnan().all()) for tensors in into)


def test_states_from_before_and_after_a_reset(numbers: None) -> None:
    """Epochs go on, so a reset does not make two launches one. A state from before it stays good."""
    emulation = Emulation(PROBLEM)
    calls = [Call.make(PROBLEM, [20, 9], seed=seed) for seed in range(2)]
    _, before = calls[0].forward(emulation)
    emulation.reset()
    _, after = calls[1].forward(emulation)
    with pytest.raises(RankMismatch, match=FOREIGN):
        calls[0].backward(emulation, [before[0], after[1]])
    assert_no_numbers(emulation)
    emulation.reset()
    judge(emulation, calls[0], before, calls[0].backward(emulation, before))


@pytest.mark.parametrize(("timeout_ns", "seed"), [(3000, 0), (6000, 1), (12000, 2), (30000, 3)])
def test_a_launch_that_is_given_up_in_between(timeout_ns: int, seed: int, numbers: None) -> None:
    """What it wrote, or added to main_grad, is right or NaN: never what was there, never a part of a sum."""
    problem = Problem(144, 272, 5, 3, ep_size=2, max_tokens=64, bias=True)
    call = Call.make(problem, [64, 30])
    for added in (False, True):
        emulation = Emulation(problem, num_ctas=4)
        _, states = call.forward(emulation)
        good = call.backward(emulation, states)
        sums = [{n: torch.ones_like(t) for n, t in w.named().items()} for w in call.masters]
        emulation.timeout_ns = timeout_ns
        with pytest.raises((ProtocolTimeout, PeerFault)):
            call.backward(emulation, states, adding_to(sums) if added else None, seed=seed)
        for of_rank, right in zip(emulation.written, good, strict=True):
            for tensor, expected in zip(of_rank[:2], right[:2], strict=True):
                assert bool((tensor.isnan() | (tensor == expected)).all())
            for tensor, expected in zip(of_rank[2:], right[2:], strict=True):
                wanted = expected.double() + added
                step = rounding_step(wanted, tensor.dtype) + rounding_step(expected, expected.dtype)
                assert bool((tensor.isnan() | ((tensor - wanted).abs() <= step * added)).all())
                assert bool(tensor.isnan().any())
