"""Allocate plain tensors, if all ranks are in one process: a group of one rank, or threads that act as ranks."""

from __future__ import annotations

import torch

from megamoe.core.errors import ConfigError, UnreachablePeer
from megamoe.group.group import Group
from megamoe.group.order import mark_of
from megamoe.window.allocators import Allocation, checked_peers


class SingleProcessTransport:
    """torch.empty, and peer access between the GPUs of one process."""

    def allocate(self, nbytes: int, device: torch.device, group: Group) -> Allocation:
        """Collective over the threads of the process."""
        if not group.in_process:
            raise ConfigError(
                "transport", '"single_process"', "ranks that are threads of one process"
            )
        # cudaMalloc aligns to 512 bytes, torch's CPU allocator only to 64.
        raw = torch.empty(nbytes + 256, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % 256
        memory = raw[start : start + nbytes]
        self._open(device, group)
        bases = group.gather(mark_of("make its window"), memory.data_ptr())
        peers = checked_peers(list(bases.values()), group)
        held = [raw]
        return Allocation(memory, peers, held.clear)

    @staticmethod
    def _open(device: torch.device, group: Group) -> None:
        devices = group.gather(mark_of("make its window"), device)
        if device.type != "cuda":
            return
        from megamoe.jit.driver import enable_peer_access

        for rank, peer in devices.items():
            if peer.index == device.index:
                continue
            if not torch.cuda.can_device_access_peer(device.index, peer.index):
                raise UnreachablePeer(
                    f"rank {group.rank} ({device}) cannot reach rank {rank} ({peer})"
                )
            enable_peer_access(device.index, peer.index)
