"""NVFP4 numbers, and matrices of them as checkpoints have them."""

from __future__ import annotations

import torch

from megamoe import Problem
from megamoe.formats.fp4 import MAGNITUDES

PROBLEM = Problem(160, 96, 4, 2, max_tokens=32, precision="bf16xnvfp4", bias=True)
NAN = (0x7F, 0xFF)


def e4m3(byte: int) -> float:
    """Return a number by its definition: sign, four bits of exponent, three of mantissa; subnormal numbers, NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte in NAN:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


SCALES = torch.tensor([e4m3(b) for b in range(256)], dtype=torch.float64)
E2M1 = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)


def checkpoint(num: int, rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return packed [L, N, K/2], scales [L, N, K/16] e4m3 of any bits but NaN, and [L] fp32."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (num, rows, width // 2), generator=g).to(torch.uint8)
    scales = torch.randint(255, (num, rows, width // 16), generator=g).to(torch.uint8)
    scales[scales == 0x7F] = 0x30
    outer = torch.rand(num, generator=g) / 1000 + 1e-4
    return packed, scales.view(torch.float8_e4m3fn), outer


def plainly(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers without the outer scale, by the words of the formats, [L, N, K] fp64."""
    low, high = (packed & 15).long(), (packed >> 4).long()
    numbers = E2M1[torch.stack((low, high), dim=-1).flatten(-2)]  # the lower nibble is the first
    steps = SCALES[scales.view(torch.uint8).long()]
    return (numbers.unflatten(-1, (-1, 16)) * steps[..., None]).flatten(-2)
