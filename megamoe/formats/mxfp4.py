"""MXFP4 weights: e2m1 numbers, two a byte, and a power of two (E8M0) for each 32 of them along K.

The format is the OCP Microscaling Formats (MX) Specification 1.0's, and the bytes are those of GPT-OSS and DeepSeek-V4
checkpoints: of two numbers the lower nibble is the first, a scale is its exponent plus 127, 255 is NaN. Only the order
of the scales is the kernel's: block by block of 128 x 128 numbers, so that each pipeline slot reads its own at once.
docs/numerics.md, "MXFP4".
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import ArgumentError
from megamoe.formats.planes import by_plane, rows_of
from megamoe.formats.table import MXFP4, MXFP4_GROUP, MXFP4_HEADER, SCALE_GROUP

BIAS = 127  # of a scale's exponent
NAN_SCALE = 255
LARGEST_EXPONENT = 2  # of e2m1: 6 = 1.5 * 2^2
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PACKED = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_SCALES = (torch.uint8, torch.float8_e8m0fnu)
# Of a block: 64 columns (a pipeline slot beside bf16), row, 32 columns.
_HALVES, _ROWS, _GROUPS = 2, SCALE_GROUP, 2
# Of e4m3's exponents a block can have, with the largest number as 384: what is `plain` needs no rounding.
_PLAIN_BINADES, _LEAST_LARGEST = 11, 7


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, exactly; int32 in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


def _encode(v: Tensor) -> tuple[Tensor, Tensor]:
    """v: [N, K] fp32 -> (codes [N, K] uint8, scales [N, K/32] uint8).

    The scale is 2^(floor(log2 amax) - 2); beyond 6 times that a number becomes 6 times that, ties go to even codes. A
    group of zeros has the scale 0 (2^-127), which raises no block's largest; one with NaN or Inf the scale NaN.
    """
    groups = v.unflatten(-1, (-1, MXFP4_GROUP))
    amax = groups.abs().amax(-1)
    exponent = (torch.frexp(amax).exponent - 1 - LARGEST_EXPONENT).clamp(-126, 125)
    r = groups.abs() * _power(-exponent)[..., None]
    codes = torch.zeros(r.shape, dtype=torch.uint8, device=r.device)
    for code, (low, high) in enumerate(zip(MAGNITUDES, MAGNITUDES[1:], strict=False)):
        middle = (low + high) / 2
        codes += r > middle if code % 2 == 0 else r >= middle
    codes |= (groups.signbit() & (codes != 0)).to(torch.uint8) << 3
    scales = torch.where(amax == 0, 0, exponent + BIAS)
    scales = torch.where(amax.isfinite(), scales, NAN_SCALE)
    return codes.flatten(-2), scales.to(torch.uint8)


def quantize_mxfp4(
    w: Tensor, planes: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize weights.

    w: [L, P*I, K] or [L, P, I, K], of any strides -> (packed [L, P*I, K/2] uint8, scales as ExpertWeights has them).
    out: both, to write into. Raises ArgumentError where 32 does not divide K.
    """
    w = by_plane(w, planes)
    num, planes, rows, width = w.shape
    if width % MXFP4_GROUP:
        raise ArgumentError("w.shape[-1]", width, f"a multiple of {MXFP4_GROUP}")
    if out is None:
        shape, (blocks, *of_block) = (
            (num, planes * rows, width // 2),
            MXFP4.scale_shape(rows, width),
        )
        scale = torch.empty((num, planes * blocks, *of_block), dtype=torch.uint8, device=w.device)
        out = torch.empty(shape, dtype=torch.uint8, device=w.device), scale
    for expert in range(num):  # one by one: fp32 copies of all experts would be large
        codes, scales = _encode(rows_of(w[expert].detach()).float())
        out[0][expert] = codes[:, 0::2] | codes[:, 1::2] << 4
        out[1][expert] = arrange_scales(scales[None], planes)[0]
    return out


def dequantize_mxfp4(
    packed: Tensor, scales: Tensor, planes: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the numbers, [L, P*I, K]: exact in fp32 and, for scales from 2^-125 on, in bf16."""
    packed = by_plane(packed, planes)
    num, planes, rows, width = packed.shape
    values = torch.tensor(MAGNITUDES, device=packed.device)
    values = torch.cat((values, -values))
    plain = plain_scales(scales, planes, rows, 2 * width)
    exponents = plain.int()
    power = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is subnormal
    power = torch.where(exponents == NAN_SCALE, 0x7FC00000, power).view(torch.float32)
    out = torch.empty((num, planes * rows, 2 * width), dtype=dtype, device=packed.device)
    for expert in range(num):
        bytes_ = rows_of(packed[expert])
        codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)
        groups = values[codes.int()].unflatten(-1, (-1, MXFP4_GROUP))
        out[expert] = (groups * power[expert][..., None]).flatten(-2)
    return out


def arrange_scales(plain: Tensor, planes: int = 1) -> Tensor:
    """Bring scales from a checkpoint's order into the kernel's.

    plain: [L, P*I, K/32] or [L, P, I, K/32] uint8 -> [L, P*ceil(I/128), ceil(K/128), 528] uint8. Of the 528 of a block
    the first is its largest scale, the second 1 where all others are at most eleven binades below, and 14 are not used;
    512 are the scales, [2, 128, 2]: 64 columns, row, 32 columns. Blocks restart at each plane; what is beyond the last
    row or column is 0.
    """
    plain = by_plane(plain, planes)
    num, planes, rows, groups = plain.shape
    of_block = _HALVES * _GROUPS
    n, k = -(-rows // _ROWS), -(-groups // of_block)

    def blocks(padding: int) -> Tensor:
        edges = (0, k * of_block - groups, 0, n * _ROWS - rows)
        padded = torch.nn.functional.pad(plain, edges, value=padding)
        by_block = padded.view(num, planes * n, _ROWS, k, _HALVES, _GROUPS).permute(
            0, 1, 3, 4, 2, 5
        )
        return by_block.flatten(-3)

    scales = blocks(0)
    arranged = scales.new_zeros((*scales.shape[:3], MXFP4.block_scales))
    largest = scales.amax(-1)
    arranged[..., 0] = largest
    below = largest.int().clamp_min(_LEAST_LARGEST) - blocks(NAN_SCALE).amin(-1).int()
    arranged[..., 1] = below <= _PLAIN_BINADES
    arranged[..., MXFP4_HEADER:] = scales
    return arranged


def plain_scales(scales: Tensor, planes: int, rows: int, width: int) -> Tensor:
    """Invert arrange_scales: -> [L, P*I, K/32] uint8."""
    num, height, k, _ = scales.shape
    blocks = (
        scales[..., MXFP4_HEADER:]
        .unflatten(-1, (_HALVES, _ROWS, _GROUPS))
        .permute(0, 1, 4, 2, 3, 5)
    )
    padded = blocks.reshape(num, planes, height // planes * _ROWS, k * _HALVES * _GROUPS)
    groups = width // MXFP4_GROUP
    return padded[:, :, :rows, :groups].reshape(num, planes * rows, groups)


def from_checkpoint(
    name: str, packed: Tensor, scales: Tensor, planes: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return (packed, arranged scales) of one matrix as checkpoints have it; `packed` is a view, nothing is copied.

    packed: [L, P*I, K/2], or in blocks [L, P*I, K/32, 16], of bytes. scales: [L, P*I, K/32]. Or both with [L, P, I] in
    place of [L, P*I]. interleaved: gate and up rows alternate.
    Raises ArgumentError for other shapes and dtypes, and for scales whose numbers bf16 does not have.
    """
    for what, tensor, dtypes in ((name, packed, _PACKED), (f"{name}_scale", scales, _SCALES)):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(what, type(tensor).__name__, "a tensor")
        if tensor.dtype not in dtypes:
            raise ArgumentError(f"{what}.dtype", tensor.dtype, " or ".join(map(str, dtypes)))
    if planes not in (1, 2):
        raise ArgumentError("planes", planes, "1 or 2")
    packed, scales = packed.view(torch.uint8), scales.view(torch.uint8)
    block = MXFP4_GROUP // 2
    if packed.shape == (*scales.shape, block):
        packed = packed.flatten(-2)
    rows = tuple(packed.shape[:-1])
    if (
        packed.shape != (*scales.shape[:-1], block * scales.shape[-1])
        or not (len(rows) == 2 and rows[1] % planes == 0 or len(rows) == 3 and rows[1] == planes)
        or (interleaved and len(rows) == 3)
    ):
        expected = f"[L, {planes}*I, K/2] or [L, {planes}*I, K/32, {block}] beside scales [L, {planes}*I, K/32]"
        raise ArgumentError(f"{name}.shape", [list(packed.shape), list(scales.shape)], expected)
    if scales.numel() > 0 and int(scales.max()) > 2 * BIAS - LARGEST_EXPONENT:
        raise ArgumentError(
            f"{name}_scale", int(scales.max()), f"at most {2 * BIAS - LARGEST_EXPONENT}"
        )
    if interleaved:
        packed, scales = (t.unflatten(1, (-1, planes)).transpose(1, 2) for t in (packed, scales))
    return packed, arrange_scales(scales, planes)
