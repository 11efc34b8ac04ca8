"""Rows of x that the caller has quantized, as they go through the backends; weights that stay quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor


@final
class QuantizedRows(NamedTuple):
    """q: [T, H] e4m3, or its bytes. scale: [T, S] fp32, any numbers, S as the precision has it; value = q * scale."""

    q: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """[T, H]."""
        return self.q.shape

    @property
    def device(self) -> torch.device:
        """Where both lie."""
        return self.q.device

    def take(self, tokens: Tensor) -> QuantizedRows:
        """Return the rows of some tokens; e4m3 itself cannot be indexed everywhere."""
        q = self.q.view(torch.uint8)[tokens].view(self.q.dtype)
        return QuantizedRows(q, self.scale[tokens])


def keeping(
    quantized: Sequence[Tensor], fn: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return fn, as nn.Module._apply takes it, but that these keep their types: they move, and are not cast."""

    def move(t: Tensor) -> Tensor:
        made = fn(t)
        cast = made.dtype != t.dtype and any(t is q for q in quantized)
        return t.to(made.device) if cast else made

    return move
