"""The real kernel on the emulated machine against the reference: shapes, routings, ranks, orders of execution."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import calls_of
from flaws import SEEN, names, plant
from hypothesis import HealthCheck, given, settings
from layouts import LAYOUTS
from shapes import Case, cases
from torch import Tensor
from training_cases import least_pool

from megamoe.backends.call import Call
from megamoe.backends.emulate import emulation as emulator
from megamoe.backends.emulate.backend import EmulateBackend
from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.reference.layer import forward
from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.core.errors import MegaMoEError, PeerFault, ProtocolTimeout, RankMismatch, WindowBroken
from megamoe.formats.weights import ExpertWeights
from megamoe.launch import arguments, layout, table
from megamoe.testing.compare import assert_close
from megamoe.testing.inputs import ROUTINGS, Inputs, make_inputs, make_weights
from megamoe.testing.intermediates import few_steps
from megamoe.testing.launch import launch

# Relative Frobenius error to the reference with the kernel's roundings. What remains are fp32 sums in another order,
# which now and then round to the neighbouring bf16 or e4m3 value. Where there are so few elements that two such steps
# are more than this, the limit is those two steps (megamoe/testing/intermediates.py).
TOLERANCE = {"bf16": 2e-3, "fp8": 4e-3, "fp8_channel": 4e-3}
PRECISIONS = list(TOLERANCE)
SLOW = os.environ.get("SLOW") == "1"
# Where h is quantized the code behind an activation sees one number, of two planes or of one.
VARIANTS = [
    (precision, activation)
    for precision in PRECISIONS
    for activation in ACTIVATIONS
    if precision == "bf16" or activation in ("swiglu", "relu2")
]


def inputs_of(
    problem: Problem, tokens: list[int], **options: Any
) -> tuple[list[Inputs], list[ExpertWeights]]:
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    inputs = [make_inputs(p, t, **options) for p, t in zip(ranks, tokens, strict=True)]
    return inputs, [make_weights(p, seed=1) for p in ranks]


def columns(inputs: list[Inputs]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [i.x for i in inputs], [i.topk_ids for i in inputs], [i.topk_weights for i in inputs]


def reference(problem: Problem, inputs: list[Inputs], weights: list[ExpertWeights]) -> list[Tensor]:
    return forward(problem, *columns(inputs), weights)["y"]


def check(
    emulation: Emulation, tokens: list[int], *, seed: int = 0, **options: Any
) -> list[Tensor]:
    problem = emulation.problem
    inputs, weights = inputs_of(problem, tokens, **options)
    ys = emulation.forward_all(calls_of(*columns(inputs), weights), seed=seed)
    for rank, (y, expected) in enumerate(zip(ys, reference(problem, inputs, weights), strict=True)):
        ids = inputs[rank].topk_ids
        rows = int(((ids >= 0) & (ids < problem.num_experts)).sum())
        limit = max(TOLERANCE[problem.precision], few_steps(problem, rows, y.numel()))
        assert_close(y, expected, relative=limit, name=f"y of rank {rank}")
    return ys


EXAMPLES = 400 if SLOW else 25  # each up to a second


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(VARIANTS, ROUTINGS, tokens=900, experts=300))
def test_any_shape(case: Case) -> None:
    check(case.emulation(), case.tokens, **case.options)


@pytest.mark.parametrize(("precision", "activation"), VARIANTS)
def test_every_variant_through_several_launches(precision: str, activation: str) -> None:
    problem = Problem(
        272,
        144,
        5,
        3,
        ep_size=2,
        max_tokens=70,
        precision=precision,
        activation=activation,
        bias=True,
    )
    emulation = Emulation(problem)
    for seed, (routing, tokens) in enumerate(
        [("uniform", [70, 33]), ("hot", [1, 70]), ("dropped", [0, 64]), ("uniform", [0, 0])]
    ):
        check(emulation, tokens, routing=routing, seed=seed)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_several_passes(precision: str) -> None:
    """A pool of the least size makes many passes; later launches reuse it."""
    problem = Problem(144, 80, 4, 4, ep_size=2, max_tokens=200, precision=precision)
    emulation = Emulation(problem, pool_rows=least_pool(problem), num_ctas=2)
    for seed, routing in enumerate(["uniform", "one_rank", "hot"]):
        check(emulation, [200, 130], routing=routing, seed=seed)


@pytest.mark.parametrize(("precision", "seed"), [("bf16", 1), ("bf16", 3), ("fp8", 1)])
def test_a_pass_waits_for_the_last_one(precision: str, seed: int) -> None:
    """With these seeds a CTA is so late that without the grid barrier others overwrite the tables that it reads."""
    problem = Problem(144, 80, 4, 4, ep_size=2, max_tokens=300, precision=precision)
    check(
        Emulation(problem, num_ctas=6, pool_rows=least_pool(problem), timeout_s=60),
        [200, 130],
        seed=seed,
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_do_not_depend_on_anything_but_the_inputs(precision: str) -> None:
    problem = Problem(272, 272, 6, 4, ep_size=2, max_tokens=130, precision=precision, bias=True)
    inputs, weights = inputs_of(problem, [130, 57])
    first: list[Tensor] | None = None
    worst = layout.worst_pool_rows(problem)
    for num_ctas, pool_rows, step_blocks, seed in (
        *((2, None, 16, 0), (6, worst, 16, 1), (2, least_pool(problem) + 256, 17, 2)),
        *((4, None, 40, 3), (2, least_pool(problem), 16, 5)),
    ):
        emulation = Emulation(
            problem, num_ctas=num_ctas, pool_rows=pool_rows, step_blocks=step_blocks
        )
        for _ in range(2):
            ys = emulation.forward_all(calls_of(*columns(inputs), weights), seed=seed)
            first = first or ys
            assert all(torch.equal(a, b) for a, b in zip(first, ys, strict=True)), (
                num_ctas,
                pool_rows,
                step_blocks,
                seed,
            )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_of_few_tokens_move_in_slices(precision: str) -> None:
    """By as many warps as there are: 2 CTAs pull whole rows, 16 pull slices; sums are in slices, one not full."""
    problem = Problem(2320, 80, 4, 3, ep_size=2, max_tokens=40, precision=precision)
    found = [check(Emulation(problem, num_ctas=n), [2, 1], seed=n) for n in (2, 16)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_orders_of_execution(seed: int) -> None:
    problem = Problem(
        144, 144, 6, 2, ep_size=3, max_tokens=64, precision="fp8" if seed % 2 else "bf16"
    )
    emulation = Emulation(
        problem,
        num_ctas=2 + 2 * (seed % 2),
        pool_rows=least_pool(problem) if seed % 4 == 0 else None,
    )
    for _ in range(2):
        check(emulation, [64, 20, 41], seed=seed)


FLAWS = {
    "a slot is read whatever the look found": (
        "gemm/mainloop.cuh",
        "has_arrived = ring.test(ctx.mem, smem.pipeline);",
        "has_arrived = true;",
    ),
    "a look at the last lap": (
        "protocol/ring.h",
        "return mem.test(s.full[slot()], parity());",
        "return mem.test(s.full[slot()], parity() ^ 1);",
    ),
    "a slot is given back behind its first half": (
        "gemm/mainloop.cuh",
        "if (half == 1) {",
        "if (half == 0) {",
    ),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_of_the_fp8_loop_is_seen(
    flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = Problem(400, 144, 6, 2, max_tokens=200, precision="fp8")
    plant(FLAWS[flaw], monkeypatch, tmp_path)

    def orders() -> None:
        for seed in range(4):
            check(Emulation(problem), [200], seed=seed)

    with pytest.raises(SEEN):
        orders()


@pytest.mark.parametrize(
    ("precision", "experts", "top_k", "tokens", "routing", "several_passes"),
    [
        ("bf16", 70, 2, [80], "uniform", False),  # in three rounds, of which the last is not full
        ("bf16", 200, 2, [1060, 1100], "dropped", False),  # 100 local experts, 70 chunks
        ("fp8", 140, 10, [1060, 1100], "uniform", True),  # two blocks of each of 70
        ("bf16", 70, 1, [4200], "uniform", False),  # 132 chunks
        ("fp8", 2, 4, [1100], "one_expert", False),  # 35 blocks of one expert
        ("bf16", 1024, 1, [1100], "uniform", False),  # as many local experts as there may be
    ],
)
def test_more_than_a_warp_has_lanes_for(
    precision: str, experts: int, top_k: int, tokens: list[int], routing: str, several_passes: bool
) -> None:
    """Local experts, chunks, blocks, blocks of one expert: loops of a warp with two rounds and more."""
    problem = Problem(
        16, 16, experts, top_k, len(tokens), max_tokens=max(tokens), precision=precision
    )
    whole = sum(tokens) * top_k + layout.BLOCK_ROWS * problem.num_local_experts(0)
    pool_rows = least_pool(problem) if several_passes else whole // 128 * 128
    emulation = Emulation(problem, pool_rows=pool_rows, num_ctas=4)
    check(emulation, tokens, routing=routing)
    assert (int(emulation.statistics(0).passes) > 1) == several_passes


def test_four_ranks() -> None:
    problem = Problem(256, 256, 8, 4, ep_size=4, max_tokens=64, precision="fp8")
    check(Emulation(problem), [64, 1, 64, 32])


@pytest.mark.parametrize(("precision", "seed"), [("bf16", 0), ("fp8", 1)])
def test_eight_ranks_and_sixteen_routes(precision: str, seed: int) -> None:
    """As many ranks and routes as there may be; E does not divide over the ranks; a rank without tokens."""
    problem = Problem(64, 48, 19, 16, ep_size=8, max_tokens=40, precision=precision)
    emulation = Emulation(problem, pool_rows=least_pool(problem) if seed else None)
    tokens = [40, 0, 7, 33, 1, 40, 16, 5]
    check(emulation, tokens, seed=seed)
    check(emulation, tokens[::-1], routing="dropped", seed=seed)


@pytest.mark.parametrize(
    ("precision", "top_k", "routing"),
    [("bf16", 22, "uniform"), ("fp8", 32, "dropped"), ("bf16", 32, "duplicates")],
)
def test_thirty_two_routes(precision: str, top_k: int, routing: str) -> None:
    """As many routes as a row's number can hold; several passes; not gated, as in Nemotron 3 Super."""
    problem = Problem(
        64, 48, 41, top_k, ep_size=2, max_tokens=40, precision=precision, activation="relu2"
    )
    emulation = Emulation(problem, pool_rows=least_pool(problem))
    check(emulation, [40, 33], routing=routing, seed=top_k)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_strided_weights_are_read_in_place(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    """The same bits as from contiguous ones; a map that forgets the strides gives others."""
    problem = Problem(272, 144, 5, 3, max_tokens=40, precision=precision, bias=True)
    inputs, weights = inputs_of(problem, [40])
    strided = [LAYOUTS[name](w) for w in weights]
    emulation = Emulation(problem)
    expected = emulation.forward_all(calls_of(*columns(inputs), weights))[0]
    assert torch.equal(emulation.forward_all(calls_of(*columns(inputs), strided))[0], expected)
    dense = table.plane_strides
    with monkeypatch.context() as patch:
        patch.setattr(table, "plane_strides", lambda w, planes: dense(w.contiguous(), planes))
        assert not torch.equal(
            emulation.forward_all(calls_of(*columns(inputs), strided))[0], expected
        )


def at_the_end_of_memory(t: Tensor) -> Tensor:
    """Return a copy behind which nothing can be read."""
    page = mmap.PAGESIZE
    room = -(-t.nbytes // page) * page
    whole = torch.frombuffer(mmap.mmap(-1, room + page), dtype=torch.uint8)
    behind = ctypes.c_void_p(whole.data_ptr() + room)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(page), 0) == 0
    return whole[room - t.nbytes : room].view(t.dtype).view(t.shape).copy_(t)


def test_scales_of_weights_are_not_read_past_their_end() -> None:
    """The last expert's last tile of 384 columns has no second half, nor scales of it. Else: a segmentation fault."""
    problem = Problem(384, 128, 4, 2, max_tokens=16, precision="fp8")
    inputs, (weights,) = inputs_of(problem, [16])
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    ends = {n: at_the_end_of_memory(getattr(weights, n)) for n in ("w13_scale", "w2_scale")}
    ys = [
        Emulation(problem).forward_all(calls_of(*columns(inputs), [w]))[0]
        for w in (weights, replace(weights, **ends))
    ]
    assert torch.equal(*ys)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_call_leaves_its_routes_in_its_state(precision: str) -> None:
    """Calls on one workspace do not touch each other's state; one that is shared does not outlive the next call."""
    problem = Problem(64, 48, 7, 3, ep_size=2, max_tokens=70, precision=precision)
    emulation = Emulation(problem, pool_rows=least_pool(problem))
    plans = [rank.plan for rank in emulation.ranks]

    def new_states() -> list[Tensor]:
        sizes = [plan.state.bytes for plan in plans]
        return [torch.full((size,), 0xFF, dtype=torch.uint8) for size in sizes]

    def call(seed: int, states: list[Tensor]) -> list[Tensor]:
        inputs, weights = inputs_of(problem, [70, 33], seed=seed, routing="dropped")
        ys = emulation.forward_all(calls_of(*columns(inputs), weights), states=states)
        for y, expected in zip(ys, reference(problem, inputs, weights), strict=True):
            assert_close(y, expected, relative=TOLERANCE[precision])
        return [state.clone() for state in states]

    first, second = new_states(), new_states()
    left = call(0, first)
    call(1, second)
    rows = forward(problem, *columns(inputs_of(problem, [70, 33], seed=0, routing="dropped")[0]),
                   inputs_of(problem, [70, 33])[1])["rows"]  # fmt: skip
    for rank, (state, before, plan) in enumerate(zip(first, left, plans, strict=True)):
        assert torch.equal(state, before)
        prefix = plan.state["chunk_prefix"].view(state)
        counts = rows[rank].counts  # [C, L]; of the chunks that have tokens
        assert torch.equal(prefix[:, : counts.shape[0] + 1].diff(dim=1).T, counts.int())
        ids = plan.state["route_ids"].view(state)[: counts.shape[0] * 32]
        assert int((ids >= 0).sum()) == rows[rank].token.numel()
    call(1, first)
    assert not all(torch.equal(state, before) for state, before in zip(first, left, strict=True))


def test_fewer_tokens_by_device_count() -> None:
    problem = Problem(64, 48, 4, 2, ep_size=2, max_tokens=64)
    inputs, weights = inputs_of(problem, [50, 40])
    counts = [torch.tensor([17], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)]
    ys = Emulation(problem).forward_all(calls_of(*columns(inputs), weights, counts))
    for i, count in zip(inputs, counts, strict=True):
        i.topk_ids[int(count) :] = -1
    for y, expected, count in zip(ys, reference(problem, inputs, weights), counts, strict=True):
        assert_close(y[: int(count)], expected[: int(count)], relative=TOLERANCE["bf16"])


@pytest.mark.parametrize(("precision", "activation"), VARIANTS)
def test_nan_and_inf_stay_in_their_tokens(precision: str, activation: str) -> None:
    problem = Problem(
        144, 80, 4, 2, ep_size=2, max_tokens=40, precision=precision, activation=activation
    )
    inputs, weights = inputs_of(problem, [40, 9])
    lost = {(0, 3): float("nan"), (0, 17): float("inf"), (1, 8): -float("inf")}
    for (rank, token), value in lost.items():
        inputs[rank].x[token, 5] = value
    ys = Emulation(problem).forward_all(calls_of(*columns(inputs), weights))
    for rank, y in enumerate(ys):
        wanted = torch.zeros(y.shape[0], dtype=torch.bool)
        wanted[[token for r, token in lost if r == rank]] = True
        assert torch.equal(y.isnan().all(-1), wanted)
        assert torch.equal(~y.isfinite().all(-1), wanted)


# --- faults ---


def test_other_configuration_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(64, 48, 4, 2, ep_size=2, max_tokens=32)
    emulation = Emulation(problem)
    fill = arguments.fill_call

    def fill_otherwise(args: Any, *rest: Any) -> None:
        fill(args, *rest)
        if args.rank == 1:
            args.config_hash ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(arguments, "fill_call", fill_otherwise)
        with pytest.raises(RankMismatch):
            check(emulation, [8, 8])
    with pytest.raises(WindowBroken):
        check(emulation, [8, 8])
    emulation.reset()
    check(emulation, [8, 8])


@pytest.mark.parametrize("seed", [0, 1])
def test_absent_rank_is_a_timeout_and_poisons_y(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Rank 1 believes to be at another launch: its flags carry the wrong epoch."""
    problem = Problem(64, 48, 4, 2, ep_size=2, max_tokens=32)
    emulation = Emulation(problem, timeout_s=60)
    emulation.region(1, "epoch")[0] = 5
    inputs, weights = inputs_of(problem, [8, 8])
    with pytest.raises(ProtocolTimeout, match="routes_ready"):
        emulation.forward_all(calls_of(*columns(inputs), weights), seed=seed)
    assert "edge routes_ready" in emulation.report
    emulation.reset()
    check(emulation, [8, 8])


def test_y_of_a_poisoned_launch_alone_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one rank sums go into y, and no flag says which: what was there before must not stay as if it were made."""
    monkeypatch.setattr(emulator, "nan_like", lambda x, dtype: torch.ones_like(x, dtype=dtype))
    problem = Problem(64, 48, 4, 2, max_tokens=70)
    emulation = Emulation(problem)
    inputs, weights = inputs_of(problem, [70])
    emulation.region(0, "window_abort").fill_(1)
    with pytest.raises(MegaMoEError):
        emulation.forward_all(calls_of(*columns(inputs), weights))
    assert bool(emulation.written[0][0].isnan().all())
    emulation.reset()
    check(emulation, [70])


def test_a_host_that_raises_an_abort_cell_ends_the_launch() -> None:
    """What Window.abort() writes: the cell, which ends launches until reset(), and who, which no kernel writes."""
    problem = Problem(64, 48, 4, 2, ep_size=2, max_tokens=32)
    emulation = Emulation(problem)
    inputs, weights = inputs_of(problem, [8, 8])
    emulation.region(0, "window_abort").copy_(torch.tensor([1, 2]))
    with pytest.raises(PeerFault, match="another rank gave up"):
        emulation.forward_all(calls_of(*columns(inputs), weights))
    assert emulation.region(0, "window_abort").tolist() == [1, 2]
    assert emulation.region(1, "window_abort").tolist() == [1, 0]
    emulation.reset()
    check(emulation, [8, 8])


# --- the backend ---


def backend_inputs() -> tuple[Problem, list[Inputs], list[ExpertWeights], list[Tensor]]:
    problem = Problem(64, 48, 4, 2, ep_size=2, max_tokens=32)
    inputs, weights = inputs_of(problem, [20, 9])
    return problem, inputs, weights, reference(problem, inputs, weights)


def test_backend_alone() -> None:
    problem = Problem(64, 48, 4, 2, max_tokens=32)
    inputs, weights = inputs_of(problem, [20])
    backend = EmulateBackend(problem)
    backend.prepare(weights[0])
    out = torch.empty_like(inputs[0].x)
    i = inputs[0]
    y, _ = backend.forward(Call(i.x, i.topk_ids, i.topk_weights, weights[0], out=out))
    assert y is out
    assert_close(y, reference(problem, inputs, weights)[0], relative=TOLERANCE["bf16"])
    backend.close()


def _process_main(rank: int) -> Any:
    import torch.distributed as dist

    from megamoe import Layer

    problem, inputs, weights, _ = backend_inputs()
    i = inputs[rank]
    layer = Layer(replace(problem, rank=rank), dist.group.WORLD, backend="emulate")
    y = layer(i.x, i.topk_ids, i.topk_weights, weights[rank])
    return y.float().numpy()


def test_backend_of_processes() -> None:
    expected = backend_inputs()[3]
    for y, e in zip(launch(_process_main, 2), expected, strict=True):
        assert_close(torch.from_numpy(y), e, relative=TOLERANCE["bf16"])
