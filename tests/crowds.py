"""Build batches that contain the same tokens among different others: a token's result must not depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.testing.inputs import Inputs, make_inputs

ROUTINGS = ("uniform", "hot", "one_rank", "dropped", "one_expert")


@dataclass
class Crowd:
    """One batch. inputs, counts: of each rank, counts for num_tokens_device. homes, rows: of each watched token."""

    name: str
    inputs: list[Inputs]
    counts: list[int]
    homes: Tensor  # [W] the rank
    rows: Tensor  # [W] the token of that rank

    def of_watched(self, ys: list[Tensor]) -> Tensor:
        """ys: of each rank, [T, ...] -> what belongs to the watched tokens, [W, ...]."""
        found = zip(self.homes.tolist(), self.rows.tolist(), strict=True)
        return torch.stack([ys[home][row] for home, row in found])


def crowds(problem: Problem, watched: Inputs, seed: int = 0) -> Iterator[Crowd]:
    """Yield batches that hold the watched tokens, W at most max_tokens / 2, on the watched tensors' device.

    Alone; on other ranks; at other places among others, routed in every way; between padding of dropped routes and
    NaN; beside tokens that are not finite; before rows that a count leaves out.
    """
    num, ranks = watched.x.shape[0], problem.ep_size
    dice = torch.Generator().manual_seed(seed)
    zeros = torch.zeros(num, dtype=torch.int64)
    nobody = [0] * ranks
    room = problem.max_tokens - num

    def crowd(name: str, homes: Tensor, others: list[Inputs], counted: bool = False) -> Crowd:
        return _mixed(name, watched, homes, others, None if counted else dice)

    def drawn(tokens: list[int], routing: str, seed: int) -> list[Inputs]:
        device, dtype = watched.x.device, watched.topk_ids.dtype
        make = partial(make_inputs, seed=seed, routing=routing, device=device, ids_dtype=dtype)
        return [make(problem, n, rank=r) for r, n in enumerate(tokens)]

    yield crowd("alone", zeros, drawn(nobody, "uniform", 0))
    yield crowd("alone, at home on the last rank", zeros + ranks - 1, drawn(nobody, "uniform", 0))
    for number, routing in enumerate(ROUTINGS):
        homes = torch.randint(ranks, (num,), generator=dice)
        tokens = torch.randint(room // 2, room + 1, (ranks,), generator=dice).tolist()
        others = drawn(tokens, routing, seed + number + 1)
        yield crowd(f"among {tokens} others, {routing}", homes, others)
    homes = torch.randint(ranks, (num,), generator=dice)
    padding = drawn([room] * ranks, "all_dropped", seed)
    for each in padding:
        each.x.fill_(torch.nan)
        each.topk_weights.fill_(torch.nan)
    yield crowd("between padding", homes, padding)
    others = drawn([room] * ranks, "uniform", seed + 9)
    for each in others:
        each.x[::2] = torch.nan
        each.x[1::4] = torch.inf
    yield crowd("beside what is not finite", homes, others)
    yield crowd("before a count", homes, others, counted=True)


def _mixed(
    name: str,
    watched: Inputs,
    homes: Tensor,
    others: list[Inputs],
    dice: torch.Generator | None,
) -> Crowd:
    """Mix the watched tokens into the others of their homes; without dice they come first, and the count ends there."""
    rows, inputs, counts = torch.zeros_like(homes), [], []
    for rank, other in enumerate(others):
        (mine,) = torch.where(homes == rank)
        total = mine.numel() + other.x.shape[0]
        order = torch.arange(total) if dice is None else torch.randperm(total, generator=dice)
        rows[mine] = order[: mine.numel()]
        columns = []
        for field in ("x", "topk_ids", "topk_weights"):
            given = getattr(watched, field), getattr(other, field)
            both = torch.cat((given[0][mine.to(given[0].device)], given[1]))
            columns.append(torch.empty_like(both).index_copy_(0, order.to(both.device), both))
        inputs.append(Inputs(*columns))
        counts.append(mine.numel() if dice is None else total)
    return Crowd(name, inputs, counts, homes, rows)
