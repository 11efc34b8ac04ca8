"""Which experts a tensor holds: in state dicts, in checkpoints of torch.distributed (DCP), as DTensors.

A rank's w13 has L of E experts. `Experts` says which ones, in every state dict of a layer over more than one
rank: torch.save writes it as a plain tensor that says so, DCP as rows [begin, begin + L) of E, so that it loads into
any number of ranks. `Place.take` is the way back, and refuses what is another rank's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, RankMismatch
from megamoe.core.planes import is_dtensor
from megamoe.experts.tensors import Experts, noted
from megamoe.group.group import Group

if TYPE_CHECKING:  # 1.2 s to import (2026-11-24): who has such objects has paid
    from torch.distributed.tensor import DTensor


def span(problem: Problem) -> list[int]:
    """Return [E, first expert, number of experts] of this rank: what a state dict's metadata holds."""
    return [problem.num_experts, problem.expert_begin(), problem.num_local_experts()]


def local_part(value: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor, and which of its rows comes first."""
    if not is_dtensor(value):
        return value, 0
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits = zip(
        value.device_mesh.shape,
        value.device_mesh.get_coordinate() or (),
        value.placements,
        strict=True,
    )
    begin, rows = 0, value.shape[0]
    # FSDP2 cuts what the experts' mesh has cut before (_StridedShard), whatever the order of the mesh
    for size, rank, placement in sorted(splits, key=lambda s: isinstance(s[2], _StridedShard)):
        if placement.is_replicate():
            continue
        if not placement.is_shard(0) and not isinstance(placement, _StridedShard):
            raise ArgumentError("placements", value.placements, "Shard(0) or Replicate()")
        rows, offset = Shard.local_shard_size_and_offset(rows, size, rank)
        begin += offset
    return value.to_local(), begin


class Place:
    """Where a layer's tensors lie among the E experts. distributed: DTensors over all E, not over L."""

    def __init__(self, problem: Problem, group: Any = None, distributed: bool = False) -> None:
        self.problem, self.group, self.distributed = problem, group, distributed

    def rows(self, value: Tensor) -> tuple[Tensor, int]:
        """value: a parameter, or of its form -> (this rank's rows, the expert of the first one)."""
        local, first = local_part(value)
        if self.distributed and is_dtensor(value):
            return local, first
        self._check_mesh(value)
        return local, self.problem.expert_begin() + first

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter as the layer computes with it: all its experts, not FSDP2's shard of them."""
        if not is_dtensor(value):
            return value
        if self.distributed:
            value = value.to_local()
            if value.shape[0] == self.problem.num_local_experts():
                return value
        self._check_mesh(value)
        expected = "whole: call unshard() of the module that fully_shard() was given before"
        raise ArgumentError(name, "FSDP2's shard of it", expected)

    def mixed(self, ranks: Iterable[int]) -> list[int]:
        """Return which of these ranks hold different experts of the layer, of which there are none or several."""
        own = dist.get_process_group_ranks(self.group) if self.problem.ep_size > 1 else []
        shared = sorted(set(ranks) & set(own))
        return shared if len(shared) > 1 else []

    def _check_mesh(self, value: Tensor) -> None:
        """Raise RankMismatch where FSDP2 shards or copies over ranks that hold other experts."""
        if is_dtensor(value) and (mixed := self.mixed(value.device_mesh.mesh.flatten().tolist())):
            raise RankMismatch(
                f"fully_shard() was given the experts over ranks {mixed}, which hold different ones of the "
                "same layer: it would mix them. Give it ignored_params, or the layer a mesh of the ranks that hold "
                "the same experts (docs/training.md)"
            )

    def mark(self, value: Tensor) -> Tensor:
        """Return Experts that share the memory of `value`; a DTensor over all E knows its place."""
        if self.problem.ep_size == 1 or (self.distributed and is_dtensor(value)):
            return value
        local, begin = self.rows(value)
        return Experts.of(local, begin, self.problem.num_experts)

    def as_dtensor(self, experts: Experts) -> DTensor:
        """Return experts of all ranks as Shard(0); raise ArgumentError where that cannot say what this rank holds."""
        total, begin, count = span(self.problem)
        if total % self.problem.ep_size or (experts.begin, experts.shape[0]) != (begin, count):
            expected = (
                "False where ranks do not divide the experts, or FSDP2 shards them: use dcp.save()"
            )
            raise ArgumentError("full_state_dict", True, expected)
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self.group, experts.device.type)
        return DTensor.from_local(experts.local(), mesh, (Shard(0),), run_check=False)

    def take(self, name: str, value: Tensor, parameter: Tensor | None, told: list[int]) -> Tensor:
        """Return what load_state_dict may copy into `parameter`; raise ArgumentError if it is not ours.

        value: Experts, DTensor or plain tensor, of this rank's experts or of all E.
        parameter: what is there, perhaps FSDP2's shard of it; None: nothing yet, this rank's experts are due.
        told: span() of who wrote a plain `value`.
        """
        total, begin, count = span(self.problem)
        if is_dtensor(value):
            if is_dtensor(parameter) and value.shape == parameter.shape:
                return value
            value = self._of_dtensor(name, value)
        if (note := noted(value)) is not None:
            told = [note[1], note[0], value.shape[0]]
            held = value.local() if isinstance(value, Experts) else value
        elif value.dim() and value.shape[0] == total:
            told, held = [total, 0, total], value
        elif value.dim() and value.shape[0] == told[2]:
            held = value
        else:
            return value  # torch names the sizes
        if parameter is not None:
            rows, begin = self.rows(parameter)
            count = rows.shape[0]
        skip = begin - told[1]
        if told[0] != total or skip < 0 or skip + count > told[2]:
            given = f"experts [{told[1]}, {told[1] + told[2]}) of {told[0]}"
            expected = f"[{begin}, {begin + count}) of {total}, what rank {self.problem.rank} holds"
            raise ArgumentError(f"state_dict[{name!r}]", given, expected)
        held = held[skip : skip + count]
        if not is_dtensor(parameter):
            return held
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            held.contiguous(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _of_dtensor(self, name: str, value: DTensor) -> Tensor:
        """Return this rank's Experts, or all E rows, of a DTensor that is not placed as ours is."""
        if all(p.is_replicate() for p in value.placements):
            return value.to_local()
        total, _, count = span(self.problem)
        ranks = value.device_mesh.size()
        from torch.distributed.tensor import Shard

        if value.placements != (Shard(0),) or total % ranks or value.shape[0] != total:
            given = f"a DTensor of {value.shape[0]} experts, {value.placements} on {ranks} ranks"
            expected = (
                f"{total} experts, (Shard(0),), on ranks that divide them: elsewhere DTensor's "
                "ranks hold other experts than the layer's"
            )
            raise ArgumentError(f"state_dict[{name!r}]", given, expected)
        rows, first = local_part(value)
        return Experts.of(rows, first, total)


def write(place: Place, state_dict: dict[str, Any], prefix: str, names: Iterable[str]) -> None:
    """Mark a layer's tensors in a state dict that torch has filled."""
    metadata = getattr(state_dict, "_metadata", {})
    if prefix[:-1] in metadata:
        metadata[prefix[:-1]]["experts"] = span(place.problem)
    full = place.problem.ep_size > 1 and _full_is_wanted()
    if full:
        Group.of(place.group).begin("a full state dict")
    for name in names:
        value = state_dict.get(prefix + name)
        # With keep_vars=True it is a view that autograd knows, not the parameter.
        if isinstance(value, Tensor):
            value = place.mark(value)
            if isinstance(value, Experts) and full:
                value = place.as_dtensor(value)
            state_dict[prefix + name] = value


def _full_is_wanted() -> bool:
    """Whether torch's get_model_state_dict(full_state_dict=True) asks: it gathers DTensors only, without a word."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_get_model_state_dict":
            return bool(getattr(frame.f_locals.get("info"), "full_state_dict", False))
        frame = frame.f_back
    return False


def read(
    place: Place,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    parameters: dict[str, Tensor | None],
) -> bool:
    """Replace a layer's tensors in a state dict by what torch may copy into `parameters`.

    Returns whether every one of them said which experts it holds.
    """
    told, known = metadata.get("experts", span(place.problem)), "experts" in metadata
    sure = True
    for name, parameter in parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor):
            said = noted(value) or is_dtensor(value) or value.shape[:1] == told[:1]
            sure = sure and bool(known or said)
            state_dict[prefix + name] = place.take(prefix + name, value, parameter, told)
    return sure


def distributed(problem: Problem, group: Any, mesh: DeviceMesh, local: Tensor) -> DTensor:
    """local: [L, ...] -> [E, ...] as DTensor, Shard(0) over `mesh`, which has the ranks of `group`."""
    if problem.num_experts % problem.ep_size:
        expected = f"a multiple of {problem.ep_size} ranks: DTensor would cut other experts"
        raise ArgumentError("num_experts", problem.num_experts, expected)
    ranks = mesh.mesh.flatten().tolist()
    mine = dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
    if mesh.ndim != 1 or ranks != mine:
        raise ArgumentError("mesh", mesh, f"one dimension, of the ranks of the group: {mine}")
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, mesh, (Shard(0),), run_check=False)
