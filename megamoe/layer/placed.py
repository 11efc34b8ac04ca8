"""Define `PlacedLayer`: a layer with redundant experts, for inference.

Three look-ups on the device map the router's ids to slots; the tokens of an expert take its slots in turn. The backend
computes P slots as if each of them were an expert. move_experts() moves experts to other slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.core.planes import is_dtensor
from megamoe.experts.moves import Moves, check_rows
from megamoe.experts.placement import ExpertPlacement
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import RankConfig
from megamoe.layer.inputs import Inputs
from megamoe.layer.layer import Layer


class PlacedLayer(Layer):
    """Run a Layer with redundant experts, for inference: several slots may hold one popular expert.

    Calls take `topk_ids` of logical experts and `weights` of this rank's slots. The layer's `problem` counts slots as
    experts. A call whose gradients would be recorded raises ArgumentError: train a Layer without a placement.

    Args:
        problem: As for Layer, with the number of logical experts.
        group: As for Layer.
        placement: The expert of each slot, equal on all ranks.
        **options: The other arguments of Layer.

    Raises:
        ConfigError: The placement does not fit the problem.
        RankMismatch: The ranks have different placements.
    """

    placement: ExpertPlacement

    def __init__(
        self,
        problem: Problem | Callable[[Any], Problem],
        group: Any = None,
        *,
        placement: ExpertPlacement,
        **options: Any,
    ) -> None:
        self.placement = placement
        self._tables: tuple[Tensor, ...] = ()

        def of_slots(ranks: Any) -> Problem:
            if not isinstance(placement, ExpertPlacement):
                raise ConfigError("placement", type(placement).__name__, "an ExpertPlacement")
            return placement.problem(problem(ranks) if callable(problem) else problem)

        super().__init__(of_slots, group, placement=placement, **options)
        self._adjusts = True
        self._no_gradients = (
            "a layer with a placement is for inference, train a layer without placement="
        )

    def move_experts(self, placement: ExpertPlacement, weights: ExpertWeights) -> None:
        """Move experts to the slots of another placement, and route tokens by it from now on. Collective.

        Weights and routing change together, or an error leaves both unchanged. Captured graphs use the new placement.
        The next call creates new FP8 copies. The move needs memory for the rows that change.

        Args:
            placement: The new placement, with the same numbers of experts and slots, equal on all ranks.
            weights: The weights that calls receive. They are overwritten in place; each rank fetches a missing expert
                once.

        Raises:
            ConfigError: The placement has other sizes.
            ArgumentError: Weights are not tensors with one row per slot of this rank.
            RankMismatch: Ranks have different placements or weights.
            PeerFault: Another rank failed.
        """
        moves: list[Moves] = []

        def stage() -> RankConfig:
            tensors = check_rows(self.problem, weights)
            moves.append(self._moves_to(placement))
            moves[0].stage(tensors.values())
            kinds = [(name, str(t.dtype), tuple(t.shape[1:])) for name, t in tensors.items()]
            return RankConfig(equal={"placement": placement.expert_of, "weights": kinds})

        def fetch() -> RankConfig:
            moves[0].fetch(self.ranks)
            return RankConfig()

        self.ranks.agree("move_experts()", stage)
        self.ranks.agree("move_experts()", fetch)
        with self._lock, torch.inference_mode():  # in which torch writes to tensors of every mode
            moves[0].write_()
            if self._tables:
                for table, content in zip(self._tables, _tables(placement), strict=True):
                    table.copy_(content)  # in place: captured graphs read it
            self.placement = placement
        self.invalidate()

    def take_slots(self, state_dict: dict[str, Any], prefix: str, names: Iterable[str]) -> None:
        """Replace tensors of all logical experts in a state dict by the rows of this rank's slots.

        Args:
            state_dict: The state dict, changed in place.
            prefix: Prefix of the layer's keys.
            names: Names of the tensors.

        Raises:
            ArgumentError: A tensor does not have one row per logical expert.
        """
        total, begin = self.placement.num_logical, self.problem.expert_begin()
        held = self.placement.expert_of[begin : begin + self.problem.num_local_experts()]
        for key in [prefix + name for name in names if prefix + name in state_dict]:
            value = state_dict[key]
            if is_dtensor(value) or value.shape[:1] != (total,):
                given = f"{type(value).__name__} {list(value.shape)}"
                expected = (
                    f"a plain tensor of all {total} logical experts, as the layer has a placement"
                )
                raise ArgumentError(f"state_dict[{key!r}]", given, expected)
            state_dict[key] = value[held]

    def _moves_to(self, placement: ExpertPlacement) -> Moves:
        old = self.placement
        if not isinstance(placement, ExpertPlacement):
            raise ConfigError("placement", type(placement).__name__, "an ExpertPlacement")
        if (placement.num_physical, placement.num_logical) != (old.num_physical, old.num_logical):
            what = f"{placement.num_logical} experts in {placement.num_physical} slots"
            expected = f"{old.num_logical} in {old.num_physical}"
            raise ConfigError("placement", what, expected)
        return Moves(old, placement, self.problem)

    def _keep(self, weights: ExpertWeights) -> None:
        super()._keep(weights)
        device = weights.w13.device
        if not self._tables or self._tables[0].device != device:
            self._tables = tuple(t.to(device) for t in _tables(self.placement))

    def _adjusted(self, inputs: Inputs) -> Inputs:
        return super()._adjusted(inputs._replace(topk_ids=self._slots(inputs.topk_ids)))

    def _slots(self, topk_ids: Tensor) -> Tensor:
        """topk_ids: [..., K] logical, dropped outside [0, E) -> slots, same shape and dtype. A graph may capture it."""
        order, begin, count = self._tables
        valid = (topk_ids >= 0) & (topk_ids < self.placement.num_logical)
        experts = topk_ids.long().where(valid, 0)
        num_tokens = topk_ids.numel() // topk_ids.shape[-1] if topk_ids.numel() else 0
        turn = torch.arange(num_tokens, device=topk_ids.device).view(*topk_ids.shape[:-1], 1)
        slots = order[begin[experts] + turn % count[experts]]
        return slots.where(valid, -1).to(topk_ids.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise MegaMoEError("a layer with a placement cannot be copied: create a new one")


def _tables(placement: ExpertPlacement) -> tuple[Tensor, ...]:
    """Return the slots sorted by expert [P], each expert's first place in them [E], its number of slots [E]."""
    count = torch.tensor([len(slots) for slots in placement.slots_of], device="cpu")
    order = torch.tensor([slot for slots in placement.slots_of for slot in slots], device="cpu")
    return order, count.cumsum(0) - count, count
