"""FP4 weights of any bits, and what the kernel without expansion makes of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from calls import calls_of
from torch import Tensor

from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem
from megamoe.core.table import FP4_HEADER, NVFP4, NVFP4_GROUP
from megamoe.formats.mxfp4 import arrange_scales
from megamoe.formats.nvfp4 import arrange_scales as arrange_nvfp4
from megamoe.formats.weights import ExpertWeights, expected_weights
from megamoe.testing import make_inputs
from megamoe.testing.compare import same_bits

PLAIN = {"fp8xmxfp4": "fp8", "bf16xmxfp4": "bf16", "bf16xnvfp4": "bf16"}
CENTRE, HEADROOM, LEAST = 116, 6, 7  # numbers of about 2^-11 to 2^-9; fp4/format.cuh


def random_bits(
    problem: Problem, spread: int, seed: int, most: tuple[int, int] = (CENTRE, CENTRE)
) -> ExpertWeights:
    """Return FP4 weights of any bits, with scales within 2^spread of each other. most: MXFP4's of w13 and of w2."""
    if problem.formats.w == NVFP4:
        return nvfp4_bits(problem, range(max(15 - spread, 0), 16), seed)
    g = torch.Generator().manual_seed(seed)
    planes, rows = problem.activation.planes, problem.intermediate
    plain = {
        "w13_scale": (planes * rows, problem.hidden // 32),
        "w2_scale": (problem.hidden, rows // 32),
    }
    found = {}
    for name, (shape, dtype) in expected_weights(problem).items():
        if name in plain:
            bits = torch.randint(spread + 1, (shape[0], *plain[name]), generator=g)
            scales = (bits + most[name == "w2_scale"] - spread).to(torch.uint8)
            found[name] = arrange_scales(scales, planes if name == "w13_scale" else 1)
        elif name.startswith("b"):
            found[name] = torch.randn(shape, generator=g) / 8
        else:
            found[name] = torch.randint(256, shape, generator=g).to(dtype)
    return ExpertWeights(**found)


def nvfp4_bits(problem: Problem, exponents: range, seed: int) -> ExpertWeights:
    """Return NVFP4 weights of any bits, of numbers up to about 2^-9; each matrix with its own power of two.

    exponents: what the scales' four bits may be: 0 is that of subnormal ones.
    """
    g = torch.Generator().manual_seed(seed)
    num, planes, rows = (
        problem.num_local_experts(problem.rank),
        problem.activation.planes,
        problem.intermediate,
    )
    made = []
    for p, height, width in ((planes, rows, problem.hidden), (1, problem.hidden, rows)):
        shape = num, p * height, width // NVFP4_GROUP
        scales = torch.randint(exponents.start, exponents.stop, shape, generator=g) << 3
        scales |= torch.randint(8, shape, generator=g) | torch.randint(2, shape, generator=g) << 7
        scales[scales & 127 == 127] -= 1  # NaN
        outer = torch.randint(3, (num, p), generator=g) - exponents.stop - 5
        packed = torch.randint(256, (num, p * height, width // 2), generator=g).to(torch.uint8)
        powers = torch.ldexp(torch.ones(num, p), outer)
        made.append((packed, arrange_nvfp4(scales.to(torch.uint8), powers, p)))
    b13, b2 = (
        torch.randn(num, height, generator=g) / 8 if problem.bias else None
        for height in (planes * rows, problem.hidden)
    )
    (w13, s13), (w2, s2) = made
    return ExpertWeights(w13, w2, b13, b2, s13, s2)


def as_fp8(problem: Problem, w: ExpertWeights) -> ExpertWeights:
    """Return FP8 weights by the rule of docs/numerics.md: relative to each block's largest scale, rounded to e4m3."""
    out = []
    dense = w.dense(problem, torch.float32)
    assert w.w13_scale is not None
    assert w.w2_scale is not None
    for values, scales, planes in (
        (dense.w13, w.w13_scale, problem.activation.planes),
        (dense.w2, w.w2_scale, 1),
    ):
        largest = scales[..., FP4_HEADER:].amax(-1).int().clamp(min=LEAST)
        power = torch.ldexp(torch.ones(largest.shape), largest - 127 - HEADROOM)
        rows = values.shape[1] // planes
        blocks = power.unflatten(1, (planes, -1)).repeat_interleave(128, 2)[:, :, :rows]
        of_each = blocks.flatten(1, 2).repeat_interleave(128, 2)[:, :, : values.shape[2]]
        out.append(((values / of_each).to(torch.float8_e4m3fn), power))
    return ExpertWeights(out[0][0], out[1][0], w.b13, w.b2, out[0][1], out[1][1])


def spread_ids(rows: Sequence[int]) -> Tensor:
    """Return ids [T, 1] of sum(rows) tokens, no multiple of 7: expert e has rows[e] of them, spread."""
    total = sum(rows)
    assert total % 7 != 0
    sorted_ids = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    return sorted_ids[torch.arange(total) * 7 % total, None]


def over_ranks(
    problem: Problem, tokens: Sequence[int], rows: Sequence[int]
) -> tuple[list[Tensor], tuple[list[Tensor], list[Tensor]], list[ExpertWeights]]:
    """Return x, (ids, scores) and weights of each rank, top_k 1: expert e has rows[e] of all tokens, spread."""
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    inputs = [make_inputs(p, t) for p, t in zip(ranks, tokens, strict=True)]
    call = list(spread_ids(rows).split(list(tokens))), [i.topk_weights for i in inputs]
    return [i.x for i in inputs], call, [random_bits(p, 4, p.rank) for p in ranks]


def of_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def by_quads(values: Tensor, dim: int, planes: int = 1) -> Tensor:
    """values: [..., planes * K, ...] -> zeros up to whole groups of 128 of K, and each group's fours by quads."""
    values = values.unflatten(dim, (planes, -1)).movedim(dim + 1, -1)
    values = torch.nn.functional.pad(values.float(), (0, -values.shape[-1] % 128)).to(values.dtype)
    order = torch.arange(128).view(4, 8, 4).transpose(0, 1).flatten()
    found = values.unflatten(-1, (-1, 128))[..., order].flatten(-2)
    return found.movedim(-1, dim + 1).flatten(dim, dim + 1).contiguous()


def of_quads(problem: Problem, w: ExpertWeights) -> ExpertWeights:
    """Return e4m3 weights for columns of x, h and y by quads: sums have an order inside 128 of K."""
    planes, e4m3 = problem.activation.planes, w.w13.dtype
    w13, w2 = w.w13.float(), w.w2.float()
    w13 = by_quads(by_quads(w13, 2), 1, planes).to(e4m3)
    w2 = by_quads(by_quads(w2, 2), 1).to(e4m3)
    b13 = None if w.b13 is None else by_quads(w.b13, 1, planes)
    b2 = None if w.b2 is None else by_quads(w.b2, 1)
    return replace(w, w13=w13, w2=w2, b13=b13, b2=b2)


def plainly(
    problem: Problem, xs: list[Tensor], weights: list[ExpertWeights]
) -> tuple[Problem, list[Tensor], list[ExpertWeights]]:
    """Return what the kernel without expansion takes: problem, x and weights of all ranks."""
    plain = replace(problem, precision=PLAIN[problem.precision])
    if not problem.formats.h.scaled:
        return plain, xs, [w.dense(problem, torch.bfloat16) for w in weights]
    widths = {"hidden": problem.hidden, "intermediate": problem.intermediate}
    plain = replace(plain, **{name: -(-width // 128) * 128 for name, width in widths.items()})
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    found = [of_quads(p, as_fp8(p, w)) for p, w in zip(ranks, weights, strict=True)]
    return plain, [by_quads(x, 1) for x in xs], found


def check(
    problem: Problem, tokens: int, *, spread: int = 4, seed: int = 0, routing: str = "uniform", num_ctas: int = 2
) -> list[Tensor]:  # fmt: skip
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    inputs = [make_inputs(p, tokens, routing=routing, seed=seed) for p in ranks]
    weights = [random_bits(p, spread, 7 * seed + p.rank) for p in ranks]
    call = [[i.x for i in inputs], [i.topk_ids for i in inputs], [i.topk_weights for i in inputs]]
    ys = Emulation(problem, num_ctas=num_ctas).forward_all(calls_of(*call, weights), seed=seed)
    plain, xs, others = plainly(problem, call[0], weights)
    expected = Emulation(plain, num_ctas=num_ctas).forward_all(calls_of(xs, *call[1:], others))
    for y, want in zip(ys, expected, strict=True):
        assert bool(y.isfinite().all())
        if problem.formats.h.scaled:
            y = by_quads(y, 1)
        assert same_bits(y, want)
    return ys
