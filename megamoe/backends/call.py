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
from megamoe.formats.weights import ExpertWeights, TransposedWeights, check_tensor


class Call(NamedTuple):
    """Hold the arguments of one call on one rank. T may be zero.

    Args:
        x: [T, H] bf16 or, if the precision stores it so, quantized; ranks may differ in this.
        topk_ids: [T, K] int32 or int64. Ids outside [0, E) are dropped.
        topk_weights: [T, K] fp32.
        weights: This rank's weights in the precision's format; in a backward pass the masters.
        num_tokens_device: [1] int32. Tokens from this number on are not computed.
        out: [T, H] bf16 to write y into.
        known: Validation token. Two calls with the same token have identical shapes, dtypes, strides and weight
            addresses, already validated. None: not validated.
        state: [state_bytes] uint8, memory for the state if it is saved.
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
        """x, or its quantized numbers, and its scales."""
        return self.x if isinstance(self.x, QuantizedRows) else (self.x, None)

    def computed_ids(self) -> Tensor:
        """Return topk_ids in which all routes of tokens from num_tokens_device on are dropped."""
        if self.num_tokens_device is None:
            return self.topk_ids
        tokens = torch.arange(self.topk_ids.shape[0], device=self.topk_ids.device)
        return self.topk_ids.masked_fill((tokens >= self.num_tokens_device)[:, None], -1)


class Needs(NamedTuple):
    """Name the gradients that a rank needs."""

    x: bool = True
    topk_weights: bool = True
    w13: bool = True
    w2: bool = True
    b13: bool = True
    b2: bool = True

    @property
    def of_weights(self) -> tuple[bool, ...]:
        """True for each of w13, w2, b13 and b2 whose gradient is needed."""
        return self[2:]


class Gradients(NamedTuple):
    """Hold gradients; None: not needed. x: [T, H] bf16; w13, w2: the masters' type; topk_weights, b13, b2: fp32."""

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
class StashedRows:
    """Hold the rows from which one backward pass's weight gradients are computed: [bytes] uint8, filled by the backend.

    resets: the number of resets of the backend at that time. After another reset the contents are invalid.
    """

    memory: Tensor
    resets: int = 0


class GradRequest(NamedTuple):
    """Request the results of a backward pass.

    Args:
        needs: The gradients that are needed.
        into: "w13", "w2", "b13" or "b2" -> a tensor of the master's shape, fp32 or bf16, to which the gradient is
            added. Gradients then has None for it. Only names that `needs` has.
        only_weights: True: no rank needs the first two of `needs`, so a backend may skip them.
        transposed: Transposes of e4m3 weights; None for other formats.
        stash: Result of new_stash(), to be filled. Then no gradient of weights is needed.
    """

    needs: Needs = Needs()
    into: Mapping[str, Tensor] = {}
    only_weights: bool = False
    transposed: TransposedWeights | None = None
    stash: StashedRows | None = None


class Backend(Protocol):
    """Run a layer on one rank. Everything is collective, also the constructor, except check() and statistics().

    Attributes:
        state_bytes: Size of the state that a forward pass saves.
        recomputes: True: backward() runs the call again and receives the weights of the forward pass. Other backends
            receive the masters, and GradRequest.transposed if weights are stored with scales.
        needs_close: True if close() has to free something together with other ranks.
        max_stashed: Largest number of stashed passes that weight_gradients() takes; 0: new_stash() returns None.
    """

    state_bytes: int = 0
    recomputes: bool = False
    needs_close: bool = False
    max_stashed: int = 0
    _statistics: Statistics | None = None  # of the last forward

    def prepare(self, weights: ExpertWeights) -> None:
        """Compile, allocate and map what the first forward would. A second call is not collective."""

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return y [T, H] bf16 and, with `keep`, the call's state [state_bytes] uint8.

        keep: True: gradients are recorded. The caller owns the state and may move it. y has the same bits in both
        cases.
        """
        raise NotImplementedError

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Return the gradients of the call that saved `state`, which is not changed. dy: [T, H] bf16, contiguous.

        x is not quantized. Weights are masters if w13 or w2 need a gradient.
        """
        raise NotImplementedError

    def prepare_stash(self) -> None:
        """Compile what weight_gradients() needs, so that no rank compiles while the others run."""
        return

    def new_stash(self) -> StashedRows | None:
        """Allocate memory for the rows of a backward pass; None if this backend keeps none. Not collective."""
        return None

    def weight_gradients(
        self, weights: ExpertWeights, stashed: Sequence[StashedRows], wanted: GradRequest
    ) -> Gradients:
        """Return the weight gradients, each summed in fp32 over the rows of all stashed passes.

        Not collective: it needs no other rank. weights: the masters. wanted: only gradients of weights. Raises
        MegaMoEError for rows that were lost by reset(). If a pass filled its pool several times, this call or a later
        one raises WorkspaceTooSmall, and the gradients are NaN.
        """
        raise MegaMoEError("this backend keeps no rows of a backward pass")

    def statistics(self) -> Statistics:
        """Return statistics of the last forward, without waiting for it."""
        return Statistics.of_last(self._statistics)

    def later_statistics(self) -> Callable[[], Statistics]:
        """Return a function that returns the statistics of the last forward, even after other calls."""
        found = self.statistics()
        return lambda: found

    def abort(self, error: Exception) -> None:
        """End the call that the other ranks wait in, where this rank raises `error` before it has met them."""
        return

    def check(self) -> None:
        """Wait for pending launches, and raise the error of a failed one."""

    def reset(self) -> None:
        """Make the backend usable again after a failed launch."""

    def close(self) -> None:
        """Free what is shared with other ranks, after a barrier of the group."""


def check_call(problem: Problem, call: Call, device: torch.device | None = None) -> None:
    """Raise ArgumentError unless the tensors of one call, except weights, fit the problem. It reads no contents.

    device: where they must be; None: the device of x.
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


def check_stash(stashed: Sequence[StashedRows], resets: int) -> None:
    """Raise MegaMoEError if rows were stashed before the last reset."""
    lost = sum(rows.resets != resets for rows in stashed)
    if lost:
        raise MegaMoEError(
            f"reset() was called since {lost} of {len(stashed)} backward passes kept their rows: their weight "
            "gradients are lost. Call close() and skip this optimizer step"
        )


def shares(out: Tensor, read: Iterable[Tensor | None]) -> bool:
    """Return True if `out` has the storage of a tensor that the call reads."""
    of = out.untyped_storage()._cdata
    return any(t is not None and t.untyped_storage()._cdata == of for t in read)


def overwrites(out: Tensor, x: Tensor, others: Sequence[Tensor | None]) -> bool:
    """Return True if `out` has a storage that the call reads. It may be x itself."""
    same = out.data_ptr() == x.data_ptr() and out.element_size() == x.element_size()
    return shares(out, others if same else (x, *others))


def check_out(out: Tensor, x: Tensor, routes: tuple[Tensor, Tensor], w: ExpertWeights) -> None:
    """Raise ArgumentError if `out` cannot be written, or if writing it changes what the call reads.

    routes: topk_ids, topk_weights. Under torch.compile y is computed first and then copied.
    """
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("out", "a tensor with a gradient", "one without: it is overwritten")
    if torch.compiler.is_compiling():
        return
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError("out", "an inference tensor", "one made outside of inference_mode()")
    if overwrites(out, x, (*routes, *vars(w).values())):
        raise ArgumentError("out", "in a storage that the call reads", "x, or a storage of its own")
