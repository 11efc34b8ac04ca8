"""Define the records of a layer's call on one rank: what each backend receives, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights, TurnedWeights, check_tensor


class Call(NamedTuple):
    """What a rank brings. T tokens, zero too; the same weights, but for their values, until others are given.

    x: [T, H] bf16 or, where the precision stores it so, quantized: ranks need not agree on that.
    topk_ids: [T, K] int32 | int64; an id outside [0, E) is dropped. topk_weights: [T, K] fp32.
    weights: of this rank, as the precision stores them; of a backward pass the bf16 masters.
    num_tokens_device: [1] int32; tokens from there on are not computed. out: [T, H] bf16, for y.
    known: stands for all that the checks of a call look at, and for where weights lie: calls that have the same object
        are alike in that, and were checked. None: the backend looks itself.
    state: [state_bytes] uint8, where a state that is kept may be put.
    """

    x: Tensor | QuantizedRows
    topk_ids: Tensor
    topk_weights: Tensor
    weights: ExpertWeights
    num_tokens_device: Tensor | None = None
    out: Tensor | None = None
    known: Any = None
    state: Tensor | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor | None]:
        """x, or what it is stored as, and its scales."""
        return self.x if isinstance(self.x, QuantizedRows) else (self.x, None)

    def computed_ids(self) -> Tensor:
        """Return topk_ids with the routes of all tokens from num_tokens_device on dropped."""
        if self.num_tokens_device is None:
            return self.topk_ids
        tokens = torch.arange(self.topk_ids.shape[0], device=self.topk_ids.device)
        return self.topk_ids.masked_fill((tokens >= self.num_tokens_device)[:, None], -1)


class Needs(NamedTuple):
    """Which gradients a rank needs."""

    x: bool = True
    topk_weights: bool = True
    w13: bool = True
    w2: bool = True
    b13: bool = True
    b2: bool = True

    @property
    def of_weights(self) -> tuple[bool, ...]:
        """Whether those of w13, w2, b13, b2 are needed."""
        return self[2:]


class Gradients(NamedTuple):
    """x: [T, H] bf16; topk_weights: [T, K] fp32; w13, w2: bf16 like the masters; b13, b2: fp32. None: not needed."""

    x: Tensor | None = None
    topk_weights: Tensor | None = None
    w13: Tensor | None = None
    w2: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None

    @property
    def of_weights(self) -> tuple[Tensor | None, ...]:
        """The gradients of w13, w2, b13, b2."""
        return self[2:]


@dataclass(frozen=True)
class KeptRows:
    """What the experts' gradients of one backward pass are made of: memory, [bytes] uint8, as the backend fills it.

    resets: how often the backend had been reset when it was made; what it holds is worth nothing behind another.
    """

    memory: Tensor
    resets: int = 0


class Wanted(NamedTuple):
    """What a backward pass is to make.

    into: "w13", "w2", "b13", "b2" -> a tensor like that master, fp32 or bf16, that its gradient is added to; Gradients
        has None for it then. Only what `needs` has.
    only_weights: no rank needs the first two of `needs`; a backend may leave out what makes them.
    turned: made of the call's weights, what is multiplied where weights are stored as e4m3; else None.
    kept: of new_kept(), to be filled; no gradient of weights is needed then.
    """

    needs: Needs = Needs()
    into: Mapping[str, Tensor] = {}
    only_weights: bool = False
    turned: TurnedWeights | None = None
    kept: KeptRows | None = None


class Backend(Protocol):
    """What runs a layer on one rank. All of it, making one too, is collective, but for check() and statistics().

    state_bytes: of what a forward pass that keeps its state returns.
    recomputes: whether backward() computes the call again, and is given the weights that the forward pass took; others
        are given the masters, and Wanted.turned where weights are stored in a format with scales.
    needs_close: whether close() has something to free together with other ranks.
    max_kept: backward passes whose kept rows weight_gradients() takes at a time; 0: new_kept() returns None.
    """

    state_bytes: int = 0
    recomputes: bool = False
    needs_close: bool = False
    max_kept: int = 0

    def prepare(self, weights: ExpertWeights) -> None:
        """Compile, allocate, map: everything that a first forward would otherwise do. Again, it is not collective."""

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return y [T, H] bf16 and, if it is to be kept, the call's state.

        keep: gradients are recorded. The state, [state_bytes] uint8, is the caller's, who may move it; y has the same
            bits with and without it.
        """
        raise NotImplementedError

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: Wanted) -> Gradients:
        """Return the gradients of the call that left `state`, which stays as it is. dy: [T, H] bf16, contiguous.

        x is not quantized; weights are bf16 masters wherever w13 or w2 need a gradient.
        """
        raise NotImplementedError

    def prepare_kept(self) -> None:
        """Compile what weight_gradients() would otherwise compile while other ranks go on."""
        return

    def new_kept(self) -> KeptRows | None:
        """Return memory for what a backward pass keeps, None where this backend keeps nothing. Not collective."""
        return None

    def weight_gradients(
        self, weights: ExpertWeights, kept: Sequence[KeptRows], wanted: Wanted
    ) -> Gradients:
        """Return the weights' gradients, each summed in fp32 over the rows of all passes that were kept.

        Not collective: it needs no other rank. weights: the masters. wanted: of weights alone.
        Raises MegaMoEError for rows that were lost by reset(). A pass that filled its pool several times becomes a
        WorkspaceTooSmall of this call or a later one, and the gradients NaN.
        """
        raise MegaMoEError("this backend keeps no rows of a backward pass")

    def statistics(self) -> Statistics:
        """Return what the last forward did, without waiting for it."""
        raise NotImplementedError

    def later_statistics(self) -> Callable[[], Statistics]:
        """Return a function that makes those of the last forward, also when others have followed."""
        found = self.statistics()
        return lambda: found

    def abort(self, error: Exception) -> None:
        """End the call that the other ranks wait in, where this rank raises `error` before it has met them."""
        return

    def check(self) -> None:
        """Wait for what is pending; raise the fault of a launch, if there is one."""

    def reset(self) -> None:
        """Make it usable again after a fault."""

    def close(self) -> None:
        """Free what is shared with other ranks, after a barrier of the group."""


def check_call(problem: Problem, call: Call, device: torch.device | None = None) -> None:
    """Raise ArgumentError unless the tensors of one call, but for the weights, fit the problem. Reads no contents.

    device: where they have to lie; None: where x does.
    """
    (x, x_scale), stored = call.rows, problem.formats.x
    if x_scale is not None and not stored.scaled:
        raise ArgumentError("x_scale", "given", f"None with precision {problem.precision!r}")
    if not isinstance(x, Tensor) or x.dim() != 2:
        value = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError("x.shape", value, f"[T, {problem.hidden}]")
    tokens, device = x.shape[0], device or x.device
    dtype = torch.bfloat16 if x_scale is None else stored.dtype
    check_tensor("x", x, (tokens, problem.hidden), dtype, device)
    if x_scale is not None:
        groups = stored.scale_shape(tokens, problem.hidden)
        check_tensor("x_scale", x_scale, groups, torch.float32, device)
    if tokens > problem.max_tokens:
        raise ArgumentError("x.shape[0]", tokens, f"at most max_tokens = {problem.max_tokens}")
    routes = (tokens, problem.top_k)
    check_tensor("topk_ids", call.topk_ids, routes, (torch.int32, torch.int64), device)
    check_tensor("topk_weights", call.topk_weights, routes, torch.float32, device)
    if call.out is not None:
        check_tensor("out", call.out, (tokens, problem.hidden), torch.bfloat16, device)
        check_out(call.out, x, (call.topk_ids, call.topk_weights), call.weights)
    if call.num_tokens_device is not None:
        check_tensor("num_tokens_device", call.num_tokens_device, (1,), torch.int32, device)


def check_kept(kept: Sequence[KeptRows], resets: int) -> None:
    """Raise MegaMoEError for rows that were kept before the last of so many resets."""
    lost = sum(rows.resets != resets for rows in kept)
    if lost:
        raise MegaMoEError(
            f"reset() was called since {lost} of {len(kept)} backward passes kept their rows: their weight gradients "
            "are lost; close() the layer, or leave out the step"
        )


def shares(out: Tensor, read: Iterable[Tensor | None]) -> bool:
    """Return whether `out` has the storage of something that is read."""
    of = out.untyped_storage()._cdata
    return any(t is not None and t.untyped_storage()._cdata == of for t in read)


def overwrites(out: Tensor, x: Tensor, others: Sequence[Tensor | None]) -> bool:
    """Return whether `out` has a storage that the call reads. It may be x itself."""
    same = out.data_ptr() == x.data_ptr() and out.element_size() == x.element_size()
    return shares(out, others if same else (x, *others))


def check_out(out: Tensor, x: Tensor, routes: tuple[Tensor, Tensor], w: ExpertWeights) -> None:
    """Raise ArgumentError for an `out` that cannot be written, or not without changing what the call reads.

    routes: topk_ids, topk_weights. Compiled, y is made first and then copied.
    """
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("out", "a tensor with a gradient", "one without: it is overwritten")
    if torch.compiler.is_compiling():
        return
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError("out", "an inference tensor", "one that was made outside")
    if overwrites(out, x, (*routes, *vars(w).values())):
        raise ArgumentError("out", "in a storage that the call reads", "x, or a storage of its own")
