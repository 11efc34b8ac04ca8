"""The order of calls: a mark of layer and call travels with every exchange, so that ranks that differ are named.

Off the kernel, layers meet in collectives that know nothing of layers: two of them called in opposite order would
exchange each other's rows. The mark is part of an exchange that is made anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from megamoe.config import Problem
from megamoe.errors import RankMismatch

# What a call does, as bits: the exchanges that its backward pass will make belong to it.
BACKWARD, GRAD_OF_X, GRAD_OF_ROWS, REFUSED = 1, 2, 4, 8
_FLAG_BITS = 8
MARK_INTS = 2

_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # group -> layers made on it


@dataclass(frozen=True)
class Mark:
    """One layer of a group. `number` counts the layers made on it, equal everywhere: making is collective."""

    number: int
    fingerprint: int

    @classmethod
    def make(cls, problem: Problem, group: Any) -> Mark:
        """Return the mark of a new layer."""
        if group is not None:
            _made[group] = _made.get(group, 0) + 1
        return cls(_made[group] if group is not None else 0, problem.fingerprint() & 0x7FFFFFFF)

    def ints(self, flags: int = 0) -> list[int]:
        """Return MARK_INTS numbers below 2**31 that stand for a call."""
        return [self.number << _FLAG_BITS | flags, self.fingerprint]


def check_marks(marks: Sequence[Sequence[int]], rank: int) -> None:
    """Raise RankMismatch unless all ranks make the same call. marks: Mark.ints() by rank; rank: this one.

    A rank that refuses its arguments only tells the others, and raises its own error.
    """
    if marks[rank][0] & REFUSED:
        return
    for other, mark in enumerate(marks):
        if other != rank and mark[0] & REFUSED:
            raise RankMismatch(f"rank {other} refused its arguments: see that rank's error")
    for other, mark in enumerate(marks):
        if list(mark) != list(marks[rank]):
            raise RankMismatch(
                f"rank {other} calls {_call(mark)}, rank {rank} {_call(marks[rank])}. Make and call the "
                "layers of a group in the same order on all ranks, with gradients of the same tensors"
            )


def _call(mark: Sequence[int]) -> str:
    number, flags = mark[0] >> _FLAG_BITS, mark[0] & ((1 << _FLAG_BITS) - 1)
    what = "backward" if flags & BACKWARD else "forward"
    grads = [n for bit, n in ((GRAD_OF_X, "x"), (GRAD_OF_ROWS, "the experts' rows")) if flags & bit]
    wanted = f", gradients of {' and '.join(grads)}" if grads else ""
    return f"{what} of layer {number} ({mark[1]:#010x}{wanted})"
