"""Compute the layer's gradients with the backend, from the state that its forward saved.

This is collective, so every rank must need the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.backends.call import Gradients, GradRequest, StashedRows
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import check_kind, check_memory, is_freed
from megamoe.formats.weights import ExpertWeights, check_tensor
from megamoe.layer.inputs import Inputs, flat
from megamoe.layer.runtime import Runtime

ALIGNMENT = 16  # bytes, of what the kernel reads


class Pass(NamedTuple):
    """Hold what the backward pass of a call reads.

    dy: like x; None: zeros. state: saved by the call's forward pass, never changed.
    """

    inputs: Inputs
    dy: Tensor | None
    state: Tensor


def known_of(known: Any, inputs: Inputs) -> Any:
    """Return a call's Signature if the tensors of its backward pass still match it, else None.

    FSDP2 may have freed weights, and saved-tensor hooks may have replaced tensors.
    """
    if known is None or inputs.w13 is None:
        return None
    return known if known.fits(*inputs.arguments, None) else None


def gradients(runtime: Runtime, given: Pass, wanted: GradRequest, known: Any = None) -> Gradients:
    """Return the gradients of a call in the dtypes, shapes and strides of its inputs. Collective.

    wanted: without `transposed`, which this function adds. known: known_of(); None: validate all inputs.
    Raises ArgumentError if dy does not match y.
    """
    inputs, dy, state = given
    x, weights = inputs.x, inputs.weights
    if known is None:
        _check_there(runtime.problem, inputs)
        for name, t in inputs.named():
            check_memory(name, t)
    if dy is None or known is None or not _are_plain(dy, x, state, runtime.state_bytes):
        dy = _checked(dy, x)
        check_tensor("state", state, (runtime.state_bytes,), torch.uint8, x.device)
    with runtime.lock, nullcontext() if runtime.as_forward else runtime.cache.turn:
        if runtime.as_forward:
            weights = runtime.weights(weights)
        elif runtime.transposes:
            transposed = runtime.cache.transposed(runtime.problem, weights)
            wanted = wanted._replace(transposed=transposed)
        found = runtime.backend.backward(inputs.call(weights, known), flat(dy), state, wanted)
    return _finished(runtime, found, wanted, inputs)


def _are_plain(dy: Tensor, x: Tensor, state: Tensor, state_bytes: int) -> bool:
    """Return whether nothing has to be checked or copied of the two."""
    return (
        type(dy) is type(state) is Tensor
        and dy.shape == x.shape
        and dy.dtype == torch.bfloat16
        and dy.device == state.device == x.device
        and dy.is_contiguous()
        and not dy.is_neg()
        and state.shape == (state_bytes,)
        and state.is_contiguous()
        and not (dy.data_ptr() | state.data_ptr()) % ALIGNMENT
        and not is_freed(dy)
    )


def stashed_gradients(
    runtime: Runtime, weights: ExpertWeights, stashed: Sequence[StashedRows], wanted: GradRequest
) -> Gradients:
    """Return the weight gradients of stashed passes, as gradients() does. Not collective."""
    with runtime.lock:
        found = runtime.backend.weight_gradients(weights, stashed, wanted)
    return _finished(runtime, found, wanted, weights)


def _finished(
    runtime: Runtime, found: Gradients, wanted: GradRequest, of: Inputs | ExpertWeights
) -> Gradients:
    """Return gradients as autograd takes them. of: the tensors that they belong to, by name."""
    laid_out: dict[str, Tensor] = {}
    for name, need in wanted.needs._asdict().items():
        grad, leaf = getattr(found, name), getattr(of, name, None)
        if not need or grad is None or leaf is None:
            continue
        if grad.shape != leaf.shape or grad.dtype != leaf.dtype or grad.stride() != leaf.stride():
            grad = _laid_out(grad, leaf)
        of_weights = name not in ("x", "topk_weights")
        mean = of_weights and runtime.mean_over != 1
        laid_out[name] = grad / runtime.mean_over if mean else grad
    return Gradients(**laid_out)


def _checked(dy: Tensor | None, x: Tensor) -> Tensor:
    """Return dy as the kernel reads it."""
    if dy is None:
        return torch.zeros_like(x)
    check_kind("dy", dy)
    dy = dy.contiguous().resolve_neg()
    check_tensor("dy", dy, tuple(x.shape), torch.bfloat16, x.device)
    # A slice of a larger gradient may lie elsewhere than at a multiple.
    return dy.clone() if dy.data_ptr() % ALIGNMENT else dy


def _check_there(problem: Problem, inputs: Inputs) -> None:
    """Raise ArgumentError if memory of weights was freed after the call, as other libraries do by `p.data = ...`."""
    matrix = problem.num_local_experts(problem.rank) * problem.intermediate * problem.hidden
    if inputs.w13_scale is not None:  # not masters
        matrix //= problem.formats.w.packed
    planes = problem.activation.planes
    for name, w, count in (("w13", inputs.w13, planes * matrix), ("w2", inputs.w2, matrix)):
        if w.numel() != count:
            expected = f"{count} elements, as in the forward pass: its data was replaced behind it"
            raise ArgumentError(f"weights.{name}.shape", list(w.shape), expected)


def _laid_out(grad: Tensor, master: Tensor) -> Tensor:
    """Return the gradient in the master's dtype, shape and, where its memory is dense, strides."""
    if grad.shape != master.shape or grad.dtype != master.dtype:
        grad = grad.to(master.dtype).reshape(master.shape)
    if grad.stride() == master.stride():
        return grad
    if grad.stride() == torch.empty_like(master, device="meta").stride():
        return grad
    return torch.empty_like(master).copy_(grad)
