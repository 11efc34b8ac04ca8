"""Record what a thread allocates and launches, so that megamoe/ops/calls.py can repeat it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


class _Recording(threading.local):
    """What this thread does.

    plans: that see it. known: a call like one that was validated. blocks: module.Block of each launch to come, if it
    repeats an earlier call.
    """

    plans: tuple[Any, ...] = ()
    known = False
    blocks: Iterator[Any] = iter(())


recording = _Recording()


def made(t: Tensor) -> Tensor:
    """Return memory of any content that was allocated now, for a result or between launches."""
    for plan in recording.plans:
        plan.allocated(t)
    return t


def launch(fill: Callable[[], Any], addresses: list[int], stream: int) -> None:
    """Launch a module.Block, by default the one that fill() returns, with these addresses."""
    block = next(recording.blocks, None) or fill()
    block.launch(addresses, stream)
    for plan in recording.plans:
        plan.launched(block, addresses)
