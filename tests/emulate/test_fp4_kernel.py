"""FP4 weights in the emulated kernel: bit for bit what the kernel makes of the same numbers in e4m3 or bf16.

The two have to agree exactly: in the wide form and in the tall one, whatever the order of fibers, where scales lie so
far apart that e4m3 rounds, and at edges of tiles. Rows of FP8 beside MXFP4 lie by quads, and sums have an order inside
128 of K: the FP8 kernel gets columns in that order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import calls_of
from flaws import SEEN, names, plant
from fp4_cases import (
    HEADROOM,
    PLAIN,
    by_quads,
    check,
    nvfp4_bits,
    of_bytes,
    over_ranks,
    plainly,
    random_bits,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_cases import least_pool

from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.mega.launches import rows_of_forward
from megamoe.backends.reference import forward
from megamoe.core.config import Activation, Problem
from megamoe.core.table import NVFP4_GROUP
from megamoe.formats.fp4 import MAGNITUDES
from megamoe.formats.mxfp4 import arrange_scales, plain_scales
from megamoe.formats.nvfp4 import arrange_scales as arrange_nvfp4
from megamoe.formats.nvfp4 import plain_scales as plain_nvfp4
from megamoe.formats.quantization import dequantize_rows
from megamoe.formats.quantized import QuantizedRows
from megamoe.testing import ROUTINGS, assert_close, make_inputs
from megamoe.testing.compare import same_bits


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
    """Blocks of 1 to 128 rows: in the wide form for 16, 32, 64 and, in bf16, 128; shared A and shared B."""
    check(
        Problem(416, 288, 3, 2, max_tokens=150, precision=precision),
        *(tokens,), spread=4 if seed < 6 else 20, seed=seed, routing=routing, num_ctas=4,
    )  # fmt: skip


# e4m3 rows keep no amax below 1e-10, so that x or h, and its weights' scales, cannot be at opposite ends.
@pytest.mark.parametrize(
    ("precision", "of_x", "most"),
    [
        *((name, 100, (4, 160)) for name in ("fp8xmxfp4", "bf16xmxfp4")),
        *((name, 0, (160, 4)) for name in ("fp8xmxfp4", "bf16xmxfp4")),
        ("fp8xmxfp4", -30, (205, 60)),
        ("bf16xmxfp4", -100, (252, 116)),
        *((name, 0, (107, 252)) for name in ("fp8xmxfp4", "bf16xmxfp4")),
    ],
)
@pytest.mark.parametrize("rows", [16, 100])
def test_scales_at_the_ends_of_their_range(
    precision: str, of_x: int, most: tuple[int, int], rows: int
) -> None:
    """2^-127, which is no normal number, to 2^125; x and the other matrix keep h and y in range."""
    problem = Problem(160, 96, 1, 1, max_tokens=rows, precision=precision)
    inputs, w = make_inputs(problem, rows), random_bits(problem, 4, 1, most)
    xs, call = [inputs.x * 2.0**of_x], [[inputs.topk_ids], [inputs.topk_weights]]
    found = Emulation(problem).forward_all(calls_of(xs, *call, [w]))[0]
    plain, of_plain, others = plainly(problem, xs, [w])
    expected = Emulation(plain).forward_all(calls_of(of_plain, *call, others))[0]
    assert bool(found.isfinite().all())
    assert bool(found.any(1).all())
    if problem.formats.h.scaled:
        found = by_quads(found, 1)
    assert same_bits(found, expected)


@pytest.mark.parametrize(("hidden", "intermediate"), [(160, 96), (416, 288), (256, 128)])
def test_rows_are_read_by_column(hidden: int, intermediate: int) -> None:
    """x, given as bf16 and as e4m3, and h, in the window and the pool: what lies behind the last column is zeros."""
    problem = Problem(hidden, intermediate, 1, 1, max_tokens=90, precision="fp8xmxfp4")
    inputs, weights = make_inputs(problem, 90), random_bits(problem, 3, 1)
    call = [inputs.topk_ids], [inputs.topk_weights], [weights]
    expected = forward(problem, [inputs.x], *call)
    quantized = QuantizedRows(expected["x_q"][0], expected["x_scale"][0])
    used = expected["rows"][0].pool_row.long()
    by_row = ("x_pool", "x_pool_scale", "h", "h_scale", "y_rows", "route_rows")
    for x in (inputs.x, quantized):
        kernel = Emulation(problem)
        kernel.forward_all(calls_of([x], *call))
        views = {name: kernel.region(0, name) for name in by_row}
        found = rows_of_forward(problem, views)
        for name, width in (("x_pool", hidden), ("h", intermediate)):
            assert found[name].shape[1] == width
            behind = problem.formats.x.in_order(views[name], -(-width // 128) * 128)[used, width:]
            assert not of_bytes(behind).bitwise_and(127).any()  # -0, too
        assert torch.equal(of_bytes(found["x_pool"][used]), of_bytes(expected["x_pool"][0]))
        staged = problem.formats.x.in_order(kernel.region(0, "window_x")[:90], hidden)
        assert torch.equal(of_bytes(staged), of_bytes(expected["x_q"][0]))
        pairs = [
            (found["h"][used], found["h_scale"][used]),
            (expected["h"][0], expected["h_scale"][0]),
        ]
        h, want = (dequantize_rows(*pair) for pair in pairs)
        assert_close(h, want, relative=1e-2)


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


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_nvfp4_of_every_scale(rows: int) -> None:
    """Each of 256 scales with each of 16 numbers, among others of its size, so that none is lost in a sum."""
    problem = Problem(64, 64, 1, 1, max_tokens=128, precision="bf16xnvfp4")
    bf16 = replace(problem, precision="bf16")
    x = torch.eye(64, dtype=torch.bfloat16).repeat(2, 1)[:rows]  # columns of w13, one by one
    call = [x], [torch.zeros(rows, 1, dtype=torch.int64)], [torch.ones(rows, 1)]
    for exponent in range(16):
        w = nvfp4_bits(problem, range(exponent, exponent + 1), exponent)
        groups = plain_nvfp4(w.w13_scale, 2, 64, 64)[0].repeat_interleave(NVFP4_GROUP, -1)
        codes = torch.stack((w.w13 & 15, w.w13 >> 4), dim=-1).flatten(-2)
        pairs = (groups.int() * 16 + codes).unique().numel()
        assert pairs == 16 * (14 if exponent == 15 else 16)
        found = Emulation(problem).forward_all(calls_of(*call, [w]))[0]
        dense = w.dense(problem, torch.bfloat16)
        assert same_bits(found, Emulation(bf16).forward_all(calls_of(*call, [dense]))[0])
        assert bool(found.isfinite().all())
        assert bool(found.any())


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("tokens", [40, 140])
def test_a_nan_scale_of_nvfp4_makes_its_expert_nan_and_no_other(byte: int, tokens: int) -> None:
    problem = Problem(160, 96, 3, 1, max_tokens=140, precision="bf16xnvfp4")
    inputs = make_inputs(problem, tokens, routing="hot")
    weights = nvfp4_bits(problem, range(10, 16), 1)
    inputs.topk_ids[:5] = 0
    for name, planes, row, group in (("w2_scale", 1, 2, 3), ("w13_scale", 2, 100, 9)):
        rows, width = (160, 96) if planes == 1 else (96, 160)
        plain, outer = plain_nvfp4(getattr(weights, name), planes, rows, width)
        plain[1, row, group] = byte
        changed = replace(weights, **{name: arrange_nvfp4(plain, outer, planes)})
        call = [inputs.x], [inputs.topk_ids], [inputs.topk_weights]
        y = Emulation(problem).forward_all(calls_of(*call, [changed]))[0]
        hit = (inputs.topk_ids == 1).any(-1)
        assert 0 < int(hit.sum()) < tokens
        assert bool(y[hit].isnan().any(-1).all())
        assert bool(y[~hit].isfinite().all())


@pytest.mark.parametrize("precision", ["bf16xmxfp4", "bf16xnvfp4"])
def test_passes_over_ranks_and_a_token_that_is_nan(precision: str) -> None:
    """Blocks of 1 to 128 rows of two ranks, several passes: bits of one pass, and no token gets the NaN of another."""
    problem = Problem(160, 96, 6, 1, 2, max_tokens=355, precision=precision)
    xs, call, weights = over_ranks(problem, (355, 350), (63, 64, 65, 127, 129, 257))
    plain, _, others = plainly(problem, xs, weights)
    expected = Emulation(plain).forward_all(calls_of(xs, *call, others))
    few = Emulation(problem, pool_rows=least_pool(problem), num_ctas=4)
    ys = few.forward_all(calls_of(xs, *call, weights), seed=3)
    assert max(int(few.statistics(r).passes) for r in range(2)) > 1
    assert all(map(same_bits, ys, expected))
    xs[1][200, 17] = torch.nan
    y, other = few.forward_all(calls_of(xs, *call, weights), seed=4)
    assert bool(other[200].isnan().all())
    other[200] = expected[1][200]
    assert all(map(same_bits, (y, other), expected))


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


@pytest.mark.parametrize("precision", ["fp8xmxfp4", "bf16xmxfp4"])
def test_a_nan_scale_makes_its_expert_nan_and_no_other(precision: str) -> None:
    problem = Problem(160, 96, 3, 1, max_tokens=40, precision=precision)
    inputs, weights = make_inputs(problem, 40), random_bits(problem, 3, 1)
    assert weights.w2_scale is not None
    plain = plain_scales(weights.w2_scale, 1, problem.hidden, problem.intermediate)
    plain[1, 2, 1] = 255
    weights = replace(weights, w2_scale=arrange_scales(plain))
    call = [inputs.x], [inputs.topk_ids], [inputs.topk_weights]
    y = Emulation(problem).forward_all(calls_of(*call, [weights]))[0]
    hit = (inputs.topk_ids == 1).any(-1)
    assert bool(hit.any())
    assert bool(y[hit].isnan().any(-1).all())
    assert bool(y[~hit].isfinite().all())


def test_the_oracle_of_quantized_weights() -> None:
    for precision in PLAIN:
        problem = Problem(160, 96, 4, 2, max_tokens=40, precision=precision)
        inputs, weights = make_inputs(problem, 40), random_bits(problem, 6, 1)
        call = [inputs.x], [inputs.topk_ids], [inputs.topk_weights]
        y = Emulation(problem).forward_all(calls_of(*call, [weights]))[0]
        assert_close(y, forward(problem, *call, [weights])["y"][0], relative=4e-3)


FLAWS = {
    "not waiting for the other half": (
        "gemm/mainloop.cuh",
        "            beside.await(ring);",
        "",
    ),
    "not meeting before writing": (
        "fp4/expand_slots.cuh",
        "[&] { warpgroup_sync(half); }",
        "[] {}",
    ),
    "an absent tile's slots do not pass": (
        "fp4/forms.cuh",
        "if constexpr (expands_slots<T>) pass_half<T>(ctx, ring);",
        "",
    ),
    "a short tile's slots do not pass": (
        "fp4/wide.cuh",
        "pass_half<T>(ctx, ring);  // all lanes have read",
        "arch::warp_sync();",
    ),
    "rows are scaled by one warp's largest": (
        "epilogue/wide.cuh",
        "math_sync();  // the largest of all columns",
        "",
    ),
    "rows are scaled before a factor is known": (
        "epilogue/wide.cuh",
        "math_sync();  // the factors of all rows",
        "",
    ),
    "a slot is handed over half filled": (
        "roles/math.cuh",
        "math_sync();  // either warpgroup's commits are for both",
        "",
    ),
    "a word of x lies elsewhere": ("formats/e4m3.cuh", "to + Words::place(4)", "to + 4"),
    "x has no zeros behind its last column": (
        "formats/e4m3.cuh",
        "if (column >= row_bytes(columns)) return;",
        "if (column >= columns) return;",
    ),
    "a word of a tall tile's h lies elsewhere": (
        "formats/e4m3.cuh",
        "Words::place(f.column(g))",
        "f.column(g)",
    ),
    "a word of a short tile's h lies elsewhere": (
        "epilogue/wide.cuh",
        "Words::place(column + 8)",
        "Words::place(column) + 8",
    ),
    "a word of expanded weights lies elsewhere": (
        "fp4/format.cuh",
        "<< 4)) + k * 4;",
        "<< 4)) + (k ^ 1) * 4;",
    ),
    "a lane takes another quad's codes": (
        "fp4/operand.cuh",
        "at.vector(at.quad)",
        "at.vector(at.quad ^ 1)",
    ),
    "a lane takes another group's scale": (
        "fp4/operand.cuh",
        "* (2 * scale_group) + quad % 2]",
        "* (2 * scale_group)]",
    ),
    "a slot is filled while it is stored": (
        "roles/math.cuh",
        "at.acquire(ctx.mem, smem.outputs[warpgroup]);",
        "{}",
    ),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_is_seen(flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path)
    # A mover of one rank polls every 64 ns: a wait of 120 virtual seconds would take hours.
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "0.005")
    problem = Problem(416, 288, 3, 2, max_tokens=150, precision="fp8xmxfp4")

    def run() -> None:
        for seed in range(1, 9):
            check(problem, 150, routing="hot", seed=seed, num_ctas=4)
            check(problem, 16, seed=seed)
            check(problem, 60, seed=seed)

    with pytest.raises(SEEN):
        run()


NVFP4_FLAWS = {
    "a scale's sign is lost": ("fp4/format.cuh", "& 0x87f087f0", "& 0x07f007f0"),
    "NaN is 480": ("fp4/format.cuh", "(twice & 0x7f) == 0x7f", "false"),
    "NaN is not looked for": ("fp4/format.cuh", "(nan & 0x80808080) == 0", "true"),
    "three of four scales": ("fp4/format.cuh", "0x1111 * static_cast<uint32_t>(i)", "0x1111 * (i < 3 ? i : 2)"),
    "1.5 is 3": ("fp4/format.cuh", "0x7b7b7b00", "0x7c7b7b00"),
    "up has gate's scale": ("fp4/format.cuh", "half0_ + half * to_half1_ + k", "half0_ + k"),
    "sums are not scaled": ("epilogue/wide.cuh", "scale_sums<T>(ctx, tile, sum);", ""),
    "rows lie 64 too early": ("epilogue/wide.cuh", "8 * g < warpgroup_rows ? mine.slot", "true ? mine.slot"),
}  # fmt: skip


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(NVFP4_FLAWS))
def test_a_flaw_of_nvfp4_is_seen(
    flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(NVFP4_FLAWS[flaw], monkeypatch, tmp_path)

    def run() -> None:
        for rows in (16, 128):
            test_nvfp4_of_every_scale(rows)
            test_a_nan_scale_of_nvfp4_makes_its_expert_nan_and_no_other(0xFF, 20 + rows)

    with pytest.raises(SEEN):
        run()
