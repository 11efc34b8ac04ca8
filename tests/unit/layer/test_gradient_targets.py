"""Where experts' gradients go: what is refused, what is written or added in place, what goes through a copy."""

from __future__ import annotations

import torch

from megamoe.backends.mega.gradients import Targets
from megamoe.core.config import Problem
from megamoe.testing.inputs import make_weights

PROBLEM = Problem(64, 48, 4, 2, bias=True)


def test_gradients_are_written_or_added_as_a_launch_can() -> None:
    """One type and one mode a launch: what is wanted otherwise goes through a tensor of its own."""
    weights = make_weights(PROBLEM, quantize=False)
    sums = {
        "w13": torch.ones(weights.w13.shape),
        "w2": torch.ones_like(weights.w2),  # bf16
        "b13": torch.ones(2 * weights.b13.numel())[::2].view(weights.b13.shape),
    }
    targets = Targets.make(weights, (True,) * 4, sums)
    given = targets.tensors
    assert targets.accumulate is True
    assert given["w13"] is sums["w13"]
    for name in ("w2", "b13", "b2"):
        assert given[name].dtype == torch.float32
        assert given[name].is_contiguous()
        assert not given[name].any()  # to be added to
    for name in ("w13", "w2", "b13", "b2"):
        given[name] += 2
    assert [None if r is None else r.dtype for r in targets.results()] == [None] * 3 + [
        torch.float32
    ]
    assert all(bool((t == 3).all()) for t in sums.values())

    plain = Targets.make(weights, (True, True, False, True))
    assert plain.accumulate is False
    assert "b13" not in plain.tensors
    assert [r is not None for r in plain.results()] == [True, True, False, True]
    assert plain.results()[0].dtype == torch.bfloat16
