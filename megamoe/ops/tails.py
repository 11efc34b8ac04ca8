"""What is left of each expert's rows behind the last whole 64, for the weight gradient."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64  # of a pipeline slot: group_rows of csrc/megamoe/schedule/tile_shape.h


def tails(t: Tensor, offs: Tensor | None) -> Tensor:
    """t: [M > 0, N], sorted by expert -> [E * 64, N]: of each expert those rows, then zeros. Nothing waits."""
    if offs is None:
        ends = torch.full((1,), t.shape[0], device=t.device)
    else:
        ends = offs.long().clamp(0, t.shape[0]).cummax(0)[0]
    left = ends.diff(prepend=ends.new_zeros(1)) % ROWS
    place = torch.arange(ROWS, device=t.device)
    rows = ((ends - left)[:, None] + place).clamp(max=t.shape[0] - 1).flatten()
    behind = (place >= left[:, None]).flatten()
    return t.index_select(0, rows).masked_fill_(behind[:, None], 0)
