"""Let others see what a thread allocates and launches: megamoe/ops/calls.py repeats it."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor


class _Recording(threading.local):
    plans: tuple[Any, ...] = ()


recording = _Recording()


def made(t: Tensor, zeros: bool = False) -> Tensor:
    """Return memory that was allocated now, for a result or between launches. zeros: else it has any content."""
    for plan in recording.plans:
        plan.allocated(t, zeros)
    return t


def launched(block: Any, addresses: list[int]) -> None:
    """Tell of a launch. block: module.Block, with these addresses."""
    for plan in recording.plans:
        plan.launched(block, addresses)
