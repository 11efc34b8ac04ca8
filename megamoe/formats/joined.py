"""Join tensors that a layer takes as one, such as gate and up projections, without a copy if their memory allows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError


class Joined(torch.autograd.Function):
    """Join tensors into one: a view if as_one() finds one, else a copy. The gradient goes back to each tensor.

    Args:
        as_one: Function from the tensors to a view of them, or None.
        cut: Function from the joined tensor to one part per tensor.
        copied: Function from the tensors to a new one, used if as_one() returns None.
        joint: Receives gradients that are added to main_grad, see megamoe/layer/main_grad.py.
    """

    @staticmethod
    def forward(ctx: Any, as_one: Any, cut: Any, copied: Any, joint: Any, *parts: Tensor) -> Tensor:
        ctx.cut, ctx.joint = cut, joint
        ctx.set_materialize_grads(False)
        whole: Tensor | None = as_one(parts)
        if whole is None:
            made: Tensor = copied(parts)
            return made
        ctx.save_for_backward(*parts)  # the view counts writes to the first one only
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises where one was written to
        if ctx.joint is not None and ctx.joint.used:
            return None, None, None, None, *ctx.joint.add(grad)
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, None, None, *ctx.cut(grad)


def join_w1_w3(w1: Tensor, w3: Tensor) -> Tensor:
    """Return w1 and w3, which check_joinable() has accepted, as one view [L, 2, I, H]."""
    whole: Tensor = Joined.apply(_planes, lambda whole: whole.unbind(1), None, None, w1, w3)
    return whole


def _planes(parts: tuple[Tensor, Tensor]) -> Tensor:
    w1, w3 = parts
    (num, rows, width), (expert, row, column) = w1.shape, w1.stride()
    strides = expert, w3.storage_offset() - w1.storage_offset(), row, column
    return w1.detach().as_strided((num, 2, rows, width), strides)


def check_joinable(w1: Tensor, w3: Tensor) -> None:
    """Raise ArgumentError unless w3 has the shape, dtype and strides of w1 and is behind it in memory."""
    for name, w in (("w1", w1), ("w3", w3)):
        if not isinstance(w, Tensor):
            raise ArgumentError(name, type(w).__name__, "a tensor")
        if w.dim() != 3 or w.shape != w1.shape or w.dtype != w1.dtype:
            raise ArgumentError(
                name, f"{w.dtype} {list(w.shape)}", f"{w1.dtype} [L, I, H], like w1"
            )
    hint = "views of one tensor: w1, w3 = torch.empty(2, L, I, H)"
    if w1.untyped_storage().data_ptr() != w3.untyped_storage().data_ptr():
        raise ArgumentError("w3", "in another storage than w1", hint)
    if w1.stride() != w3.stride():
        raise ArgumentError("w3.stride()", w3.stride(), f"{w1.stride()}, w1's")
    distance = (w3.storage_offset() - w1.storage_offset()) * w1.element_size()
    if distance <= 0:
        raise ArgumentError("w3", f"{distance} bytes behind w1", "a positive distance: w1, then w3")


def join_pair(name: str, first: Tensor | None, second: Tensor | None, join: Any) -> Tensor | None:
    """Return join((first, second), dim=1), or None if both are None. Raise ArgumentError if their shapes differ."""
    shapes = [None if t is None else list(t.shape) for t in (first, second)]
    if shapes[0] != shapes[1]:
        raise ArgumentError(f"{name} of w1 and w3", shapes, "both, of equal shapes")
    return None if first is None else join((first, second), dim=1)
