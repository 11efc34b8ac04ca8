"""Quantize and read NVFP4 weights: e2m1 numbers, two per byte, an e4m3 scale per 16 along K, an fp32 scale per matrix.

A number is e2m1 * e4m3 * fp32. The bytes are those of NVIDIA ModelOpt (`weight`, `weight_scale`, `weight_scale_2`) and
of compressed-tensors (`weight_packed`, `weight_scale`, and `weight_global_scale`, the inverse of the last). The header
of each block of scales holds the fp32 scale of its matrix, which may differ between gate and up. A tile reads the one
in the last block of its rows. See docs/numerics.md, "NVFP4".
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import by_plane, rows_of
from megamoe.core.table import FP4_HEADER, NVFP4, NVFP4_GROUP, SCALE_GROUP
from megamoe.formats import fp4
from megamoe.formats.quantized import by_expert

E4M3 = torch.float8_e4m3fn
E4M3_MAX, E2M1_MAX = 448.0, 6.0
NAN_SCALE = 0x7F  # and with the sign 0xFF
_OUTER = slice(4, 8)  # of a header
LEAST_OUTER = 2.0**-126  # its inverse is finite


def _encode(v: Tensor) -> tuple[Tensor, Tensor]:
    """v: [P, I, K] fp32 -> one expert as quantize_nvfp4() returns it.

    outer: so that the plane's largest finite number becomes 6 * 448. A group's scale is e4m3(amax / 6 / outer), and its
    numbers are e2m1(v / (scale * outer)), ties to even codes; where the scale is 0 they are 0. A group with NaN or Inf
    has the scale NaN.
    """
    groups = v.unflatten(-1, (-1, NVFP4_GROUP))
    amax = groups.abs().amax(-1)
    largest = torch.where(amax.isfinite(), amax, 0.0).flatten(1).amax(1)
    # Tensor over tensor: torch computes tensor / scalar on CUDA in another way.
    most = torch.full_like(largest, E2M1_MAX * E4M3_MAX)
    outer = torch.where(largest == 0, 1.0, (largest / most).clamp(min=LEAST_OUTER))
    unit = outer[:, None, None]
    scale = (amax / torch.full_like(amax, E2M1_MAX) / unit).clamp(max=E4M3_MAX).to(E4M3)
    step = scale.float() * unit
    codes = fp4.encode((groups / step[..., None]).flatten(-2).flatten(0, 1))
    codes *= (scale.float() != 0).repeat_interleave(NVFP4_GROUP, -1).flatten(0, 1)
    bytes_ = torch.where(amax.isfinite(), scale.view(torch.uint8), NAN_SCALE).flatten(0, 1)
    return fp4.pack(codes), arrange_scales(bytes_[None], outer[None], len(v))[0]


def quantize_nvfp4(
    w: Tensor, planes: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize weights.

    w: [L, P*I, K] or [L, P, I, K], of any strides -> (packed [L, P*I, K/2] uint8, scales as ExpertWeights has them).
    out: both, to write into. Raises ArgumentError where 32 does not divide K.
    """
    return by_expert(w, planes, out, NVFP4, _encode)


def dequantize_nvfp4(
    packed: Tensor, scales: Tensor, planes: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the numbers, [L, P*I, K]: e2m1 * e4m3 is exact; times the fp32 scale it is rounded, and to `dtype`."""
    packed = by_plane(packed, planes)
    num, planes, rows, width = packed.shape
    plain, outer = plain_scales(scales, planes, rows, 2 * width)
    steps = plain.view(E4M3).float()
    of_rows = outer.repeat_interleave(rows, 1)[..., None]
    out = torch.empty((num, planes * rows, 2 * width), dtype=dtype, device=packed.device)
    for expert in range(num):
        groups = fp4.unpack(rows_of(packed[expert])).unflatten(-1, (-1, NVFP4_GROUP))
        out[expert] = (groups * steps[expert][..., None]).flatten(-2) * of_rows[expert]
    return out


def arrange_scales(plain: Tensor, outer: Tensor, planes: int = 1) -> Tensor:
    """Bring scales from a checkpoint's order into the kernel's.

    plain: [L, P*I, K/16] or [L, P, I, K/16] uint8; outer: [L, P] fp32 -> [L, P*ceil(I/128), ceil(K/128), 1040] uint8:
    of a block 4 zeros, the fp32 scale of its matrix, 8 zeros, the scales as fp4.arrange has them.
    """
    blocks = fp4.arrange(plain, planes, NVFP4_GROUP)
    num, height, width, _ = blocks.shape
    # A clone has no odd strides, not even in a dimension of one element, where contiguous() leaves them.
    outer = outer.float().clone(memory_format=torch.contiguous_format)
    of_planes = outer.view(torch.uint8).view(num, planes, 4)
    header = blocks.new_zeros((num, height, width, FP4_HEADER))
    header[..., _OUTER] = of_planes.repeat_interleave(height // planes, 1)[:, :, None]
    return torch.cat((header, blocks), dim=-1)


def plain_scales(scales: Tensor, planes: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Invert arrange_scales: -> [L, P*I, K/16] uint8, and the fp32 of each plane, [L, P]."""
    of_blocks = -(-rows // SCALE_GROUP)
    found = scales[:, ::of_blocks, -1, _OUTER]  # as a tile reads it
    outer = found.contiguous().view(torch.float32).reshape(len(scales), planes)
    return fp4.plain(scales, planes, rows, width, NVFP4_GROUP), outer


def from_checkpoint(
    name: str,
    packed: Tensor,
    scales: Tensor,
    outer: Tensor,
    *,
    inverse: bool,
    planes: int = 1,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (packed, arranged scales) of one matrix as checkpoints have it; `packed` is a view, nothing is copied.

    As fp4.read_checkpoint, scales e4m3 or their bytes. outer: [L] or [L, P], fp32; inverse: divided by, not multiplied.
    Raises ArgumentError for other shapes and dtypes, NaN scales, and an outer scale that is negative or not finite.
    """
    given = name, packed, scales, NVFP4_GROUP, (E4M3, torch.uint8)
    packed, scales = fp4.read_checkpoint(*given, planes=planes, interleaved=interleaved)
    nan = (scales & NAN_SCALE) == NAN_SCALE
    if bool(nan.any()):
        where = nan.nonzero()[0].tolist()
        raise ArgumentError(f"{name}_scale", f"NaN at {where}", "e4m3 numbers")
    of_planes = _outer(f"outer of {name}", outer, len(packed), planes, inverse)
    return packed, arrange_scales(scales, of_planes, planes)


def _outer(name: str, outer: Tensor, num: int, planes: int, inverse: bool) -> Tensor:
    """Return the scales that numbers are multiplied by, [L, P] fp32."""
    if not isinstance(outer, Tensor):
        raise ArgumentError(name, type(outer).__name__, "a tensor")
    if outer.dtype != torch.float32:
        raise ArgumentError(f"{name}.dtype", outer.dtype, "torch.float32")
    shapes = [(num,), (num, 1), (num, planes)]
    if tuple(outer.shape) not in shapes:
        expected = " or ".join(str(list(s)) for s in dict.fromkeys(shapes))
        raise ArgumentError(f"{name}.shape", list(outer.shape), expected)
    made = 1.0 / outer if inverse else outer
    wrong = ~((outer >= 0) & outer.isfinite() & made.isfinite())
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        found = f"{float(outer[tuple(where)])} at {where}"
        raise ArgumentError(
            name, found, "0 or more, and finite" + ", and its inverse finite" * inverse
        )
    made = made.reshape(num, *outer.shape[1:] or (1,)).expand(num, planes)
    return made.clone(memory_format=torch.contiguous_format)  # of a rank without experts, too
