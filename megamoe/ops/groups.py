"""Describe which rows each expert has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.launch.passes import fused_kernels, on_hopper
from megamoe.launch.table import ROWS


class Groups(NamedTuple):
    """Rows sorted by expert: expert e's end at offs[e], and begin at offs[e - 1] rounded up to the alignment.

    offs: [E] int32; None: one expert has all rows. Rows between are of no expert. Ends are taken as ascending and none
    past the rows, as the kernel does.
    """

    offs: Tensor | None
    alignment: int = 1

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each expert's rows begin and end, both [E] int64. like: [M, ...], the rows."""
        num = like.shape[0]
        if self.offs is None:
            ends = torch.full((1,), num, device=like.device)
        else:
            ends = self.offs.long().clamp(0, num).cummax(0)[0]
        begins = torch.cat((ends.new_zeros(1), ends[:-1]))
        return (-(-begins // self.alignment) * self.alignment).minimum(ends), ends

    def of_rows(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's expert [M] int64, and whether it has one [M]; where not, its expert is any."""
        begins, ends = self.bounds(like)
        rows = torch.arange(like.shape[0], device=like.device)
        expert = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
        return expert, (rows >= begins[expert]) & (rows < ends[expert])

    def times(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        """rows: [M, N], scale: [M] fp32 -> their product; scales of rows of no expert are any."""
        return rows if scale is None else rows * scale.where(self.of_rows(rows)[1], 0)[:, None]

    def slices(self, like: Tensor) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, and its rows. This waits for the device of offs."""
        bounds = (t.tolist() for t in self.bounds(like))
        for e, rows in enumerate(map(slice, *bounds)):
            if rows.stop > rows.start:
                yield e, rows


def tails(a: Tensor, b: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Copy each expert's rows after its last whole group of 64, for the weight gradient.

    a, b: [M > 0, N] sorted by expert -> both as [E * 64, N], padded with zeros. Nothing waits.
    """
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
