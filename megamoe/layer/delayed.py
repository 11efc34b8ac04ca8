"""Delay weight gradients until backward_dw(): what a layer's backward passes save with delay_wgrad.

With True, a pass keeps what its forward saved, and backward_dw() repeats the pass for weights only. With "keep", it
keeps the rows that weight gradients multiply. One launch, without communication, then computes several passes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megamoe.backends.call import GradRequest, Needs, StashedRows
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.core.transforms import lasting
from megamoe.core.uncompiled import uncompiled
from megamoe.formats.weights import ExpertWeights
from megamoe.layer import main_grad
from megamoe.layer.backward import Pass, gradients, stashed_gradients
from megamoe.layer.runtime import Runtime

NAMES = ("w13", "w2", "b13", "b2")
_CHANGED = "unchanged from its backward pass until backward_dw()"


@dataclass
class _Pending:
    """One backward pass that waits. weights: those of the call, so gradients go where autograd would add them.

    asked: names of weights that required a gradient then. As in autograd, a weight that is frozen now gets none.
    rows: what it stashed, or the pass itself, to replay.
    """

    weights: ExpertWeights
    asked: frozenset[str]
    rows: StashedRows | Pass

    def __post_init__(self) -> None:
        self.versions = [_version(t) for _, t in self.tensors]

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        if isinstance(self.rows, StashedRows):
            return [(f"weights.{name}", w) for name, w in self.weights.named().items()]
        inputs, dy, state = self.rows
        return [*([] if dy is None else [("dy", dy)]), ("state", state), *inputs.named()]

    def check(self) -> None:
        """Raise ArgumentError where a tensor is not what it was."""
        for (name, t), version in zip(self.tensors, self.versions, strict=True):
            if not t.untyped_storage().nbytes() and t.numel():
                freed = "memory that was freed, as FSDP2 does behind a backward pass"
                raise ArgumentError(
                    name, freed, _CHANGED + "; delay_wgrad=False under fully_shard()"
                )
            if not isinstance(self.rows, StashedRows) and _version(t) != version:
                how = "changed in place, or given other memory"
                raise ArgumentError(name, how, _CHANGED)

    def like(self, other: _Pending) -> bool:
        """Return True if both have the same weights, so that one gradient serves both."""

        def lies(w: Tensor | None) -> Any:
            return None if w is None else (w.data_ptr(), w.shape, w.stride(), w.dtype)

        if self.needs() != other.needs():
            return False
        pairs = [(getattr(self.weights, n), getattr(other.weights, n)) for n in NAMES]
        if all(mine is theirs for mine, theirs in pairs):
            return True
        alike = all(lies(mine) == lies(theirs) for mine, theirs in pairs)
        return alike and self.leaves() == other.leaves()

    def needs(self) -> frozenset[str]:
        """Return the names of weights whose gradients are to come."""
        return self.asked & asked_of(self.weights)

    def leaves(self) -> set[int]:
        """Return the ids of the parameters whose gradients are to come."""
        found, nodes = set(), []
        for name in self.needs():
            w = getattr(self.weights, name)
            nodes.append(w.grad_fn) if w.grad_fn is not None else found.add(id(w))
        while nodes:
            node = nodes.pop()
            if hasattr(node, "variable"):
                found.add(id(node.variable))
            nodes += [n for n, _ in node.next_functions if n is not None]
        return found


def asked_of(weights: ExpertWeights) -> frozenset[str]:
    """Return the names of weights that need a gradient."""
    return frozenset(n for n in NAMES if getattr(getattr(weights, n), "requires_grad", False))


def _version(t: Tensor) -> tuple[int, int]:
    return -1 if t.is_inference() else t._version, t.data_ptr()


class Delayed:
    """Hold the backward passes of one layer whose weight gradients are not computed yet, oldest first."""

    def __init__(self, adding: bool, stashes: bool) -> None:
        """adding: add gradients of w13 and w2 to their main_grad. stashes: passes stash rows, if the backend can."""
        self._adding, self.stashes = adding, stashes
        self._queue: deque[_Pending] = deque()
        # An input of every call, so that autograd comes by even where only weights need a gradient.
        with lasting():
            self.anchor = torch.zeros(0, device="cpu", requires_grad=True)
        if not _watched:
            _watched.append(register_optimizer_step_pre_hook(_before_step))

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, weights: ExpertWeights, asked: frozenset[str], rows: StashedRows | Pass) -> None:
        """Add a backward pass whose gradients of x and topk_weights are computed.

        asked: asked_of() the weights at the time of the call. rows: what the pass stashed, or itself.
        """
        self._queue.append(_Pending(weights, asked, rows))
        _waiting.add(self)

    def check(self) -> None:
        """Raise ArgumentError if the oldest pass no longer has the tensors that its gradients need."""
        if self._queue:
            self._queue[0].check()

    def make(self, runtime: Runtime, passes: int) -> None:
        """Compute the weight gradients of the oldest passes. Collective unless their rows were stashed."""
        written: set[int] = set()
        if self.stashes and (most := runtime.backend.max_stashed):  # no other rank waits
            self._check_passes(passes, most)
            self._make(runtime, passes, written)
            return
        with runtime.together:
            self._check_passes(passes, 0)
        for _ in range(passes):
            with runtime.together:
                self._make(runtime, 1, written)

    def _check_passes(self, passes: int, most: int) -> None:
        """Raise ArgumentError unless so many passes wait and fit into a launch. most: passes of one; 0: one by one."""
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ArgumentError("passes", repr(passes), "a number of backward passes")
        if not self._queue:
            raise ArgumentError(
                "backward_dw()", "called while no backward pass waits", "one call per backward pass"
            )
        if passes > len(self._queue):
            raise ArgumentError("passes", passes, f"at most {len(self._queue)}, which wait")
        if most and passes > most:
            raise ArgumentError("passes", passes, f"at most {most}, which a launch takes")
        for i in range(1, passes if most else 1):
            if not self._queue[i].like(self._queue[0]):
                value = f"{passes}, of which number {i} had other weights than number 0"
                raise ArgumentError(
                    "passes", value, "the same memory of the same parameters in all"
                )

    def _make(self, runtime: Runtime, passes: int, written: set[int]) -> None:
        """Compute the weight gradients of the oldest pass, or of several stashed ones. written: as for targets()."""
        into: dict[str, Tensor] = {}
        pending = self._queue[0]
        pending.check()
        given = {name: getattr(pending.weights, name) for name in NAMES}
        needs = pending.needs()
        asked = {name: name in needs for name in NAMES}
        if self._adding:
            into = main_grad.targets(pending.weights, (asked["w13"], asked["w2"]), written)
        stashed = [p.rows for p in islice(self._queue, passes) if isinstance(p.rows, StashedRows)]
        self.forget(passes)
        if not any(asked.values()):
            return
        with torch.no_grad():
            wanted = GradRequest(Needs(False, False, **asked), into, only_weights=True)
            if isinstance(pending.rows, StashedRows):
                found = stashed_gradients(runtime, pending.weights, stashed, wanted)._asdict()
            else:
                found = gradients(runtime, pending.rows, wanted)._asdict()
        for name in into:
            w: Any = given[name]
            joint = getattr(w, "joint_main_grad", None)
            found[name] = main_grad.added(w) if joint is None else joint.nothing(w)
        pairs = [(w, found[name]) for name, w in given.items() if found[name] is not None]
        if pairs:
            torch.autograd.backward([w for w, _ in pairs], [gradient for _, gradient in pairs])

    def forget(self, count: int) -> None:
        """Drop the oldest `count` passes."""
        for _ in range(count):
            self._queue.popleft()
        if not self._queue:
            _waiting.discard(self)

    def owns(self, parameters: set[int]) -> bool:
        """Whether gradients of one of these, by id, are still to come."""
        return any(parameters & pending.leaves() for pending in self._queue)


_waiting: WeakSet[Delayed] = WeakSet()
_watched: list[Any] = []


@uncompiled("which passes wait is not seen by torch.compile")
def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise MegaMoEError if an optimizer would step without gradients that still wait."""
    if not _waiting:
        return
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for delayed in list(_waiting):
        if delayed.owns(parameters):
            raise MegaMoEError(
                f"optimizer.step() while {len(delayed)} backward passes of a layer with delay_wgrad wait for "
                "backward_dw(): call it for all of them first"
            )
