"""Copy each expert's rows after its last whole group of 64, for the weight gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.launch.table import ROWS
from megamoe.ops.scales import ends_of


def tails(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return those rows of a and b, [M > 0, N] sorted by expert, as [E * 64, N] padded with zeros. Nothing waits."""
    num = a.shape[0]
    ends = torch.full((1,), num, device=a.device) if offs is None else ends_of(offs, num)
    left = ends.diff(prepend=ends.new_zeros(1)) % ROWS
    place = torch.arange(ROWS, device=a.device)
    rows = ((ends - left)[:, None] + place).clamp(max=num - 1).flatten()
    behind = (place >= left[:, None]).view(-1, 1)

    def of(t: Tensor) -> Tensor:
        return t.index_select(0, rows).masked_fill_(behind, 0)

    return of(a), of(b)
