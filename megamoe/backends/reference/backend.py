"""The oracle behind the backend interface: gather everything, compute all ranks, keep one y."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.reference.backward import backward
from megamoe.backends.reference.layer import forward
from megamoe.backends.reference.quant import quantize_experts
from megamoe.backends.reference.state import State
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.formats.quantized import QuantizedRows
from megamoe.group.group import Group
from megamoe.group.order import BACKWARD, RECORDED, REFUSED

# what has a gradient -> its name in backward's results
RESULTS = {
    "x": "dx",
    "topk_weights": "d_topk_weights",
    "w13": "dw13",
    "w2": "dw2",
    "b13": "db13",
    "b2": "db2",
}
_numbers = itertools.count(1)


class ReferenceBackend:
    """Slow on purpose. With a group, inputs and weights of all ranks are gathered on every rank."""

    name = "reference"

    def __init__(self, problem: Problem, group: Any = None, rounding: str = "kernel") -> None:
        self.problem, self.group, self.rounding = problem, Group.of(group), rounding
        self.mark = self.group.mark(problem)
        self.number = next(_numbers)  # of the backend in this process: states carry it
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

    @property
    def state_bytes(self) -> int:
        """Bytes of a call's state."""
        return State.num_bytes(self.problem)

    @torch.no_grad()
    def forward(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: Any,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
        flags: int = 0,
    ) -> Tensor:
        """Return y [T, H] of this rank; rows from num_tokens_device on are zero. flags: of the call's mark."""
        weights.validate(self.problem, x.device)
        topk_ids = _without_rows_behind(topk_ids, num_tokens_device)
        given = x, None
        if isinstance(x, QuantizedRows):  # torch cannot pickle float8 tensors
            given = x.q.view(torch.uint8), x.scale
        mine = given[0], topk_ids, topk_weights, given[1]
        xs, *routes, scales, experts = self._gather(self.mark.ints(flags), mine, weights)
        for i, scale in enumerate(scales):
            if scale is not None:
                xs[i] = QuantizedRows(xs[i].view(torch.float8_e4m3fn), scale)
        result = forward(self.problem, xs, *routes, experts, rounding=self.rounding)
        counts = result["counts"][self.problem.rank].sum(0)
        self._statistics = Statistics.without_pool(counts)
        y = result["y"][self.problem.rank].to(torch.bfloat16)
        return y if out is None else out.copy_(y)

    def forward_train(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: Any,
        num_tokens_device: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what forward does, and the state for backward: [state_bytes] uint8 on x's device."""
        y = self.forward(x, topk_ids, topk_weights, weights, num_tokens_device, None, RECORDED)
        routes = _without_rows_behind(topk_ids, num_tokens_device), topk_weights
        return y, State.pack(self.problem, self.number, *routes)

    @torch.no_grad()
    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        weights: Any,
        state: Tensor,
        needs: Sequence[bool],
        *,
        num_tokens_device: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
        only_weights: bool = False,
        turned: Any = None,
    ) -> list[Tensor | None]:
        """Return the gradients of x, topk_weights, w13, w2, b13, b2 that `needs` asks for, else None. Collective.

        weights: the bf16 masters, also in FP8. turned: in FP8, TurnedWeights; None: made from the masters.
        state: forward_train's; routes and the number of tokens are its own.
        into: tensors by name ("w13", "w2", "b13", "b2") that gradients are added to; the list then holds None.
        Raises ArgumentError, on the other ranks RankMismatch, for a state that is not of this layer and call.
        """
        try:
            routes = State.unpack(self.problem, self.number, state, topk_ids)
        except ArgumentError:
            self.refuse()
            raise
        mark = self.mark.ints(BACKWARD)
        given = weights if turned is None else turned.forward
        dys, *call, stored = self._gather(mark, (dy, x, *routes), given)
        if self.problem.formats.w.scaled and turned is None:
            stored = [quantize_experts(self.problem, experts) for experts in stored]
        into = into or {}
        with torch.autocast(x.device.type, enabled=False):
            out = backward(
                *(self.problem, dys, *call, stored),
                rounding=self.rounding,
                dw_dtype=torch.float32 if into else None,
            )
        masters_of = {"x": x, "topk_weights": routes[1], **vars(weights)}
        found: list[Tensor | None] = []
        for (name, result), need in zip(RESULTS.items(), needs, strict=True):
            gradient = out[result][self.problem.rank]
            if need and name in into:
                into[name].add_(gradient.reshape(into[name].shape))
            wanted = need and name not in into and gradient is not None
            master = masters_of[name]
            made = gradient.reshape(master.shape) if wanted else None
            found.append(None if made is None else torch.empty_like(master).copy_(made))
        return found

    def _gather(self, mark: list[int], tensors: tuple[Any, ...], weights: Any) -> list[Any]:
        """Return the tensors and weights of all ranks: a list by rank of each."""
        device = tensors[0].device
        parts: list[Any] = [(*tensors, weights)]
        if self.problem.ep_size > 1:
            found = self.group.gather(mark, (*tensors, pack(weights)))
            parts = [(*of_rank, unpack(packed)) for *of_rank, packed in found.values()]
        *columns, experts = (list(column) for column in zip(*parts, strict=True))
        moved = [[None if t is None else t.to(device) for t in c] for c in columns]
        return [*moved, [_to(e, device) for e in experts]]

    def refuse(self) -> None:
        """Tell the ranks that meet for a call that this one makes none. Collective."""
        self.group.meet(self.mark.ints(REFUSED))


def _without_rows_behind(topk_ids: Tensor, num_tokens_device: Tensor | None) -> Tensor:
    if num_tokens_device is None:
        return topk_ids
    behind = torch.arange(topk_ids.shape[0], device=topk_ids.device) >= num_tokens_device
    return topk_ids.masked_fill(behind[:, None], -1)


def pack(weights: Any) -> tuple[type, dict[str, Any]]:
    """Return the weights as (class, name -> (bytes, dtype)): torch cannot pickle float8 tensors."""
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    packed = {name: None if t is None else (_bytes(t), t.dtype) for name, t in tensors.items()}
    return type(weights), packed


def _bytes(t: Tensor) -> Tensor:
    # contiguous() would leave a dimension of one element its stride, and view() refuses some
    return t.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unpack(packed: tuple[type, dict[str, Any]]) -> Any:
    cls, tensors = packed
    return cls(**{name: t if t is None else t[0].view(t[1]) for name, t in tensors.items()})


def _to(weights: Any, device: torch.device) -> Any:
    moved = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return type(weights)(**{name: t if t is None else t.to(device) for name, t in moved.items()})
