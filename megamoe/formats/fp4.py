"""Pack e2m1 numbers, two per byte, and arrange their scales: the code that MXFP4 and NVFP4 share.

The first of two numbers is in the lower nibble. The kernel reads scales block by block, 128 x 128 numbers each. A block
has a header, which each format fills, and then [2, 128, 64 / group] scales: 64 columns (one pipeline slot of bf16
rows), row, groups of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import by_plane
from megamoe.core.table import FP4_HEADER, SCALE_GROUP

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PACKED = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_SLOT, _SLOTS = 64, 2  # columns, of a block


def encode(v: Tensor) -> Tensor:
    """Encode v [N, K] fp32, in units of its scales -> codes [N, K] uint8: nearest, ties to even codes, at most 6."""
    r = v.abs()
    codes = torch.zeros(r.shape, dtype=torch.uint8, device=r.device)
    for code, (low, high) in enumerate(zip(MAGNITUDES, MAGNITUDES[1:], strict=False)):
        middle = (low + high) / 2
        codes += r > middle if code % 2 == 0 else r >= middle
    return codes | (v.signbit() & (codes != 0)).to(torch.uint8) << 3


def pack(codes: Tensor) -> Tensor:
    """[N, K] uint8 -> [N, K/2]."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """packed: [N, K/2] uint8 -> the numbers without their scales, [N, K] fp32."""
    values = torch.tensor(MAGNITUDES, dtype=torch.float32, device=packed.device)
    values = torch.cat((values, -values))
    return values[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()]


def arrange(plain: Tensor, planes: int, group: int, padding: int = 0) -> Tensor:
    """Bring scales from a checkpoint's order into the kernel's, without headers.

    plain: [L, P*I, K/group] or [L, P, I, K/group] uint8 -> [L, P*ceil(I/128), ceil(K/128), 128*128/group] uint8. Blocks
    restart at each plane. padding: what is beyond the last row or column.
    """
    plain = by_plane(plain, planes)
    num, planes, rows, groups = plain.shape
    of_slot, of_block = _SLOT // group, SCALE_GROUP // group
    n, k = -(-rows // SCALE_GROUP), -(-groups // of_block)
    edges = (0, k * of_block - groups, 0, n * SCALE_GROUP - rows)
    padded = torch.nn.functional.pad(plain, edges, value=padding)
    split = num, planes * n, SCALE_GROUP, k, _SLOTS, of_slot  # of rows that may lie in turn
    blocks = padded.reshape(split).permute(0, 1, 3, 4, 2, 5)
    return blocks.reshape(num, planes * n, k, SCALE_GROUP * of_block)


def plain(scales: Tensor, planes: int, rows: int, width: int, group: int) -> Tensor:
    """scales: with headers -> [L, P*I, K/group] uint8, as arrange() was given."""
    num, height, k, _ = scales.shape
    scales = scales[..., FP4_HEADER:]
    of_slot, of_block = _SLOT // group, SCALE_GROUP // group
    blocks = scales.reshape(num, height, k, _SLOTS, SCALE_GROUP, of_slot).permute(0, 1, 4, 2, 3, 5)
    padded = blocks.reshape(num, planes, height // planes * SCALE_GROUP, k * of_block)
    groups = width // group
    return padded[:, :, :rows, :groups].reshape(num, planes * rows, groups)


def read_checkpoint(
    name: str,
    packed: Tensor,
    scales: Tensor,
    group: int,
    dtypes: tuple[torch.dtype, ...],
    planes: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return (packed, scales) of one matrix as bytes, both by plane or with rows [P*I], views.

    packed: [L, P*I, K/2], or in blocks [L, P*I, K/group, group/2]. scales: [L, P*I, K/group], of one of `dtypes`. Or
    both with [L, P, I] in place of [L, P*I]. interleaved: gate and up rows alternate.
    Raises ArgumentError for other shapes and dtypes.
    """
    for what, tensor, known in ((name, packed, PACKED), (f"{name}_scale", scales, dtypes)):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(what, type(tensor).__name__, "a tensor")
        if tensor.dtype not in known:
            raise ArgumentError(f"{what}.dtype", tensor.dtype, " or ".join(map(str, known)))
    if type(planes) is not int or planes not in (1, 2):
        raise ArgumentError("planes", repr(planes), "1 or 2")
    packed, scales = packed.view(torch.uint8), scales.view(torch.uint8)
    block = group // 2
    if packed.shape == (*scales.shape, block):
        packed = packed.flatten(-2)
    rows = tuple(packed.shape[:-1])
    if (
        packed.shape != (*scales.shape[:-1], block * scales.shape[-1])
        or not (len(rows) == 2 and rows[1] % planes == 0 or len(rows) == 3 and rows[1] == planes)
        or (interleaved and len(rows) == 3)
    ):
        shape = f"[L, {planes}*I, K/{group}"
        expected = f"[L, {planes}*I, K/2] or {shape}, {block}] beside scales {shape}]"
        raise ArgumentError(f"{name}.shape", [list(packed.shape), list(scales.shape)], expected)
    if interleaved:
        packed, scales = (t.unflatten(1, (-1, planes)).transpose(1, 2) for t in (packed, scales))
    return packed, scales


def read_biases(
    biases: tuple[Tensor, Tensor] | None, planes: int, interleaved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return b13 [L, P*I], gate rows first, and b2 [L, H] in fp32. Raises ArgumentError for others."""
    if biases is None:
        return None, None
    if not isinstance(biases, (tuple, list)) or len(biases) != 2:
        raise ArgumentError("biases", type(biases).__name__, "a pair: of w13, of w2")
    for bias in biases:
        if not isinstance(bias, Tensor) or (interleaved and bias.dim() != 2):
            what = list(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
            raise ArgumentError("biases", what, f"[L, {planes}*I] and [L, H]")
        if not bias.is_floating_point():
            raise ArgumentError("biases", bias.dtype, "of any float type")
    if interleaved and biases[0].shape[1] % planes:
        raise ArgumentError("biases[0].shape", list(biases[0].shape), f"[L, {planes}*I]")
    b13, b2 = (b.float() for b in biases)
    if interleaved:
        b13 = b13.unflatten(1, (-1, planes)).transpose(1, 2).flatten(1)
    return b13, b2
