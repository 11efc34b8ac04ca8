"""backend="emulate" trains: the state and the gradients of each rank, the bits that its emulation gives."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import LAYOUTS
from thread_group import ThreadGroup
from training_cases import Call as OfRanks
from training_cases import zeros

from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.emulate.backend import EmulateBackend
from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.formats.weights import TransposedWeights

PROBLEM = Problem(64, 48, 4, 2, ep_size=2, max_tokens=32, bias=True)


def on_ranks(problem: Problem, call: Any) -> list[Any]:
    """call(rank, its backend) on a thread each -> what they return."""
    results: list[Any] = [None] * problem.ep_size

    def rank_main(rank: int, group: ThreadGroup) -> None:
        results[rank] = call(rank, EmulateBackend(replace(problem, rank=rank), group))

    threads = [
        threading.Thread(target=rank_main, args=pair)
        for pair in enumerate(ThreadGroup.create(problem.ep_size))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_ranks_as_threads(precision: str) -> None:
    """Two microbatches in flight, gradients written and added, masters of another layout."""
    problem = replace(PROBLEM, precision=precision)
    calls = [OfRanks.make(problem, [20, 9], seed=seed) for seed in range(2)]
    emulation = Emulation(problem)
    expected = []
    for c in calls:
        ys, states = c.forward(emulation)
        expected.append((ys, c.backward(emulation, states)))

    def rank_main(rank: int, backend: EmulateBackend) -> Any:
        states, grads = [], []
        for c, (ys, _) in zip(calls, expected, strict=True):
            x, ids, scores = (column[rank] for column in c.routed)
            y, state = backend.forward(Call(x, ids, scores, c.weights[rank]), keep=True)
            assert torch.equal(y, ys[rank])
            assert (state.dtype, state.shape) == (torch.uint8, (backend.state_bytes,))
            states.append(state)
        into = {"w13": zeros(calls[0].masters[rank].w13), "w2": zeros(calls[0].masters[rank].w2)}
        for i in (0, 1):
            c, master = calls[i], LAYOUTS["interleaved"](calls[i].masters[rank])
            given = Call(*(column[rank] for column in c.routed), master)
            needs = Needs() if i == 0 else Needs(True, False, True, True, False, True)
            wanted = GradRequest(needs, {} if i == 0 else into)
            if precision == "fp8":
                transposed = TransposedWeights.of(backend.problem, c.weights[rank])
                wanted = wanted._replace(transposed=transposed)
            grads.append(backend.backward(given, c.dys[rank], states[i], wanted))
            if i == 0:
                assert grads[0][2].shape == master.w13.shape
                assert grads[0][2].stride() == torch.empty_like(master.w13).stride()
        return grads, into

    for rank, (grads, into) in enumerate(on_ranks(problem, rank_main)):
        for got, wanted in zip(grads[0], expected[0][1][rank], strict=True):
            assert torch.equal(got.reshape(wanted.shape), wanted)
        dx, d_weights, dw13, dw2, db13, db2 = grads[1]
        wanted = expected[1][1][rank]
        assert torch.equal(dx, wanted[0])
        assert torch.equal(db2, wanted[5])
        assert (d_weights, dw13, dw2, db13) == (None,) * 4
        for name, single in (("w13", wanted[2]), ("w2", wanted[3])):
            assert torch.equal(into[name].bfloat16(), single)


def test_weights_of_another_precision_are_refused() -> None:
    """Codes taken for bf16 numbers would be garbage, and so would bf16 numbers taken for codes."""
    problem = replace(PROBLEM, ep_size=1, precision="fp8")
    call, backend = OfRanks.make(problem, [4]), EmulateBackend(problem)
    rows = [column[0] for column in call.routed]
    given, dy = Call(*rows, call.masters[0]), call.dys[0]
    _, state = backend.forward(Call(*rows, call.weights[0]), keep=True)
    transposed = TransposedWeights.of(problem, call.weights[0])
    with pytest.raises(ArgumentError, match="transposed is None"):
        backend.backward(given, dy, state, GradRequest())
    wrong = replace(transposed, w2=transposed.w2.bfloat16())
    with pytest.raises(ArgumentError, match="transposed.w2.dtype"):
        backend.backward(given, dy, state, GradRequest(transposed=wrong))
    with pytest.raises(ArgumentError, match="weights.w13.dtype"):
        backend.backward(
            Call(*rows, call.weights[0]), dy, state, GradRequest(transposed=transposed)
        )
    with pytest.raises(ArgumentError, match="weights.w13_scale"):
        TransposedWeights.of(problem, call.masters[0])
    with pytest.raises(ArgumentError, match="weights.w13_scale|weights.w13"):
        backend.forward(given, keep=True)
    with pytest.raises(ArgumentError, match="state"):
        backend.backward(given, dy, state[:-256], GradRequest(transposed=transposed))
