"""Make the calls of several ranks out of their columns."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megamoe.backends.call import Call
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights


def calls_of(
    xs: Sequence[Tensor | QuantizedRows],
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    weights: Sequence[ExpertWeights],
    counts: Sequence[Tensor | None] | None = None,
) -> list[Call]:
    """Return the calls of all ranks. counts: num_tokens_device of each."""
    given = counts or [None] * len(xs)
    return list(map(Call, xs, topk_ids, topk_weights, weights, given))
