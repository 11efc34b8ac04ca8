"""Implement backend="emulate": rank 0 emulates the kernel's own source for all ranks (emulation.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megamoe.backends.call import Call, Gradients, GradRequest, StashedRows, check_stash
from megamoe.backends.emulate.emulation import DEFAULT_CTAS, Emulation, stashed_gradients
from megamoe.backends.emulate.memory import aligned_zeros
from megamoe.backends.gathered import Gathered
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.formats.weights import MASTERS, ExpertWeights, check_tensor
from megamoe.group.group import Group
from megamoe.group.order import BACKWARD, RECORDED, mark_of
from megamoe.launch import layout
from megamoe.launch.arguments import Plan


class EmulateBackend(Gathered):
    """Rank 0 emulates all ranks and shares the results."""

    def __init__(
        self,
        problem: Problem,
        group: Any = None,
        *,
        num_ctas: int = DEFAULT_CTAS,
        pool_rows: int | None = None,
        weight_gradients: str = "bf16",
        few: bool = True,
    ) -> None:
        layout.check_window(problem)
        super().__init__(problem, group)
        self._options: dict[str, Any] = {
            "num_ctas": num_ctas,
            "pool_rows": pool_rows,
            "weight_gradients": weight_gradients,
        }
        rows = pool_rows or layout.default_pool_rows(problem)
        self._plan = Plan(problem, rows, weight_gradients=weight_gradients)
        self.max_stashed = layout.max_stashed_passes(problem)
        self._few = layout.few_kernel(problem, self._plan.pool_rows) if few else ""
        self._emulation: Emulation | None = None
        self._resets = 0
        self._prepared = False

    @property
    def emulation(self) -> Emulation:
        """The ranks; made on first use, on rank 0 only."""
        if self._emulation is None:
            self._emulation = Emulation(self.problem, **self._options)
        return self._emulation

    def prepare(self, weights: ExpertWeights) -> None:
        """Compile the kernel. Collective, at first."""
        if not self._prepared:
            mark = mark_of("prepare the kernel")
            kind = self._kind(self.problem.max_tokens)
            _on_rank_0(self.group, mark, lambda: self.emulation.kernel(kind) and None)
            self._prepared = True

    def _kind(self, tokens: int) -> str:
        """Return the kernel of a forward that saves nothing."""
        return self._few if self._few and tokens <= layout.few_tokens(self.problem) else "forward"

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        """Bytes of a call's state."""
        return self._plan.train_state.bytes

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return y [T, H] bf16, and the state [state_bytes] uint8. Collective."""

        def run(calls: list[Call]) -> list[Any]:
            if keep:
                results: Any = zip(*self.emulation.train_all(calls), strict=True)
            else:
                kind = self._kind(max(len(c.topk_ids) for c in calls))
                results = ((y, None) for y in self.emulation.forward_all(calls, kind=kind))
            return [(result, self.emulation.statistics(r)) for r, result in enumerate(results)]

        device = call.x.device
        call.weights.validate(self.problem, device)
        (y, state), found = self._run(
            run, RECORDED * keep, call._replace(out=None, known=None, state=None)
        )
        self._statistics = Statistics(*(t.to(device) for t in vars(found).values()))
        y, state = y.to(device), None if state is None else state.to(device)
        return y if call.out is None else call.out.copy_(y), state

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Return the gradients. Collective."""
        weights, device = call.weights, dy.device
        weights.validate(self.problem, device, masters=not self.problem.formats.packed)
        self._check(call, state, wanted)

        def run(everyone: list[Any]) -> list[Any]:
            calls, dys, states, all_wanted = map(list, zip(*everyone, strict=True))
            for r, w in enumerate(all_wanted):
                if w.stash is not None:  # as memory that was not zeroed
                    memory = aligned_zeros(self.emulation.ranks[r].plan.stash.bytes).fill_(0xFF)
                    all_wanted[r] = w._replace(stash=StashedRows(memory))
            found = self.emulation.backward_all(calls, dys, states, all_wanted)
            return [(made, w.into, w.stash) for made, w in zip(found, all_wanted, strict=True)]

        sent = wanted if wanted.stash is None else wanted._replace(stash=StashedRows(dy[:0]))
        mine = call._replace(out=None, known=None, state=None), dy, state, sent
        found, sums, stash = self._run(run, BACKWARD, mine)
        if wanted.stash is not None:
            wanted.stash.memory.copy_(stash.memory)
        of = {"x": call.x, "topk_weights": None, **vars(weights)}
        return _returned(found, sums, wanted, of, device)

    def new_stash(self) -> StashedRows:
        """Return memory for what a backward pass keeps, on the CPU."""
        return StashedRows(aligned_zeros(self._plan.stash.bytes), self._resets)

    def weight_gradients(
        self, weights: ExpertWeights, stashed: Sequence[StashedRows], wanted: GradRequest
    ) -> Gradients:
        """Emulate the launch of this rank, here: it meets no other one."""
        check_stash(stashed, self._resets)
        device, into = weights.w13.device, {n: t.cpu() for n, t in wanted.into.items()}
        here, num_ctas = wanted._replace(into=into), self._options["num_ctas"]
        found = stashed_gradients(self._plan, weights, stashed, here, num_ctas=num_ctas)
        return _returned(found, into, wanted, vars(weights), device)

    def _check(self, call: Call, state: Tensor, wanted: GradRequest) -> None:
        """Raise ArgumentError for what a backward launch cannot take."""
        transposed, device = wanted.transposed, call.x.device
        if self.problem.formats.transposes != (transposed is not None):
            value = None if transposed is None else "given"
            raise ArgumentError(
                "transposed", value, "TransposedWeights with precision 'fp8', else None"
            )
        check_tensor("state", state, (self.state_bytes,), torch.uint8, device)
        for name in ("w13", "w2"):
            dtype = getattr(call.weights, name).dtype
            if getattr(wanted.needs, name) and dtype not in MASTERS:
                raise ArgumentError(f"weights.{name}.dtype", dtype, "bf16 or fp32, for gradients")
        if transposed is not None:
            transposed.validate(self.problem, device)

    def _run(self, run: Callable[[list[Any]], list[Any]], flags: int, mine: Any) -> Any:
        """Return this rank's part of what run() returns of what each rank brings."""
        everyone = self._gather(flags, mine, "cpu")
        mark = self.mark.ints(flags)
        return _on_rank_0(self.group, mark, lambda: run(everyone))[self.problem.rank]

    def reset(self) -> None:
        """Make the emulated ranks usable again after a fault."""
        self._resets += 1
        if self._emulation is not None:
            self._emulation.reset()

    def close(self) -> None:
        """Free the emulated ranks."""
        self._emulation = None


def _returned(
    found: Gradients,
    sums: Mapping[str, Tensor],
    wanted: GradRequest,
    of: Mapping[str, Any],
    device: torch.device,
) -> Gradients:
    """Return gradients as those who asked have them; put sums where they were asked for. of: what they are of."""
    for name, target in wanted.into.items():
        target.copy_(sums[name])
    made = zip(Gradients._fields, found, strict=True)
    return Gradients(**{n: g if g is None else _laid_out(g, of[n], device) for n, g in made})


def _laid_out(gradient: Tensor, master: Tensor | None, device: torch.device) -> Tensor:
    """Return it with the master's strides, which do not survive the way to rank 0 and back."""
    if master is None:
        return gradient.to(device)
    return torch.empty_like(master, dtype=gradient.dtype).copy_(gradient)


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
        group.met = True
        # An unpickled tensor looks as if it had hooks already, and autograd would call no others.
        result = tree_map_only(Tensor, Tensor.detach, result)
    if error is not None:
        raise error
    return result
