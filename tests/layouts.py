"""Store weights in layouts other than [L, P*I, H], as views that every backend takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megamoe.formats.weights import ExpertWeights

GAP_BYTES = 16


def interleaved(w: Tensor) -> Tensor:
    """w: [L, 2*I, ...] -> a view [L, 2, I, ...] of rows g0, u0, g1, u1 ..."""
    split = w.unflatten(1, (2, -1))
    return split.transpose(1, 2).contiguous().transpose(1, 2)


def apart(w: Tensor) -> Tensor:
    """w: [L, 2*I, ...] -> a view [L, 2, I, ...] of [2, L, I, ...]."""
    return w.unflatten(1, (2, -1)).transpose(0, 1).contiguous().transpose(0, 1)


def with_gaps(w: Tensor) -> Tensor:
    """w: [..., K] -> the same with NaN behind each row."""
    raw = w.contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, GAP_BYTES), value=0xFF)
    return padded.view(w.dtype)[..., : w.shape[-1]]


def _of_w13(change: Callable[[Tensor], Tensor], e: ExpertWeights) -> ExpertWeights:
    return replace(e, w13=change(e.w13), b13=None if e.b13 is None else change(e.b13))


LAYOUTS: dict[str, Callable[[ExpertWeights], ExpertWeights]] = {
    "interleaved": lambda e: _of_w13(interleaved, e),
    "apart": lambda e: _of_w13(apart, e),
    "gaps": lambda e: replace(e, w13=with_gaps(e.w13), w2=with_gaps(e.w2)),
}
