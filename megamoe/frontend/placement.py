"""Redundant experts: several slots of a layer hold one popular expert, and its tokens take turns.

The layer knows slots only: it is made with num_experts = P slots, and topk_ids become slots on the way in, by two
look-ups on the device. Serving systems call this EPLB; logical experts are the router's, physical ones are slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.backends.statistics import Statistics
from megamoe.config import Problem
from megamoe.errors import ArgumentError, ConfigError
from megamoe.formats.weights import ExpertWeights
from megamoe.frontend.agreement import begins, check_equal, process_group, together
from megamoe.frontend.experts import is_dtensor


class ExpertPlacement:
    """Which of E logical experts each of P physical slots holds.

    physical_to_logical: [P] int, the expert of each slot, every expert 0..E-1 at least once. Equal on all ranks.
    device: where topk_ids are.

    Raises ConfigError for a list that leaves an expert out.
    """

    def __init__(
        self, physical_to_logical: Sequence[int] | Tensor, device: torch.device | str = "cpu"
    ) -> None:
        slots = _as_tensor("physical_to_logical", physical_to_logical, "[P] integers, P > 0")
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or not len(slots):
            what = f"{list(slots.shape)} {slots.dtype}"
            raise ConfigError("physical_to_logical", what, "[P] integers, P > 0")
        self.expert_of: list[int] = slots.tolist()
        self.num_physical, self.num_logical = len(slots), int(slots.max()) + 1
        # P slots that leave none of the first P experts out hold no others: numbers may be of any size.
        first = range(min(self.num_logical, self.num_physical))
        missing = sorted(set(first) - set(self.expert_of))
        if missing or int(slots.min()) < 0:
            what = f"without {missing}" if missing else f"with {int(slots.min())}"
            expected = f"every expert of 0..{self.num_logical - 1} at least once"
            raise ConfigError("physical_to_logical", what, expected)
        self.slots_of: list[list[int]] = [[] for _ in range(self.num_logical)]
        for slot, expert in enumerate(self.expert_of):
            self.slots_of[expert].append(slot)
        most = max(map(len, self.slots_of))
        padded = [(slots * most)[:most] for slots in self.slots_of]
        self._slots = torch.tensor(padded, device=device)  # [E, most]
        self._replicas = torch.tensor([len(s) for s in self.slots_of], device=device)  # [E]
        self._expert_of = slots.to(device, torch.int64)

    @classmethod
    def balanced(
        cls,
        load: Sequence[float] | Tensor,
        num_physical: int,
        num_ranks: int,
        device: torch.device | str = "cpu",
    ) -> ExpertPlacement:
        """Return a placement under which slots and ranks have nearly equal loads.

        load: [E], tokens of each expert, from counters(). num_physical: P >= E, a multiple of num_ranks, which hold
        P / num_ranks slots each, in order. Each further slot goes to the expert with the most tokens a slot; then the
        fullest slots are dealt first, each to the emptiest rank that has room. Deterministic.

        Raises ConfigError for other loads and numbers.
        """
        expected = "[E] finite numbers that are not negative"
        loads = _as_tensor("load", load, expected, torch.float64)
        fine = (loads >= 0) & loads.isfinite()
        if loads.dim() != 1 or not len(loads) or not bool(fine.all()):
            raise ConfigError("load", loads.tolist(), expected)
        for name, value in (("num_physical", num_physical), ("num_ranks", num_ranks)):
            if not isinstance(value, int):
                raise ConfigError(name, repr(value), "an int")
        if num_physical < len(loads) or num_ranks < 1 or num_physical % num_ranks:
            expected = f"at least {len(loads)} and a multiple of num_ranks"
            raise ConfigError("num_physical, num_ranks", (num_physical, num_ranks), expected)
        replicas = [1] * len(loads)
        for _ in range(num_physical - len(loads)):
            fullest = max(range(len(loads)), key=lambda e: (loads[e].item() / replicas[e], -e))
            replicas[fullest] += 1
        share = [loads[e].item() / replicas[e] for e in range(len(loads))]
        slots = [e for e, n in enumerate(replicas) for _ in range(n)]
        room, of_rank = num_physical // num_ranks, [0.0] * num_ranks
        held: list[list[int]] = [[] for _ in range(num_ranks)]
        for expert in sorted(slots, key=lambda e: (-share[e], e)):
            free = [r for r in range(num_ranks) if len(held[r]) < room]
            rank = min(free, key=lambda r: (held[r].count(expert), of_rank[r], r))
            held[rank].append(expert)
            of_rank[rank] += share[expert]
        return cls([expert for experts in held for expert in experts], device)

    def physical(self, topk_ids: Tensor) -> Tensor:
        """topk_ids: [T, K] int32 or int64, logical, outside [0, E) dropped -> [T, K] of the same type, slots.

        An expert's tokens take its slots in turns, by their number. Waits for nothing; may be captured.
        """
        if not isinstance(topk_ids, Tensor):
            raise ArgumentError("topk_ids", type(topk_ids).__name__, "a tensor")
        if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
            what = f"{list(topk_ids.shape)} {topk_ids.dtype}"
            raise ArgumentError("topk_ids", what, "[T, K] int32 or int64")
        if topk_ids.device != self._slots.device:
            expected = f"{self._slots.device}, the placement's"
            raise ArgumentError("topk_ids.device", topk_ids.device, expected)
        valid = (topk_ids >= 0) & (topk_ids < self.num_logical)
        experts = topk_ids.long().where(valid, 0)
        turn = torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None]
        slots = self._slots[experts, turn % self._replicas[experts]]
        return slots.where(valid, -1).to(topk_ids.dtype)

    def counters(self, statistics: Statistics, group: Any = None) -> Tensor:
        """Return [E] int64, tokens of each logical expert in the last call, from all ranks. Collective.

        statistics: of the layer. group: as the layer was given it; its ranks hold P / size slots each.
        Raises ArgumentError for statistics of another number of slots.
        """
        group = process_group(group)
        with begins("ExpertPlacement.counters()", group):
            if not isinstance(statistics, Statistics):
                raise ArgumentError("statistics", type(statistics).__name__, "layer.statistics()")
            counts, ranks = (
                statistics.tokens_per_expert.long(),
                1 if group is None else group.size(),
            )
            if len(counts) * ranks != self.num_physical:
                what = f"of {len(counts) * ranks} slots"
                raise ArgumentError("statistics", what, f"{self.num_physical}")
        if group is not None:
            every = [torch.empty_like(counts) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, counts, group=group)
            counts = torch.cat(every)
        return counts.new_zeros(self.num_logical).index_add_(0, self._expert_of, counts)

    @torch.no_grad()
    def fill_(
        self, weights: ExpertWeights | nn.Module, source: ExpertPlacement, group: Any = None
    ) -> None:
        """Bring this rank's slots from what they hold under `source` to this placement, in place. Collective.

        weights: those that the layer is given, or a MegaMoE, which owns them. group: as counters() has it. Only
        experts that a rank does not hold travel; the memory taken is that of the experts that move. Afterwards FP8
        copies follow by themselves, as after any write.

        Raises ConfigError for placements of other sizes, ArgumentError for weights of another number of slots,
        RankMismatch where ranks differ in the placements.
        """
        group, plans = process_group(group), []

        def stated() -> tuple[list[int], list[int]]:
            plans.append(self._plan(weights, source, group))
            return source.expert_of, self.expert_of

        found = together(group, "ExpertPlacement.fill_()", stated)
        check_equal("what fill_() moves", {rank: f"{a} -> {b}" for rank, (a, b) in found.items()})
        sent, got, tensors = plans[0]
        for tensor in tensors:
            _exchange(tensor.detach(), sent, got, group)

    def _plan(
        self, weights: ExpertWeights | nn.Module, source: ExpertPlacement, group: Any
    ) -> tuple[list[list[int]], list[list[int]], list[Tensor]]:
        """Return this rank's slots to send to each rank, those to fill from each, and the tensors they are in."""
        if not isinstance(source, ExpertPlacement):
            raise ConfigError("source", type(source).__name__, "an ExpertPlacement")
        names = [f.name for f in fields(ExpertWeights)]
        if not all(hasattr(weights, name) for name in names):
            raise ArgumentError("weights", type(weights).__name__, "ExpertWeights or a MegaMoE")
        if (source.num_physical, source.num_logical) != (self.num_physical, self.num_logical):
            what = f"{source.num_logical} experts in {source.num_physical} slots"
            raise ConfigError("source", what, f"{self.num_logical} in {self.num_physical}")
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        room, rest = divmod(self.num_physical, ranks)
        if rest:
            raise ConfigError("group", f"{ranks} ranks", f"a divisor of {self.num_physical} slots")
        moves = [
            (source._nearest(expert, slot // room, room), slot)
            for slot, expert in enumerate(self.expert_of)
            if source.expert_of[slot] != expert
        ]
        sent = [
            [a % room for a, b in moves if (a // room, b // room) == (rank, r)]
            for r in range(ranks)
        ]
        got = [
            [b % room for a, b in moves if (a // room, b // room) == (r, rank)]
            for r in range(ranks)
        ]
        tensors = {name: getattr(weights, name) for name in names}
        for name, tensor in tensors.items():
            if is_dtensor(tensor):
                raise ArgumentError(name, "a DTensor", "a tensor of this rank's experts")
            if tensor is not None and tensor.shape[0] != room:
                raise ArgumentError(name, list(tensor.shape), f"[{room}, ...], this rank's slots")
        return sent, got, [tensor for tensor in tensors.values() if tensor is not None]

    def _nearest(self, expert: int, rank: int, room: int) -> int:
        """Return a slot that holds the expert: one of that rank, if there is any."""
        return min(self.slots_of[expert], key=lambda slot: (slot // room != rank, slot))

    def problem(self, problem: Problem) -> Problem:
        """Return a logical layer's problem with this placement's slots as its experts.

        Raises ConfigError for a problem of another number of experts.
        """
        if not isinstance(problem, Problem):
            raise ConfigError("problem", type(problem).__name__, "a Problem")
        if problem.num_experts != self.num_logical:
            raise ConfigError("problem.num_experts", problem.num_experts, f"{self.num_logical}")
        return replace(problem, num_experts=self.num_physical)


def _as_tensor(name: str, values: Any, expected: str, dtype: torch.dtype | None = None) -> Tensor:
    try:
        return torch.as_tensor(values, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(name, repr(values), expected) from error


def _exchange(tensor: Tensor, sent: list[list[int]], got: list[list[int]], group: Any) -> None:
    """Send experts `sent[r]` of [L, ...] to each rank r; put those that arrive at `got[r]`. Collective."""
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)  # e4m3 cannot be indexed everywhere
    leaving = [row for of_rank in sent for row in of_rank]
    arrived = rows = tensor[leaving].contiguous()  # copies: their slots may be written
    if group is not None:
        arrived = rows.new_empty((sum(map(len, got)), *tensor.shape[1:]))
        width = rows.element_size() * tensor[0].numel()
        sizes = [[len(rows) * width for rows in way] for way in (got, sent)]
        as_bytes = (t.view(-1).view(torch.uint8) for t in (arrived, rows))
        dist.all_to_all_single(*as_bytes, *sizes, group=group)
    at = [row for of_rank in got for row in of_rank]
    if at:
        tensor[at] = arrived
