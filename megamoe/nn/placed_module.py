"""What a module has whose layer was given a placement: moves of its parameters, slots in state dicts, refusals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.experts.placement import ExpertPlacement
from megamoe.experts.shards import Place
from megamoe.experts.tensors import is_fsdp
from megamoe.layer.layer import Layer

_SLOTS = "slot_experts"


class PlacedModule(nn.Module):
    """The part of MegaMoE that its Layer does, and what it says to placements, if it has one."""

    _layer: Layer
    problem: Problem
    place: Place
    averaged: type | None

    @property
    def accumulate_into_main_grad(self) -> bool:
        """Whether gradients of w13 and w2 are in their main_grad, not in their grad."""
        return self._layer.accumulate_into_main_grad

    @property
    def num_delayed(self) -> int:
        """How many backward passes wait for backward_dw()."""
        return self._layer.num_delayed

    def backward_dw(self, passes: int = 1) -> None:
        """Make the weight gradients of the oldest backward passes that wait for them, see Layer.backward_dw()."""
        self._layer.backward_dw(passes)

    @property
    def _kind(self) -> type:
        """The class, without that of parametrizations: torch makes another one whenever they come, as PEFT's do."""
        kind = type(self)
        if "parametrizations" not in self._modules:
            return kind
        base = kind.__bases__[0]
        return base if kind.__name__ == f"Parametrized{base.__name__}" else kind

    def _surroundings(self) -> tuple[Any, ...]:
        """Return what changes where somebody has wrapped this layer since who may have overwritten experts.

        fully_shard() of the layer makes it another class, that of a module around it leaves a mark; within DDP's
        forward pass torch says so. All of it is the same on all ranks, since a check is collective, and comes back:
        evaluation and the repeat of a checkpoint are outside of DDP's forward pass.
        """
        around = DistributedDataParallel._active_ddp_module
        return self._kind, "_is_fsdp_managed_module" in self.__dict__, around and id(around)

    def divide_gradients(self, num_ranks: int) -> None:
        """Divide experts' gradients by num_ranks where they are reduced: by FSDP2, or in the layer's backward pass."""
        self.averaged = self._kind
        if not is_fsdp(self):
            self._layer.divide_weight_gradients(num_ranks)
            return
        fsdp: Any = self
        fsdp.set_gradient_divide_factor(float(num_ranks))
        ranks = fsdp.w13.device_mesh.size()
        copies = ranks // self.problem.ep_size if self.place.distributed else ranks
        if not self.w13.is_cuda and copies > 1:
            # gloo cannot scale while it reduces. With one copy, torch 2.13 would divide twice.
            fsdp.set_force_sum_reduction_for_comms(True)

    def statistics(self) -> Statistics:
        """Return what the last forward did, see Layer.statistics()."""
        return self._layer.statistics()

    def check(self) -> None:
        """Raise the fault that a finished launch left behind, if there is one."""
        self._layer.check()

    def reset(self) -> None:
        """Make the layer usable again after a fault. Collective, see Layer.reset()."""
        self._layer.reset()

    @property
    def placement(self) -> ExpertPlacement | None:
        """The placement that is in force, if there is one."""
        return self._layer.placement

    @torch.no_grad()
    def move_experts(
        self,
        placement: ExpertPlacement,
        *,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
    ) -> None:
        """Move parameters to the slots of another placement, see Layer.move_experts(). Collective."""
        parameters: dict[str, Tensor] = dict(self.named_parameters(recurse=False))
        buffers = {name: b for name, b in self.named_buffers(recurse=False) if name != _SLOTS}
        self._layer.move_tensors(placement, parameters | buffers, optimizers)
        self._write_slots()

    def _make_slots(self, device: Any) -> None:
        if (of := self.placement) is not None:
            self.register_buffer(_SLOTS, torch.tensor(of.expert_of, device=device))
            self._own = self._ids()

    def _ids(self) -> list[int]:
        return [id(p) for p in self._parameters.values()]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)
        if self.placement is not None:
            self._own = self._ids()  # from the meta device others
        return moved

    def _write_slots(self) -> None:
        """Say in a buffer which expert each slot holds: state dicts have it, and to_empty() may have lost it."""
        if (of := self.placement) is not None:
            slots: Tensor = getattr(self, _SLOTS)
            if not slots.is_meta:
                slots.copy_(torch.tensor(of.expert_of))

    def _check_slots(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raise ArgumentError for a state dict of another placement: its rows are other experts'."""
        if self.placement is None:
            if prefix + _SLOTS in state_dict:
                given = state_dict[prefix + _SLOTS].tolist()
                expected = "no placement, as the layer has none"
                raise ArgumentError(f"state_dict[{prefix + _SLOTS!r}]", given, expected)
            return
        given = state_dict.get(prefix + _SLOTS)
        if given is None and not any(prefix + name in state_dict for name in ("w13", "w2")):
            return
        if given is None or given.tolist() != self.placement.expert_of:
            expected = f"{self.placement.expert_of}, the placement of the layer that loads it"
            value = None if given is None else given.tolist()
            raise ArgumentError(f"state_dict[{prefix + _SLOTS!r}]", value, expected)

    def _refuse_shards(self, sharded: bool) -> None:
        """Raise ConfigError for DTensors of slots: reductions over them round replicas differently."""
        if self.placement is None:
            return
        around = "_is_fsdp_managed_module" in self.__dict__ and self._ids() != self._own
        if sharded or around:
            expected = "None under fully_shard() and distribute(): what reduces there may round replicas differently"
            raise ConfigError("placement", "given", expected)


def first_slots(module: nn.Module, grad: Tensor) -> list[Tensor]:
    """Return the parts of a parameter's gradient that norms count: each expert once."""
    replicas = module._layer.replicas if isinstance(module, PlacedModule) else None
    return [grad] if replicas is None else [grad[i] for i in replicas.first_slots()]
