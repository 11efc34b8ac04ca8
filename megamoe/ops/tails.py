"""Copy each expert's rows after its last whole group of 64, for the weight gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.launch.passes import fused_kernels, on_hopper
from megamoe.launch.table import ROWS
from megamoe.ops.groups import Groups


def tails(a: Tensor, b: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return those rows of a and b, [M > 0, N] sorted by expert, as [E * 64, N] padded with zeros. Nothing waits."""
    if on_hopper(a) and (kernels := fused_kernels()) is not None:
        num = 1 if groups.offs is None else len(groups.offs)
        return kernels.copy_tails(a, b, (groups.offs, num, groups.alignment))
    begins, ends = groups.bounds(a)
    left = (ends - begins) % ROWS
    place = torch.arange(ROWS, device=a.device)
    rows = ((ends - left)[:, None] + place).clamp(max=len(a) - 1).flatten()
    behind = (place >= left[:, None]).view(-1, 1)

    def of(t: Tensor) -> Tensor:
        return t.index_select(0, rows).masked_fill_(behind, 0)

    return of(a), of(b)
