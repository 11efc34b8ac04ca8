"""Report what a call did, as tensors on the device. Nothing in this module waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.core.config import CHUNK_TOKENS
from megamoe.core.errors import MegaMoEError


@dataclass(frozen=True)
class Statistics:
    """Report what one call did on this rank. A token that chose an expert twice counts twice, a dropped route never.

    Args:
        tokens_per_expert: [L] int32, the routes from all ranks to each local expert.
        passes: [1] int32, how often the pool was filled; 1 for backends without a pool.
    """

    tokens_per_expert: Tensor
    passes: Tensor

    @staticmethod
    def of_last(found: Statistics | None) -> Statistics:
        """Return `found`. Raise MegaMoEError if there was no call yet."""
        if found is None:
            raise MegaMoEError("statistics() needs a call of the layer before it")
        return found

    @classmethod
    def without_pool(cls, counts: Tensor) -> Statistics:
        """Build the statistics of a backend without a pool from counts [L] of any integer type."""
        counts = counts.detach().to(torch.int32)
        return cls(counts, torch.ones(1, dtype=torch.int32, device=counts.device))

    @staticmethod
    def cells(routes: Tensor, epoch: Tensor) -> Tensor:
        """Return a copy [R, 4] of the route table of a launch. routes: [2, R, 4]; epoch: [1], of the launch."""
        return routes.index_select(0, (epoch & 1).long())[0]

    @classmethod
    def of_cells(
        cls, cells: Tensor, chunk_prefix: Tensor, pool_rows: int, block_rows: int
    ) -> Statistics:
        """Read the tables that a launch of the kernel left, with operations on the device.

        cells: of the launch. chunk_prefix: [L, C + 1], as in megamoe/launch/layout.py.
        """
        longest = cells[:, :1].amax(0)  # [1] tokens
        used = (longest + (CHUNK_TOKENS - 1)) // CHUNK_TOKENS * cells.shape[0]
        # Behind the chunks of this launch lies what other launches left. Those chunks are taken as empty.
        position = torch.arange(chunk_prefix.shape[1], device=chunk_prefix.device)
        column = torch.minimum(position, used).expand(chunk_prefix.shape[0], -1)
        prefix = chunk_prefix.gather(1, column)
        return cls(prefix[:, -1].clone(), _num_passes(prefix, pool_rows, block_rows))


def _num_passes(prefix: Tensor, pool_rows: int, block_rows: int) -> Tensor:
    """Count the passes: [L, C + 1] routes before each chunk -> [1] int32, as pass_end() of csrc/megamoe/rows/plan.cuh.

    First find, for all chunks at once, where a pass that begins at this chunk ends. Then follow the ends from chunk 0
    on, in doubling strides.
    """
    local, chunks = prefix.shape[0], prefix.shape[1] - 1
    begin = torch.arange(chunks, device=prefix.device)
    fits, most = begin, torch.full_like(begin, chunks)
    for _ in range(chunks.bit_length()):  # the largest end that fits, by bisection
        middle = (fits + most + 1) // 2
        rows = prefix.gather(1, middle.expand(local, -1)) - prefix[:, :-1]
        padded = (rows + (block_rows - 1)) // block_rows * block_rows
        fit = padded.sum(0) <= pool_rows
        fits, most = torch.where(fit, middle, fits), torch.where(fit, most, middle - 1)
    end = torch.cat([torch.maximum(fits, begin + 1), most.new_full((1,), chunks)])
    passes = torch.ones_like(end)
    passes[-1].zero_()  # an assignment copies from the host, which no capture takes
    for _ in range(chunks.bit_length()):
        passes, end = passes + passes[end], end[end]
    return passes[:1].to(torch.int32)
