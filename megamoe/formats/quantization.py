"""Quantize to FP8: activations in groups of 1x128 or by token, weights in blocks of 128x128 or by channel.

The formula is docs/numerics.md, "Quantization": amax = max(max|v|, 1e-10), scale = amax / 448, q = e4m3(clamp(v * (448
/ amax), -448, 448)), value = q * scale. It computes in fp32, with exactly these two divisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.core.errors import ConfigError
from megamoe.core.planes import by_plane, rows_of
from megamoe.core.table import (
    BF16,
    E4M3_BLOCKS,
    E4M3_CHANNELS,
    E4M3_QUADS,
    E4M3_ROWS,
    E4M3_TOKENS,
    MXFP4,
    NVFP4,
    SCALE_GROUP,
    Format,
)
from megamoe.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from megamoe.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from megamoe.formats.quantized import by_expert

E4M3, E4M3_MAX = E4M3_ROWS.dtype, E4M3_ROWS.largest
MIN_AMAX = 1e-10
GROUP = SCALE_GROUP


def num_groups(width: int) -> int:
    """Return S = ceil(width / 128)."""
    return -(-width // GROUP)


def _quantize(v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """v: fp32, one group along `dims` -> (e4m3 of the same shape, scale with `dims` kept as 1)."""
    amax = v.abs().amax(dim=dims, keepdim=True).clamp(min=MIN_AMAX)
    # Tensor over tensor: torch computes scalar / tensor as reciprocal * scalar, and on CUDA tensor / scalar as
    # tensor * (1 / scalar), one ulp away from the kernel's division.
    limit = torch.full_like(amax, E4M3_MAX)
    # The clamp matters: torch <= 2.11 turns values past 448 into NaN.
    q = (v * (limit / amax)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return q, amax / limit


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [..., K] -> (q [..., K] e4m3, scale [..., ceil(K/128)] fp32); groups of 1x128."""
    width, groups = x.shape[-1], num_groups(x.shape[-1])
    v = torch.nn.functional.pad(x.float(), (0, groups * GROUP - width))
    q, scale = _quantize(v.unflatten(-1, (groups, GROUP)), dims=(-1,))
    return q.flatten(-2)[..., :width].contiguous(), scale.squeeze(-1)


def dequantize_rows(q: Tensor, scale: Tensor) -> Tensor:
    """q: [..., K] e4m3, scale: [..., ceil(K/128)] -> [..., K] fp32."""
    return q.float() * scale.repeat_interleave(GROUP, dim=-1)[..., : q.shape[-1]]


def blocks_of_rows(x: Tensor, by_column: bool) -> tuple[Tensor, Tensor]:
    """x: [B * 128, N], N a multiple of 128 -> what rows_of_blocks() takes; scales are powers of two.

    by_column: each column of a block has its scale; else 128 columns share one.
    """
    blocks = x.float().view(-1, GROUP, x.shape[1]).mT
    v = blocks.unflatten(2, (-1, 2, 8)).transpose(3, 4).flatten(2)
    amax = v.abs().amax(2)
    if not by_column:
        groups = amax.unflatten(1, (-1, GROUP))
        amax = groups.amax(2, keepdim=True).expand_as(groups).flatten(1)
    mantissa, exponent = torch.frexp(amax.clamp(min=MIN_AMAX))
    scale = torch.ldexp(torch.ones_like(amax), exponent - 9 + (mantissa > E4M3_MAX / 512))
    q = (v / scale[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return q.to(E4M3), scale


def rows_of_blocks(q: Tensor, scale: Tensor) -> Tensor:
    """q: [B, N, 128] e4m3, blocks of 128 transposed rows, scale: [B, N] -> the rows, [B * 128, N] fp32.

    As the kernel writes them: of 16 rows, r and r + 8 are neighbours.
    """
    values = q.float() * scale[:, :, None]
    in_order = values.unflatten(2, (-1, 8, 2)).transpose(3, 4)
    return in_order.flatten(2).transpose(1, 2).flatten(0, 1)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [..., K] -> (q [..., K] e4m3, scale [..., 1] fp32); a group is a row."""
    q, scale = _quantize(x.float(), dims=(-1,))
    return q.contiguous(), scale


def dequantize_tokens(q: Tensor, scale: Tensor) -> Tensor:
    """q: [..., K] e4m3, scale: [..., 1] -> [..., K] fp32."""
    return q.float() * scale


def quantize_channels(
    w: Tensor, planes: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize weights by output channel, that is by row.

    w: [L, P*I, K] or [L, P, I, K], of any strides -> (q [L, P*I, K] e4m3, scale [L, P*I, 1] fp32). out: (q, scale) to
    write into.
    """
    return by_expert(w, planes, out, E4M3_CHANNELS, lambda v: quantize_tokens(rows_of(v)))


def dequantize_channels(
    q: Tensor, scale: Tensor, planes: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Invert quantize_channels: -> [L, P*I, K], computed in fp32, rounded to `dtype`."""
    out = torch.empty(stored_shape(q), dtype=dtype, device=q.device)
    for expert in range(len(q)):
        out[expert] = dequantize_tokens(rows_of(q[expert]), scale[expert])
    return out


def stored_shape(w: Tensor, stored: Format = E4M3_BLOCKS) -> tuple[int, int, int]:
    """w: [L, P*I, K] or [L, P, I, K] -> (L, P*I, elements of a row) of its quantized copy."""
    num, *height, width = w.shape
    return num, math.prod(height), stored.width(width)


def quantize_blockwise(
    w: Tensor, planes: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize weights in blocks of 128x128 that restart at each plane.

    w: [L, P*I, K] or [L, P, I, K], of any strides -> (q [L, P*I, K] e4m3, scale [L, P*ceil(I/128), ceil(K/128)] fp32).
    planes: 2 for the w13 of a gated activation (gate rows, then up rows), else 1.
    out: (q, scale) to write into.
    """
    return by_expert(w, planes, out, E4M3_BLOCKS, _quantize_blocks)


def _quantize_blocks(v: Tensor) -> tuple[Tensor, Tensor]:
    """v: [P, I, K] fp32 -> one expert as quantize_blockwise() returns it."""
    _, rows, width = v.shape
    n, k = num_groups(rows), num_groups(width)
    padded = torch.nn.functional.pad(v, (0, k * GROUP - width, 0, n * GROUP - rows))
    q, scale = _quantize(padded.unflatten(2, (k, GROUP)).unflatten(1, (n, GROUP)), (2, 4))
    return q.flatten(3, 4).flatten(1, 2)[:, :rows, :width].flatten(0, 1), scale.reshape(-1, k)


def transpose_blocks(
    q: Tensor, scale: Tensor, planes: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Transpose the result of quantize_blockwise() plane by plane. Blocks are square, so the numbers stay the same.

    q: [L, P*I, K] or [L, P, I, K], scale: [L, P*ceil(I/128), ceil(K/128)]
    -> ([L, P, K, I] e4m3, [L, ceil(K/128), P*ceil(I/128)] fp32).
    out: (q, scale) to write into.
    """
    out = new_transposes(q, scale, planes) if out is None else out
    out[0].view(torch.uint8).copy_(by_plane(q.view(torch.uint8), planes).transpose(2, 3))
    out[1].copy_(scale.transpose(1, 2))
    return out


def new_transposes(q: Tensor, scale: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """Return memory for what transpose_blocks() makes of these."""
    num, height, width = stored_shape(q)
    made = torch.empty((num, planes, width, height // planes), dtype=q.dtype, device=q.device)
    return made, scale.new_empty(num, scale.shape[2], scale.shape[1])


def dequantize_blockwise(
    q: Tensor, scale: Tensor, planes: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Invert quantize_blockwise: -> [L, P*I, K], computed in fp32, rounded to `dtype`."""
    num, height, width = stored_shape(q)
    rows = height // planes
    out = torch.empty((num, height, width), dtype=dtype, device=q.device)
    for expert in range(num):
        s = scale[expert].reshape(planes, -1, scale.shape[-1])
        s = s.repeat_interleave(GROUP, dim=1)[:, :rows]
        s = s.repeat_interleave(GROUP, dim=2)[:, :, :width]
        out[expert] = rows_of(q[expert]).float() * s.reshape(height, width)
    return out


class Codec(NamedTuple):
    """Hold the two functions of a format with scales: quantize from floats, dequantize to fp32."""

    quantize: Callable[..., tuple[Tensor, Tensor]]
    dequantize: Callable[..., Tensor]


_CODECS: dict[Format, Codec | None] = {
    BF16: None,
    E4M3_ROWS: Codec(quantize_rows, dequantize_rows),
    E4M3_QUADS: Codec(quantize_rows, dequantize_rows),
    E4M3_TOKENS: Codec(quantize_tokens, dequantize_tokens),
    E4M3_CHANNELS: Codec(quantize_channels, dequantize_channels),
    E4M3_BLOCKS: Codec(quantize_blockwise, dequantize_blockwise),
    MXFP4: Codec(quantize_mxfp4, dequantize_mxfp4),
    NVFP4: Codec(quantize_nvfp4, dequantize_nvfp4),
}


def codec(stored: Format) -> Codec | None:
    """Return the functions of a format, None for bf16, which has no scales. Raise ConfigError for an unknown format."""
    if stored not in _CODECS:
        raise ConfigError(
            "format", repr(stored.name), "one with formulas in megamoe.formats.quantization"
        )
    return _CODECS[stored]
