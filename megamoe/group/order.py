"""The order of calls: every collective operation of a group begins with marks, so that ranks that differ are named.

Off the kernel, layers meet in collectives that know nothing of layers: two of them called in opposite order would
exchange each other's rows, and a rank that calls while another makes a layer would wait for ever. So all of them
begin with an exchange of one size. staged has its counts in it, so that it costs nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.core.config import MAX_LOCAL_EXPERTS, Problem
from megamoe.core.errors import RankMismatch

# What a call does, as bits: the exchanges that its backward pass will make belong to it.
BACKWARD, RECORDED, GRAD_OF_X, GRAD_OF_ROWS, REFUSED = (1 << bit for bit in range(5))
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
    *("make_backend()", "a full state dict", "set-up"),
)
_FLAG_BITS = 8
MARK_INTS = 2
WIDTH = MARK_INTS + MAX_LOCAL_EXPERTS

_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # group -> backends made on it
_layers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # group -> layers made on it


def number_layer(group: Any) -> int:
    """Return which of a group's layers is made now: making is collective, opening them in the same order is, too."""
    if group is None:
        return 0
    _layers[group] = _layers.get(group, 0) + 1
    return _layers[group]


@dataclass(frozen=True)
class Mark:
    """One layer of a group. `number` counts those opened on it, equal everywhere: opening is collective."""

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


def announce(group: Any, name: str, refused: bool = False) -> None:
    """Begin a collective call of CALLS: raise RankMismatch, on all ranks, unless all come for it. Collective.

    group: None: nobody to tell. refused: this rank only tells the others that it refuses its arguments.
    """
    if group is not None:
        meet(group, [REFUSED if refused else 0, CALLS.index(name)])


def meet(group: Any, mark: list[int], parts: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Exchange WIDTH numbers with each rank: the mark, then what `parts` [R] has for it. Collective.

    group: a process group. mark: Mark.ints(), or that of announce(). Raises RankMismatch unless all meet for the
    same. Returns what came [R, WIDTH] int32, and its copy in CPU memory.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if parts:
        device = parts[0].device
    else:  # as dist.all_gather_object chooses it
        device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    label = torch.tensor(mark, dtype=torch.int64, device=device)
    padding = torch.zeros(WIDTH, dtype=torch.int64, device=device)
    rows = [
        (label, part, padding[MARK_INTS + part.numel() :]) for part in parts or [padding[:0]] * size
    ]
    sent = torch.cat([piece for row in rows for piece in row]).to(torch.int32).view(size, WIDTH)
    if dist.get_backend(group) == "fake":  # which exchanges nothing
        return sent, sent.cpu()
    table = torch.empty_like(sent)
    ones = [1] * size
    # As bytes, like the rows: one kind of collective, whatever the ranks came for.
    dist.all_to_all_single(table.view(torch.uint8), sent.view(torch.uint8), ones, ones, group=group)
    found = table.cpu()
    check_marks(found[:, :MARK_INTS].tolist(), rank)
    return table, found


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
                f"rank {other} comes for {_call(mark)}, rank {rank} for {_call(marks[rank])}. Make and call the "
                "layers of a group in the same order on all ranks, with gradients of the same tensors"
            )


def _call(mark: Sequence[int]) -> str:
    number, flags = mark[0] >> _FLAG_BITS, mark[0] & ((1 << _FLAG_BITS) - 1)
    if not number:  # layers are counted from 1
        return CALLS[mark[1]]
    what = "backward" if flags & BACKWARD else "forward"
    details = [f"{mark[1]:#010x}", *(words for bit, words in _WORDS.items() if flags & bit)]
    return f"{what} of layer {number} ({', '.join(details)})"
