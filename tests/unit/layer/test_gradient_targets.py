"""Where experts' gradients go: what is refused, what is written or added in place, what goes through a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.backends.mega.gradients import Targets
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.testing.inputs import make_weights

PROBLEM = Problem(64, 48, 4, 2, bias=True)


def _other(weights: Any, name: str, tensor: Tensor) -> Any:
    return Targets.make(weights, (True,) * 4, {name: tensor})


def test_what_cannot_be_added_to_is_refused() -> None:
    weights = make_weights(PROBLEM, quantize=False)
    cases = {
        r"into\['w2'\].shape is \[4, 48, 64\]": ("w2", weights.w2.transpose(1, 2)),
        r"into\['w13'\].dtype": ("w13", weights.w13.half()),
        r"into\['b2'\].device": ("b2", weights.b2.to("meta")),
        r"into is 'x', expected gradients that are needed: w13, w2, b13, b2": ("x", weights.w2),
    }
    for message, (name, tensor) in cases.items():
        with pytest.raises(ArgumentError, match=message):
            _other(weights, name, tensor)
    with pytest.raises(
        ArgumentError, match="into is 'w13', expected gradients that are needed: w2"
    ):
        Targets.make(weights, (False, True, False, False), {"w13": weights.w13})


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
