"""Describe the operands of a product: bf16, or e4m3 with scales that are given or computed here.

To add a format, change this file, its dtype and the shapes of its scales in checks.py, and its kernels in
jit/grouped.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megamoe.core.table import E4M3_BLOCKS
from megamoe.formats.quantization import (
    GROUP,
    blocks_of_rows,
    dequantize_blockwise,
    dequantize_channels,
    dequantize_rows,
    dequantize_tokens,
    num_groups,
    quantize_rows,
    rows_of_blocks,
)
from megamoe.launch.cache import quantize_weights
from megamoe.launch.passes import Pair, kernels_for
from megamoe.ops.groups import Groups
from megamoe.ops.scales import by_block, by_row, num_places, places


class Operands(NamedTuple):
    """x: [M, K]; its scales by block, of groups of 128 columns or one a row.

    w: [E, K, P*N]; its scales by 128 x 128 of a plane [E, P * ceil(N/128), ceil(K/128)] or by channel [E, P * N, 1].
    planes: P, 2 if gate and up are halves. Without scales both are bf16, with them e4m3.
    """

    x: Tensor
    w: Tensor
    x_scale: Tensor | None = None
    w_scale: Tensor | None = None
    planes: int = 1

    @property
    def suffix(self) -> str:
        """Return what the names of these operands' kernels have, see jit/grouped.py."""
        if self.x_scale is None or self.w_scale is None:
            return "" if by_k(self.w) else "-columns"
        if not by_channel(self.w, self.w_scale):
            return "-e4m3"
        return "-e4m3-tokens" if self.x_scale.shape[0] == 1 else "-e4m3-channels"


def by_channel(w: Tensor, scale: Tensor) -> bool:
    """Say whether each column of w [E, K, N] has its own scale; N is a multiple of 16, so blocks are fewer."""
    return scale.shape[1] == w.shape[2]


def readable(w: Tensor, columns: bool = True) -> Tensor:
    """w: [E, K, N] -> itself, or a copy if it is contiguous neither in K nor, where `columns` says so, in N."""
    return w if w.stride(1) == 1 or (columns and not by_k(w)) else w.mT.contiguous().mT


def by_k(w: Tensor) -> bool:
    """Say whether w [E, K, N] is contiguous in K; else it is in N."""
    return w.stride(2) != 1


def quantized(given: Operands, groups: Groups) -> Operands:
    """Quantize what has no scales yet. w: contiguous in K, or in N with one plane; then in K."""
    x, w, x_scale, w_scale, planes = given
    if x_scale is None:
        x, x_scale = rows_by_group(x, groups, w.shape[0])
    if w_scale is None:
        w, w_scale = _matrices(w, planes)
    return Operands(x, w, x_scale, w_scale, planes)


def dequantized(given: Operands, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return x and w as they are in bf16, and of e4m3 their values: in fp32, on GPUs in bf16."""
    x, w, x_scale, w_scale, planes = given
    if x_scale is None or w_scale is None:
        return x, w
    of_rows = by_row(x_scale, groups, x, w.shape[0])
    rows = (dequantize_tokens if of_rows.shape[1] == 1 else dequantize_rows)(x, of_rows)
    matrices = dequantize_channels if by_channel(w, w_scale) else dequantize_blockwise
    wide = matrices(w.mT, w_scale, planes=planes).mT
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    return rows.to(dtype), wide.to(dtype)


def rows_by_group(x: Tensor, groups: Groups | None = None, num_experts: int = 1) -> Pair:
    """x: [M, K] -> e4m3, and scales by block, without groups [M, ceil(K/128)]. One kernel on Hopper, of bf16."""
    x, plain = x.contiguous(), x.dtype != torch.bfloat16 or torch.compiler.is_compiling()
    kernels = None if plain else kernels_for(x)
    if kernels is None:
        q, scale = quantize_rows(x)
        return q, scale if groups is None else by_block(scale, groups, num_experts)
    ends = None if groups is None else (groups.offs, num_experts, groups.alignment)
    return kernels.quantize_rows(x, ends, num_places(len(x), num_experts))


def transposed_rows(x: Tensor, groups: Groups, num_experts: int, by_column: bool = False) -> Pair:
    """x: [M, N] -> e4m3 of blocks of 128 rows [B, N', 128], and their scales, for a weight gradient.

    B = P/128, N' = N rounded up to 128. by_column: of its first operand, [B + 1, N']; else [N'/128, B + 1]. The last
    block has scales alone, zeros, as have blocks of no expert.
    """
    at, inside = places(groups, x, num_experts)
    rows = x.new_zeros(num_places(len(x), num_experts), num_groups(x.shape[1]) * GROUP)
    rows[at, : x.shape[1]] = x.where(inside[:, None], 0)
    q, scale = blocks_of_rows(rows, by_column)
    used = torch.zeros(len(q) + 1, 1, dtype=torch.bool, device=x.device)
    used[at // GROUP] |= inside[:, None]
    scale = pad(scale, (0, 0, 0, 1)).where(used, 0)
    return q, scale if by_column else scale[:, ::GROUP].t().contiguous()


def rows_of_transposed(a: Pair, b: Pair, groups: Groups) -> tuple[Tensor, Tensor, Groups]:
    """Return both operands of a weight gradient in fp32 [P, N'], and whose rows they are."""
    of_b = b[1].t()[:-1].repeat_interleave(GROUP, 1)
    rows = rows_of_blocks(a[0], a[1][:-1]), rows_of_blocks(b[0], of_b)
    begins, ends = groups.bounds(rows[0])
    return *rows, Groups((GROUP * -(-(ends - begins) // GROUP)).cumsum(0).int())


def _matrices(w: Tensor, planes: int) -> Pair:
    """w: [E, K, P*N] -> e4m3, contiguous in K, and [E, P * ceil(N/128), ceil(K/128)]."""
    if by_k(w) or planes > 1:
        w = readable(w, columns=False).mT
        (q, scale), _ = quantize_weights(w, planes, E4M3_BLOCKS, None, False, None)
        return q.mT, scale
    # Blocks of 128 x 128 are those of the transpose, too.
    _, transposed = quantize_weights(w, 1, E4M3_BLOCKS, None, True, None)
    assert transposed is not None
    return transposed[0][:, 0].mT, transposed[1]
