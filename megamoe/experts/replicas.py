"""A placement in a layer: which slot a route takes, how replicas stay equal, how experts move to other slots.

Forward. Ids are the router's. By three look-ups on the device an expert's tokens take its slots in turns, and the
backend computes P slots as if each were an expert.

Backward. A slot has the gradient of the tokens that took it; its expert's is the sum over its slots:

    rows of the slots whose experts have several -> all_to_all: each to every rank that holds the same expert
    -> every holder adds the rows of an expert in fp32, in the order of their slots, and rounds once -> its slots

Equal rows in equal order, so that replicas get equal bits, whoever holds them, and an optimizer that treats all
elements alike keeps them equal. This is part of the layer's backward pass, before autograd is given anything: hooks,
accumulation, averages and backward_dw() see sums. For main_grad those rows of it are set aside, the pass adds to zeros,
and what they held is added to the sums.

move_experts(), in moves.py. Weights, grad, main_grad and optimizers' moments move alike: each rank fetches the experts
that it lacks, once, and copies the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.backends.call import Gradients, Wanted
from megamoe.backends.select import Question
from megamoe.core.config import Problem
from megamoe.core.errors import RankMismatch
from megamoe.experts.placement import ExpertPlacement
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import Group
from megamoe.group.order import BACKWARD, MARK_INTS, Mark

WEIGHTS = ("w13", "w2", "b13", "b2")


class Replicas:
    """The placement of one layer. `problem` counts slots as experts."""

    def __init__(self, placement: ExpertPlacement, problem: Problem, group: Group) -> None:
        self.placement, self.problem, self.group = placement, problem, group
        self._tables: tuple[Tensor, ...] | None = None
        self._sums: _Sums | None = None
        self._agreed: set[tuple[bool, ...]] = set()  # which gradients all ranks were found to need

    def slots(self, topk_ids: Tensor) -> Tensor:
        """topk_ids: [..., K], logical, outside [0, E) dropped -> the same shape and type, slots. May be captured."""
        fits = isinstance(topk_ids, Tensor) and topk_ids.dim() >= 2
        if not fits or topk_ids.dtype not in (torch.int32, torch.int64):
            return topk_ids  # the call's checks name it
        if self._tables is None or self._tables[0].device != topk_ids.device:
            self._tables = self._made_tables(topk_ids.device)
        order, begin, count = self._tables
        valid = (topk_ids >= 0) & (topk_ids < self.placement.num_logical)
        experts = topk_ids.long().where(valid, 0)
        num_tokens = topk_ids.numel() // topk_ids.shape[-1] if topk_ids.numel() else 0
        turn = torch.arange(num_tokens, device=topk_ids.device).view(*topk_ids.shape[:-1], 1)
        slots = order[begin[experts] + turn % count[experts]]
        return slots.where(valid, -1).to(topk_ids.dtype)

    def _made_tables(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the slots by expert [P], where each expert's begin [E], how many they are [E]."""
        count = torch.tensor([len(slots) for slots in self.placement.slots_of])
        order = torch.tensor([slot for slots in self.placement.slots_of for slot in slots])
        return tuple(t.to(device) for t in (order, count.cumsum(0) - count, count))

    @torch.no_grad()
    def summed(
        self, make: Callable[[], Gradients], wanted: Wanted, mark: Mark, device: torch.device
    ) -> Gradients:
        """Return the gradients that make() returns, those of weights summed over replicas. Collective.

        wanted: what make() makes. Raises RankMismatch, before anything is made, where ranks need gradients of other
        tensors: looked at once for each choice.
        """
        self._agree(wanted.needs.of_weights, mark, device)
        if self._sums is None or self._sums.device != device:
            self._sums = _Sums(self.placement, self.problem, device)
        sums, into = self._sums, wanted.into
        before = {name: target[sums.rows] for name, target in into.items()}
        for target in into.values():
            target.index_fill_(0, sums.rows, 0)
        try:
            found = make()
            for name in WEIGHTS:
                grad = into.get(name, getattr(found, name))
                if grad is not None:
                    sums.sum_(grad, self.group, before.get(name))
        except BaseException:
            for name, target in into.items():
                target.index_copy_(0, sums.rows, before[name])
            raise
        return found

    def _agree(self, needs: tuple[bool, ...], mark: Mark, device: torch.device) -> None:
        if needs in self._agreed:
            return
        part = torch.tensor(needs, dtype=torch.int64, device=device)
        _, found = self.group.meet(mark.ints(BACKWARD), [part] * self.problem.ep_size)
        for rank, row in enumerate(found[:, MARK_INTS : MARK_INTS + len(needs)].tolist()):
            if tuple(map(bool, row)) != needs:
                wanted = [
                    [name for name, flag in zip(WEIGHTS, flags, strict=True) if flag]
                    for flags in (row, needs)
                ]
                raise RankMismatch(
                    f"rank {rank} needs gradients of {wanted[0]}, rank {self.problem.rank} of {wanted[1]}: their sums "
                    "over replicas are collective. Freeze the same tensors on all ranks"
                )
        self._agreed.add(needs)

    def experts(self) -> list[int]:
        """Return the expert of each of this rank's slots."""
        begin = self.problem.expert_begin()
        return self.placement.expert_of[begin : begin + self.problem.num_local_experts()]

    def alike(self) -> bool:
        """Whether two ranks hold the same experts in the same order."""
        room, of = self.problem.num_local_experts(), self.placement.expert_of
        held = [tuple(of[i : i + room]) for i in range(0, len(of), room)]
        return len(set(held)) < len(held)

    def first_slots(self) -> list[int]:
        """Return which of this rank's slots are the first ones of their experts in the layer: norms count those."""
        begin, count = self.problem.expert_begin(), self.problem.num_local_experts()
        of = self.placement
        return [i for i in range(count) if of.slots_of[of.expert_of[begin + i]][0] == begin + i]

    def take(self, new: ExpertPlacement) -> None:
        """Take another placement from now on, where experts have moved."""
        self.placement, self._sums = new, None
        if self._tables is not None:  # in place: graphs that were captured follow
            made = self._made_tables(self._tables[0].device)
            for table, content in zip(self._tables, made, strict=True):
                table.copy_(content)

    def question(self, weights: ExpertWeights) -> Question:
        """Return what asks all ranks whether replicas of an expert are equal: RankMismatch where they are not."""
        begin, of = self.problem.expert_begin(), self.placement
        count = self.problem.num_local_experts()
        several = [i for i in range(count) if len(of.slots_of[of.expert_of[begin + i]]) > 1]

        @torch.no_grad()
        def state() -> dict[int, Any]:
            tensors = weights.named().values()
            if any(t.is_meta for t in tensors):
                return {}
            return {begin + i: [_digest(t[i]) for t in tensors] for i in several}

        def check(by_rank: dict[int, dict[int, Any]]) -> None:
            found = {slot: digest for said in by_rank.values() for slot, digest in said.items()}
            for slot in sorted(found):
                first = of.slots_of[of.expert_of[slot]][0]
                if first in found and found[first] != found[slot]:
                    raise RankMismatch(
                        f"slots {first} and {slot} hold expert {of.expert_of[slot]}, and different weights: replicas "
                        "have to start equal, and an optimizer has to treat all elements alike (docs/training.md)"
                    )

        return Question(state, check)


class _Sums:
    """Who sends which rows to whom, and which are summed, on one device."""

    def __init__(self, placement: ExpertPlacement, problem: Problem, device: torch.device) -> None:
        rank, ranks = problem.rank, range(problem.ep_size)
        of_rank: list[dict[int, list[int]]] = [{} for _ in ranks]  # expert -> slots there
        for slots in placement.slots_of:
            for slot in slots if len(slots) > 1 else ():
                where = of_rank[problem.rank_of_expert(slot)]
                where.setdefault(placement.expert_of[slot], []).append(slot)
        mine = of_rank[rank]
        own = sorted(slot for slots in mine.values() for slot in slots)
        to = [
            sorted(s for e in mine if r != rank and e in of_rank[r] for s in mine[e]) for r in ranks
        ]
        fro = [
            sorted(s for e in mine if r != rank and e in of_rank[r] for s in of_rank[r][e])
            for r in ranks
        ]
        pool = {slot: i for i, slot in enumerate([*own, *(s for slots in fro for s in slots)])}
        experts = sorted(mine)
        begin = problem.expert_begin()

        def index(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        self.device = device
        self.rows = index(slot - begin for slot in own)
        self._leaving = index(s - begin for slots in to for s in slots)
        self._sizes = [len(slots) for slots in fro], [len(slots) for slots in to]
        self._exchanges = any(
            len({problem.rank_of_expert(s) for s in slots}) > 1 for slots in placement.slots_of
        )
        most = max((len(placement.slots_of[e]) for e in experts), default=0)
        self._steps = []  # the j-th slot of each expert that has one: which sum, which row of the pool
        for j in range(most):
            pairs = [
                (i, pool[placement.slots_of[e][j]])
                for i, e in enumerate(experts)
                if len(placement.slots_of[e]) > j
            ]
            self._steps.append((index(i for i, _ in pairs), index(at for _, at in pairs)))
        self._of_row = index(experts.index(placement.expert_of[slot]) for slot in own)

    def sum_(self, grad: Tensor, group: Group, before: Tensor | None) -> None:
        """grad: [L, ...]; its rows of replicas become sums, of `before`, [len(rows), ...], too. Collective."""
        own = grad[self.rows]
        pool = own.new_empty(len(own) + sum(self._sizes[0]), *grad.shape[1:])
        pool[: len(own)] = own
        if self._exchanges:
            exchange(pool[len(own) :], grad[self._leaving], self._sizes, group)
        if not self._steps:
            return
        total = pool[self._steps[0][1]].float()
        for which, rows in self._steps[1:]:
            total[which] = total[which] + pool[rows].float()
        made = total[self._of_row]
        if before is not None:
            made += before.float()
        grad.index_copy_(0, self.rows, made.to(grad.dtype))


def exchange(out: Tensor, rows: Tensor, sizes: tuple[list[int], list[int]], group: Group) -> None:
    """Send rows [n, ...] to the ranks, by all_to_all as bytes; sizes: rows from each rank, to each rank."""
    width = (
        out.element_size() * out[:0].flatten(1).shape[1] if out.dim() > 1 else out.element_size()
    )
    received, sent = (t.contiguous().view(-1).view(torch.uint8) for t in (out, rows))
    of_each, to_each = ([n * width for n in way] for way in sizes)
    dist.all_to_all_single(received, sent, of_each, to_each, group=group.process_group)


def _digest(row: Tensor) -> str:
    copy = (
        row.detach().cpu().clone(memory_format=torch.contiguous_format)
    )  # NumPy keeps what it sees from FSDP2
    return sha256(copy.view(-1).view(torch.uint8).numpy().data).hexdigest()
