"""Grouped GEMM: each row times the matrix of its expert, fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def full_fp32(device: torch.device) -> Iterator[None]:
    """Switch TF32 and autocast off: an oracle with 10 mantissa bits is none."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def grouped_gemm(
    rows: Tensor, expert: Tensor, matrix: Callable[[int], Tensor], bias: Tensor | None, width: int
) -> Tensor:
    """rows: [M, K] fp32 sorted by expert [M]; matrix(e): [N, K] fp32; bias: [L, N] -> [M, N]."""
    experts, lengths = torch.unique_consecutive(expert, return_counts=True)
    parts, first = [], 0
    for e, length in zip(experts.tolist(), lengths.tolist(), strict=True):
        part = rows[first : first + length] @ matrix(e).T
        parts.append(part if bias is None else part + bias[e].reshape(-1).float())
        first += length
    return torch.cat(parts) if parts else rows.new_zeros(0, width)
