"""Which calls of a layer have passed all checks: shapes, types and places of what they brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megamoe.core.planes import SUSPECT_BELOW
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights
from megamoe.layer.autograd import watched
from megamoe.layer.functional import overlap

MAX_CALLS = 1024


def tensors_of(w: ExpertWeights) -> list[Tensor]:
    """Return the tensors that are there; a list and no dictionary, for its speed."""
    return [t for t in (w.w13, w.w2, w.b13, w.b2, w.w13_scale, w.w2_scale) if t is not None]


def records(x: Tensor, topk_weights: Tensor, w: ExpertWeights) -> bool:
    """Whether the call's gradients are recorded."""
    if not torch.is_grad_enabled():
        return False
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():  # both may be on
        return False
    return (
        x.requires_grad
        or w.w13.requires_grad
        or w.w2.requires_grad
        or topk_weights.requires_grad
        or any(t.requires_grad for t in tensors_of(w))
    )


def unsaved(rows: Sequence[Tensor], count: Tensor | None, w: ExpertWeights) -> str | None:
    """Return the name of a tensor of torch.inference_mode(), which autograd does not save; None: there is none.

    rows: x, topk_ids, topk_weights. Asked before a call, since the other ranks would wait behind it.
    """
    of_weights = w.w13, w.w2, w.b13, w.b2, w.w13_scale, w.w2_scale
    for i, t in enumerate((*rows, count, *of_weights)):
        if t is not None and t.is_inference():
            of_call = "x", "topk_ids", "topk_weights", "num_tokens_device"
            return (*of_call, *(f"weights.{f.name}" for f in fields(w)))[i]
    return None


class KnownCalls:
    """Calls of one layer, with one set of weights at a time."""

    def __init__(self) -> None:
        self._calls: set[tuple[Any, ...]] = set()
        self._weights: list[Any] | None = None

    def has(
        self,
        rows: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None,
        out: Tensor | None,
    ) -> bool:
        """Whether operators need not be called: nobody watches, and a call like this passed all checks."""
        x = rows
        if type(rows) is QuantizedRows:
            x, scale = rows
            if type(scale) is not Tensor or not scale.is_contiguous() or scale.is_neg():
                return False
            if scale.data_ptr() < SUSPECT_BELOW:
                return False
            if scale.requires_grad:
                return False
        if (
            type(x) is not Tensor
            or type(topk_ids) is not Tensor
            or type(topk_weights) is not Tensor
            or watched()
        ):
            return False
        try:
            if not (
                x.is_contiguous() and topk_ids.is_contiguous() and topk_weights.is_contiguous()
            ):
                return False
            if x.is_neg() or topk_ids.is_neg() or topk_weights.is_neg():
                return False
            if x.shape[0] and not (
                x.data_ptr() >= SUSPECT_BELOW
                and topk_ids.data_ptr() >= SUSPECT_BELOW
                and topk_weights.data_ptr() >= SUSPECT_BELOW
            ):
                return False
            if out is not None and (out.data_ptr() < SUSPECT_BELOW or overlap(out, x)):
                return False
            if num_tokens_device is not None and num_tokens_device.data_ptr() < SUSPECT_BELOW:
                return False
            call = _key(rows, topk_ids, topk_weights, num_tokens_device, out)
            return _weights_key(tensors_of(weights)) == self._weights and call in self._calls
        except (AttributeError, RuntimeError):
            return False  # something is no tensor, or lies nowhere: the checks will name it

    def add(
        self,
        rows: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None,
        out: Tensor | None,
    ) -> None:
        """Remember a call that passed all checks."""
        if len(self._calls) >= MAX_CALLS:
            self._calls.clear()
        self._calls.add(_key(rows, topk_ids, topk_weights, num_tokens_device, out))
        self._weights = _weights_key(tensors_of(weights))

    def clear(self) -> None:
        """Forget all."""
        self._calls.clear()


def _key(
    rows: Tensor | QuantizedRows,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_tokens_device: Tensor | None,
    out: Tensor | None,
) -> tuple[Any, ...]:
    """Return what the checks of a call look at."""
    x = rows if type(rows) is QuantizedRows else (rows,)
    key = [(t.shape, t.dtype, t.device) for t in (*x, topk_ids, topk_weights)]
    for t in (num_tokens_device, out):
        key.append(t if t is None else (t.shape, t.dtype, t.device, t.is_contiguous(), type(t)))
    return tuple(key)


def _weights_key(experts: list[Tensor]) -> list[Any]:
    """Return what the checks of weights look at; the address stands for the device, too."""
    return [
        (t.data_ptr(), t.shape, t.dtype, t.is_contiguous() or t.stride(), type(t)) for t in experts
    ]
