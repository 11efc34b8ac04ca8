"""What a step of an optimizer would make wrong of experts, which differ between ranks: refused before it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import is_dtensor
from megamoe.core.uncompiled import uncompiled
from megamoe.experts.tensors import is_fsdp

_layers: WeakSet[Any] = WeakSet()
_hooks: list[Any] = []


def watch(layer: Any) -> None:
    """Look at every step of an optimizer while this MegaMoE, over several ranks, lives."""
    _layers.add(layer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def check_not_sharded(layer: Any) -> None:
    """Raise ArgumentError where FSDP2 shards experts with a module around the layer, and divides by other ranks."""
    for name, p in layer.named_parameters():
        if is_dtensor(p) and (p.device_mesh.ndim > 1 or not layer.place.distributed):
            expected = "whole, or sharded by a fully_shard() of the layer's own"
            raise ArgumentError(name, "sharded by a module around the layer", expected)


@uncompiled("steps of optimizers over experts are not seen by torch.compile")
def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    spreads = any(t.__name__ == "ZeroRedundancyOptimizer" for t in type(optimizer).__mro__)
    for layer in list(_layers) if spreads else ():
        experts = {id(p) for p in layer.parameters()}
        if any(id(p) in experts for group in optimizer.param_groups for p in group["params"]):
            expected = (
                "dense parameters, and another optimizer for experts: it broadcasts what it steps"
            )
            raise ArgumentError(
                "ZeroRedundancyOptimizer", "given experts of several ranks", expected
            )
    for layer in list(_layers):
        if layer.averaged is not None and not is_fsdp(layer):
            check_not_sharded(layer)
