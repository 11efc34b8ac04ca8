"""Arrange the state dicts of optimizers over experts, which differ between ranks.

A module's state dict has experts as DTensors over all E, or as ExpertRows. The optimizer's state dict has their moments
in the same form. So get_optimizer_state_dict() and set_optimizer_state_dict() of torch, DCP and torch.save work.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from megamoe.core.errors import ArgumentError, RankMismatch
from megamoe.core.uncompiled import uncompiled
from megamoe.experts.shards import Place, span

_layers: WeakSet[Any] = WeakSet()
_hooks: list[Any] = []
_seen: WeakSet[Optimizer] = WeakSet()  # optimizers with our hooks on their state dicts


def watch(layer: Any) -> None:
    """Let state dicts of this layer's optimizers describe which experts moments belong to. For several ranks."""
    _layers.add(layer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


@uncompiled("hooks on optimizers are not traced")
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Register our hooks at an optimizer's first step; torch's get_optimizer_state_dict() makes one if needed."""
    if optimizer in _seen:
        return
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        _check_broadcasts(optimizer)
    _seen.add(optimizer)
    optimizer.register_state_dict_post_hook(partial(_converted, False))
    optimizer.register_load_state_dict_pre_hook(partial(_converted, True))
    given = {"state": optimizer.state, "param_groups": optimizer.param_groups}  # loaded before
    optimizer.state.update(_converted(True, optimizer, given)["state"])


def _check_broadcasts(optimizer: Any) -> None:
    """Raise RankMismatch if a rank's experts would be broadcast over those of others."""
    ranks = dist.get_process_group_ranks(optimizer.process_group)
    mixed = {id(p) for layer in _layers if layer.place.mixed(ranks) for p in layer.parameters()}
    if any(id(p) in mixed for group in optimizer.param_groups for p in group["params"]):
        raise RankMismatch(
            f"ZeroRedundancyOptimizer would broadcast experts to ranks {ranks}, which hold different "
            "ones: give experts an optimizer of their own"
        )


def _converted(loads: bool, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with experts' tensors converted. Keys are numbers, names (DCP) or parameters."""
    known = {id(p): (layer.place, n) for layer in _layers for n, p in layer.named_parameters()}
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    given = [p for group in optimizer.param_groups for p in group["params"]]
    state = dict(state_dict["state"])
    for key, p in zip(keys, given, strict=False):  # torch names other lengths
        if id(p) in known and key in state:
            convert = partial(_moment, loads, *known[id(p)], p)
            state[key] = tree_map_only(Tensor, convert, state[key])
    return state_dict | {"state": state}


def _moment(loads: bool, place: Place, name: str, p: Tensor, value: Tensor) -> Tensor:
    """Return a tensor in the form of the optimizer or of its state dict; a scalar is no expert's and stays.

    Raises ArgumentError if rows are not experts, as in 8-bit optimizers.
    """
    if not value.dim():
        return value
    own = place.take(name, value, p, span(place.problem)) if loads else value
    if own.shape[0] != p.shape[0]:
        expected = f"[{p.shape[0]}, ...], as the parameter has it"
        raise ArgumentError(f"the optimizer's state of {name}", list(own.shape), expected)
    return own if loads else place.spread(own)
