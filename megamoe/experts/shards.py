"""Determine which experts a tensor holds: in state dicts, in checkpoints of torch.distributed (DCP), as DTensors.

A rank's w13 has L of E experts. If the layer has several ranks, state dicts contain it as a DTensor over all E, so that
torch's functions for checkpoints work. If no DTensor can describe it, they contain ExpertRows. `Place.take` converts
back, and rejects experts of another rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, RankMismatch
from megamoe.core.planes import is_dtensor
from megamoe.experts.tensors import ExpertRows

if TYPE_CHECKING:  # It takes 1.2 s to import (2026-11-24): only programs that use DTensors do so.
    from torch.distributed.tensor import DTensor


class Span(NamedTuple):
    """Name the experts of some rows: `num` of `total`, from `begin` on."""

    total: int
    begin: int
    num: int

    @property
    def end(self) -> int:
        """The expert after the last."""
        return self.begin + self.num

    def __str__(self) -> str:
        return f"[{self.begin}, {self.end}) of {self.total}"


def span(problem: Problem) -> Span:
    """Return the experts of this rank."""
    return Span(problem.num_experts, problem.expert_begin(), problem.num_local_experts())


def local_part(value: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor, and which of its rows comes first."""
    if not is_dtensor(value):
        return value, 0
    local = value.to_local()
    if local.shape[1:] != value.shape[1:] or any(p.is_partial() for p in value.placements):
        raise ArgumentError("placements", value.placements, "Shard(0) or Replicate()")
    (chunk,) = value.__create_chunk_list__()  # DCP's question, also of shards of shards
    return local, chunk.offsets[0]


class Place:
    """Say which of the E experts a layer's tensors hold. distributed: True: they are DTensors over all E."""

    def __init__(self, problem: Problem, group: Any = None, distributed: bool = False) -> None:
        self.problem, self.group, self.distributed = problem, group, distributed
        self._meshes: dict[str, DeviceMesh] = {}  # of the group, by the type of device

    def rows(self, value: Tensor) -> tuple[Tensor, int]:
        """value: a parameter, or a tensor of its form -> (this rank's rows, the expert of the first row)."""
        local, first = local_part(value)
        if self.distributed and is_dtensor(value):
            return local, first
        self._check_mesh(value)
        return local, self.problem.expert_begin() + first

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter as the layer multiplies it: all local experts, not FSDP2's shard of them."""
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
        """Return those of these ranks that hold different experts of the layer: none or several."""
        own = dist.get_process_group_ranks(self.group) if self.problem.ep_size > 1 else []
        shared = sorted(set(ranks) & set(own))
        return shared if len(shared) > 1 else []

    def _check_mesh(self, value: Tensor) -> None:
        """Raise RankMismatch if FSDP2 shards or replicates over ranks that hold different experts."""
        if is_dtensor(value) and (mixed := self.mixed(value.device_mesh.mesh.flatten().tolist())):
            raise RankMismatch(
                f"fully_shard() was given the experts over ranks {mixed}, which hold different ones of the "
                "same layer: it would mix them. Give it ignored_params, or the layer a mesh of the ranks that hold "
                "the same experts (docs/training.md)"
            )

    def spread(self, value: Tensor) -> Tensor:
        """Return a parameter, or a tensor of its form, as a tensor over all E experts that shares its memory."""
        if self.problem.ep_size == 1 or (self.distributed and is_dtensor(value)):
            return value
        local, begin = self.rows(value)
        placed = self._placed(value)
        if placed is None:
            return ExpertRows(local, begin, self.problem.num_experts)
        from torch.distributed.tensor import DTensor

        shape = torch.Size((self.problem.num_experts, *value.shape[1:]))
        return DTensor.from_local(
            local, *placed, run_check=False, shape=shape, stride=value.stride()
        )

    def _placed(self, value: Tensor) -> tuple[DeviceMesh, list[Any]] | None:
        """Return the mesh and placements of spread(value); None if no DTensor can have these rows."""
        ranks = self.problem.ep_size
        if self.problem.num_experts % ranks:
            return None
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        if not is_dtensor(value):
            device = "cpu" if value.is_meta else value.device.type
            if device not in self._meshes:
                self._meshes[device] = DeviceMesh.from_group(self.group, device)
            return self._meshes[device], [Shard(0)]
        # FSDP2 shards this rank's rows over `copies`. With the experts' ranks they are one mesh if the user made one.
        copies = value.device_mesh
        root, mine = copies._get_root_mesh(), dist.get_process_group_ranks(self.group)
        names, inner = root.mesh_dim_names or (), copies.mesh_dim_names or ()
        found = [n for n in names if dist.get_process_group_ranks(root.get_group(n)) == mine]
        moved = value.device.type != copies.device_type  # CPUOffloadPolicy: from_local() would copy
        if moved or len(found) != 1 or not set(inner) <= set(names):
            return None
        placed = dict(zip(inner, value.placements, strict=True)) | {found[0]: Shard(0)}
        ordered = [name for name in names if name in placed]
        if ordered.index(found[0]):  # what is split first comes last in the mesh
            before = ordered[: ordered.index(found[0])]
            placed |= {
                n: _StridedShard(0, split_factor=ranks) for n in before if placed[n].is_shard()
            }
        return root[tuple(ordered)], [placed[name] for name in ordered]

    def _check_shards(self, name: str, value: DTensor, parameter: DTensor) -> None:
        """Raise ArgumentError if a DTensor of the parameter's shape is another rank's shard, or FSDP2's own one."""
        if value is parameter and not self.distributed and self.problem.ep_size > 1:
            given = "FSDP2's own shard, as set_model_state_dict(full_state_dict=True) leaves it"
            expected = "experts of all ranks: call distribute() before fully_shard()"
            raise ArgumentError(f"state_dict[{name!r}]", given, expected)
        mine, theirs = (v.device_mesh.get_coordinate() for v in (parameter, value))
        if value.device_mesh == parameter.device_mesh and mine != theirs:
            given = f"of the rank at {theirs} of the mesh"
            raise ArgumentError(f"state_dict[{name!r}]", given, f"of the one at {mine}")

    def take(self, name: str, value: Tensor, parameter: Tensor | None, told: Span) -> Tensor:
        """Return the rows for load_state_dict to copy into `parameter`; raise ArgumentError for rows of other experts.

        value: DTensor or ExpertRows, or a plain tensor of this rank's experts or of all E.
        parameter: the target, perhaps FSDP2's shard; None: nothing yet, return this rank's experts.
        told: span() of the rank that wrote a plain `value`.
        """
        mine = span(self.problem)
        if is_dtensor(value) and is_dtensor(parameter) and value.shape == parameter.shape:
            self._check_shards(name, value, parameter)
            return value
        found = _source(value, mine.total, told)
        if found is None:
            return value  # torch names the sizes
        rows, given = found
        if parameter is not None:
            local, begin = self.rows(parameter)
            mine = Span(mine.total, begin, local.shape[0])
        inside = given.begin <= mine.begin and mine.end <= given.end
        if given.total != mine.total or (mine.num and not inside):
            expected = f"{mine}, what rank {self.problem.rank} holds"
            raise ArgumentError(f"state_dict[{name!r}]", f"experts {given}", expected)
        skip = mine.begin - given.begin
        held = rows[skip : skip + mine.num]
        if not is_dtensor(parameter):
            return held
        from torch.distributed.tensor import DTensor

        placed = parameter.device_mesh, parameter.placements
        whole: Any = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(held.contiguous(), *placed, run_check=False, **whole)


def _source(value: Tensor, total: int, told: Span) -> tuple[Tensor, Span] | None:
    """Return a tensor's rows and their experts: for a plain one all `total`, or `told`; None if neither fits."""
    if is_dtensor(value):
        rows, first = local_part(value)
        return rows, Span(value.shape[0], first, rows.shape[0])
    if isinstance(value, ExpertRows):
        return value.local, Span(value.total, value.begin, value.local.shape[0])
    if value.shape[:1] == (total,):
        return value, Span(total, 0, total)
    return (value, told) if value.shape[:1] == (told.num,) else None


def write(place: Place, state_dict: dict[str, Any], prefix: str, names: Iterable[str]) -> None:
    """Spread a layer's tensors over all experts in a state dict that torch has filled."""
    metadata = getattr(state_dict, "_metadata", {})
    if prefix[:-1] in metadata:
        # A list: torch.load(weights_only=True) rejects a NamedTuple.
        metadata[prefix[:-1]]["experts"] = list(span(place.problem))
    for name in names:
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor):
            state_dict[prefix + name] = place.spread(value)


def read(
    place: Place,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    parameters: dict[str, Tensor | None],
) -> None:
    """Replace a layer's tensors in a state dict by what torch may copy into `parameters`."""
    told = Span(*metadata.get("experts", span(place.problem)))
    for name, parameter in parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor):
            state_dict[prefix + name] = place.take(prefix + name, value, parameter, told)


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
