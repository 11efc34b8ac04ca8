"""Scales by token and by channel in the emulated kernel: what is staged, stage by stage, and flaws that are seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import calls_of
from flaws import SEEN, names, plant
from test_forward import check, columns, inputs_of

from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.mega.launches import rows_of_forward
from megamoe.backends.reference import forward
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.formats.quantization import dequantize_rows
from megamoe.formats.quantized import QuantizedRows
from megamoe.launch.table import weight_rows
from megamoe.testing import assert_close, make_weights

# Halves that end within 128 columns, in h and y; rows of more than a batch of a warp's loads in stage.
PROBLEM = Problem(2176, 208, 3, 2, 2, max_tokens=90, precision="fp8_channel", bias=True)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("quantized", [False, True])
def test_every_stage(quantized: bool) -> None:
    """x and its scales have the oracle's bits, also of rows of zeros, with Inf and of very different sizes."""
    inputs, weights = inputs_of(PROBLEM, [90, 17])
    xs, *call = columns(inputs)
    xs[0][3], xs[0][4], xs[0][5, 7] = 0, xs[0][4] * 1000, float("inf")
    expected = forward(PROBLEM, xs, *call, weights)
    given = [
        QuantizedRows(*pair) for pair in zip(expected["x_q"], expected["x_scale"], strict=True)
    ]
    kernel = Emulation(PROBLEM)
    ys = kernel.forward_all(calls_of(given if quantized else xs, *call, weights))
    finite = torch.ones(90, dtype=torch.bool)
    finite[5] = False
    for rank, (y, want) in enumerate(zip(ys, expected["y"], strict=True)):
        tokens, keep = len(y), finite[: len(y)] | (rank > 0)
        x_q, scale = (kernel.region(rank, n)[:tokens] for n in ("window_x", "window_x_scale"))
        assert torch.equal(bytes_of(x_q)[keep], bytes_of(expected["x_q"][rank])[keep])
        assert torch.equal(scale, expected["x_scale"][rank])
        assert_close(y[keep], want[keep], relative=4e-3)
        assert not y[~keep].isfinite().any()
        names = "x_pool", "x_pool_scale", "h", "h_scale", "y_rows", "route_rows"
        found = rows_of_forward(PROBLEM, {n: kernel.region(rank, n) for n in names})
        used = expected["rows"][rank].pool_row.long()
        scales = expected["x_pool_scale"][rank]
        assert torch.equal(found["x_pool_scale"][used], scales)
        kept = scales[:, 0].isfinite()
        pairs = [
            (found["h"][used], found["h_scale"][used]),
            (expected["h"][rank], expected["h_scale"][rank]),
        ]
        h, of_oracle = (dequantize_rows(*pair)[kept] for pair in pairs)
        assert_close(h, of_oracle, relative=4e-3)


def test_scales_that_differ_by_column_and_row() -> None:
    """Powers of two from 2^-8 to 2^8, of any order, which quantization would not make."""
    inputs, weights = inputs_of(PROBLEM, [60, 60])
    g = torch.Generator().manual_seed(1)
    for w in weights:
        for scale in (w.w13_scale, w.w2_scale):
            assert scale is not None
            scale.mul_(torch.exp2(torch.randint(-8, 9, scale.shape, generator=g)))
    call = (*columns(inputs), weights)
    expected = forward(PROBLEM, *call)["y"]
    for y, want in zip(Emulation(PROBLEM).forward_all(calls_of(*call)), expected, strict=True):
        assert_close(y, want, relative=6e-3)


def test_scales_are_read_by_vectors() -> None:
    alone = replace(PROBLEM, ep_size=1)
    w = make_weights(alone)
    assert w.w13_scale is not None
    shifted = torch.empty(w.w13_scale.numel() + 1)[1:].view_as(w.w13_scale)
    with pytest.raises(ArgumentError, match="weights' scales is 0x.*, expected 16-byte aligned"):
        weight_rows(alone, replace(w, w13_scale=shifted), 4096)


COLUMNS = "epilogue/column_scales.cuh"
FLAWS = {
    "up has gate's scales": (COLUMNS, "halves.plane(half)", "halves.plane(0)"),
    "another expert's scales": (COLUMNS, "tile.expert()", "0"),
    "the neighbouring column's scale": (COLUMNS, "+ f.column(g));", "+ (f.column(g) ^ 2));"),
    "scales are not awaited": (COLUMNS, "arch::copies_wait();", ""),
    "another warp's copies are not awaited": (
        COLUMNS,
        "arch::copies_wait();\n        warpgroup_sync(math_warpgroup());",
        "arch::copies_wait();",
    ),
    "scales change while they are read": (
        COLUMNS,
        "warpgroup_sync(math_warpgroup());  // those",
        "// those",
    ),
    "row 8 has row 0's scale": ("gemm/mainloop.cuh", "a_scale[slot][row + 8 * i]", "a_scale[slot][row]"),
    "slots have scales of their own": ("gemm/gemm.cuh", "A::whole_rows ? 0 : args", "args"),
    "a lane's largest": ("rows/stage.cuh", "group.join_lanes<32>();", ""),
    "every second token has another's scale": (
        "rows/dispatch.cuh",
        "int64_t{token} * X::num_scales(args.hidden)",
        "int64_t{token & ~1} * X::num_scales(args.hidden)",
    ),
}  # fmt: skip


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_is_seen(flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path)

    def run() -> None:
        for seed in range(6):
            check(Emulation(PROBLEM, num_ctas=2), [90, 60], seed=seed)

    with pytest.raises(SEEN):
        run()


OF_MOVERS = {
    "a warp moves before others have read": (
        COLUMNS,
        "void end() { warpgroup_sync(math_warpgroup()); }",
        "void end() {}",
    ),
    "one warpgroup's scales lie where the other moves": (
        COLUMNS,
        "*reinterpret_cast<ColumnScales*>(first + math_warpgroup() * 128)",
        "reinterpret_cast<ColumnScales*>(first)[math_warpgroup()]",
    ),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(OF_MOVERS))
def test_a_flaw_of_memory_that_movers_have_is_seen(
    flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rarely: in one order of execution of sixty, and in one of six."""
    plant(OF_MOVERS[flaw], monkeypatch, tmp_path)
    problem = Problem(272, 144, 5, 3, 2, max_tokens=70, precision="fp8_channel", bias=True)

    def run() -> None:
        for seed in (17, *range(17)):
            check(Emulation(problem), [1, 70], seed=seed, routing="hot")

    with pytest.raises(SEEN):
        run()
