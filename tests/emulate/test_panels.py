"""MXFP4 weights that the emulated kernel expands in memory, for launches of many rows: bits of the FP8 kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from calls import calls_of
from flaws import SEEN, names, plant
from fp4_cases import by_quads, check, over_ranks, plainly, random_bits
from training_cases import least_pool

from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Activation, Problem
from megamoe.core.errors import ProtocolTimeout
from megamoe.launch import panels
from megamoe.testing import make_inputs
from megamoe.testing.compare import same_bits


@pytest.fixture(params=[1, 2], ids=["one room", "two rooms"])
def rooms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every launch has panels, and room for so many experts."""
    monkeypatch.setattr(panels, "MEAN_ROWS", 0)
    monkeypatch.setattr(panels, "EXPANDED_BYTES", 0)
    monkeypatch.setattr(panels, "LEAST_ROOMS", request.param)
    return int(request.param)


def test_bits_are_those_of_the_same_numbers(rooms: int) -> None:
    """Blocks of few rows and of many, shared A and shared B, scales near each other and far apart."""
    for tokens, routing, seed in ((65, "hot", 2), (150, "uniform", 4), (150, "hot", 7)):
        problem = Problem(416, 288, 3, 2, max_tokens=150, precision="fp8xmxfp4")
        check(problem, tokens, spread=4 if seed < 6 else 20, seed=seed, routing=routing, num_ctas=4)


def test_more_experts_than_rooms(rooms: int) -> None:
    """Experts with rows for the wide form only, and without rows, stand between others."""
    for ep_size, bias, name in ((1, True, "swiglu"), (2, False, "relu2")):
        problem = Problem(
            160, 96, 12, 2, ep_size, max_tokens=400, precision="fp8xmxfp4", bias=bias, activation=Activation(name)
        )  # fmt: skip
        for seed, routing in enumerate(("uniform", "hot", "one_rank")):
            check(problem, 400, seed=seed, routing=routing, num_ctas=2 + 2 * ep_size)


def test_passes_over_ranks(rooms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a launch all have panels, or none. The second rank has 700 rows, some 450 of them in its first pass."""
    problem = Problem(160, 96, 6, 1, 2, max_tokens=446, precision="fp8xmxfp4")
    xs, call, weights = over_ranks(problem, (446, 446), (63, 64, 65, 200, 200, 300))
    whole = Emulation(problem, num_ctas=4).forward_all(calls_of(xs, *call, weights))
    assert plainly(problem, xs, weights)[0].precision == "fp8"
    # All passes; those of a launch whose first one has more than 300 rows; none.
    for mean_rows in (0, 100, 170):
        monkeypatch.setattr(panels, "MEAN_ROWS", mean_rows)
        few = Emulation(problem, pool_rows=least_pool(problem), num_ctas=4)
        found = few.forward_all(calls_of(xs, *call, weights), seed=3)
        assert max(int(few.statistics(r).passes) for r in range(2)) > 1
        assert all(map(same_bits, found, whole))


@pytest.mark.parametrize(
    ("rooms", "hidden", "intermediate", "rows"),
    [(1, 160, 4224, (70, 81)), (2, 32, 32, (8300, 70, 80))],
    ids=["panels and patches", "blocks"],
    indirect=["rooms"],
)
def test_more_than_a_warp_has_lanes_for(
    rooms: int, hidden: int, intermediate: int, rows: tuple[int, ...]
) -> None:
    """Panels of an expert, its patches for one warp, blocks whose tiles use a room; a second launch has others."""
    problem = Problem(
        hidden, intermediate, len(rows), 1, max_tokens=sum(rows), precision="fp8xmxfp4"
    )
    emulation = Emulation(problem)
    xs, call, weights = over_ranks(problem, [sum(rows)], rows)
    for changed in (weights, [random_bits(problem, 4, 1)]):
        plain, of_plain, others = plainly(problem, xs, changed)
        expected = Emulation(plain).forward_all(calls_of(of_plain, *call, others))[0]
        found = emulation.forward_all(calls_of(xs, *call, changed))[0]
        assert same_bits(by_quads(found, 1), expected)


LOST = {
    "a peer's x": (
        ("rows/stage.cuh", "XReady::publish(", "if (ctx.args.rank != 1) XReady::publish("),
        # whichever wait behind it began first: of a CTA whose first tile is gemm2's, that for h
        "x_ready|rows_ready|panel_ready|h_ready",
    ),
    "an expert's panels": (
        ("fp4/expand.cuh", "PanelReady::publish(", "if (s.expert != 2) PanelReady::publish("),
        r"panel_ready \(expand -> load_b\) for expert",
    ),
}


@pytest.mark.parametrize("rooms", [1], indirect=True)
@pytest.mark.parametrize("lost", names({name: flaw for name, (flaw, _) in LOST.items()}))
def test_what_is_lost_ends_the_launch_and_is_named(
    lost: str, rooms: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flaw, named = LOST[lost]
    plant(flaw, monkeypatch, tmp_path / "flaw")
    problem = Problem(160, 96, 8, 2, 2, max_tokens=300, precision="fp8xmxfp4")
    ranks = [replace(problem, rank=r) for r in range(2)]
    inputs = [make_inputs(p, 300) for p in ranks]
    columns = [[getattr(i, name) for i in inputs] for name in ("x", "topk_ids", "topk_weights")]
    weights = [random_bits(p, 4, p.rank) for p in ranks]
    with pytest.raises(ProtocolTimeout, match=named):
        Emulation(problem, num_ctas=4).forward_all(calls_of(*columns, weights))


FLAWS = {
    "load_b does not wait": (
        "fp4/panels.cuh",
        "PanelShape<T>(ctx.args, tile.gemm).patches(), tile.expert()",
        "0, tile.expert()",
    ),
    "nobody asks for the room": (
        "fp4/expand.cuh",
        "!is_free(ctx, id, at.block_before, blocks_before)",
        "false",
    ),
    "only experts with panels ask for the room": (
        "fp4/expand.cuh",
        "if (!is_free(ctx",
        "if (min_of(rows, rows_before) >= Panels::least_rows && !is_free(ctx",
    ),
    "the room of another expert": (
        "fp4/expand.cuh",
        "expert - launch_args<T>(args).expanded.rooms",
        "-1",
    ),
    "math warps expand, too": (
        "fp4/expand_slots.cuh",
        "in_slots_(!has_panels<T>())",
        "in_slots_(true)",
    ),
    "a pass decides for itself": ("rows/plan.cuh", "if (start.is_first)", "if (true)"),
    "the other CTA of a pair is not told": (
        "fp4/forms.cuh",
        "has = *arch::in_member(&has, 1) =",
        "has =",
    ),
    "a patch is left out": (
        "fp4/expand.cuh",
        "s.patches = shape.panels * shape.patches();",
        "s.patches = shape.panels * shape.patches() - 1;",
    ),
    "words lie elsewhere": ("fp4/expand.cuh", "+ 32 * word;", "+ 32 * (word ^ 1);"),
    "another group's scale": ("fp4/expand.cuh", "w % 2 * 8 & 0xff", "0 & 0xff"),
    "no zeros behind the last column": ("fp4/expand.cuh", "words * w < words_left", "true"),
    "all scales are near": ("fp4/expand.cuh", "if (Row::To::plain(half, {0})) {", "if (true) {"),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_is_seen(
    flaw: str, rooms: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path / "flaw")

    def run() -> None:
        with monkeypatch.context() as patch:
            test_passes_over_ranks(rooms, patch)
        for _ in range(3):
            test_bits_are_those_of_the_same_numbers(rooms)
            test_more_experts_than_rooms(rooms)

    with pytest.raises(SEEN):
        run()
