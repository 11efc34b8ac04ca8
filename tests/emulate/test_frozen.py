"""Backward through packed weights, which it expands in memory: the bits of the BF16 kernel on the dense weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import calls_of
from flaws import SEEN, names, plant
from fp4_cases import random_bits, spread_ids
from torch import Tensor
from training_cases import least_pool

from megamoe.backends.call import Gradients, GradRequest, Needs
from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.reference import backward, forward
from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.core.errors import ProtocolTimeout
from megamoe.core.table import PRECISIONS
from megamoe.formats.quantization import codec
from megamoe.formats.weights import ExpertWeights
from megamoe.launch import layout, panels
from megamoe.testing import make_inputs
from megamoe.testing.compare import assert_close, same_bits
from megamoe.testing.intermediates import LIMIT

PACKED = [p.name for p in PRECISIONS.values() if p.packed]
# Of MXFP4 numbers of about 1, so that clamps are reached.
SCALES = (124, 124)


@pytest.fixture(params=[1, 2], ids=["one room", "two rooms"])
def rooms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rooms for so many experts."""
    monkeypatch.setattr(panels, "EXPANDED_BYTES", 0)
    monkeypatch.setattr(panels, "LEAST_ROOMS", request.param)
    return int(request.param)


def problem_of(*sizes: int, precision: str = "bf16xmxfp4", **options: Any) -> Problem:
    """Return one with the activation that every test of a precision has, so that they share kernels."""
    activation = {"bf16xmxfp4": "swiglu_oai", "fp8xmxfp4": "relu2"}[precision]
    return Problem(*sizes, precision=precision, activation=activation, **options)


def weights_of(problem: Problem, seed: int) -> list[ExpertWeights]:
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    return [random_bits(p, 4, 7 * seed + p.rank, SCALES) for p in ranks]


def check(
    problem: Problem, tokens: Sequence[int], *, seed: int = 0, routing: str = "uniform",
    num_ctas: int = 2, several: bool = False, ids: list[Tensor] | None = None,
) -> list[Gradients]:  # fmt: skip
    """Compare y, which saving must not change, and all gradients, bit by bit."""
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    inputs = [
        make_inputs(p, t, routing=routing, seed=seed) for p, t in zip(ranks, tokens, strict=True)
    ]
    dys = [make_inputs(p, t, seed=seed + 1000).x for p, t in zip(ranks, tokens, strict=True)]
    xs, scores = [i.x for i in inputs], [i.topk_weights for i in inputs]
    ids = ids or [i.topk_ids for i in inputs]
    needs = Needs(True, True, False, False, problem.bias, problem.bias)
    pool_rows, weights = least_pool(problem) if several else None, weights_of(problem, seed)

    def run(p: Problem, xs: list[Tensor], w: list[ExpertWeights], gu: Any = None) -> Any:
        emulation = Emulation(p, num_ctas=num_ctas, pool_rows=pool_rows)
        calls = calls_of(xs, ids, scores, w)
        plain = None if gu else emulation.forward_all(calls, seed=seed)
        ys, states = emulation.train_all(calls, seed=seed)
        regions = [
            r.plan.train_state["gu"].view(s) for r, s in zip(emulation.ranks, states, strict=True)
        ]
        for mine, others in zip(regions, gu or (), strict=False):
            mine.copy_(others)
        passes = max(int(emulation.statistics(r).passes) for r in range(p.ep_size))
        assert (passes > 1) == several
        found = emulation.backward_all(
            calls, dys, states, [GradRequest(needs)] * p.ep_size, seed=seed
        )
        assert plain is None or all(map(same_bits, plain, ys))
        return found, regions

    found, gate_up = run(problem, xs, weights)
    if not several:
        oracle = forward(problem, xs, ids, scores, weights)
        for saved, want, rows in zip(gate_up, oracle["gate_up"], oracle["rows"], strict=True):
            got = saved.flatten(1)[rows.pool_row]
            assert_close(got, want.to(got.dtype), relative=LIMIT[problem.precision])
    # Later passes compute the pre-activations again, from the saved x.
    x_codec = codec(problem.formats.x)
    if x_codec is not None:
        xs = [x_codec.dequantize(*x_codec.quantize(x)).bfloat16() for x in xs]
    dense = [w.dense(p, torch.bfloat16) for p, w in zip(ranks, weights, strict=True)]
    expected, _ = run(replace(problem, precision="bf16"), xs, dense, gate_up)
    for of_rank, want in zip(found, expected, strict=True):
        for name, got, of_plain in zip(Gradients._fields, of_rank, want, strict=True):
            assert (got is None) == (of_plain is None) == (not getattr(needs, name)), name
            if got is not None:
                assert bool(got.isfinite().all()), name
                assert same_bits(got, of_plain), name
    return found


QUICK = {("bf16xmxfp4", "swiglu_oai"), ("bf16xnvfp4", "swiglu"), ("fp8xmxfp4", "relu2")}


@pytest.mark.parametrize(
    ("precision", "activation"),
    [
        pytest.param(p, a, marks=() if (p, a) in QUICK else pytest.mark.slow)
        for p in PACKED
        for a in ACTIVATIONS
    ],
)
def test_gradients_are_those_of_the_dense_weights(precision: str, activation: str) -> None:
    """Biases, clamps, ragged sizes, dropped ids, ranks without tokens or rows, several passes."""
    problem = Problem(
        288, 160, 5, 3, ep_size=2, max_tokens=150, precision=precision, activation=activation, bias=True
    )  # fmt: skip
    for seed, (routing, tokens, several) in enumerate(
        [
            ("uniform", (70, 33), False),
            ("duplicates", (1, 70), False),
            ("dropped", (0, 64), False),
            ("one_rank", (150, 130), True),
        ]
    ):
        found = check(problem, tokens, seed=seed, routing=routing, several=several)
        assert any(bool(g.x.any()) for g in found if g.x is not None)


# Rooms know no precision.
@pytest.mark.parametrize(
    ("precision", "rooms"), [("fp8xmxfp4", 2), ("bf16xmxfp4", 1)], indirect=["rooms"]
)
def test_more_experts_than_rooms(precision: str, rooms: int) -> None:
    """Experts without rows stand between others, steps of the tile order hold several."""
    problem = problem_of(160, 96, 12, 2, 2, max_tokens=400, precision=precision)
    for seed, routing in enumerate(("uniform", "hot")):
        check(problem, (250, 130), seed=seed, routing=routing, num_ctas=4 + 2 * seed)
    check(problem, (400, 400), seed=2, num_ctas=4, several=True)


def test_blocks_of_one_expert(rooms: int) -> None:
    """More than a warp has lanes for, and steps longer than an expert."""
    rows = (4200, 70, 0, 300)
    problem = problem_of(32, 32, 4, 1, max_tokens=sum(rows))
    check(problem, [sum(rows)], ids=[spread_ids(rows)])


def test_nvfp4_rounds_its_numbers_once() -> None:
    """Matrix scales that are no powers of two: backward multiplies bf16(e2m1 * e4m3 * fp32)."""
    problem = Problem(128, 96, 3, 2, max_tokens=40, precision="bf16xnvfp4")
    inputs = make_inputs(problem, 40)
    generator = torch.Generator().manual_seed(2)
    masters = [
        torch.randn(3, n, k, generator=generator).bfloat16() / 8 for n, k in ((192, 128), (128, 96))
    ]
    weights = ExpertWeights(*masters).quantized(problem)
    dense = weights.dense(problem, torch.float32)
    assert not torch.equal(dense.w2, dense.w2.bfloat16().float())
    dy, needs = make_inputs(problem, 40, seed=9).x, Needs(True, True, False, False, False, False)
    found: list[Any] = []
    saved = None
    for p, w in (
        (problem, weights),
        (replace(problem, precision="bf16"), weights.dense(problem, torch.bfloat16)),
    ):
        emulation, calls = (
            Emulation(p),
            calls_of([inputs.x], [inputs.topk_ids], [inputs.topk_weights], [w]),
        )
        _, states = emulation.train_all(calls)
        gate_up = emulation.ranks[0].plan.train_state["gu"].view(states[0])
        if saved is not None:  # forward multiplies sums by the scale
            gate_up.copy_(saved)
        saved = gate_up.clone()
        found.append(emulation.backward_all(calls, [dy], states, [GradRequest(needs)])[0])
    assert same_bits(found[0].x, found[1].x)
    assert same_bits(found[0].topk_weights, found[1].topk_weights)


def test_memory_holds_a_few_experts() -> None:
    """GPT-OSS-120B: 32 or 128 local experts, 5 of them dense."""
    for ep_size in (1, 4):
        problem = Problem(2880, 2880, 128, 4, ep_size, max_tokens=4096, precision="bf16xmxfp4")
        packed = layout.backward_regions(problem, 32768)
        plain = layout.backward_regions(replace(problem, precision="bf16"), 32768)
        more = packed.bytes - plain.bytes
        assert more <= 5 * 3 * 2880 * 2880 * 2 + 4096


def test_the_oracle_is_that_of_bf16() -> None:
    problem = Problem(128, 96, 3, 2, max_tokens=40, precision="bf16xmxfp4")
    inputs, (weights,) = make_inputs(problem, 40), weights_of(problem, 0)
    dy = make_inputs(problem, 40, seed=9).x
    call = [dy], [inputs.x], [inputs.topk_ids], [inputs.topk_weights]
    found = backward(problem, *call, [weights])
    plain = replace(problem, precision="bf16")
    expected = backward(plain, *call, [weights.dense(problem, torch.bfloat16)])
    assert torch.equal(found["dx"][0], expected["dx"][0])


FLAWS = {
    "tiles do not wait": (
        "fp4/matrices.cuh",
        "Panels(ctx.args, tile.gemm).patches(), tile.expert()",
        "0, tile.expert()",
    ),
    "nobody asks for the room": (
        "fp4/expand.cuh",
        "!is_free(ctx, id, at.block_before, blocks_before)",
        "false",
    ),
    "recomputed tiles free no room": (
        "roles/store.cuh",
        "(Forms<T>::in_rooms && tile.gemm == GemmId::recompute)",
        "false",
    ),
    "matrices of the pass before": (
        "fp4/matrices.cuh",
        "if (arch::lane_idx() < 2) launch_args",
        "if (false) launch_args",
    ),
    "a room of another expert": (
        "fp4/matrices.cuh",
        "return Panels::room(ctx.args, tile.expert());",
        "return 0;",
    ),
    "up is gate": ("fp4/matrices.cuh", "(1 + w13_planes<T>()) + g + plane", "(1 + w13_planes<T>()) + g"),
    "up has gate's scales": (
        "fp4/matrices.cuh",
        "int64_t{expert * m.planes + plane}",
        "int64_t{expert * m.planes}",
    ),
    "another row's scale": ("fp4/matrices.cuh", "+ row % scale_group) * row_scales", ") * row_scales"),
    "another group's scale": ("fp4/matrices.cuh", "(u * unit + k * 2 * word) / Weights::group", "0"),
    "columns from 64 on have other scales": (
        "fp4/matrices.cuh",
        "(pair * scale_group + row % scale_group)",
        "(row % scale_group)",
    ),
    "a lane keeps its own words": ("fp4/matrices.cuh", "is_odd ? other : even_word", "even_word"),
    "the last rows of a matrix": ("fp4/matrices.cuh", "m.rows - row : 0", "m.rows - row - 1 : 0"),
    "NVFP4's matrix scale": ("fp4/matrices.cuh", "if constexpr (Weights::scales_sums)", "if constexpr (false)"),
    "x restored by quads": ("rows/restore.cuh", "row + Words::place(column + 4 * w)", "row + column + 4 * w"),
    "rows behind the last are not made": (
        "gemm/tiles.cuh",
        "if (T::Pool::padded) out->entry",
        "if (false) out->entry",
    ),
    "pre-activations are those of h": (
        "epilogue/wide.cuh",
        "if constexpr (E::saves) {",
        "if constexpr (E::saves) {\n            E::transform(ctx.args, sum);",
    ),
    "one half is saved twice": (
        "epilogue/wide.cuh",
        "write_columns(Bf16Rows{}, output, sum[half], nullptr",
        "write_columns(Bf16Rows{}, output, sum[0], nullptr",
    ),
}  # fmt: skip


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
@pytest.mark.parametrize("rooms", [2], indirect=True)
def test_a_flaw_is_seen(
    flaw: str, rooms: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path / "flaw")
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "0.005")

    def run() -> None:
        test_gradients_are_those_of_the_dense_weights("bf16xmxfp4", "swiglu_oai")
        test_more_experts_than_rooms("bf16xmxfp4", rooms)
        test_nvfp4_rounds_its_numbers_once()
        test_gradients_are_those_of_the_dense_weights("fp8xmxfp4", "relu2")

    with pytest.raises(SEEN):
        run()


@pytest.mark.parametrize("rooms", [1], indirect=True)
def test_lost_matrices_end_the_launch_and_are_named(
    rooms: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = problem_of(160, 96, 6, 2, max_tokens=100)
    inputs, emulation = make_inputs(problem, 100), Emulation(problem)
    call = [inputs.x], [inputs.topk_ids], [inputs.topk_weights], weights_of(problem, 0)
    _, states = emulation.train_all(calls_of(*call))
    lost = ("fp4/expand.cuh", "PanelReady::publish(", "if (s.expert != 2) PanelReady::publish(")
    plant(lost, monkeypatch, tmp_path / "flaw")
    needs = GradRequest(Needs(True, True, False, False, False, False))
    with pytest.raises(ProtocolTimeout, match=r"panel_ready \(expand -> load_b\) for expert"):
        emulation.backward_all(calls_of(*call), [inputs.x], states, [needs])
