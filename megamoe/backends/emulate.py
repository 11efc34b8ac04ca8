"""backend="emulate": the kernel's own source, emulated by rank 0 for all ranks (emulation.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megamoe.backends.emulation import DEFAULT_CTAS, Emulation
from megamoe.backends.reference.backend import pack, unpack
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights, TurnedWeights, check_tensor
from megamoe.group.group import Group
from megamoe.group.order import BACKWARD, RECORDED, REFUSED, mark_of
from megamoe.launch import layout
from megamoe.launch.arguments import Plan


class EmulateBackend:
    """The backend interface: rank 0 gathers what all ranks were given, emulates them all, and shares the results."""

    name = "emulate"

    def __init__(
        self,
        problem: Problem,
        group: Any = None,
        *,
        num_ctas: int = DEFAULT_CTAS,
        pool_rows: int | None = None,
    ) -> None:
        layout.check_window(problem)
        self.problem, self.group = problem, Group.of(group)
        self.mark = self.group.mark(problem)
        self._options = {"num_ctas": num_ctas, "pool_rows": pool_rows}
        self._statistics: Statistics | None = None
        self._emulation: Emulation | None = None

    @property
    def emulation(self) -> Emulation:
        """The ranks; made on first use, on rank 0 only."""
        if self._emulation is None:
            self._emulation = Emulation(self.problem, **self._options)
        return self._emulation

    def prepare(self, weights: ExpertWeights) -> None:
        """Compile the kernel. Collective."""
        mark = mark_of("prepare the kernel")
        _on_rank_0(self.group, mark, lambda: self.emulation.kernel() and None)

    @property
    def state_bytes(self) -> int:
        """Bytes of a call's state."""
        rows = self._options["pool_rows"] or layout.default_pool_rows(self.problem)
        return Plan(self.problem, rows).train_state_bytes

    def forward(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return y [T, H] bf16. Collective."""

        scale = None
        if isinstance(x, QuantizedRows):
            x, scale = x.q.view(torch.uint8), x.scale

        def run(
            xs: Any, ids: Any, scores: Any, counts: Any, scales: Any, experts: Any
        ) -> list[Tensor]:
            pairs = zip(xs, scales, strict=True)
            xs = [x if scale is None else QuantizedRows(x, scale) for x, scale in pairs]
            return self.emulation.forward_all(xs, ids, scores, experts, num_tokens_device=counts)

        y = self._run(run, 0, (x, topk_ids, topk_weights, num_tokens_device, scale), weights)
        return y.to(x.device) if out is None else out.copy_(y)

    def forward_train(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return y [T, H] bf16, and the state for backward [state_bytes] uint8. Collective."""

        def run(xs: Any, ids: Any, scores: Any, counts: Any, experts: Any) -> list[Any]:
            call = (xs, ids, scores, experts)
            return list(
                zip(*self.emulation.train_all(*call, num_tokens_device=counts), strict=True)
            )

        y, state = self._run(run, RECORDED, (x, topk_ids, topk_weights, num_tokens_device), weights)
        return y.to(x.device), state.to(x.device)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        weights: ExpertWeights,
        state: Tensor,
        needs: Sequence[bool],
        *,
        num_tokens_device: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
        only_weights: bool = False,
        turned: TurnedWeights | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients of x, topk_weights, w13, w2, b13, b2 that `needs` asks for, else None. Collective.

        weights: the bf16 masters. state: forward_train's. into: tensors by name ("w13", "w2", "b13", "b2") that
        gradients are added to; the list then holds None for them. turned: with precision "fp8", what is multiplied.
        """
        if self.problem.formats.w.scaled != (turned is not None):
            value = None if turned is None else "given"
            raise ArgumentError("turned", value, "TurnedWeights with precision 'fp8', else None")
        check_tensor("state", state, (self.state_bytes,), torch.uint8, x.device)
        sums = {name: _to(t, "cpu") for name, t in (into or {}).items()}
        packed = None
        for name, need in zip(("w13", "w2"), needs[2:], strict=False):
            dtype = getattr(weights, name).dtype
            if need and dtype != torch.bfloat16:
                raise ArgumentError(f"weights.{name}.dtype", dtype, "bf16, of what has gradients")
        if turned is not None:
            turned.validate(self.problem, x.device)
            packed = pack(turned.forward), pack(ExpertWeights(**turned.named()))
        given = (
            dy,
            x,
            topk_ids,
            state,
            num_tokens_device,
            tuple(needs),
            sums,
            only_weights,
            packed,
        )

        def run(dys: Any, xs: Any, ids: Any, states: Any, counts: Any, *rest: Any) -> list[Any]:
            wanted, all_sums, only, all_packed, experts = rest
            all_turned = None
            if turned is not None:
                pairs = [(unpack(forward), unpack(turns)) for forward, turns in all_packed]
                all_turned = [TurnedWeights(forward, **turns.named()) for forward, turns in pairs]
            found = self.emulation.backward_all(
                *(dys, xs, ids, experts, states),
                needs=wanted, into=all_sums, num_tokens_device=counts, only_weights=only,
                turned=all_turned,
            )  # fmt: skip
            return list(zip(found, all_sums, strict=True))

        found, sums = self._run(run, BACKWARD, given, weights, counted=False)
        for name, target in (into or {}).items():
            target.copy_(sums[name])
        masters = (x, None, weights.w13, weights.w2, weights.b13, weights.b2)
        return [
            gradient if gradient is None else _laid_out(gradient, master, x.device)
            for gradient, master in zip(found, masters, strict=True)
        ]

    def _run(
        self,
        run: Any,
        flags: int,
        given: tuple[Any, ...],
        weights: ExpertWeights,
        counted: bool = True,
    ) -> Any:
        """Return this rank's part of what run() returns: given what each rank has, then weights, as lists by rank."""
        device = given[0].device
        masters = not counted and weights.w13_scale is None
        weights.validate(
            replace(self.problem, precision="bf16") if masters else self.problem, device
        )
        mine = tuple(_to(t, "cpu") if isinstance(t, Tensor) else t for t in given)
        experts = ExpertWeights(**{n: _to(t, "cpu") for n, t in weights.named().items()})
        mark = self.mark.ints(flags)
        everyone = self.group.gather(mark, (*mine, pack(experts)))
        *columns, packed = map(list, zip(*everyone.values(), strict=True))

        def on_rank_0() -> list[Any]:
            results = run(*columns, [unpack(e) for e in packed])
            found = [self.emulation.statistics(r) if counted else None for r in range(len(results))]
            return list(zip(results, found, strict=True))

        result, found = _on_rank_0(self.group, mark, on_rank_0)[self.problem.rank]
        if found is not None:
            self._statistics = Statistics(*(t.to(device) for t in vars(found).values()))
        return result

    def statistics(self) -> Statistics:
        """Return those of the last forward."""
        return Statistics.of_last(self._statistics)

    def refuse(self) -> None:
        """Tell the ranks that meet for a call that this one makes none. Collective."""
        self.group.meet(self.mark.ints(REFUSED))

    def check(self) -> None:
        """Nothing can be pending: forward raises where it fails."""

    def reset(self) -> None:
        """Make the emulated ranks usable again after a fault."""
        if self._emulation is not None:
            self._emulation.reset()

    def close(self) -> None:
        """Free the emulated ranks."""
        self._emulation = None


def _laid_out(gradient: Tensor, master: Tensor | None, device: torch.device) -> Tensor:
    """Return it with the master's strides, which do not survive the way to rank 0 and back."""
    if master is None:
        return gradient.to(device)
    return torch.empty_like(master, dtype=gradient.dtype).copy_(gradient)


def _to(tensor: Tensor | None, device: str) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(device)


def _on_rank_0(group: Group, mark: list[int], function: Any) -> Any:
    """Return function() of rank 0 on all ranks; its exception is everybody's."""
    result, error = None, None
    if group.rank == 0:
        try:
            result = function()
        except MegaMoEError as caught:
            error = caught
        except Exception as caught:  # the other ranks wait for an answer, whatever it is
            error = MegaMoEError(f"rank 0 could not emulate: {type(caught).__name__}: {caught}")
    if group.size > 1:
        result, error = group.gather(mark, (result, error))[0]
        # An unpickled tensor looks as if it had hooks already, and autograd would call no others.
        result = tree_map_only(Tensor, Tensor.detach, result)
    if error is not None:
        raise error
    return result
