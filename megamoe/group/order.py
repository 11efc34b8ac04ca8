"""Check the order of calls: every collective of a group begins with marks, so an error names the rank that differs.

Outside of the kernel, layers use collectives that know nothing of layers. Two collectives in opposite order would
exchange each other's rows, and a rank that makes a call while another creates a layer would wait forever. So each
collective begins with an exchange of one fixed size. In `staged` it also carries the counts, so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megamoe.core.config import MAX_LOCAL_EXPERTS
from megamoe.core.errors import PeerFault, RankMismatch

# What a call does, as bits: the exchanges that its backward pass will make belong to it.
BACKWARD, RECORDED, GRAD_OF_X, GRAD_OF_ROWS, FAILED = (1 << bit for bit in range(5))
# Bits -> words, for errors.
_WORDS = {
    RECORDED: "gradients recorded",
    GRAD_OF_X: "gradients of x",
    GRAD_OF_ROWS: "gradients of the experts' rows",
}
# Collective calls that are not a layer's forward or backward; a mark has the place in this list.
CALLS = (
    *("a new layer", "prepare()", "a first call", "close()", "reset()"),
    *("grad_norm() or clip_grad_norm_()", "ExpertPlacement.counters()", "move_experts()"),
    *("make_backend()", "set-up", "a barrier"),
    *("make its window", "prepare the kernel", "prepare the kernels of training"),
)
_FLAG_BITS = 8
MARK_INTS = 2
WIDTH = MARK_INTS + MAX_LOCAL_EXPERTS + 1  # the mark, rows of each expert, the number of a call


@dataclass(frozen=True)
class Mark:
    """One layer of a group. `number` counts those opened on it, equal everywhere: opening is collective."""

    number: int
    fingerprint: int

    def ints(self, flags: int = 0) -> list[int]:
        """Return MARK_INTS numbers below 2**31 that stand for a call."""
        return [self.number << _FLAG_BITS | flags, self.fingerprint]


def mark_of(call: str) -> list[int]:
    """Return the mark of one of CALLS."""
    return [0, CALLS.index(call)]


def check_marks(
    marks: Sequence[Sequence[int]],
    rank: int,
    label: Callable[[int], str],
    error_of: Callable[[int], str] = lambda _: "an error",
) -> None:
    """Raise RankMismatch unless all ranks make the same call, PeerFault if another one has failed: on all ranks.

    marks: Mark.ints() by rank; rank: this one, which raises its own error if it has failed. label: how to call a rank.
    error_of: returns the error of a rank that has failed.
    """
    if marks[rank][0] & FAILED:
        return
    for other, mark in enumerate(marks):
        if mark[0] & FAILED:
            raise PeerFault(f"{label(other)} raised {error_of(other)}")
    for other, mark in enumerate(marks):
        if list(mark) != list(marks[rank]):
            raise RankMismatch(
                f"{label(other)} comes for {_call(mark)}, {label(rank)} for {_call(marks[rank])}. Make and call the "
                "layers of a group in the same order on all ranks, with gradients of the same tensors"
            )


def check_numbers(numbers: Sequence[int], rank: int, label: Callable[[int], str]) -> None:
    """Raise RankMismatch unless the backward passes of all ranks belong to the same call. numbers: by rank."""
    own = numbers[rank]
    for other, number in enumerate(numbers):
        if number != own:
            raise RankMismatch(
                f"{label(other)} comes for backward of call {number}, {label(rank)} of call {own}, in the order in "
                "which they were recorded. Make the same backward passes in the same order on all ranks"
            )


def _call(mark: Sequence[int]) -> str:
    number, flags = mark[0] >> _FLAG_BITS, mark[0] & ((1 << _FLAG_BITS) - 1)
    if not number:  # layers are counted from 1
        return CALLS[mark[1]]
    what = "backward" if flags & BACKWARD else "forward"
    details = [f"{mark[1]:#010x}", *(words for bit, words in _WORDS.items() if flags & bit)]
    return f"{what} of layer {number} ({', '.join(details)})"
