"""Compute grouped GEMMs: each row times the matrix of its expert, and products over the rows of an expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def grouped_gemm(
    rows: Tensor, expert: Tensor, matrix: Callable[[int], Tensor], bias: Tensor | None, width: int
) -> Tensor:
    """rows: [M, K] fp32 or fp64, sorted by expert [M]; matrix(e): [N, K] alike; bias: [L, N] -> [M, N]."""
    parts = []
    for e, own in _rows_by_expert(expert):
        part = rows[own] @ matrix(e).T
        parts.append(part if bias is None else part + bias[e].reshape(-1).to(part.dtype))
    return torch.cat(parts) if parts else rows.new_zeros(0, width)


def grouped_outer(left: Tensor, right: Tensor, expert: Tensor, num: int) -> Tensor:
    """left: [M, N], right: [M, K], sorted by expert [M] -> [L, N, K]: left^T right over each expert's rows."""
    out = left.new_zeros(num, left.shape[1], right.shape[1])
    for e, own in _rows_by_expert(expert):
        out[e] = left[own].T @ right[own]
    return out


def _rows_by_expert(expert: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and its rows. expert: [M], sorted."""
    experts, lengths = torch.unique_consecutive(expert, return_counts=True)
    first = 0
    for e, length in zip(experts.tolist(), lengths.tolist(), strict=True):
        yield e, slice(first, first + length)
        first += length
