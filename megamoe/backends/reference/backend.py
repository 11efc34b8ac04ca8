"""The oracle behind the backend interface: gather everything, compute all ranks, keep one y."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.backends.order import REFUSED, Mark, meet
from megamoe.backends.reference.layer import forward
from megamoe.backends.statistics import Statistics
from megamoe.config import Problem


class ReferenceBackend:
    """Slow on purpose. With a group, inputs and weights of all ranks are gathered on every rank."""

    name = "reference"
    differentiable = False

    def __init__(self, problem: Problem, group: Any = None, rounding: str = "kernel") -> None:
        self.problem, self.group, self.rounding = problem, group, rounding
        self.mark = Mark.make(problem, group)
        self._statistics: Statistics | None = None

    def prepare(self, weights: Any) -> None:
        """Nothing to prepare."""

    def check(self) -> None:
        """Nothing can be pending."""

    def statistics(self) -> Statistics:
        """Return those of the last forward."""
        return Statistics.of_last(self._statistics)

    def close(self) -> None:
        """Nothing is held."""

    @torch.no_grad()
    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: Any,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return y [T, H] of this rank; rows from num_tokens_device on are zero."""
        weights.validate(self.problem, x.device)
        if num_tokens_device is not None:
            behind = torch.arange(x.shape[0], device=x.device) >= num_tokens_device
            topk_ids = topk_ids.masked_fill(behind[:, None], -1)
        parts = [(x, topk_ids, topk_weights, weights)]
        if self.problem.ep_size > 1:
            meet(self.group, self.mark.ints())
            parts = [None] * self.problem.ep_size  # type: ignore[list-item]
            mine = (x, topk_ids, topk_weights, pack(weights))
            dist.all_gather_object(parts, mine, group=self.group)
            parts = [(*tensors, unpack(packed)) for *tensors, packed in parts]
        xs, ids, scores, experts = (list(column) for column in zip(*parts, strict=True))
        xs, ids, scores = ([t.to(x.device) for t in tensors] for tensors in (xs, ids, scores))
        experts = [_to(e, x.device) for e in experts]
        result = forward(self.problem, xs, ids, scores, experts, rounding=self.rounding)
        counts = result["counts"][self.problem.rank].sum(0)
        self._statistics = Statistics.without_pool(counts)
        y = result["y"][self.problem.rank].to(x.dtype)
        return y if out is None else out.copy_(y)

    def refuse(self) -> None:
        """Tell the ranks that meet for a call that this one makes none. Collective."""
        if self.problem.ep_size > 1:
            meet(self.group, self.mark.ints(REFUSED))


def pack(weights: Any) -> tuple[type, dict[str, Any]]:
    """Return the weights as (class, name -> (bytes, dtype)): torch cannot pickle float8 tensors."""
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    packed = {
        name: None if t is None else (t.detach().contiguous().view(torch.uint8), t.dtype)
        for name, t in tensors.items()
    }
    return type(weights), packed


def unpack(packed: tuple[type, dict[str, Any]]) -> Any:
    cls, tensors = packed
    return cls(**{name: t if t is None else t[0].view(t[1]) for name, t in tensors.items()})


def _to(weights: Any, device: torch.device) -> Any:
    moved = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return type(weights)(**{name: t if t is None else t.to(device) for name, t in moved.items()})
