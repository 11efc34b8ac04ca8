"""Quantize and read MXFP4 weights: e2m1 numbers, two per byte, with a power of two (E8M0) per 32 numbers along K.

The format is OCP Microscaling Formats (MX) 1.0, with the bytes of GPT-OSS and DeepSeek-V4 checkpoints: a scale is its
exponent plus 127, and 255 is NaN. See docs/numerics.md, "MXFP4".
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import by_plane, rows_of
from megamoe.core.table import FP4_HEADER, MXFP4, MXFP4_GROUP
from megamoe.formats import fp4
from megamoe.formats.quantized import by_expert

BIAS = 127  # of a scale's exponent
NAN_SCALE = 255
LARGEST_EXPONENT = 2  # of e2m1: 6 = 1.5 * 2^2
_SCALES = (torch.uint8, torch.float8_e8m0fnu)
# How many of e4m3's exponents a block can use when its largest number becomes 384: a `plain` block needs no rounding.
_PLAIN_BINADES = 11


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, exactly; int32 in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


def _encode(v: Tensor) -> tuple[Tensor, Tensor]:
    """v: [P, I, K] fp32 -> one expert as quantize_mxfp4() returns it.

    The scale is 2^(floor(log2 amax) - 2); beyond 6 times that a number becomes 6 times that, ties go to even codes. A
    group of zeros has the scale 0 (2^-127), which raises no block's largest; one with NaN or Inf the scale NaN.
    """
    groups = rows_of(v).unflatten(-1, (-1, MXFP4_GROUP))
    amax = groups.abs().amax(-1)
    exponent = (torch.frexp(amax).exponent - 1 - LARGEST_EXPONENT).clamp(-126, 125)
    codes = fp4.encode((groups * _power(-exponent)[..., None]).flatten(-2))
    scales = torch.where(amax == 0, 0, exponent + BIAS)
    scales = torch.where(amax.isfinite(), scales, NAN_SCALE)
    return fp4.pack(codes), arrange_scales(scales.to(torch.uint8)[None], len(v))[0]


def quantize_mxfp4(
    w: Tensor, planes: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize weights.

    w: [L, P*I, K] or [L, P, I, K], of any strides -> (packed [L, P*I, K/2] uint8, scales as ExpertWeights has them).
    out: both, to write into. Raises ArgumentError where 32 does not divide K.
    """
    return by_expert(w, planes, out, MXFP4, _encode)


def dequantize_mxfp4(
    packed: Tensor, scales: Tensor, planes: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the numbers, [L, P*I, K]: exact in fp32 and, for scales from 2^-125 on, in bf16."""
    packed = by_plane(packed, planes)
    num, planes, rows, width = packed.shape
    exponents = plain_scales(scales, planes, rows, 2 * width).int()
    power = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is subnormal
    power = torch.where(exponents == NAN_SCALE, 0x7FC00000, power).view(torch.float32)
    out = torch.empty((num, planes * rows, 2 * width), dtype=dtype, device=packed.device)
    for expert in range(num):
        groups = fp4.unpack(rows_of(packed[expert])).unflatten(-1, (-1, MXFP4_GROUP))
        out[expert] = (groups * power[expert][..., None]).flatten(-2)
    return out


def arrange_scales(plain: Tensor, planes: int = 1) -> Tensor:
    """Bring scales from a checkpoint's order into the kernel's.

    plain: [L, P*I, K/32] or [L, P, I, K/32] uint8 -> [L, P*ceil(I/128), ceil(K/128), 528] uint8. Of the 528 of a block
    the first is its largest scale, the second 1 where all others are at most eleven binades below, and 14 are not used;
    512 are the scales as fp4.arrange has them.
    """
    scales = fp4.arrange(plain, planes, MXFP4_GROUP)
    least = fp4.arrange(plain, planes, MXFP4_GROUP, padding=NAN_SCALE).amin(-1).int()
    largest = scales.amax(-1)
    header = scales.new_zeros((*scales.shape[:3], FP4_HEADER))
    header[..., 0] = largest
    header[..., 1] = largest.int() - least <= _PLAIN_BINADES
    return torch.cat((header, scales), dim=-1)


def plain_scales(scales: Tensor, planes: int, rows: int, width: int) -> Tensor:
    """Invert arrange_scales: -> [L, P*I, K/32] uint8."""
    return fp4.plain(scales, planes, rows, width, MXFP4_GROUP)


def from_checkpoint(
    name: str, packed: Tensor, scales: Tensor, planes: int = 1, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (packed, arranged scales) of one matrix as checkpoints have it; `packed` is a view, nothing is copied.

    As fp4.read_checkpoint. Raises ArgumentError for other shapes and dtypes, and for scales whose numbers bf16 does not
    have.
    """
    given = name, packed, scales, MXFP4_GROUP, _SCALES
    packed, scales = fp4.read_checkpoint(*given, planes=planes, interleaved=interleaved)
    most = 2 * BIAS - LARGEST_EXPONENT
    if scales.numel() > 0 and int(scales.max()) > most:
        raise ArgumentError(f"{name}_scale", int(scales.max()), f"at most {most}")
    return packed, arrange_scales(scales, planes)
