"""The emulated backward kernel against the oracle: every region that it leaves, and every gradient."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import calls_of
from hypothesis import HealthCheck, given, settings
from layouts import LAYOUTS
from shapes import Case, cases
from torch import Tensor
from training_cases import Call, adding_to, check, judge, least_pool, needing, zeros

from megamoe.backends.call import GradRequest, Needs
from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.launch import layout
from megamoe.testing.compare import assert_close, rounding_step
from megamoe.testing.gradients import GRADIENTS
from megamoe.testing.inputs import OVERLOADED, ROUTINGS

SMALL = {
    "hidden": 144,
    "intermediate": 80,
    "num_experts": 5,
    "top_k": 3,
    "ep_size": 2,
    "max_tokens": 70,
}


QUICK = ("swiglu_oai", "relu2")  # swiglu is in the tests below


@pytest.mark.parametrize(
    "activation",
    [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ACTIVATIONS],
)
def test_every_activation_through_several_launches(activation: str) -> None:
    """Bias, ragged sizes, dropped ids, repeated experts, ranks without tokens, experts and ranks without rows."""
    problem = Problem(272, 144, 5, 3, ep_size=2, max_tokens=70, activation=activation, bias=True)
    emulation = Emulation(problem)
    for seed, (routing, tokens) in enumerate(
        [
            ("uniform", [70, 33]),
            ("duplicates", [1, 70]),
            ("dropped", [0, 64]),
            ("one_expert", [9, 3]),
        ]
    ):
        call = Call.make(problem, tokens, seed=seed, routing=routing, scale=1 + 3 * (seed == 1))
        check(emulation, call, seed=seed)
    grads = check(emulation, Call.make(problem, [0, 0]))
    assert all(g is None or not g.any() for of_rank in grads for g in of_rank)


@pytest.mark.parametrize(
    ("activation", "width"),
    [
        ("swiglu", 400),
        pytest.param("swiglu_oai", 144, marks=pytest.mark.slow),
        pytest.param("relu2", 272, marks=pytest.mark.slow),
    ],
)
def test_fp8(activation: str, width: int) -> None:
    """Saved tokens have scales, all of them are saved; dgu goes on in e4m3, plane by plane, tiles of several halves."""
    problem = Problem(
        272,
        width,
        5,
        3,
        ep_size=2,
        max_tokens=70,
        precision="fp8",
        activation=activation,
        bias=True,
    )
    emulation = Emulation(problem)
    for seed, (routing, tokens) in enumerate([("uniform", [70, 33]), ("dropped", [0, 64])]):
        check(emulation, Call.make(problem, tokens, seed=seed, routing=routing), seed=seed)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_passes_of_wide_experts(precision: str) -> None:
    """recompute has two planes in a tile where gemm1 has one: more units of a block than gemm1, here 2 and 1."""
    problem = Problem(64, 384, 3, 2, ep_size=1, max_tokens=200, precision=precision)
    emulation = Emulation(problem, pool_rows=least_pool(problem))
    call = Call.make(problem, [200])
    check(emulation, call)
    assert emulation.statistics(0).passes > 1


@pytest.mark.parametrize(("intermediate", "fixed"), [(8192, True), (8128, False)])
def test_long_tiles_are_dealt_by_fixed_shares(intermediate: int, fixed: bool) -> None:
    """Of gemm2, from 256 pipeline slots on, here two planes of 128: nobody takes a ticket of it then."""
    problem = Problem(16, intermediate, 3, 2, max_tokens=10)
    emulation = Emulation(problem, num_ctas=4)
    check(emulation, Call.make(problem, [10]), seed=1)
    assert emulation.region(0, "gemm2_done")[:3].tolist() == [1] * 3  # each block's tile, once
    gemm1, gemm2, weights = emulation.region(0, "scheduled").tolist()
    assert (gemm2 == 0) == fixed
    assert min(gemm1, weights) > 0


QUICK_TRAINED = [("bf16", "swiglu"), ("bf16", "relu2")]
EXAMPLES = 200 if os.environ.get("SLOW") == "1" else 10


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(QUICK_TRAINED, (*ROUTINGS, OVERLOADED), tokens=600, experts=200))
def test_any_shape(case: Case) -> None:
    call = Call.make(case.problem, case.tokens, **case.options)
    check(case.emulation(), call, seed=case.options["seed"])


@pytest.mark.parametrize(
    ("precision", "experts", "top_k", "tokens", "routing", "several_passes"),
    [
        ("bf16", 70, 2, [80], "uniform", False),  # in three rounds, of which the last is not full
        ("fp8", 140, 3, [600, 580], "dropped", False),  # 70 local experts, 38 chunks
        ("bf16", 40, 5, [1100], "uniform", True),  # 35 chunks, two blocks of most experts
        ("bf16", 2, 4, [1100], "one_expert", False),  # 35 blocks of one expert
    ],
)
def test_more_than_a_warp_has_lanes_for(
    precision: str, experts: int, top_k: int, tokens: list[int], routing: str, several_passes: bool
) -> None:
    """Local experts, chunks, blocks, blocks of one expert: loops of a warp with two rounds and more."""
    problem = Problem(
        16, 16, experts, top_k, len(tokens), max_tokens=max(tokens), precision=precision
    )
    whole = sum(tokens) * top_k // 128 * 128 + 128 * problem.num_local_experts(0)
    pool_rows = least_pool(problem) if several_passes else whole
    emulation = Emulation(problem, pool_rows=pool_rows, num_ctas=4)
    check(emulation, Call.make(problem, tokens, routing=routing))
    assert (int(emulation.statistics(0).passes) > 1) == several_passes


@pytest.mark.parametrize("num_ctas", [4, 6, 8])
def test_ctas_without_tiles(num_ctas: int) -> None:
    """Their last unit of gemm1 may hold no tile for them; weight tiles everywhere wait until they say so."""
    problem = Problem(144, 80, 1, 1, max_tokens=200, bias=True)
    check(Emulation(problem, num_ctas=num_ctas), Call.make(problem, [200]))


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_few_tokens_move_in_slices(bias: bool) -> None:
    """Gradients of routing weights come with one slice of dx; with biases rows of dy are pulled whole."""
    problem = Problem(2320, 80, 4, 3, ep_size=2, max_tokens=40, bias=bias)
    check(Emulation(problem, num_ctas=16), Call.make(problem, [2, 1]))


@pytest.mark.parametrize(("precision", "activation"), [("bf16", "swiglu_oai"), ("fp8", "swiglu")])
def test_several_passes(precision: str, activation: str) -> None:
    """gu of later passes is computed again; weight gradients of all passes are added."""
    problem = Problem(
        144,
        80,
        4,
        4,
        ep_size=2,
        max_tokens=200,
        precision=precision,
        activation=activation,
        bias=True,
    )
    emulation = Emulation(problem, pool_rows=least_pool(problem))
    for seed, routing in enumerate(["uniform", "one_rank"]):
        check(emulation, Call.make(problem, [200, 130], seed=seed, routing=routing), seed=seed)
        assert max(int(emulation.statistics(r).passes) for r in range(2)) >= 3


@pytest.mark.parametrize("order", [(0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1)])
def test_microbatches_in_flight(order: tuple[int, ...]) -> None:
    """Forward calls of two microbatches, then their backward calls in any order; twice: a graph's replay."""
    problem = Problem(**SMALL, bias=True)
    emulation = Emulation(problem)
    calls = [Call.make(problem, [70, 33], seed=s, routing="dropped") for s in range(2)]
    states: dict[int, list[Tensor]] = {}
    found: dict[int, list[list[Tensor | None]]] = {}
    for step in order:
        if step not in states:
            _, states[step] = calls[step].forward(emulation)
        else:
            found[step] = calls[step].backward(emulation, states[step])
            again = calls[step].backward(emulation, states[step])
            assert_equal(found[step], again)  # the state is not changed: retain_graph
    for s, grads in found.items():
        judge(emulation, calls[s], states[s], grads, regions=False)
    assert len(found) == 2


@pytest.mark.parametrize("into", [False, True])
def test_any_needs(into: bool) -> None:
    """What is wanted does not depend on what else is, and nothing else is returned: a bias without its matrix too."""
    problem = Problem(144, 80, 2, 2, max_tokens=40, bias=True)
    call, emulation = Call.make(problem, [40]), Emulation(problem)
    _, states = call.forward(emulation)
    full = call.backward(emulation, states)[0]
    for bits in range(16):
        needs = [True, True, *(bool(bits >> i & 1) for i in range(4))]
        sums = {}
        if into and needs[4]:
            sums = {"b13": torch.zeros_like(call.masters[0].b13)}
        found = call.backward(emulation, states, [GradRequest(Needs(*needs), sums)])[0]
        for i, (name, need, expected) in enumerate(zip(GRADIENTS, needs, full, strict=True)):
            got = sums["b13"] if i == 4 and sums else found[i]
            assert (got is not None) == need, (name, needs)
            assert got is None or torch.equal(got.reshape(expected.shape), expected), (name, needs)


def assert_equal(a: Any, b: Any, what: Any = "") -> None:
    for r, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
        for name, x, y in zip(GRADIENTS, of_a, of_b, strict=True):
            assert torch.equal(x, y) if y is not None else x is None, (r, name, what)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bits_depend_on_nothing_but_the_inputs(precision: str) -> None:
    problem = Problem(272, 272, 6, 4, ep_size=2, max_tokens=130, bias=True, precision=precision)
    call = Call.make(problem, [130, 57])
    expected, grads = call_forward(problem, call), None
    for num_ctas, step_blocks, seed in ((2, 0, 0), (6, 17, 2), (4, 40, 3)):
        emulation = Emulation(problem, num_ctas=num_ctas, step_blocks=step_blocks)
        ys, states = call.forward(emulation, seed=seed)
        assert all(
            torch.equal(a, b) for a, b in zip(ys, expected, strict=True)
        )  # saving moves none
        found = call.backward(emulation, states, seed=seed)
        grads = grads or found
        assert_equal(found, grads, (num_ctas, step_blocks, seed))


def call_forward(problem: Problem, call: Call) -> list[Tensor]:
    return Emulation(problem).forward_all(calls_of(*call.routed, call.weights))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_dx_does_not_depend_on_passes(precision: str) -> None:
    """Nor do the gradients of the routing weights; weight gradients, new ones here, are rounded once more a pass."""
    problem = Problem(144, 80, 4, 2, ep_size=2, max_tokens=400, precision=precision)
    call, first, least = Call.make(problem, [400, 190]), None, least_pool(problem)
    for pool_rows in (layout.worst_pool_rows(problem), least, least + 128):
        emulation = Emulation(problem, pool_rows=pool_rows)
        _, states = call.forward(emulation)
        found = call.backward(emulation, states)
        first = first or found
        for rank, (of_a, of_b) in enumerate(zip(first, found, strict=True)):
            pairs = list(zip(of_a[:4], of_b[:4], strict=True))
            assert all(torch.equal(a, b) for a, b in pairs[:2]), pool_rows
            passes = int(emulation.statistics(rank).passes)
            assert (passes > 1) == (pool_rows <= least + 128)
            for a, b in pairs[2:]:
                assert_close(b, a, relative=passes * 2**-8, name=f"{pool_rows}, rank {rank}")


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_masters_are_read_and_gradients_written_as_they_lie(name: str) -> None:
    problem = Problem(272, 144, 5, 3, max_tokens=40, bias=True)
    call, emulation = Call.make(problem, [40]), Emulation(problem)
    _, states = call.forward(emulation)
    dense = call.backward(emulation, states)[0]
    strided = replace(call, masters=[LAYOUTS[name](w) for w in call.masters])
    found = strided.backward(emulation, states)[0]
    for gradient, master in zip(
        found[2:4], (strided.masters[0].w13, strided.masters[0].w2), strict=True
    ):
        assert gradient.shape == master.shape
        assert gradient.stride() == torch.empty_like(master).stride()
    for got, expected in zip(found, dense, strict=True):
        assert torch.equal(got.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("w13", "w2", "bias"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, None, None),
    ],
)
def test_accumulation(w13: Any, w2: Any, bias: Any) -> None:
    """fp32: the sum is that of torch, to a rounding; each type may be another, and some may be new tensors."""
    problem = Problem(144, 80, 5, 3, ep_size=2, max_tokens=40, bias=True)
    call, emulation = Call.make(problem, [40, 21]), Emulation(problem)
    _, states = call.forward(emulation)
    plain = call.backward(emulation, states)
    into, before = [], []
    for masters in call.masters:
        types = {"w13": w13, "w2": w2, "b13": bias, "b2": bias}
        given = {n: torch.randn(getattr(masters, n).shape).to(t) for n, t in types.items() if t}
        into.append(given)
        before.append({n: t.clone() for n, t in given.items()})
    found = call.backward(emulation, states, adding_to(into))
    for r, of_rank in enumerate(found):
        assert torch.equal(of_rank[0], plain[r][0])
        for name, got, single in zip(
            ("w13", "w2", "b13", "b2"), of_rank[2:], plain[r][2:], strict=True
        ):
            assert (got is None) == (name in into[r])
            if got is not None:
                assert torch.equal(got, single)
                continue
            got, old = into[r][name], before[r][name].double()
            step = rounding_step(torch.maximum(single.abs(), old.abs()) * 2, got.dtype)
            step = step + rounding_step(single, single.dtype)  # the plain one's own
            assert bool(((old + single.double() - got.double()).abs() <= step).all()), (r, name)
            assert bool((got != before[r][name]).any())


def test_gradients_that_nobody_needs() -> None:
    problem = Problem(**SMALL, bias=True)
    call, emulation = Call.make(problem, [70, 33]), Emulation(problem)
    _, states = call.forward(emulation)
    every = call.backward(emulation, states)
    for needs in (
        [(True, True, False, False, False, False), (True,) * 6],
        [(False, False, False, True, True, False), (False, True, True, False, False, True)],
    ):
        found = call.backward(emulation, states, needing(*needs))
        for r, of_rank in enumerate(found):
            for got, expected, need in zip(of_rank, every[r], needs[r], strict=True):
                assert (got is not None) == need
                assert got is None or torch.equal(got, expected)


@pytest.mark.parametrize("seed", [1, 2])
def test_weights_alone(seed: int) -> None:
    """The same bits, between other launches, in one pass and in several; no row of dx is computed, reduced or sent."""
    problem = Problem(144, 80, 4, 4, ep_size=2, max_tokens=200, bias=True)
    pool_rows = least_pool(problem) if seed == 1 else None
    emulation = Emulation(problem, pool_rows=pool_rows)
    calls = [Call.make(problem, [200, 130], seed=s, routing="dropped") for s in (seed, 9)]
    states = [call.forward(emulation, seed=seed)[1] for call in calls]
    assert (int(emulation.statistics(0).passes) > 1) == (seed == 1)
    full = [call.backward(emulation, s) for call, s in zip(calls, states, strict=True)]
    left = [emulation.region(r, n) for r in range(2) for n in ("dx_rows", "window_partials")]
    for region in left:
        region.fill_(7)
    only = [GradRequest(Needs(x=False, topk_weights=False), only_weights=True)] * 2
    for order in (0, 1):
        found = calls[order].backward(emulation, states[order], only, seed=seed)
        assert_equal(found, [[None, None, *of_rank[2:]] for of_rank in full[order]])
    assert all(bool((region == 7).all()) for region in left)
    assert_equal(calls[0].backward(emulation, states[0], seed=seed), full[0])


def test_fewer_tokens_by_device_count() -> None:
    """Gradients of what lies behind the count are zero, as that was not used."""
    problem = Problem(64, 48, 4, 2, ep_size=2, max_tokens=64)
    call = Call.make(problem, [50, 40])
    counts = [torch.tensor([17], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)]
    emulation = Emulation(problem)
    _, states = call.forward(emulation, counts)
    found = call.backward(emulation, states, counts=counts)
    for i, count in zip(call.inputs, counts, strict=True):
        i.topk_ids[int(count) :] = -1
    _, states = call.forward(emulation)
    expected = call.backward(emulation, states)
    assert_equal(found, expected)
    assert not found[1][0].any()


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_ranks_and_sixteen_routes(seed: int) -> None:
    """As many ranks as there may be; E does not divide over them; a rank without tokens; saved tokens that moved."""
    problem = Problem(64, 48, 19, 16, ep_size=8, max_tokens=40)
    emulation = Emulation(problem, pool_rows=least_pool(problem) if seed else None)
    call = Call.make(problem, [40, 0, 7, 33, 1, 40, 16, 5], seed=seed, routing="dropped")
    _, states = call.forward(emulation, seed=seed)
    moved = [torch.empty_like(s).copy_(s) for s in states]
    for s in states:
        s.fill_(0xFF)
    into = [{"w13": zeros(w.w13), "w2": zeros(w.w2)} for w in call.masters]
    grads = call.backward(emulation, moved, adding_to(into), seed=seed)
    for of_rank, sums in zip(grads, into, strict=True):
        of_rank[2:4] = sums["w13"], sums["w2"]
    judge(emulation, call, moved, grads)


def test_nan_stays_in_its_token_and_its_experts() -> None:
    """In dy: rows of zeros and rows of other experts beside it in memory must not spread it."""
    problem = Problem(144, 80, 6, 2, ep_size=2, max_tokens=40, bias=True)
    call, emulation = Call.make(problem, [40, 9]), Emulation(problem)
    lost = {(0, 3): float("nan"), (1, 8): float("inf")}
    for (rank, token), value in lost.items():
        call.dys[rank][token, 5] = value
        call.inputs[rank].topk_ids[token] = torch.tensor([1, 4])  # an expert of each rank
    _, states = call.forward(emulation)
    grads = call.backward(emulation, states)
    for rank, (dx, d_weights, *of_experts) in enumerate(grads):
        wanted = torch.zeros(dx.shape[0], dtype=torch.bool)
        wanted[[token for r, token in lost if r == rank]] = True
        assert torch.equal(~dx.isfinite().all(1), wanted)
        assert torch.equal(~d_weights.isfinite().all(1), wanted)
        for gradient in of_experts:
            finite = gradient.isfinite().flatten(1).all(1).tolist()
            assert finite == [True, False, True]
