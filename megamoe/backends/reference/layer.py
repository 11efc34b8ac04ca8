"""Compute the whole layer on all ranks, stage by stage. Read this file to learn what megamoe computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.reference.combine import combine, reduce
from megamoe.backends.reference.gemm import grouped_gemm
from megamoe.backends.reference.quant import BLOCKS, ROWS, formulas
from megamoe.backends.reference.route import Rows, route
from megamoe.core.config import Problem
from megamoe.core.full_fp32 import full_fp32
from megamoe.formats.quantized import QuantizedRows


def forward(
    problem: Problem,
    x: list[Any],
    topk_ids: list[Tensor],
    topk_weights: list[Tensor],
    weights: list[Any],
    *,
    rounding: str = "kernel",
    check_tokens: Tensor | list[Tensor] | None = None,
) -> dict[str, list[Any]]:
    """Compute every intermediate of every rank; the lists have one entry per rank.

    x: [T, H], topk_ids: [T, K], topk_weights: [T, K] of each home rank, all on one device; T may
        differ. fp8: x may be QuantizedRows, which are taken as they are.
    weights: ExpertWeights of each expert rank. problem.rank is not used.
    rounding: "kernel" rounds where the kernel does: h to bf16 (fp8: quantized from fp32 by 1x128),
        y_rows and partials to bf16, y to bf16. "none" keeps fp32 throughout, on the same inputs
        (fp8: x is quantized).
    check_tokens: tokens to compute, for all home ranks alike or one tensor each; the others still
        count in the row order. Rows, partials and y then hold only those tokens, in that order.
    Returns, by home rank: y [T, H] (and fp8: x_q, x_scale). By expert rank: rows (Rows), counts [C,
    L], x_pool [M, H], gate_up [M, P*I] fp32, h [M, I], y_rows [M, H], partials [all T, H]; fp8:
    x_pool_scale, h_scale. Row m lies in the kernel's pool at rows.pool_row[m]. Differentiable with
    bf16 or fp32 weights.
    """
    out, note, all_rows, kept = begin(problem, x, topk_ids, rounding, check_tokens)
    stored = torch.bfloat16 if rounding == "kernel" else torch.float32
    x_codec = formulas(ROWS, problem.formats.x.name)
    h_codec = formulas(ROWS, problem.formats.h.name)
    width = problem.activation.planes * problem.intermediate
    x = [_take(x_T, tokens) for x_T, tokens in zip(x, kept, strict=True)]
    weight_NK = torch.cat([w[tokens] for w, tokens in zip(topk_weights, kept, strict=True)])
    if x_codec is not None:
        for x_T in x:
            q, scale = x_T if isinstance(x_T, QuantizedRows) else x_codec[0](x_T)
            note("x_q", q)
            note("x_scale", scale)

    with full_fp32(weight_NK.device):
        for rows, experts in zip(all_rows, weights, strict=True):
            note("rows", rows)
            note("counts", rows.counts)
            x_pool = _dispatch(rows, x, out, note, x_codec)
            w13, w2 = (matrices(problem, experts, name) for name in ("w13", "w2"))
            product = grouped_gemm(x_pool, rows.expert, w13, experts.b13, width)
            gate_up = note("gate_up", product)
            h = _act(problem, gate_up, note, stored, h_codec if rounding == "kernel" else None)
            product = grouped_gemm(h, rows.expert, w2, experts.b2, problem.hidden)
            y_rows = note("y_rows", product.to(stored))
            note("partials", reduce(rows, y_rows, weight_NK, stored))
        y = combine(out["partials"], stored)
    out["y"] = list(y.split([tokens.numel() for tokens in kept]))
    return out


def begin(
    problem: Problem, x: list[Any], topk_ids: list[Tensor], rounding: str, check_tokens: Any
) -> tuple[dict[str, list[Any]], Callable[[str, Any], Any], list[Rows], list[Tensor]]:
    """Return an empty dict, a function that adds to it, rows by expert rank and the tokens to compute by home rank.

    Raises ValueError for an unknown rounding.
    """
    if rounding not in ("kernel", "none"):
        raise ValueError(f'rounding is {rounding!r}, expected "kernel" or "none"')
    out: dict[str, list[Any]] = {}

    def note(name: str, value: Any) -> Any:
        out.setdefault(name, []).append(value)
        return value

    all_rows = [route(problem, rank, topk_ids) for rank in range(problem.ep_size)]
    kept = _kept_tokens(x, check_tokens)
    if check_tokens is not None:
        all_rows = keep_rows(all_rows, topk_ids, kept)
    return out, note, all_rows, kept


def _take(x_TH: Any, tokens: Tensor) -> Any:
    return x_TH.take(tokens) if isinstance(x_TH, QuantizedRows) else x_TH[tokens]


def _kept_tokens(x: list[Any], check_tokens: Tensor | list[Tensor] | None) -> list[Tensor]:
    """Return the tokens to compute of each home rank."""
    if check_tokens is None:
        return [torch.arange(x_T.shape[0], device=x_T.device) for x_T in x]
    if isinstance(check_tokens, Tensor):
        check_tokens = [check_tokens] * len(x)
    return [t.to(x_T.device, torch.int64) for t, x_T in zip(check_tokens, x, strict=True)]


def keep_rows(all_rows: list[Rows], topk_ids: list[Tensor], kept: list[Tensor]) -> list[Rows]:
    """Return the rows of the kept tokens, of each expert rank."""
    starts = [0, *accumulate(len(ids) for ids in topk_ids[:-1])]
    tokens = torch.cat([of_home + start for of_home, start in zip(kept, starts, strict=True)])
    return [rows.keep(tokens) for rows in all_rows]


def _dispatch(
    rows: Rows, x: list[Tensor], out: dict[str, list[Any]], note: Any, x_codec: Any
) -> Tensor:
    """Copy each row's token into the pool; return it as fp32 values."""
    if x_codec is None:
        return note("x_pool", torch.cat(x)[rows.token]).float()
    stored = out["x_q"][0].dtype
    q = torch.cat([t.view(torch.uint8) for t in out["x_q"]])[rows.token].view(stored)
    scale = torch.cat(out["x_scale"])[rows.token]
    return x_codec[1](note("x_pool", q), note("x_pool_scale", scale))


def matrices(
    problem: Problem, experts: Any, name: str, dtype: torch.dtype = torch.float32
) -> Callable[[int], Tensor]:
    """Return a function of a local expert: its w13 or w2 as values [N, K] in `dtype`. name: of ExpertWeights."""
    w, scale = getattr(experts, name), getattr(experts, f"{name}_scale")
    planes = problem.activation.planes if name == "w13" else 1
    dequantize = formulas(BLOCKS, problem.formats.w.name)

    def matrix(e: int) -> Tensor:
        stored = w[e].reshape(-1, w.shape[-1])
        return (stored if scale is None else dequantize(stored, scale[e], planes)).to(dtype)

    return matrix


def _act(problem: Problem, gate_up: Tensor, note: Any, stored: torch.dtype, h_codec: Any) -> Tensor:
    """Apply the activation in fp32 and round h once; return it as fp32 values."""
    h = problem.activation(gate_up)
    if h_codec is None:
        return note("h", h.to(stored)).float()
    q, scale = h_codec[0](h)
    return h_codec[1](note("h", q), note("h_scale", scale))
