"""Allocate memory that every rank of a group can address."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ConfigError, UnreachablePeer
from megamoe.group.group import Group


@dataclass
class Allocation:
    """One rank's piece of symmetric memory. `memory` [bytes] uint8 is its own, `peers` are the base
    addresses of all ranks' pieces as mapped here. free() is not collective and called once."""

    memory: Tensor
    peers: list[int]
    free: Callable[[], None]


# (bytes, device, group) -> Allocation with undefined contents. Collective.
Transport = Callable[[int, torch.device, Group], Allocation]
_TRANSPORTS = ("symm_mem", "nvshmem", "single_process")  # modules of this package


def choose(name: str, group: Group) -> Transport:
    """Return the named transport. Where no other process takes part it is plain memory, whatever the name."""
    if group.in_process:
        name = "single_process"
    elif name == "auto":
        name = "symm_mem"
    if name not in _TRANSPORTS:
        raise ConfigError("transport", repr(name), "auto, " + ", ".join(_TRANSPORTS))
    transport: Transport = importlib.import_module(f"{__name__}.{name}").allocate
    return transport


def checked_peers(peers: list[Any], group: Group) -> list[int]:
    """Return the addresses, or raise naming the ranks that this one cannot reach."""
    missing = [rank for rank, address in enumerate(peers) if not address]
    if missing:
        names = ", ".join(map(str, missing))
        raise UnreachablePeer(
            f"rank {group.rank} cannot map the memory of rank {names}. All ranks of a group need GPUs of "
            'one host that reach each other over NVLink or PCIe peer access; else use backend="staged"'
        )
    return [int(address) for address in peers]
