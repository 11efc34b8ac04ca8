"""MXFP4 weights in the emulated kernel: bit for bit what the kernel makes of the same numbers in e4m3 or bf16.

The two have to agree exactly: in the wide form and in the tall one, whatever the order of fibers, where scales lie so
far apart that e4m3 rounds, and at edges of tiles.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megamoe.backends.emulation import Emulation, EmulationError
from megamoe.backends.reference import forward
from megamoe.config import Activation, Problem
from megamoe.formats.fp4 import MAGNITUDES
from megamoe.formats.mxfp4 import arrange_scales, plain_scales
from megamoe.formats.table import FP4_HEADER
from megamoe.formats.weights import ExpertWeights, expected_weights
from megamoe.testing import ROUTINGS, assert_close, make_inputs
from megamoe.testing.compare import same_bits

PLAIN = {"fp8xmxfp4": "fp8", "bf16xmxfp4": "bf16"}
CENTRE, HEADROOM, LEAST = 116, 6, 7  # numbers of about 2^-11 to 2^-9; formats/fp4.cuh


def random_bits(problem: Problem, spread: int, seed: int) -> ExpertWeights:
    """Return MXFP4 weights of any bits, with scales within 2^spread of each other."""
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
            scales = (bits + CENTRE - spread).to(torch.uint8)
            found[name] = arrange_scales(scales, planes if name == "w13_scale" else 1)
        elif name.startswith("b"):
            found[name] = torch.randn(shape, generator=g) / 8
        else:
            found[name] = torch.randint(256, shape, generator=g).to(dtype)
    return ExpertWeights(**found)


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


def plainly(problem: Problem, w: ExpertWeights) -> tuple[Problem, ExpertWeights]:
    """Return the problem and the weights that the kernel without expansion takes."""
    plain = replace(problem, precision=PLAIN[problem.precision])
    if problem.formats.h.scaled:
        return plain, as_fp8(problem, w)
    return plain, w.dense(problem, torch.bfloat16)


def check(
    problem: Problem, tokens: int, *, spread: int = 4, seed: int = 0, routing: str = "uniform", num_ctas: int = 2
) -> list[Tensor]:  # fmt: skip
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    inputs = [make_inputs(p, tokens, routing=routing, seed=seed) for p in ranks]
    weights = [random_bits(p, spread, 7 * seed + p.rank) for p in ranks]
    call = [[i.x for i in inputs], [i.topk_ids for i in inputs], [i.topk_weights for i in inputs]]
    ys = Emulation(problem, num_ctas=num_ctas).forward_all(*call, weights, seed=seed)
    plains = [plainly(p, w) for p, w in zip(ranks, weights, strict=True)]
    other = Emulation(replace(problem, precision=PLAIN[problem.precision]), num_ctas=num_ctas)
    expected = other.forward_all(*call, [w for _, w in plains])
    for y, want in zip(ys, expected, strict=True):
        assert bool(y.isfinite().all())
        assert same_bits(y, want)
    return ys


@pytest.mark.parametrize("precision", list(PLAIN))
@pytest.mark.parametrize(
    ("tokens", "routing", "seed"),
    [
        (5, "uniform", 0), (16, "hot", 5), (17, "hot", 6), (33, "hot", 7), (64, "hot", 1),
        (65, "hot", 2), (150, "hot", 3), (150, "uniform", 4),
    ],
)  # fmt: skip
def test_bits_are_those_of_the_same_numbers(
    precision: str, tokens: int, routing: str, seed: int
) -> None:
    """Blocks of up to 64 rows, in the wide form for 16, 32 and 64, and larger ones; shared A and shared B."""
    check(
        Problem(416, 288, 3, 2, max_tokens=150, precision=precision),
        *(tokens,), spread=4 if seed < 6 else 20, seed=seed, routing=routing, num_ctas=4,
    )  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    precision=st.sampled_from(list(PLAIN)),
    sizes=st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(1, 5), st.integers(1, 3)),
    ep_size=st.integers(1, 2),
    tokens=st.integers(0, 140),
    routing=st.sampled_from(ROUTINGS),
    spread=st.integers(0, 40),
    seed=st.integers(0, 1000),
    bias=st.booleans(),
)
def test_any_shape(
    precision: str, sizes: tuple[int, ...], ep_size: int, tokens: int, routing: str, spread: int, seed: int, bias: bool
) -> None:  # fmt: skip
    h, i, experts, top_k = sizes
    check(
        Problem(32 * h, 32 * i, experts, top_k, ep_size, max_tokens=140, precision=precision, bias=bias),
        *(tokens,), spread=spread, seed=seed, routing=routing,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(PLAIN))
@pytest.mark.parametrize("activation", ["relu2", "clamped_swiglu"])
def test_activations(precision: str, activation: str) -> None:
    """Halves that are neighbouring columns, each with scales of its own, and numbers of an activation."""
    numbers = {} if activation == "relu2" else {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    for seed, tokens in enumerate((7, 20, 64, 100)):
        problem = Problem(
            416, 320, 3, 2, max_tokens=100, precision=precision, bias=True,
            activation=Activation(activation, **numbers),
        )  # fmt: skip
        check(problem, tokens, routing="hot", seed=seed)


def test_what_e4m3_rounds() -> None:
    """Exact for 14 binades below the block's largest scale; one more and 0.5 times it is lost, at 21 all are."""
    values = torch.tensor(MAGNITUDES)
    for below in range(24):
        exact = values * 2.0 ** (HEADROOM - below)
        found = exact.to(torch.float8_e4m3fn).float()
        assert torch.equal(found, exact) == (below <= 14)
        assert float((found - exact).abs().max()) <= 2**-10
        assert bool((found != 0).any()) == (below < 19)
    assert 2**-10 / (6 * 2**HEADROOM) < 2.6e-6


@pytest.mark.parametrize("precision", list(PLAIN))
def test_a_nan_scale_makes_its_expert_nan_and_no_other(precision: str) -> None:
    problem = Problem(160, 96, 3, 1, max_tokens=40, precision=precision)
    inputs, weights = make_inputs(problem, 40), random_bits(problem, 3, 1)
    assert weights.w2_scale is not None
    plain = plain_scales(weights.w2_scale, 1, problem.hidden, problem.intermediate)
    plain[1, 2, 1] = 255
    weights = replace(weights, w2_scale=arrange_scales(plain))
    call = [inputs.x], [inputs.topk_ids], [inputs.topk_weights]
    y = Emulation(problem).forward_all(*call, [weights])[0]
    hit = (inputs.topk_ids == 1).any(-1)
    assert bool(hit.any())
    assert bool(y[hit].isnan().any(-1).all())
    assert bool(y[~hit].isfinite().all())


def test_the_oracle_of_quantized_weights() -> None:
    for precision in PLAIN:
        problem = Problem(160, 96, 4, 2, max_tokens=40, precision=precision)
        inputs, weights = make_inputs(problem, 40), random_bits(problem, 6, 1)
        call = [inputs.x], [inputs.topk_ids], [inputs.topk_weights]
        y = Emulation(problem).forward_all(*call, [weights])[0]
        assert_close(y, forward(problem, *call, [weights])["y"][0], relative=4e-3)


FLAWS = {
    "not waiting for the other half": (
        "gemm/mainloop.cuh",
        "if constexpr (T::Gemm1::B::expanded) ring.await(ctx.mem, tile_smem<T>().expanded);",
        "",
    ),
    "not meeting before writing": ("gemm/mainloop.cuh", "[&] { math_group_sync(half); }", "[] {}"),
    "an absent tile's slots do not pass": (
        "gemm/mainloop.cuh",
        "if constexpr (T::Gemm1::B::expanded) pass_half<T>(ctx, ring);",
        "",
    ),
    "a short tile's slots do not pass": (
        "gemm/wide.cuh",
        "pass_half<T>(ctx, ring);  // all lanes have read",
        "arch::warp_sync();",
    ),
    "rows are scaled by one warp's largest": (
        "formats/e4m3.cuh",
        "math_sync();  // the largest of all columns",
        "",
    ),
    "rows are scaled before a factor is known": (
        "formats/e4m3.cuh",
        "math_sync();  // the factors of all rows",
        "",
    ),
    "a slot is handed over half filled": (
        "roles/math.cuh",
        "math_sync();  // either warpgroup's commits are for both",
        "",
    ),
    "a slot is filled while it is stored": (
        "roles/math.cuh",
        "at.acquire(ctx.mem, smem.outputs[group]);",
        "{}",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("flaw", list(FLAWS))
def test_a_flaw_of_the_hand_over_is_seen(
    flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    import shutil

    from megamoe.jit import paths

    source = tmp_path / "csrc"
    shutil.copytree(paths.CSRC, source)
    file, old, new = FLAWS[flaw]
    header = source / "megamoe" / file
    assert header.read_text().count(old) == 1
    header.write_text(header.read_text().replace(old, new))
    monkeypatch.setattr(paths, "CSRC", source)
    problem = Problem(416, 288, 3, 2, max_tokens=150, precision="fp8xmxfp4")

    def run() -> None:
        for seed in range(1, 9):
            check(problem, 150, routing="hot", seed=seed, num_ctas=4)
            check(problem, 16, seed=seed)
            check(problem, 60, seed=seed)

    with pytest.raises((AssertionError, EmulationError)):
        run()
