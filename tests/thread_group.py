"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.group.group import Group


class ThreadGroup(Group):
    """Ranks that are threads of one process."""

    def __init__(self, meeting: _Meeting, rank: int, timeout_s: float) -> None:
        super().__init__()
        self._meeting, self._timeout_s = meeting, timeout_s
        self.rank, self.size = rank, len(meeting.rows)
        self._exchanges = self.size > 1
        self._counts: Counter[str] = Counter()

    @classmethod
    def create(cls, size: int, timeout_s: float = 60.0) -> list[ThreadGroup]:
        """Return one member for each thread."""
        meeting = _Meeting(threading.Barrier(size), [torch.empty(0, device="cpu")] * size)
        return [cls(meeting, rank, timeout_s) for rank in range(size)]

    __eq__, __hash__ = object.__eq__, object.__hash__

    def number(self, what: str) -> int:
        """Count likewise."""
        self._counts[what] += 1
        return self._counts[what]

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _swap(self, rows: Tensor) -> Tensor:
        self._meeting.rows[self.rank] = rows
        self._meeting.barrier.wait(self._timeout_s)
        came = torch.stack([of_rank[self.rank] for of_rank in self._meeting.rows])
        self._meeting.barrier.wait(self._timeout_s)
        return came


@dataclass(eq=False)
class _Meeting:
    """What the threads of one ThreadGroup share."""

    barrier: threading.Barrier
    rows: list[Tensor]  # by the rank that sends them
