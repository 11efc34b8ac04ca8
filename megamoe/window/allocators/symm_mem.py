"""Allocate with PyTorch's symmetric memory, which exchanges CUDA VMM handles over the process group. The default."""

from __future__ import annotations

import os
from typing import Any

import torch

from megamoe.core import env
from megamoe.core.errors import UnreachablePeer
from megamoe.group.group import Group
from megamoe.window.allocators import Allocation, checked_peers


def allocate(nbytes: int, device: torch.device, group: Group) -> Allocation:
    """Allocate by torch.distributed._symmetric_memory, without multicast. Collective over a torch process group."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # never used here
    if env.share_gpus():
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    import torch.distributed._symmetric_memory as symm_mem

    process_group = group.process_group
    if process_group is None:
        raise UnreachablePeer('transport "symm_mem" needs a torch.distributed process group')
    memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        handle = symm_mem.rendezvous(memory, process_group)
    except RuntimeError as error:
        raise UnreachablePeer(
            f"rank {group.rank}: the ranks cannot map each other's memory ({error})"
        ) from error
    held: list[Any] = [memory, handle]
    peers = checked_peers(list(handle.buffer_ptrs), group)
    # Not zero where torch placed it inside a larger piece.
    shift = memory.data_ptr() - peers[group.rank]
    return Allocation(memory, [address + shift for address in peers], held.clear)
