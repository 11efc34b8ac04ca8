"""Arrange the scales of e4m3 rows by block: [ceil(K/128), P] fp32, where each expert begins at a multiple of 128.

The kernel loads 128 scales at a time from an aligned address, so they cannot be as dense as the rows: block b of the
launch has the scales 128 b to 128 b + 127. P = 128 (M // 128 + E) has room for any offsets. Scales between the rows of
two experts are undefined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.launch.layout import BLOCK_ROWS


def num_places(num_rows: int, num_experts: int) -> int:
    """Return P."""
    return BLOCK_ROWS * (num_rows // BLOCK_ROWS + num_experts)


def ends_of(offs: Tensor, num_rows: int) -> Tensor:
    """Return where the rows of each expert end, [E] int64, as the kernel takes them: ascending, none past the rows."""
    return offs.long().clamp(0, num_rows).cummax(0)[0]


def places(offs: Tensor | None, num_rows: int, num_experts: int, device: torch.device) -> Tensor:
    """Return where each row's scales stand, [M] int64; rows of no expert share the last place, which is no row's."""
    rows = torch.arange(num_rows, device=device)
    if offs is None:
        return rows
    ends = ends_of(offs, num_rows)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    blocks = (ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS
    moved = (blocks.cumsum(0) - blocks) * BLOCK_ROWS - starts
    expert = torch.searchsorted(ends, rows, right=True)
    inside = rows + moved[expert.clamp(max=num_experts - 1)]
    last = num_places(num_rows, num_experts) - 1
    return torch.where(expert < num_experts, inside, last)


def by_block(scale: Tensor, offs: Tensor | None, num_experts: int) -> Tensor:
    """scale: [M, S] by row -> [S, P]."""
    rows, groups = scale.shape
    out = scale.new_zeros(groups, num_places(rows, num_experts))
    out[:, places(offs, rows, num_experts, scale.device)] = scale.t().contiguous()
    return out


def by_row(scale: Tensor, offs: Tensor | None, num_rows: int, num_experts: int) -> Tensor:
    """scale: [S, P] -> [M, S]; of rows of no expert undefined."""
    return scale[:, places(offs, num_rows, num_experts, scale.device)].t()
