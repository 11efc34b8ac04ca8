"""Carry rows of x that the caller has quantized; allocate quantized weights, and fill them expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import by_plane
from megamoe.core.table import Format

Pair = tuple[Tensor, Tensor]  # numbers and scales


@final
class QuantizedRows(NamedTuple):
    """Hold quantized rows: value = q * scale.

    Args:
        q: [T, H] e4m3, or its bytes.
        scale: [T, S] fp32, any numbers; S depends on the precision.
    """

    q: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of q, [T, H]."""
        return self.q.shape

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.q.device

    def take(self, tokens: Tensor) -> QuantizedRows:
        """Return the rows of some tokens. It indexes bytes, since e4m3 cannot be indexed on every device."""
        q = self.q.view(torch.uint8)[tokens].view(self.q.dtype)
        return QuantizedRows(q, self.scale[tokens])


def memory_of(w: Tensor, stored: Format) -> tuple[Tensor, Tensor]:
    """Allocate memory for weights w [L, P, I, K] in a format: the numbers, [L, P*I, K] unless packed, and scales.

    Raises ArgumentError if the format cannot pack rows of K numbers.
    """
    num, planes, rows, width = w.shape
    if stored.packed > 1 and width % stored.multiple:
        raise ArgumentError("w.shape[-1]", width, f"a multiple of {stored.multiple}")
    blocks, *of_block = stored.scale_shape(rows, width)
    numbers = w.new_empty((num, planes * rows, stored.width(width)), dtype=stored.dtype)
    scale = w.new_empty((num, planes * blocks, *of_block), dtype=stored.scale_dtype)
    return numbers, scale


def by_expert(
    w: Tensor, planes: int, out: Pair | None, stored: Format, quantize: Callable[[Tensor], Pair]
) -> Pair:
    """Quantize weights [L, P*I, K] or [L, P, I, K] into `out`, or into new memory.

    quantize: one expert's planes [P, I, K], in fp32 -> its numbers and scales.
    """
    w = by_plane(w, planes)
    numbers, scales = memory_of(w, stored) if out is None else out
    for expert in range(len(w)):  # one by one: fp32 copies of all experts would be large
        numbers[expert], scales[expert] = quantize(w[expert].detach().float())
    return numbers, scales
