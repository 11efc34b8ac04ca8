"""Implement backends that compute all ranks at once: gather all inputs, compute, return each rank's part."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.backends.call import Backend
from megamoe.core.config import Problem
from megamoe.group.group import Group


class Gathered(Backend):
    """What `emulate` and `reference` have in common."""

    def __init__(self, problem: Problem, group: Any) -> None:
        self.problem, self.group = problem, Group.of(group)
        self.mark = self.group.mark(problem)

    def _gather(self, flags: int, mine: Any, device: torch.device | str) -> list[Any]:
        """Return what each rank brings, by rank, with its tensors on `device`. flags: of the call's mark."""
        if self.problem.ep_size == 1:
            return [mapped(lambda t: t.detach().to(device), mine)]
        found = self.group.gather(self.mark.ints(flags), pack(mine))
        self.group.met = True
        return [mapped(lambda t: t.to(device), unpack(packed)) for packed in found.values()]

    def abort(self, error: Exception) -> None:
        """Take part in the exchange of the others' call, with an error. Collective."""
        self.group.fail(self.mark.ints(), error)


class _Packed(NamedTuple):
    """A tensor as torch can pickle it, which float8 ones are not; strides are lost."""

    numbers: Tensor
    dtype: torch.dtype
    shape: torch.Size  # a number without dimensions has no view as bytes


def pack(record: Any) -> Any:
    """Return a record, however deep, with its tensors packed."""
    return mapped(lambda t: _Packed(_bytes(t), t.dtype, t.shape), record)


def unpack(record: Any) -> Any:
    """Return what pack() was given."""
    return mapped(lambda p: p.numbers.view(p.dtype).view(p.shape), record, _Packed)


def mapped(function: Any, record: Any, leaf: type = Tensor) -> Any:
    """Return a record of records with function(t) in the place of every t of type `leaf`."""

    def of(part: Any) -> Any:
        return mapped(function, part, leaf)

    if isinstance(record, leaf):
        return function(record)
    kind: Any = type(record)
    if is_dataclass(record):
        return kind(**{f.name: of(getattr(record, f.name)) for f in fields(record)})
    if isinstance(record, dict):
        return {name: of(part) for name, part in record.items()}
    if isinstance(record, tuple):
        return kind(*map(of, record)) if hasattr(record, "_fields") else tuple(map(of, record))
    return record


def _bytes(t: Tensor) -> Tensor:
    """Return a copy as uint8. contiguous() keeps the stride of a dimension of one element, which view() may refuse."""
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
