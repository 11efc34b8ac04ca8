"""Quantize to e4m3 with an fp32 scale per 1x128, per row or per 128x128 block, and read weights of other formats."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Problem

GROUP = 128


def quantize_group(v: Tensor) -> tuple[Tensor, Tensor]:
    """v: [M, N] of any float type -> (q [M, N] e4m3, scale [M] fp32), one scale per row."""
    v = v.float()
    amax = v.abs().amax(dim=1).clamp(min=1e-10)
    limit = torch.full_like(amax, 448.0)  # torch rounds divisions by a scalar differently
    q = (v * (limit / amax)[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return q, amax / limit


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [M, K] -> (q [M, K] e4m3, scale [M, S] fp32), group by group."""
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[0], -(-x.shape[1] // GROUP), dtype=torch.float32, device=x.device)
    for s in range(scale.shape[1]):
        columns = slice(s * GROUP, (s + 1) * GROUP)
        q[:, columns], scale[:, s] = quantize_group(x[:, columns])
    return q, scale


def dequantize_rows(q: Tensor, scale: Tensor) -> Tensor:
    """Invert quantize_rows: -> [M, K] fp32."""
    group = torch.arange(q.shape[1], device=q.device) // GROUP
    return q.float() * scale[:, group]


def power_of_two(amax: Tensor) -> Tensor:
    """amax: fp32 -> the least powers of two that are not below amax / 448, of amax >= 1e-10."""
    mantissa, exponent = torch.frexp(amax.clamp(min=1e-10))  # 448 is 0.875 * 2^9
    return torch.ldexp(torch.ones_like(mantissa), exponent - 9 + (mantissa > 0.875).int())


def round_blocks(v: Tensor, block: Tensor, amax: Tensor, width: int) -> Tensor:
    """Round to e4m3, scaled by a power of two for each block of rows and `width` columns.

    v: [M, N] fp32 or fp64. block: [M] int64, ascending. amax: [M, ceil(N/width)], at least the largest magnitude of the
    row's columns. Returns [M, N] of v's type.
    """
    blocks, which = torch.unique_consecutive(block, return_inverse=True)
    largest = torch.zeros(blocks.numel(), amax.shape[1], device=v.device)
    index = which[:, None].expand(amax.shape)
    largest = largest.scatter_reduce(0, index, amax.float(), "amax")
    scale = power_of_two(largest)[which]
    scale = scale.repeat_interleave(width, dim=1)[:, : v.shape[1]]
    q = (v.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (q.float() * scale).to(v.dtype)


def largest_of_groups(v: Tensor) -> Tensor:
    """v: [M, N] -> [M, ceil(N/128)], the largest magnitudes."""
    groups = -(-v.shape[1] // GROUP)
    padded = torch.nn.functional.pad(v, (0, groups * GROUP - v.shape[1]))
    return padded.abs().unflatten(1, (groups, GROUP)).amax(2)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [M, K] -> (q [M, K] e4m3, scale [M, 1] fp32), row by row."""
    q, scale = quantize_group(x)
    return q, scale[:, None]


def dequantize_tokens(q: Tensor, scale: Tensor, planes: int = 1) -> Tensor:
    """q: [M, K], or [P*I, K] of one expert, scale: [M, 1] -> [M, K] fp32; planes are rows like others."""
    return q.float() * scale


def quantize_blocks(w: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """w: [L, P*I, K] -> (q e4m3, scale [L, P*ceil(I/128), S]); blocks restart at a plane."""
    num, height, width = w.shape
    rows = height // planes
    tops = [p * rows + r for p in range(planes) for r in range(0, rows, GROUP)]
    q = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    scale = torch.empty(num, len(tops), -(-width // GROUP), dtype=torch.float32, device=w.device)
    for e, b, s in itertools.product(*map(range, scale.shape)):
        end = min(tops[b] + GROUP, (tops[b] // rows + 1) * rows)
        block = e, slice(tops[b], end), slice(s * GROUP, (s + 1) * GROUP)
        found, scale[e, b, s] = quantize_group(w[block].reshape(1, -1))
        q[block] = found.view(q[block].shape)
    return q, scale


def quantize_experts(problem: Problem, experts: Any) -> Any:
    """Return FP8 ExpertWeights made from the masters; w13 becomes [L, P*I, H]."""
    if problem.formats.w.name != "e4m3 128x128":
        raise ValueError(f"precision {problem.precision!r} does not train")
    w13 = experts.w13.flatten(1, -2)
    q13, s13 = quantize_blocks(w13, problem.activation.planes)
    q2, s2 = quantize_blocks(experts.w2, 1)
    return replace(experts, w13=q13, w13_scale=s13, w2=q2, w2_scale=s2)


def dequantize_block(q: Tensor, scale: Tensor, planes: int) -> Tensor:
    """q: [P*I, K] of one expert, scale: [P*ceil(I/128), S] -> fp32; blocks restart at a plane."""
    rows = q.shape[0] // planes
    blocks = -(-rows // GROUP)
    n = torch.arange(q.shape[0], device=q.device)
    n = n // rows * blocks + n % rows // GROUP
    k = torch.arange(q.shape[1], device=q.device) // GROUP
    return q.float() * scale[n][:, k]


HEADER = 16  # bytes before a block's scales
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _fp4(packed: Tensor, planes: int, group: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """packed: [P*I, K/2] of one expert -> its numbers without scales, and where each one's scale of K/group stands."""
    height, width = packed.shape[0], 2 * packed.shape[1]
    rows, of_slot = height // planes, 64 // group
    n = torch.arange(height, device=packed.device)[:, None]
    k = torch.arange(width, device=packed.device)[None, :]
    code = packed[n, k // 2] >> (4 * (k % 2)).to(torch.uint8) & 15
    values = [*E2M1, *(-v for v in E2M1)]
    table = torch.tensor(values, dtype=torch.float32, device=packed.device)
    block = n // rows * -(-rows // GROUP) + n % rows // GROUP
    within = k // 64 % 2 * GROUP * of_slot + n % rows % GROUP * of_slot + k // group % of_slot
    return table[code.long()], (block, k // GROUP, HEADER + within)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, planes: int) -> Tensor:
    """packed: [P*I, K/2] of one expert, scale: [P*ceil(I/128), ceil(K/128), 528] -> fp32, number by number."""
    numbers, places = _fp4(packed, planes, 32)
    return numbers * scale[places].view(torch.float8_e8m0fnu).float()


def dequantize_nvfp4(packed: Tensor, scale: Tensor, planes: int) -> Tensor:
    """packed: [P*I, K/2] of one expert, scale: [P*ceil(I/128), ceil(K/128), 1040] -> fp32, number by number."""
    numbers, places = _fp4(packed, planes, 16)
    outer = scale[:, -1, 4:8].contiguous().view(torch.float32)[places[0], 0]
    return numbers * scale[places].view(torch.float8_e4m3fn).float() * outer


# Name of a format -> how it is made and read; None for bf16 itself.
_E4M3_ROWS = quantize_rows, dequantize_rows
ROWS: dict[str, Any] = {
    "bf16": None,
    "e4m3 1x128": _E4M3_ROWS,
    "e4m3 by token": (quantize_tokens, dequantize_tokens),
    "e4m3 1x128 by quads": _E4M3_ROWS,  # the kernel's own order: no number is another
}
BLOCKS: dict[str, Any] = {
    "bf16": None,
    "e4m3 128x128": dequantize_block,
    "e4m3 by channel": dequantize_tokens,
    "mxfp4": dequantize_mxfp4,
    "nvfp4": dequantize_nvfp4,
}


def formulas(table: dict[str, Any], name: str) -> Any:
    """Return the formulas of a format; refuse one that the oracle does not know."""
    if name not in table:
        raise ValueError(
            f"format is {name!r}, expected one that the oracle knows: {', '.join(table)}"
        )
    return table[name]
