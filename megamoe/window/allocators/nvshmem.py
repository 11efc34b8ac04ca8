"""Allocate from NVSHMEM's symmetric heap, through nvshmem4py. The kernel uses plain peer addresses."""

from __future__ import annotations

import os
from typing import Any

import torch

from megamoe.core.errors import ConfigError
from megamoe.group.group import Group
from megamoe.group.order import mark_of
from megamoe.window.allocators import Allocation, checked_peers

_started: dict[str, tuple[int, int]] = {}  # NVSHMEM starts once a process, for one set of ranks


def _start(device: torch.device, group: Group) -> Any:
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # no multicast
    try:
        import nvshmem.core as nvshmem
        from cuda.core import Device
    except ImportError as error:
        raise ConfigError(
            "transport", '"nvshmem"', f"pip install 'megamoe[nvshmem]' ({error})"
        ) from error
    ranks = (group.rank, group.size)
    if "ranks" not in _started:
        own = Device(device.index)
        own.set_current()
        # The identifier is a small numpy record; rank 0's goes to everybody.
        uid = nvshmem.get_unique_id(empty=group.rank != 0)
        uid._data[...] = group.gather(mark_of("make its window"), uid._data.copy())[0]
        nvshmem.init(
            device=own, uid=uid, rank=group.rank, nranks=group.size, initializer_method="uid"
        )
        _started["ranks"] = ranks
    elif _started["ranks"] != ranks:
        raise ConfigError("group", ranks, f"{_started['ranks']}, for which NVSHMEM was started")
    return nvshmem


def allocate(nbytes: int, device: torch.device, group: Group) -> Allocation:
    """Allocate over the ranks that NVSHMEM was started with. Collective.

    The heap must be large enough: NVSHMEM_SYMMETRIC_SIZE.
    """
    nvshmem = _start(device, group)
    memory = nvshmem.tensor((nbytes,), dtype=torch.uint8)
    peers: list[Any] = []
    for rank in range(group.size):
        if rank == group.rank:
            peers.append(memory.data_ptr())
            continue
        try:
            peers.append(nvshmem.get_peer_tensor(memory, rank).data_ptr())
        except Exception:  # nvshmem_ptr gave NULL; every version raises something else
            peers.append(None)
    return Allocation(memory, checked_peers(peers, group), lambda: nvshmem.free_tensor(memory))
