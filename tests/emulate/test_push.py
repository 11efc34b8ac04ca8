"""The kernel for few tokens of several ranks: the bits of the ordinary one, whatever the routes are."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flaws import SEEN, names, plant
from torch import Tensor

from megamoe.backends.call import Call
from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem
from megamoe.core.errors import PeerFault, ProtocolTimeout, RankMismatch
from megamoe.formats.quantization import quantize_rows
from megamoe.formats.quantized import QuantizedRows
from megamoe.jit.paths import CSRC
from megamoe.launch import arguments
from megamoe.launch.layout import PUSHED_TOKENS, few_tokens
from megamoe.testing.compare import same_bits
from megamoe.testing.inputs import ROUTINGS, make_inputs, make_weights


def emulation_of(problem: Problem, num_ctas: int = 2, **options: Any) -> Emulation:
    return Emulation(problem, num_ctas=num_ctas, **options)


def calls_of(
    problem: Problem,
    tokens: tuple[int, ...],
    ids: Tensor | None = None,
    quantized: tuple[bool, ...] = (False, True),
    seed: int = 0,
    **options: Any,
) -> list[Call]:
    """Return a call of each rank; x of every second one is in e4m3, unless stated otherwise."""
    calls = []
    for r, count in enumerate(tokens):
        mine = replace(problem, rank=r)
        inputs = make_inputs(mine, count, seed=seed, **options)
        of_x = quantized[r % len(quantized)]
        x = QuantizedRows(*quantize_rows(inputs.x)) if of_x else inputs.x
        topk_ids = inputs.topk_ids if ids is None else ids[:count]
        calls.append(Call(x, topk_ids, inputs.topk_weights, make_weights(mine)))
    return calls


def check(emulation: Emulation, *launches: list[Call], seed: int = 0) -> list[list[Tensor]]:
    """Run the launches by both kernels, in turns; return their y."""
    ranks = range(emulation.problem.ep_size)
    found = []
    for calls in launches:
        expected = emulation.forward_all(calls, seed=seed)
        counted = [vars(emulation.statistics(r)) for r in ranks]
        for r in ranks:
            emulation.region(r, "chunk_prefix").fill_(-7)
        found.append(emulation.forward_all(calls, seed=seed, kind="push"))
        assert all(same_bits(y, e) for y, e in zip(found[-1], expected, strict=True))
        for r in ranks:
            for name, left in vars(emulation.statistics(r)).items():
                assert torch.equal(left, counted[r][name])
            local = emulation.ranks[r].plan.problem.num_local_experts(r)
            for name in ("gemm1_done", "gemm2_done"):
                done = emulation.region(r, name)
                assert not done[len(done) - local :].any()
    return found


@pytest.mark.parametrize("tokens", [(0, 0), (1, 1), (8, 8), (64, 64), (0, 5), (64, 3), (33, 31)])
def test_any_count_of_tokens(tokens: tuple[int, ...]) -> None:
    problem = Problem(272, 144, 8, 3, ep_size=2, max_tokens=64, precision="fp8")
    check(emulation_of(problem, 4), calls_of(problem, tokens))


@pytest.mark.parametrize("tokens", [(8, 0, 3, 64), (64, 64, 64, 64), (1, 1, 1, 1), (0, 0, 0, 7)])
def test_four_ranks(tokens: tuple[int, ...]) -> None:
    problem = Problem(144, 144, 12, 3, ep_size=4, max_tokens=64, precision="fp8")
    check(emulation_of(problem), calls_of(problem, tokens))


def test_eight_ranks_and_uneven_experts() -> None:
    problem = Problem(144, 144, 60, 5, ep_size=8, max_tokens=64, precision="fp8")
    tokens = (32, 0, 1, 8, 31, 2, 16, 32)
    assert few_tokens(problem) == 32
    check(emulation_of(problem), calls_of(problem, tokens, ids_dtype=torch.int32))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing(routing: str) -> None:
    problem = Problem(272, 144, 41, 5, ep_size=2, max_tokens=70, precision="fp8")
    check(emulation_of(problem, 6), calls_of(problem, (64, 9), routing=routing))


@pytest.mark.parametrize("expert", [1, 5])
def test_all_tokens_to_one_expert(expert: int) -> None:
    problem = Problem(256, 144, 6, 2, ep_size=4, max_tokens=64, precision="fp8")
    ids = torch.full((64, 2), expert)
    ids[:, 1] = -1
    check(emulation_of(problem), calls_of(problem, (64, 64, 64, 64), ids))


def test_ids_of_no_expert_and_twice_the_same() -> None:
    problem = Problem(144, 144, 5, 3, ep_size=2, max_tokens=64, precision="fp8")
    ids = torch.tensor(
        [[-1, 2**32 + 1, 5], [-(2**32) + 1, 1, -7], [2**31 + 2, 2**40, 4], [4, 4, 0], [1, 1, 1]]
    ).repeat(5, 1)
    check(emulation_of(problem), calls_of(problem, (25, 13), ids))


def test_launches_one_after_the_other() -> None:
    problem = Problem(144, 144, 7, 2, ep_size=2, max_tokens=64, precision="fp8")
    emulation = emulation_of(problem)
    counts = ((8, 8), (3, 20), (0, 8), (64, 0), (8, 9), (1, 64), (17, 17))
    launches = [calls_of(problem, tokens, seed=s) for s, tokens in enumerate(counts)]
    expected = check(emulation, *launches, seed=1)
    # One behind the other, without an ordinary launch in between.
    for calls, ys in zip(launches, expected, strict=True):
        found = emulation.forward_all(calls, kind="push", seed=2)
        assert all(same_bits(y, e) for y, e in zip(found, ys, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_with_more_tokens(ranks: int) -> None:
    """All ranks take the ordinary kernel's way, and few tokens theirs before and behind it."""
    problem = Problem(144, 144, 12, 3, ep_size=ranks, max_tokens=70, precision="fp8")
    most = few_tokens(problem)
    for seed, counts in enumerate([(70, 3), (8, 65), (5, 5), (70, 70), (most, 0), (0, 65)]):
        check(
            emulation := emulation_of(problem), calls_of(problem, counts * (ranks // 2)), seed=seed
        )
    launches = [
        calls_of(problem, counts * (ranks // 2)) for counts in ((8, 8), (70, 8), (9, 9), (8, 70))
    ]
    expected = [emulation.forward_all(calls) for calls in launches]
    for calls, ys in zip(launches, expected, strict=True):
        found = emulation.forward_all(calls, kind="push", seed=1)
        assert all(same_bits(y, e) for y, e in zip(found, ys, strict=True))


def test_between_launches_that_train() -> None:
    """One window serves all kinds of launches in any order."""
    problem = Problem(144, 144, 5, 2, ep_size=2, max_tokens=64, precision="fp8")
    emulation, calls = emulation_of(problem), calls_of(problem, (9, 40), quantized=(False,))
    masters = [
        call._replace(weights=make_weights(replace(problem, rank=r), quantize=False))
        for r, call in enumerate(calls)
    ]
    dys = [call.x.flip(0) for call in calls]
    expected, states = emulation.train_all(calls)
    gradients = emulation.backward_all(masters, dys, states)
    for seed in range(3):
        ys = emulation.forward_all(calls, kind="push", seed=seed)
        found, states = emulation.train_all(calls, seed=seed)
        ys += found + emulation.forward_all(calls, kind="push")
        assert all(same_bits(y, e) for y, e in zip(ys, expected * 3, strict=True))
        again = emulation.backward_all(masters, dys, states, seed=seed)
        assert all(torch.equal(a.x, b.x) for a, b in zip(again, gradients, strict=True))


def test_a_rank_in_another_kind_of_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a forward that saves is, whatever its tokens are."""
    problem = Problem(144, 144, 12, 3, ep_size=2, max_tokens=64, precision="fp8")
    ordinary = "own_tokens<T>(args) <= own<T>(args).tokens", "args.rank == 0"
    plant(("rows/push.cuh", *ordinary), monkeypatch, tmp_path / "flaw")
    for seed in range(3):
        check(
            emulation_of(problem), calls_of(problem, (8, 9)), calls_of(problem, (0, 3)), seed=seed
        )


def test_a_count_on_the_device() -> None:
    problem = Problem(144, 144, 5, 2, ep_size=2, max_tokens=64, precision="fp8")
    emulation, calls = emulation_of(problem), calls_of(problem, (40, 40))
    for counts in ((0, 7), (40, 100), (1, 0)):
        counted = [
            call._replace(num_tokens_device=torch.tensor([count], dtype=torch.int32))
            for call, count in zip(calls, counts, strict=True)
        ]
        ordinary = emulation.forward_all(counted)
        found = emulation.forward_all(counted, kind="push")
        for count, y, expected in zip(counts, found, ordinary, strict=True):
            assert same_bits(y[:count], expected[:count])


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow)])
def test_random_configurations(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        hidden = draw.randint(1, 40)
        problem = Problem(
            hidden=16 * hidden,
            intermediate=16 * draw.randint(1, hidden),
            num_experts=draw.choice((8, 9, 33, 65)),
            top_k=draw.randint(1, 9),
            ep_size=(ranks := draw.choice((2, 2, 3, 4))),
            max_tokens=130,
            precision="fp8",
            activation=draw.choice(("swiglu", "relu2")),
            bias=draw.random() < 0.5,
        )
        most = few_tokens(problem)
        tokens = tuple(
            draw.choice((0, 8, most, *(draw.randint(0, most) for _ in range(4)), most + 9))
            for _ in range(ranks)
        )
        calls = calls_of(
            problem,
            tokens,
            quantized=tuple(draw.random() < 0.5 for _ in range(ranks)),
            seed=seed,
            routing=draw.choice(ROUTINGS),
            ids_dtype=draw.choice((torch.int32, torch.int64)),
        )
        check(emulation_of(problem, draw.choice((2, 4))), calls, seed=seed)


@pytest.fixture
def pair() -> tuple[Emulation, list[Call]]:
    """Two ranks that wait for a minute at most, and a call of each."""
    problem = Problem(144, 144, 5, 2, ep_size=2, max_tokens=130, precision="fp8")
    return emulation_of(problem, timeout_s=60), calls_of(problem, (8, 8))


def check_after(emulation: Emulation, calls: list[Call]) -> None:
    """All that a rank has said of its tokens is NaN; a reset mends it."""
    assert any(bool(y.isnan().all()) for of_rank in emulation.written for y in of_rank)
    emulation.reset()
    check(emulation, calls)


@pytest.mark.parametrize("tokens", [(8, 8), (8, 70)])
def test_other_configuration_is_a_named_error(
    pair: tuple[Emulation, list[Call]], tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation, calls = pair
    fill = arguments.fill_call

    def fill_otherwise(args: Any, *rest: Any) -> None:
        fill(args, *rest)
        args.config_hash ^= args.rank

    with monkeypatch.context() as patch:
        patch.setattr(arguments, "fill_call", fill_otherwise)
        with pytest.raises(RankMismatch):
            emulation.forward_all(calls_of(emulation.problem, tokens), kind="push")
    check_after(emulation, calls)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_absent_rank_is_a_timeout(pair: tuple[Emulation, list[Call]], seed: int) -> None:
    """Rank 1 believes to be at another launch: its words carry another epoch."""
    emulation, calls = pair
    emulation.region(1, "epoch")[0] = 5
    with pytest.raises(ProtocolTimeout, match="routes_ready"):
        emulation.forward_all(calls, seed=seed, kind="push")
    check_after(emulation, calls)


def test_a_host_that_raises_an_abort_cell_ends_the_launch(
    pair: tuple[Emulation, list[Call]],
) -> None:
    emulation, calls = pair
    emulation.region(0, "window_abort").copy_(torch.tensor([1, 2]))
    with pytest.raises(PeerFault, match="another rank gave up"):
        emulation.forward_all(calls, kind="push")
    assert emulation.region(1, "window_abort").tolist() == [1, 0]
    check_after(emulation, calls)


FAULTS = {
    "x_ready": ("rows/push.cuh", "if (lane == 0) XReady::publish", "if (lane == 99) XReady::publish"),
    "routes_ready": ("rows/push.cuh", "if (token >= tokens ||", "if (token >= tokens - 1 ||"),
    "partials_ready": ("rows/push.cuh", "if (of.ready != nullptr && arch::lane_idx() == 0)", "if (false)"),
}  # fmt: skip


@pytest.mark.parametrize("edge", names(FAULTS))
def test_what_never_comes_is_named(
    edge: str, pair: tuple[Emulation, list[Call]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulation, calls = pair
    with monkeypatch.context() as patch:
        plant(FAULTS[edge], patch, tmp_path / "flaw")
        with pytest.raises(ProtocolTimeout, match=edge):
            emulation.forward_all(calls, kind="push")
    check_after(emulation, calls)


FLAWS = {
    "ids are not awaited": ("rows/push.cuh", "all = all && WordPushed::is_of(found[j], ctx.epoch());", ""),
    "x is not awaited": ("rows/push.cuh", "if (arch::lane_idx() < count) XReady", "if (false) XReady"),
    "partials are not awaited": ("rows/push.cuh", "!owes || PartialsReady::ready(ctx.mem, cell, ctx.epoch())", "true"),
    "experts have no blocks of their own": ("rows/push.cuh", "blocks + behind - own_blocks", "blocks"),
    "rows of one token": ("rows/push.cuh", "args.top_k + (of_lane >> 8)", "args.top_k"),
    "an expert that is named twice": ("rows/push.cuh", "arch::ffs0(arch::match_any(expert))", "lane"),
    "all ranks have as many tokens": ("rows/push.cuh", "push.source[num_tokens + t]", "push.source[of_rank * r + t]"),
    "any route cell is one of an ordinary launch": ("rows/push.cuh", "is_few = count();", "is_few = false;"),
    "no rank is in an ordinary launch": ("rows/push.cuh", "is_few = count();", "count();"),
    "mbarriers of few tokens stay behind": ("kernels/few.cuh", "arch::mbar_inval(bar);", ""),
    "the second id of a word": ("rows/push.cuh", "k + 1 < args.top_k ? topk_id(args, at + 1) : -1", "-1"),
}  # fmt: skip


def in_four_orders() -> None:
    """Compare pushed launches with ordinary ones, whose bits they have."""
    problem = Problem(144, 144, 8, 3, ep_size=2, max_tokens=130, precision="fp8")
    emulation = emulation_of(problem, 4, timeout_s=60)
    counts = ((9, 40), (64, 3), (8, 70), (33, 33), (130, 40))
    launches = [calls_of(problem, tokens, seed=s) for s, tokens in enumerate(counts)]
    expected = [emulation.forward_all(calls) for calls in launches]
    for seed in range(4):
        for calls, ys in zip(launches, expected, strict=True):
            found = emulation.forward_all(calls, kind="push", seed=seed)
            assert all(same_bits(y, e) for y, e in zip(found, ys, strict=True))
    test_ids_of_no_expert_and_twice_the_same()


@pytest.mark.flaws
def test_no_flaw_is_seen_where_none_is() -> None:
    in_four_orders()


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_is_seen(flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path / "flaw")
    with pytest.raises(SEEN):
        in_four_orders()


def test_the_numbers_of_tokens_are_the_kernels() -> None:
    text = (CSRC / "megamoe" / "cta" / "smem.h").read_text()
    assert f"max_pushed_tokens = {PUSHED_TOKENS}," in text
