"""Compute the backward pass on all ranks, stage by stage, with each formula written out. Names: docs/backward.md."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.reference.combine import combine, reduce
from megamoe.backends.reference.gemm import grouped_gemm, grouped_outer
from megamoe.backends.reference.layer import begin, matrices
from megamoe.backends.reference.quant import GROUP, ROWS, formulas, largest_of_groups, round_blocks
from megamoe.backends.reference.route import BLOCK, Rows
from megamoe.core.config import Activation, Problem
from megamoe.core.full_fp32 import full_fp32


def backward(
    problem: Problem,
    dy: list[Tensor],
    x: list[Tensor],
    topk_ids: list[Tensor],
    topk_weights: list[Tensor],
    weights: list[Any],
    *,
    rounding: str = "kernel",
    gate_up: list[Tensor] | None = None,
    check_tokens: Tensor | list[Tensor] | None = None,
    dw_dtype: torch.dtype | None = None,
    weight_gradients: str = "bf16",
) -> dict[str, list[Any]]:
    """Compute every intermediate of every rank; the lists have one entry per rank.

    dy, x: [T, H], topk_ids, topk_weights: [T, K] of each home rank, all on one device; T may differ.
    weights: ExpertWeights of each expert rank, in FP8 with scales, or as before that. problem.rank is not used.
    rounding: "kernel" rounds to bf16 what the kernel does: gate_up, dgu, hs, dx_rows, partials, dx, and dw13 and dw2
        at their end; in FP8 it quantizes x and dy by 1x128, and dgu, plane by plane, for dx_rows alone; x_rows and
        dy_rows are their values in bf16. "none" rounds nothing but FP8's x. All sums are in fp64 where x is float64,
        else in fp32.
    gate_up: [M, P*I] (or [M, P, I]) of each expert rank, in the order of its rows: the pre-activations that another
        forward saved. None: from x and `weights`, as the kernel recomputes them. A clamp can flip between the two.
    check_tokens: as in layer.forward. dw13, dw2, db13 and db2 need all tokens; with it they are lists of None.
    dw_dtype: of dw13 and dw2 instead, as when they are added to fp32 main_grad.
    weight_gradients: "bf16", or in FP8 "e4m3": with the kernel's rounding, what they multiply is rounded to e4m3 as by
        a launch of one pass; x_rows, dy_rows, dgu and hs are those values.
    Returns, by home rank: dx [T, H], d_topk_weights [T, K]. By expert rank: rows (Rows), dy_rows, x_rows [M, H],
    row_weight [M], gate_up [M, P*I], dh, h [M, I], d_s [M], dgu [M, P*I], hs [M, I], dx_rows [M, H], partials
    [all T, H], dw13, dw2, db13, db2 (shapes of the weights). d_topk_weights_size, d_s_size: the norms of the terms that
    sum to these. Raises ValueError for an unknown rounding, and lists or a gate_up of another size.
    """
    products = problem.formats.weight_gradients
    if weight_gradients not in products:
        expected = " or ".join(products)
        raise ValueError(f"weight_gradients is {weight_gradients!r}, expected {expected}")
    in_e4m3 = weight_gradients == "e4m3" and rounding == "kernel"
    _check(problem, gate_up, dy=dy, x=x, ids=topk_ids, scores=topk_weights, weights=weights)
    wide = torch.float64 if x[0].dtype == torch.float64 else torch.float32
    stored = torch.bfloat16 if rounding == "kernel" else wide
    out, note, all_rows, kept = begin(problem, x, topk_ids, rounding, check_tokens)
    x_NH, dy_NH, score_NK = (
        torch.cat([t[of] for t, of in zip(per_rank, kept, strict=True)])
        for per_rank in (x, dy, topk_weights)
    )
    amax = [_amax(problem, rows) for rows in (x_NH, dy_NH)] if in_e4m3 else []
    x_NH, saved, stored_weights = _values(problem, x_NH, wide), problem, weights
    if problem.formats.packed:  # backward is that of BF16 on the dense weights
        problem = replace(problem, precision="bf16")
        weights = [w.dense(saved, stored) for w in weights]
    if rounding == "kernel":
        dy_NH = _values(problem, dy_NH, wide)
    d_scores, size = (torch.zeros_like(score_NK, dtype=wide) for _ in range(2))

    with full_fp32(x_NH.device):
        for rank, (rows, experts, given_experts) in enumerate(
            zip(all_rows, weights, stored_weights, strict=True)
        ):
            note("rows", rows)
            dy_values = dy_NH[rows.token].to(wide)
            x_values, block = x_NH[rows.token], rows.pool_row // BLOCK
            if in_e4m3:
                of_x, of_dy = (largest[rows.token] for largest in amax)
                dy_rows = round_blocks(dy_values, block, of_dy, GROUP)
                x_rows = round_blocks(x_values, block, of_x, GROUP)
            else:
                dy_rows, x_rows = (v.to(stored).to(wide) for v in (dy_values, x_values))
            note("dy_rows", dy_rows if in_e4m3 else dy_rows.to(stored))
            note("x_rows", x_rows if in_e4m3 else x_rows.to(stored))
            s = note("row_weight", score_NK[rows.token, rows.k]).to(wide)[:, None]
            given = None if gate_up is None else gate_up[rank]
            gu = _gate_up(saved, rows, x_values, given_experts, given)
            gu = note("gate_up", gu.to(stored)).to(wide)

            dh = note("dh", _times(problem, rows, dy_values, experts, "w2"))
            unscaled, h = activation_gradient(problem.activation, gu, dh)
            note("h", h)
            terms = dh * h
            d_s = terms.sum(1)
            size[rows.token, rows.k] = note("d_s_size", terms.norm(dim=1))
            if experts.b2 is not None:
                d_s = d_s + (dy_values * experts.b2.to(wide)[rows.expert]).sum(1)
            d_scores[rows.token, rows.k] = note("d_s", d_s)  # a (token, k) has one expert
            dgu, hs = ((s * v).to(stored).to(wide) for v in (unscaled, h))
            columns = dgu
            if in_e4m3:
                columns = round_blocks(dgu, block, dgu.abs(), 1)
                hs = round_blocks(hs, block, largest_of_groups(hs), GROUP)
            note("dgu", columns if in_e4m3 else dgu.to(stored))
            note("hs", hs if in_e4m3 else hs.to(stored))

            multiplied = dgu if rounding == "none" else _by_plane(problem, dgu, wide)
            dx_rows = note("dx_rows", _times(problem, rows, multiplied, experts, "w13").to(stored))
            note("partials", reduce(rows, dx_rows, torch.ones_like(score_NK), stored))
            found = dict.fromkeys(("dw13", "dw2", "db13", "db2"))
            if check_tokens is None:
                operands = x_rows, dy_rows, s, columns, hs
                found = expert_gradients(rows, operands, experts, dw_dtype or stored)
            for name, gradient in found.items():
                note(name, gradient)
        dx = combine(out["partials"], stored)
    sizes = [tokens.numel() for tokens in kept]
    of_homes = {"dx": dx, "d_topk_weights": d_scores, "d_topk_weights_size": size}
    out |= {name: list(value.split(sizes)) for name, value in of_homes.items()}
    return out


def activation_gradient(
    activation: Activation, gate_up: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of <dh, h> in gate_up, and h itself.

    gate_up: [..., P*I] and dh: [..., I], fp32 or fp64 -> [..., P*I] and [..., I] of that type. Clamps pass the gradient
    at equality, and NaN, which stays NaN (torch.clamp's gradient there is 0).
    """
    if activation.kind == "relu2":
        r = gate_up.clamp(min=0)
        return dh * 2 * r, r * r
    gate, up = gate_up.chunk(2, dim=-1)
    g, u = gate, up
    passes_g: Tensor | int = 1
    passes_u: Tensor | int = 1
    if activation.kind == "swiglu":
        s = torch.sigmoid(g)
        value, slope = g * s, s * (1 + g * (1 - s))
    elif activation.kind == "clamped_swiglu":
        limit, alpha = activation.limit, activation.alpha
        passes_g, passes_u = ~(gate > limit), ~(up.abs() > limit)
        g = gate.clamp(max=limit)
        u = up.clamp(min=-limit, max=limit) + activation.up_offset
        s = torch.sigmoid(alpha * g)
        value, slope = g * s, s * (1 + alpha * g * (1 - s))
    elif activation.kind == "geglu":
        phi = 0.5 * torch.erfc(-g / math.sqrt(2))
        density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
        value, slope = g * phi, phi + g * density
    elif activation.kind == "geglu_tanh":
        c, a = math.sqrt(2 / math.pi), 0.044715
        s = torch.sigmoid(2 * c * (g + a * g**3))  # 0.5 (1 + tanh(v)) = sigmoid(2 v)
        value, slope = g * s, s + g * s * (1 - s) * 2 * c * (1 + 3 * a * g * g)
    else:
        raise ValueError(f"activation.kind is {activation.kind!r}: no gradient is known here")
    d_gate, d_up = dh * u * slope * passes_g, dh * value * passes_u
    return torch.cat((d_gate, d_up), dim=-1), value * u


def expert_gradients(
    rows: Rows,
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    experts: Any,
    dtype: torch.dtype,
) -> dict[str, Tensor | None]:
    """Return dw13, dw2 in `dtype`, db13, db2 in the operands' type, or None, in the shapes of `experts`.

    operands: x_rows, dy_rows [M, H], row_weight [M, 1], dgu [M, P*I], hs [M, I], all fp32 or all fp64.
    """
    x_rows, dy_rows, s, dgu, hs = operands
    num = experts.w13.shape[0]
    dw13 = grouped_outer(dgu, x_rows, rows.expert, num)
    dw2 = grouped_outer(dy_rows, hs, rows.expert, num)
    db13 = db2 = None
    if experts.b13 is not None:
        db13 = _sum_by_expert(dgu, rows, num).reshape(experts.b13.shape)
        db2 = _sum_by_expert(s * dy_rows, rows, num)
    return {
        "dw13": dw13.to(dtype).reshape(experts.w13.shape),
        "dw2": dw2.to(dtype),
        "db13": db13,
        "db2": db2,
    }


def _sum_by_expert(values: Tensor, rows: Rows, num: int) -> Tensor:
    """values: [M, N] -> [L, N]."""
    return grouped_outer(values.new_ones(values.shape[0], 1), values, rows.expert, num)[:, 0]


def _check(problem: Problem, gate_up: list[Tensor] | None, **lists: list[Any]) -> None:
    """Raise ValueError unless each list has one entry per rank."""
    if gate_up is not None:
        lists["gate_up"] = gate_up
    for name, given in lists.items():
        if len(given) != problem.ep_size:
            raise ValueError(f"{name} has {len(given)} entries, expected one for each rank")


def _values(problem: Problem, rows: Tensor, wide: torch.dtype) -> Tensor:
    """rows: [T, K] as given -> the numbers that a GEMM multiplies in their place."""
    codec = formulas(ROWS, problem.formats.x.name)
    return rows.to(wide) if codec is None else codec[1](*codec[0](rows)).to(wide)


def _amax(problem: Problem, rows: Tensor) -> Tensor:
    """rows: [T, K] as given -> what their scales say is the largest of each group of 128, [T, ceil(K/128)]."""
    codec = formulas(ROWS, problem.formats.x.name)
    return codec[0](rows)[1] * 448.0


def _by_plane(problem: Problem, dgu: Tensor, wide: torch.dtype) -> Tensor:
    """dgu: [M, P*I] -> the same, with groups that restart at a plane."""
    planes = dgu.chunk(problem.activation.planes, dim=1)
    return torch.cat([_values(problem, plane, wide) for plane in planes], dim=1)


def _gate_up(
    problem: Problem, rows: Rows, x_rows: Tensor, experts: Any, given: Tensor | None
) -> Tensor:
    """Return pre-activations [M, P*I]: x W13^T + b13 of each row's expert, or the given ones."""
    width = problem.activation.planes * problem.intermediate
    if given is not None:
        if given.numel() != rows.token.numel() * width:
            expected = f"{rows.token.numel()} rows of {width}"
            raise ValueError(f"gate_up.shape is {list(given.shape)}, expected {expected}")
        return given.to(x_rows.device).reshape(-1, width)

    matrix = matrices(problem, experts, "w13", x_rows.dtype)
    return grouped_gemm(x_rows, rows.expert, matrix, experts.b13, width)


def _times(problem: Problem, rows: Rows, given: Tensor, experts: Any, name: str) -> Tensor:
    """Return given [M, N] times W, stored [N, K], of each row's expert: [M, K]. name: "w13" or "w2"."""
    matrix = matrices(problem, experts, name, given.dtype)
    width = problem.hidden if name == "w13" else problem.intermediate
    return grouped_gemm(given, rows.expert, lambda e: matrix(e).T, None, width)
