"""Arrange the scales of e4m3 rows by block: [ceil(K/128), P] fp32, where each expert begins at a multiple of 128.

The kernel loads 128 scales at a time from an aligned address, so they cannot be as dense as the rows: block b of the
launch has the scales 128 b to 128 b + 127. P = 128 (M // 128 + E) has room for any offsets. Scales of no row are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.launch.layout import BLOCK_ROWS
from megamoe.ops.groups import Groups


def num_places(num_rows: int, num_experts: int) -> int:
    """Return P."""
    return BLOCK_ROWS * (num_rows // BLOCK_ROWS + num_experts)


def places(groups: Groups, like: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return where the scales of each row stand, [M] int64, and whether it has any; else it has no row's place."""
    begins, ends = groups.bounds(like)
    blocks = (ends - begins + BLOCK_ROWS - 1) // BLOCK_ROWS
    moved = (blocks.cumsum(0) - blocks) * BLOCK_ROWS - begins
    expert, inside = groups.of_rows(like)
    rows = torch.arange(like.shape[0], device=like.device)
    none = num_places(len(rows), num_experts) - 1
    return torch.where(inside, rows + moved[expert], none), inside


def by_block(scale: Tensor, groups: Groups, num_experts: int) -> Tensor:
    """scale: [M, S] by row -> [S, P]."""
    out = scale.new_zeros(scale.shape[1], num_places(scale.shape[0], num_experts))
    at, inside = places(groups, scale, num_experts)
    out[:, at] = scale.where(inside[:, None], 0).t().contiguous()
    return out


def by_row(scale: Tensor, groups: Groups, like: Tensor, num_experts: int) -> Tensor:
    """scale: [S, P], like: the rows -> [M, S]; of rows of no expert undefined."""
    return scale[:, places(groups, like, num_experts)[0]].t()
