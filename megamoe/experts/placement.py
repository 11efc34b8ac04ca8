"""Assign experts to slots: several slots of a layer hold one popular expert, and its tokens take turns (EPLB).

Logical experts are the router's; physical experts are slots. A layer with a placement is for inference (PlacedLayer):
it maps topk_ids to slots, and move_experts() moves experts between slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.group.group import Group


class SlotsOfShared(Problem):
    """Mark a problem whose slots SharedExperts arranges: it takes no placement, and computes as any other.

    A class, because dataclasses.replace(), copies and pickles keep a class.
    """

    __hash__ = Problem.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and vars(self) == vars(other)


class ExpertPlacement:
    """Assign one of E logical experts to each of P physical slots.

    Attributes: `num_logical` (E), `num_physical` (P), `expert_of` (the expert of each slot), `slots_of` (the slots of
    each expert).

    Args:
        physical_to_logical: [P] int, the expert of each slot. Every expert 0..E-1 occurs at least once. Equal on all
            ranks.

    Raises:
        ConfigError: It is no list of integers, or an expert is missing.
    """

    def __init__(self, physical_to_logical: Sequence[int] | Tensor) -> None:
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

    @classmethod
    def balanced(
        cls, load: Sequence[float] | Tensor, num_physical: int, num_ranks: int
    ) -> ExpertPlacement:
        """Compute a placement in which slots and ranks have nearly equal loads. The result is deterministic.

        Each extra slot goes to the expert with the most tokens per slot. Then each slot, the one with the most tokens
        first, goes to a rank with room: the one with the fewest slots of this expert, and among these the one with the
        lowest load.

        Args:
            load: [E], tokens of each expert, as counters() returns them.
            num_physical: P, at least E and a multiple of num_ranks.
            num_ranks: R. Each rank holds P / R consecutive slots.

        Returns:
            The ExpertPlacement.

        Raises:
            ConfigError: A load is negative or not finite, or a number does not fit.
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
        return cls([expert for experts in held for expert in experts])

    def counters(self, statistics: Statistics, group: Any = None) -> Tensor:
        """Count the tokens of each logical expert in the last call, over all ranks. Collective.

        Args:
            statistics: Result of the layer's statistics().
            group: The group of the layer. Default: the default process group.

        Returns:
            [E] int64.

        Raises:
            ArgumentError: The statistics have another number of slots.
        """
        ranks = Group.of(group)
        with ranks.together("ExpertPlacement.counters()"):
            if not isinstance(statistics, Statistics):
                raise ArgumentError("statistics", type(statistics).__name__, "layer.statistics()")
            counts = statistics.tokens_per_expert.long()
            if len(counts) * ranks.size != self.num_physical:
                what = f"of {len(counts) * ranks.size} slots"
                raise ArgumentError("statistics", what, f"{self.num_physical}")
            ranks.begin("ExpertPlacement.counters()")
        if ranks.size > 1:
            every = [torch.empty_like(counts) for _ in range(ranks.size)]
            dist.all_gather(every, counts, group=ranks.process_group)
            counts = torch.cat(every)
        experts = torch.tensor(self.expert_of, device=counts.device)
        return counts.new_zeros(self.num_logical).index_add_(0, experts, counts)

    def problem(self, problem: Problem) -> Problem:
        """Return the problem of a layer whose experts are the slots of this placement.

        Args:
            problem: The problem with logical experts.

        Returns:
            The problem with num_experts = P.

        Raises:
            ConfigError: The numbers of experts differ, P is no multiple of the ranks, or the layer has SharedExperts.
        """
        if not isinstance(problem, Problem):
            raise ConfigError("problem", type(problem).__name__, "a Problem")
        if isinstance(problem, SlotsOfShared):
            expected = "None for a layer with SharedExperts, which have each rank's last slots"
            raise ConfigError("placement", "given", expected)
        if problem.num_experts != self.num_logical:
            raise ConfigError("problem.num_experts", problem.num_experts, f"{self.num_logical}")
        if self.num_physical % problem.ep_size:
            expected = f"a multiple of {problem.ep_size} ranks"
            raise ConfigError("num_physical", self.num_physical, expected)
        return replace(problem, num_experts=self.num_physical)


def _as_tensor(name: str, values: Any, expected: str, dtype: torch.dtype | None = None) -> Tensor:
    try:
        return torch.as_tensor(values, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(name, repr(values), expected) from error
