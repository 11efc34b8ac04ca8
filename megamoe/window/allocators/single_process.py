"""Allocate a plain tensor, if all ranks are in one process: a group of one rank, or threads that act as ranks."""

from __future__ import annotations

import torch

from megamoe.group.group import Group
from megamoe.group.order import mark_of
from megamoe.window.allocators import Allocation, checked_peers


def allocate(nbytes: int, device: torch.device, group: Group) -> Allocation:
    """Allocate by torch.empty. Collective over the threads of the process, which use one device."""
    # cudaMalloc aligns to 512 bytes, torch's CPU allocator only to 64.
    raw = torch.empty(nbytes + 256, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % 256
    memory = raw[start : start + nbytes]
    bases = group.gather(mark_of("make its window"), memory.data_ptr())
    held = [raw]
    return Allocation(memory, checked_peers(list(bases.values()), group), held.clear)
