"""Experts move to the slots of another placement, with their gradients and optimizers' moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.core.planes import is_dtensor
from megamoe.core.uncompiled import uncompiled
from megamoe.experts.placement import ExpertPlacement
from megamoe.experts.replicas import Replicas, exchange
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import Facts, Group


class Placed:
    """What a Layer has that was given a placement."""

    _replicas: Replicas | None

    @property
    def num_delayed(self) -> int:
        """How many backward passes wait for backward_dw()."""
        raise NotImplementedError

    @property
    def placement(self) -> ExpertPlacement | None:
        """The placement that is in force, if there is one."""
        return None if self._replicas is None else self._replicas.placement

    def move_experts(
        self,
        placement: ExpertPlacement,
        weights: ExpertWeights,
        *,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
    ) -> None:
        """Move experts to the slots of another placement of as many, and take it from now on. Collective.

        weights: those that the layer is given, moved in place with their grad, main_grad and optimizers' moments. Each
            rank fetches the experts that it lacks, once. FP8 copies follow by themselves, as after any write.
        optimizers: torch.optim.Optimizers of these weights; those that have stepped are known. () where none has them.
        Graphs of forward passes follow; capture those with a backward pass again. Raises ConfigError for placements of
        other sizes, ArgumentError for weights that need gradients and have no optimizer, and for moments without a row
        for each slot; RankMismatch where ranks differ. Nothing has moved then.
        """
        self.move_tensors(placement, weights, optimizers)

    def move_tensors(
        self,
        placement: ExpertPlacement,
        weights: ExpertWeights | Mapping[str, Tensor | None],
        optimizers: Any,
    ) -> None:
        """Do what move_experts() does, for weights by name."""
        if self._replicas is None:
            raise ConfigError("placement", None, "given when the layer was made")
        _move(self._replicas, placement, weights, optimizers, self.num_delayed)

    @property
    def replicas(self) -> Replicas | None:
        """What keeps replicas equal, if there are any."""
        return self._replicas

    def _placed_problem(self, problem: Problem, placement: Any) -> Problem:
        if placement is None:
            return problem
        if not isinstance(placement, ExpertPlacement):
            raise ConfigError("placement", type(placement).__name__, "an ExpertPlacement")
        watch_optimizers()
        return placement.problem(problem)


_MOVED = "what moves (weights, grad, main_grad, moments)"


@torch.no_grad()
def _move(
    replicas: Replicas, new: ExpertPlacement, weights: Any, optimizers: Any, num_delayed: int
) -> None:
    """Move this rank's experts to the slots of `new`, see Layer.move_experts(). Collective."""

    def state() -> Facts:
        if num_delayed:
            raise ArgumentError("backward_dw()", f"due {num_delayed} times", "called before")
        if not isinstance(new, ExpertPlacement):
            raise ConfigError("placement", type(new).__name__, "an ExpertPlacement")
        old = replicas.placement
        if (new.num_physical, new.num_logical) != (old.num_physical, old.num_logical):
            what = f"{new.num_logical} experts in {new.num_physical} slots"
            expected = f"{old.num_logical} in {old.num_physical}"
            raise ConfigError("placement", what, expected)
        tensors.update(_moving(replicas, weights, optimizers))
        kinds = [(n, str(t.dtype), tuple(t.shape[1:])) for n, t in tensors.items()]
        return Facts(equal={"placement": new.expert_of, _MOVED: kinds})

    tensors: dict[str, Tensor] = {}
    replicas.group.agree("move_experts()", state)
    moves = _Moves(replicas.placement, new, replicas.problem)
    for tensor in tensors.values():
        moves.make_(tensor, replicas.group)
    replicas.take(new)


def _moving(replicas: Replicas, weights: Any, optimizers: Any) -> dict[str, Tensor]:
    """Return what has a row for each slot, by name."""
    if isinstance(weights, ExpertWeights):
        weights = vars(weights)
    if not isinstance(weights, Mapping):
        raise ArgumentError("weights", type(weights).__name__, "ExpertWeights")
    stated = () if optimizers is None else _as_optimizers(optimizers)
    known = list(stated) + [o for o in _stepped if all(o is not s for s in stated)]
    found: dict[str, Tensor] = {}
    room = replicas.problem.num_local_experts()
    for name, p in weights.items():
        if p is None:
            continue
        if is_dtensor(p):
            raise ArgumentError(f"weights.{name}", "a DTensor", "a tensor of this rank's slots")
        if p.shape[0] != room:
            expected = f"[{room}, ...], this rank's slots"
            raise ArgumentError(f"weights.{name}", list(p.shape), expected)
        if p.grad_fn is not None:
            expected = "the parameters themselves, which have the moments"
            raise ArgumentError(f"weights.{name}", "made of other tensors", expected)
        found[name] = p.detach()
        for kind in ("grad", "main_grad"):
            if (of := getattr(p, kind, None)) is not None:
                found[f"{name}.{kind}"] = of.detach()
        owners = [o for o in known if any(p is q for g in o.param_groups for q in g["params"])]
        if p.requires_grad and optimizers is None and not owners:
            expected = (
                f"those that train {name}: their moments move with it. () where none does, or where an optimizer "
                "has copies of its own, to be loaded again"
            )
            raise ArgumentError("optimizers", None, expected)
        for number, optimizer in enumerate(owners):
            for key, value in optimizer.state.get(p, {}).items():
                what = f"{name}: {type(optimizer).__name__} {number}'s {key}"
                if _has_rows(what, value, p):
                    found[what] = value.detach()
    return found


def _has_rows(what: str, value: Any, p: Tensor) -> bool:
    """Whether an entry of an optimizer's state has p's rows. Raises ArgumentError where that cannot be said."""
    if value is None or isinstance(value, (int, float, str)):
        return False
    if isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter):
        if value.numel() <= 1:
            return False
        if value.dim() == p.dim() and value.shape[0] == p.shape[0]:
            return True
        raise ArgumentError(what, list(value.shape), f"[{p.shape[0]}, ...], a row for each slot")
    raise ArgumentError(what, type(value).__name__, "a tensor with a row for each slot")


def _as_optimizers(given: Any) -> tuple[Optimizer, ...]:
    found = (given,) if isinstance(given, Optimizer) else given
    if not isinstance(found, Iterable):
        raise ArgumentError("optimizers", type(given).__name__, "torch optimizers")
    found = tuple(found)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError("optimizers", type(optimizer).__name__, "torch optimizers")
    return found


class _Moves:
    """From one placement's slots to another's, of one rank: what travels, what is copied."""

    def __init__(self, old: ExpertPlacement, new: ExpertPlacement, problem: Problem) -> None:
        begin, rank = problem.expert_begin(), problem.rank
        room = problem.num_local_experts()
        held = [set(old.expert_of[r * room : (r + 1) * room]) for r in range(problem.ep_size)]
        lacking = [
            sorted(set(new.expert_of[r * room : (r + 1) * room]) - held[r])
            for r in range(problem.ep_size)
        ]
        # (source slot, expert) of what each rank fetches, from the expert's first slot
        fetched = [[(old.slots_of[e][0], e) for e in experts] for experts in lacking]
        from_rank = [
            [e for s, e in fetched[rank] if s // room == r] for r in range(problem.ep_size)
        ]
        to_rank = [[s - begin for s, _ in of if s // room == rank] for of in fetched]
        self._sizes = list(map(len, from_rank)), list(map(len, to_rank))
        self._travels = any(lacking)
        self._leaving = [row for rows in to_rank for row in rows]
        arriving = {e: i for i, e in enumerate(e for experts in from_rank for e in experts)}
        here = {old.expert_of[begin + i]: i for i in reversed(range(room))}
        self._arrived: list[tuple[int, int]] = []  # (row here, which of those that arrive)
        self._copied: list[tuple[int, int]] = []  # (row here, row here before)
        for i in range(room):
            expert = new.expert_of[begin + i]
            if expert == old.expert_of[begin + i]:
                continue
            if expert in here:
                self._copied.append((i, here[expert]))
            else:
                self._arrived.append((i, arriving[expert]))

    def make_(self, tensor: Tensor, group: Group) -> None:
        """tensor: [L, ...], moved in place. Collective."""
        if tensor.element_size() == 1:
            tensor = tensor.view(torch.uint8)  # e4m3 cannot be indexed everywhere
        kept = tensor[[row for _, row in self._copied]]
        arrived = tensor.new_empty(sum(self._sizes[0]), *tensor.shape[1:])
        if self._travels:
            exchange(arrived, tensor[self._leaving], self._sizes, group)
        for at, rows in (
            (self._copied, kept),
            (self._arrived, arrived[[i for _, i in self._arrived]]),
        ):
            if at:
                tensor[[row for row, _ in at]] = rows


# In the order of their first steps.
_stepped: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
_watched: list[Any] = []


@uncompiled("which optimizers there are is not seen by torch.compile")
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    _stepped[optimizer] = None


def watch_optimizers() -> None:
    """Know optimizers by their steps."""
    if not _watched:
        _watched.append(register_optimizer_step_post_hook(_after_step))
