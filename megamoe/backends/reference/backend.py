"""Implement backend="reference": gather all inputs, compute all ranks with the oracle, keep this rank's y."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.call import Call, Gradients, GradRequest, Needs
from megamoe.backends.gathered import Gathered
from megamoe.backends.reference.backward import backward
from megamoe.backends.reference.layer import forward
from megamoe.backends.reference.quant import quantize_experts
from megamoe.backends.reference.state import State
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.group.order import BACKWARD, RECORDED, check_numbers

# what has a gradient -> its name in backward's results
RESULTS = {name: f"d{name}" for name in Needs._fields} | {"topk_weights": "d_topk_weights"}
_numbers = itertools.count(1)


class ReferenceBackend(Gathered):
    """Slow on purpose. With a group, inputs and weights of all ranks are gathered on every rank."""

    def __init__(
        self,
        problem: Problem,
        group: Any = None,
        rounding: str = "kernel",
        weight_gradients: str = "bf16",
    ) -> None:
        super().__init__(problem, group)
        self.rounding, self._products = rounding, weight_gradients
        self.number = next(_numbers)  # of the backend in this process: states carry it
        self.state_bytes = State.num_bytes(problem)
        self._num_recorded = 0

    @torch.no_grad()
    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return y [T, H] of this rank, and its state; rows from num_tokens_device on are zero."""
        x, topk_ids, topk_weights, weights, *_ = call
        weights.validate(self.problem, x.device)
        mine = x, call.computed_ids(), topk_weights, weights
        everyone = self._gather(RECORDED * keep, mine, x.device)
        columns = map(list, zip(*everyone, strict=True))
        result = forward(self.problem, *columns, rounding=self.rounding)
        rank = self.problem.rank
        self._statistics = Statistics.without_pool(result["counts"][rank].sum(0))
        y = result["y"][rank].to(
            torch.bfloat16, copy=True
        )  # a view may not be written over where it is recorded
        state = None
        if keep:
            self._num_recorded += 1
            state = State.pack(self.problem, self.number, *mine[1:3], self._num_recorded)
        return y if call.out is None else call.out.copy_(y), state

    @torch.no_grad()
    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Return the gradients; routes and the number of tokens are the state's own. Collective.

        Without `transposed`, in FP8, that is made from the masters. Raises ArgumentError for a state that is
        not of this layer and call; RankMismatch where ranks come with states of different calls.
        """
        *routes, number = State.unpack(self.problem, self.number, state, call.topk_ids)
        (x, _), weights, transposed = call.rows, call.weights, wanted.transposed
        given = weights if transposed is None else transposed.forward
        wide = bool(wanted.into) or weights.w13.dtype == torch.float32
        everyone = self._gather(BACKWARD, (number, dy, x, *routes, given), x.device)
        numbers, dys, xs, ids, scores, stored = map(list, zip(*everyone, strict=True))
        check_numbers(numbers, self.group.rank, self.group.label)
        if self.problem.formats.w.scaled and transposed is None:
            stored = [
                e if e.w13_scale is not None else quantize_experts(self.problem, e) for e in stored
            ]
        with torch.autocast(x.device.type, enabled=False):
            out = backward(
                *(self.problem, dys, xs, ids, scores, stored),
                rounding=self.rounding,
                dw_dtype=torch.float32 if wide else None,
                weight_gradients=self._products,
            )
        masters = {"x": x, "topk_weights": routes[1], **vars(weights)}
        found: dict[str, Tensor] = {}
        for name, need in wanted.needs._asdict().items():
            gradient = out[RESULTS[name]][self.problem.rank]
            if not need or gradient is None:
                continue
            if name in wanted.into:
                wanted.into[name].add_(gradient.reshape(wanted.into[name].shape))
            else:
                made = gradient.reshape(masters[name].shape)
                found[name] = torch.empty_like(masters[name]).copy_(made)
        return Gradients(**found)
