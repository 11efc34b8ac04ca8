"""Arrange the tensors of a call as torch's operators and autograd take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.backends.call import Call
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights


class Inputs(NamedTuple):
    """x is [..., H], topk_ids and topk_weights [..., K], all contiguous; the others as in Call and ExpertWeights."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    num_tokens_device: Tensor | None = None
    x_scale: Tensor | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w: ExpertWeights,
        num_tokens_device: Tensor | None = None,
        x_scale: Tensor | None = None,
    ) -> Inputs:
        """Return the inputs of a call."""
        of_weights = w.w13, w.w2, w.b13, w.b2, w.w13_scale, w.w2_scale
        return cls(x, topk_ids, topk_weights, *of_weights, num_tokens_device, x_scale)

    @property
    def weights(self) -> ExpertWeights:
        """The weights as they were given."""
        return ExpertWeights(*self[3:9])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of of()."""
        return *self[:3], self.weights, *self[9:]

    def call(self, weights: ExpertWeights, known: Any = None) -> Call:
        """Return the call for a backend, with the weights that it reads. known: as Call.known."""
        x, topk_ids, topk_weights, x_scale = *self[:3], self.x_scale
        if x.dim() != 2:
            x, topk_ids, topk_weights = flat(x), flat(topk_ids), flat(topk_weights)
            x_scale = None if x_scale is None else flat(x_scale)
        rows = x if x_scale is None else QuantizedRows(x, x_scale)
        return Call(rows, topk_ids, topk_weights, weights, self.num_tokens_device, None, known)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that are there, as errors call them."""
        of_weights = ExpertWeights.__dataclass_fields__
        return [
            (f"weights.{name}" if name in of_weights else name, t)
            for name, t in zip(self._fields, self, strict=True)
            if t is not None
        ]


def flat(tensor: Tensor) -> Tensor:
    """[..., N] -> [T, N]."""
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


def like(y: Tensor, x: Tensor) -> Tensor:
    """[T, H] -> the shape of x; FSDP2 takes no views."""
    return y if y.shape == x.shape else torch.ops.aten._unsafe_view(y, x.shape)
