"""Plan moves from one placement's slots to another's: which rows each rank sends, fetches and copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import is_dtensor
from megamoe.experts.placement import ExpertPlacement
from megamoe.formats.weights import check_experts
from megamoe.group.group import Group


def check_rows(problem: Problem, weights: Any) -> dict[str, Tensor]:
    """Return the weights by name; raise ArgumentError unless each has one row per slot of this rank."""
    check_experts("weights", weights)
    room = problem.num_local_experts()
    for name, tensor in weights.named().items():
        if is_dtensor(tensor):
            raise ArgumentError(f"weights.{name}", "a DTensor", "a tensor of this rank's slots")
        if tensor.shape[0] != room:
            expected = f"[{room}, ...], this rank's slots"
            raise ArgumentError(f"weights.{name}", list(tensor.shape), expected)
        if tensor.grad_fn is not None:
            expected = "the tensors that calls are given: these are written in place"
            raise ArgumentError(f"weights.{name}", "computed from other tensors", expected)
    return {name: _bytes(tensor.detach()) for name, tensor in weights.named().items()}


def _bytes(tensor: Tensor) -> Tensor:
    """Return e4m3 as bytes: torch cannot index it on every device."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


class _Staged(NamedTuple):
    """Hold one tensor and its new rows. leaving: its rows for other ranks; arrived: rows from them."""

    tensor: Tensor
    rows: Tensor  # [n] that get another expert
    content: Tensor  # [n, ...] of these
    leaving: Tensor
    arrived: Tensor


class Moves:
    """List the rows that one rank sends, fetches and copies. A rank fetches each missing expert once."""

    def __init__(self, old: ExpertPlacement, new: ExpertPlacement, problem: Problem) -> None:
        rank, room = problem.rank, problem.num_local_experts()
        begins = range(0, problem.num_experts, room)
        before, after = ([p.expert_of[b : b + room] for b in begins] for p in (old, new))
        # Each rank fetches the experts that it lacks from their first slots: in ascending order, so rank by rank.
        fetched = [
            sorted(old.slots_of[e][0] for e in {*now} - {*then})
            for then, now in zip(before, after, strict=True)
        ]
        leaving = [[s - begins[rank] for s in slots if s // room == rank] for slots in fetched]
        arriving = {old.expert_of[s]: i for i, s in enumerate(fetched[rank])}
        from_ranks = [s // room for s in fetched[rank]]
        self._sizes = [from_ranks.count(r) for r in range(problem.ep_size)], [*map(len, leaving)]
        self._travels = any(fetched)
        self._leaving = [row for rows in leaving for row in rows]
        here = {e: i for i, e in reversed([*enumerate(before[rank])])}
        changed = [(i, e) for i, e in enumerate(after[rank]) if e != before[rank][i]]
        copied = [(i, here[e]) for i, e in changed if e in here]
        came = [(i, arriving[e]) for i, e in changed if e not in here]
        self._sources, self._came = [row for _, row in copied], [row for _, row in came]
        self._rows = [i for i, _ in (*copied, *came)]
        self._staged: list[_Staged] = []

    @torch.no_grad()
    def stage(self, tensors: Iterable[Tensor]) -> None:
        """Allocate all memory that moving these tensors [L, ...] needs. It does not change them."""
        for tensor in tensors:
            rows = torch.tensor(self._rows, dtype=torch.int64, device=tensor.device)
            content = tensor.new_empty(len(rows), *tensor.shape[1:])
            content[: len(self._sources)] = tensor[self._sources]
            arrived = tensor.new_empty(sum(self._sizes[0]), *tensor.shape[1:])
            leaving = tensor[self._leaving].contiguous()
            self._staged.append(_Staged(tensor, rows, content, leaving, arrived))

    @torch.no_grad()
    def fetch(self, group: Group) -> None:
        """Fetch the experts of other ranks, by all_to_all as bytes. Collective."""
        for tensor, _, content, *buffers in self._staged if self._travels else ():
            sent, received = (t.view(-1).view(torch.uint8) for t in buffers)
            of_each, to_each = ([n * tensor[:1].nbytes for n in way] for way in self._sizes)
            dist.all_to_all_single(received, sent, of_each, to_each, group=group.process_group)
            content[len(self._sources) :] = buffers[1][self._came]

    def write_(self) -> None:
        """Write the rows that get another expert."""
        for tensor, rows, content, *_ in self._staged:
            tensor.index_copy_(0, rows, content)
