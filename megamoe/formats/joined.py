"""Gate and up projections that are tensors of their own, as one view."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError


class Joined(torch.autograd.Function):
    """w1 and w3 as one view [L, 2, I, H]; the gradient goes back to both."""

    @staticmethod
    def forward(ctx: Any, w1: Tensor, w3: Tensor) -> Tensor:
        distance = w3.storage_offset() - w1.storage_offset()
        (num, rows, width), (expert, row, column) = w1.shape, w1.stride()
        ctx.save_for_backward(w1, w3)  # the view counts writes to w1 only
        return w1.detach().as_strided((num, 2, rows, width), (expert, distance, row, column))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _ = ctx.saved_tensors  # raises where one was written to
        d1, d3 = grad.unbind(1)
        return d1, d3


def check_joinable(w1: Tensor, w3: Tensor) -> None:
    """Raise ArgumentError unless w3 has w1's shape, type and strides, and lies behind it."""
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
    """Return join((first, second), dim=1), None without both. Raises ArgumentError for those of unequal shapes."""
    shapes = [None if t is None else list(t.shape) for t in (first, second)]
    if shapes[0] != shapes[1]:
        raise ArgumentError(f"{name} of w1 and w3", shapes, "both, of equal shapes")
    return None if first is None else join((first, second), dim=1)
