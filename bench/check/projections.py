"""Every expert and every row of a backward pass, cheaply: products with one vector, from what the kernel left behind.

The oracle computes samples in full. What it leaves out is held against the launch's own rows: for a vector v of signs,
dW v = sum_r a_r (b_r . v) and dx_r . v = dgu_r . (W13 v), so that a wrong tile is seen wherever it lies.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.check.oracle import Drawn
from megamoe.backends.reference.quant import dequantize_block, dequantize_rows, quantize_rows
from megamoe.core.full_fp32 import full_fp32
from megamoe.testing import compare
from megamoe.testing.gradients import GradientChecker

BLOCK = 128  # rows of a tile of dW
# Of a block's norm, or a row's. Rounding to bf16 gives 1.7e-3, five deviations of it among many rows 8e-3; few columns
# do not average. A wrong 128 x 256 tile of a DeepSeek-V3 expert is 1.9e-1 of its block.
BLOCK_LIMIT, ROW_LIMIT = 1e-2, 2e-2

Gradients = dict[str, Any]  # tensors; None where nobody needs one


def check_everywhere(
    checker: GradientChecker, d: Drawn, found: Gradients, stages: dict[str, Tensor], saved: Tensor
) -> None:
    """Check all gradients of weights, all dx_rows and all hs of this rank. Not collective.

    found: gradients by name. stages: as backward_stages() has them. saved: gate_up [M, P*I] by pool row.
    """
    worst: dict[str, float] = {}
    with full_fp32(d.me.device):
        for expert, pool in rows_of_experts(d):
            left = {name: t[pool].float() for name, t in stages.items() if name != "partials"}
            errors = of_expert(d, found, left, expert)
            if checker.in_e4m3:  # dx_rows are made of dgu by row, which is another rounding
                del errors["dx_rows"]
            s, gu = left["row_weight"][:, None], saved[pool].float()
            hs = (s * d.problem.activation(gu)).bfloat16()
            got = stages["hs"][pool]
            apart = compare(got, hs, checker.element("hs", got, hs))
            checker.require(apart.differing == 0, f"hs of expert {expert}: {apart}")
            for name, error in errors.items():
                worst[name] = max(worst.get(name, 0.0), error)
                limit = ROW_LIMIT if name == "dx_rows" else BLOCK_LIMIT
                what = f"{name} of local expert {expert}, by products with signs: {error:.2e} of its norm"
                checker.require(error <= limit, f"{what}, limit {limit:g}")  # NaN is not
    checker.errors |= {f"{name}_all": error for name, error in worst.items()}


def rows_of_experts(d: Drawn) -> Iterator[tuple[int, Tensor]]:
    """Yield each local expert that has rows, with their pool rows."""
    rows = d.rows[d.me.rank]
    counts = rows.counts.sum(0).tolist()
    for expert, pool in enumerate(rows.pool_row.split(counts)):
        if pool.numel():
            yield expert, pool


def of_expert(d: Drawn, found: Gradients, left: dict[str, Tensor], e: int) -> dict[str, float]:
    """Return the largest error of a block (or row) of each gradient of an expert, as a part of its norm."""
    p = d.problem
    over_h, over_i = (signs(n, d.me.device) for n in (p.hidden, p.intermediate))
    one = replace(d.weights, **{n: t[e : e + 1] for n, t in d.weights.named().items()})
    one = one.dense(p, torch.bfloat16) if p.formats.packed else one
    w13, dx_rows, dgu = one.w13.reshape(-1, p.hidden).float(), left["dx_rows"], left["dgu"]
    multiplied = dgu
    if p.formats.transposes:
        assert d.weights.w13_scale is not None
        w13 = dequantize_block(d.weights.w13[e], d.weights.w13_scale[e], p.activation.planes)
        planes = [quantize_rows(plane) for plane in dgu.chunk(p.activation.planes, dim=1)]
        multiplied = torch.cat([dequantize_rows(*plane) for plane in planes], dim=1)
    apart = dx_rows @ over_h - multiplied @ (w13 @ over_h)
    errors = {"dx_rows": largest(apart.abs(), dx_rows.norm(dim=1))}
    if not p.formats.packed:
        dw13, dw2 = found["dw13"][e].reshape(-1, p.hidden).float(), found["dw2"][e].float()
        errors["dw13"] = by_block(dw13 @ over_h, dgu.T @ (left["x_rows"] @ over_h), dw13)
        errors["dw2"] = by_block(dw2 @ over_i, left["dy_rows"].T @ (left["hs"] @ over_i), dw2)
    if p.bias:
        db2 = left["dy_rows"].T @ left["row_weight"]
        for name, want in (("db13", dgu.sum(0)), ("db2", db2)):
            got = found[name][e].flatten().float()
            errors[name] = largest((got - want).norm()[None], want.norm()[None])
    return errors


def signs(length: int, device: torch.device) -> Tensor:
    """Return [length] of 1 and -1, always the same."""
    generator = torch.Generator().manual_seed(length)
    return (torch.randint(0, 2, (length,), generator=generator) * 2 - 1).float().to(device)


def by_block(got: Tensor, want: Tensor, matrix: Tensor) -> float:
    """got, want: [N] products of matrix [N, K]: -> the largest difference of a block of rows, of the block's norm."""
    pairs = zip((got - want).split(BLOCK), matrix.split(BLOCK), strict=True)
    apart, norms = zip(*((a.norm(), m.norm()) for a, m in pairs), strict=True)
    return largest(torch.stack(apart), torch.stack(norms))


def largest(apart: Tensor, norm: Tensor) -> float:
    """Return max apart / norm; 0 / 0 is 0, NaN stays NaN."""
    return torch.where(apart == 0, 0.0, apart / norm).max().item()
