"""Reduce a token's rows into one partial (expert rank); combine partials into y (home rank)."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.backends.reference.route import Rows


def reduce(rows: Rows, y_rows: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum each token's rows on one expert rank in k order, in fp32 (fp64 rows: fp64), rounded once to `dtype`.

    y_rows: [M, H]; topk_weights: [N, K] of all (kept) tokens -> partial [N, H]; zero where there
        are no rows.
    """
    wide = torch.promote_types(y_rows.dtype, torch.float32)
    total = y_rows.new_zeros(topk_weights.shape[0], y_rows.shape[1], dtype=wide)
    for k in range(topk_weights.shape[1]):
        of_k = torch.nonzero(rows.k == k).flatten()
        token = rows.token[of_k]  # unique: a (token, k) has one expert
        weighted = topk_weights[token, k].to(wide)[:, None] * y_rows[of_k].to(wide)
        total = total.index_add(0, token, weighted)
    return total.to(dtype)


def combine(partials: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum the partials [N, H] of all expert ranks in rank order, as reduce does."""
    wide = torch.promote_types(partials[0].dtype, torch.float32)
    total = partials[0].to(wide)
    for partial in partials[1:]:
        total = total + partial.to(wide)
    return total.to(dtype)
