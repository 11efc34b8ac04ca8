"""Weight gradients of several backward passes in one launch, emulated, against the passes one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from flaws import Flaw, names, plant
from torch import Tensor
from training_cases import Call, adding_to, least_pool, zeros

from megamoe.backends.call import Gradients, GradRequest, Needs, StashedRows
from megamoe.backends.emulate.emulation import Emulation, stashed_gradients
from megamoe.backends.emulate.memory import aligned_zeros
from megamoe.core.config import Problem
from megamoe.core.errors import WorkspaceTooSmall
from megamoe.launch import layout
from megamoe.testing import make_weights

WEIGHTS = ("w13", "w2", "b13", "b2")
OF_WEIGHTS = Needs(x=False, topk_weights=False)
E4M3: dict[str, object] = {"precision": "fp8", "weight_gradients": "e4m3"}
SHAPE = {"num_experts": 5, "top_k": 3, "max_tokens": 70, "bias": True}
# Passes of two ranks: expert 0 has all rows of one, a rank has no tokens in others, and in one nobody has.
PASSES = (("uniform", [70, 33]), ("one_expert", [9, 3]), ("uniform", [0, 0]), ("dropped", [0, 64]))


def keep(
    emulation: Emulation, call: Call, seed: int = 0
) -> tuple[list[StashedRows], list[dict[str, Tensor]], list[list[Tensor | None]]]:
    """Run both launches; return by rank what a pass keeps, its gradients in fp32, and all of its gradients."""
    kept = [StashedRows(aligned_zeros(r.plan.stash.bytes).fill_(0xFF)) for r in emulation.ranks]
    _, states = call.forward(emulation, seed=seed)
    sums = [{"w13": zeros(w.w13), "w2": zeros(w.w2)} for w in call.masters]
    whole = call.backward(emulation, states, adding_to(sums), seed=seed)
    wanted = [
        GradRequest(Needs(True, True, False, False, False, False), stash=rows) for rows in kept
    ]
    found = call.backward(emulation, states, wanted, seed=seed)
    for made, expected in zip(found, whole, strict=True):
        for mine, theirs in zip(made[:2], expected[:2], strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)
        assert made[2:] == [None] * 4
    for of_rank, made in zip(sums, whole, strict=True):
        of_rank |= {n: t for n, t in zip(WEIGHTS[2:], made[4:], strict=True) if t is not None}
    return kept, sums, whole


def make(
    emulation: Emulation, call: Call, rank: int, kept: Sequence[StashedRows], **options: int
) -> dict[str, Tensor]:
    """Return the gradients of a rank, w13's and w2's added to fp32 zeros."""
    master = call.masters[rank]
    sums = {"w13": zeros(master.w13), "w2": zeros(master.w2)}
    plan, wanted = emulation.ranks[rank].plan, GradRequest(OF_WEIGHTS, sums)
    found = stashed_gradients(plan, master, kept, wanted, **options)
    return sums | {n: getattr(found, n) for n in WEIGHTS[2:] if getattr(found, n) is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Allows for another order of fp32 sums."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        step = 2e-6 * float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(found[name], value, rtol=2e-6, atol=step, msg=name)


def problem_of(ranks: int = 2, **options: object) -> Problem:
    return Problem(**{"hidden": 272, "intermediate": 144, "ep_size": ranks, **SHAPE, **options})


def emulation_of(options: dict[str, object]) -> Emulation:
    of_problem = {name: value for name, value in options.items() if name != "weight_gradients"}
    products = str(options.get("weight_gradients", "bf16"))
    return Emulation(problem_of(**of_problem), weight_gradients=products)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"precision": "fp8"}, {"activation": "relu2", "bias": False}, {"ranks": 1}),
        {"num_experts": 1, "top_k": 1},
        E4M3,
        E4M3 | {"activation": "relu2", "ranks": 1},
    ],
    ids=["bf16", "fp8", "relu2", "alone", "a rank without experts", "e4m3", "e4m3, relu2, alone"],
)
def test_passes_at_once(options: dict[str, object]) -> None:
    """Each alone has the bits of the fused weight tiles; all together are the sum, with equal bits in every run."""
    emulation = emulation_of(options)
    problem = emulation.problem
    calls = [
        Call.make(problem, tokens[: problem.ep_size], seed=s, routing=routing)
        for s, (routing, tokens) in enumerate(PASSES)
    ]
    passes = [keep(emulation, call, seed) for seed, call in enumerate(calls)]
    for rank in range(problem.ep_size):
        for call, (kept, sums, _) in zip(calls, passes, strict=True):
            found = make(emulation, call, rank, [kept[rank]])
            assert all(torch.equal(found[n], value) for n, value in sums[rank].items())
        every = [kept[rank] for kept, *_ in passes]
        found = make(emulation, calls[0], rank, every, num_ctas=4)
        expected = {n: sum(sums[rank][n] for _, sums, _ in passes) for n in found}
        if problem.num_local_experts(rank):
            assert expected["w13"].abs().max() > 0
        assert_close(found, expected)
        again = make(emulation, calls[0], rank, every, seed=7)
        assert all(torch.equal(again[n], value) for n, value in found.items())


@pytest.mark.parametrize("options", [{}, E4M3], ids=["bf16", "e4m3"])
def test_bf16_that_is_written_and_experts_without_rows(options: dict[str, object]) -> None:
    """What is not added is written, zeros too, into memory that may hold anything; only what is needed is made."""
    emulation = emulation_of(options)
    problem = emulation.problem
    calls = [Call.make(problem, [9, 3], seed=s, routing="one_expert") for s in range(2)]
    passes = [keep(emulation, call) for call in calls]
    idle = {}
    for rank, master in enumerate(calls[0].masters):
        plan, every = emulation.ranks[rank].plan, [kept[rank] for kept, *_ in passes]
        found = stashed_gradients(plan, master, every, GradRequest(OF_WEIGHTS))
        fp32 = make(emulation, calls[0], rank, every)
        for name in WEIGHTS:
            got = getattr(found, name)
            assert torch.equal(got, fp32[name].to(got.dtype)), name
            idle[rank, name] = (got.flatten(1) == 0).all(1).tolist()
        part = GradRequest(Needs(False, False, False, True, False, True))
        only: Gradients = stashed_gradients(plan, master, every, part)
        assert only.w13 is None
        assert only.b13 is None
        assert torch.equal(only.w2, found.w2)
        assert torch.equal(only.b2, found.b2)
    for name in WEIGHTS:  # one expert has all rows
        assert sum(sum(not zero for zero in idle[r, name]) for r in range(2)) == 1


def test_a_pass_that_filled_its_pool_twice_is_named() -> None:
    """Rows of its first filling are gone: every gradient is NaN, and the pass is named."""
    problem = problem_of(top_k=4, max_tokens=200)
    emulation = Emulation(problem, pool_rows=least_pool(problem))
    few, many = (Call.make(problem, tokens, routing="uniform") for tokens in ([9, 3], [200, 130]))
    passes = [keep(emulation, call)[0] for call in (few, many)]
    assert int(emulation.statistics(0).passes) > 1
    plan, master = emulation.ranks[0].plan, few.masters[0]
    sums = {"w13": zeros(master.w13), "w2": zeros(master.w2)}
    with pytest.raises(WorkspaceTooSmall, match="not all rows of pass 1 .*pool_rows=") as caught:
        stashed_gradients(plan, master, [kept[0] for kept in passes], GradRequest(OF_WEIGHTS, sums))
    assert f"pool_rows={plan.pool_rows}" in str(caught.value)
    with_rows = sums["w13"].isnan().flatten(1).all(1)
    assert with_rows.all()
    assert sums["w2"].isnan().all()
    assert not any(t.isnan().any() for t in make(emulation, few, 0, [passes[0][0]]).values())


def test_how_many_passes_fit() -> None:
    """The table of as many as a launch takes, and no more, has room."""
    of_dsv3 = replace(problem_of(), num_experts=256, ep_size=4)
    assert layout.max_stashed_passes(of_dsv3) == 8
    assert layout.max_stashed_passes(replace(of_dsv3, num_experts=383, ep_size=1)) == 8
    assert layout.max_stashed_passes(replace(of_dsv3, num_experts=384, ep_size=1)) == 7
    problem = Problem(64, 48, 1023, 2, max_tokens=64, activation="relu2")
    assert layout.max_stashed_passes(problem) == 3
    emulation, weights = Emulation(problem), make_weights(problem, quantize=False)
    calls = [Call.make(problem, [64], seed=seed) for seed in range(3)]
    passes = [keep(emulation, call) for call in calls]
    found = make(emulation, calls[0], 0, [kept[0] for kept, *_ in passes])
    assert weights.w13.shape == found["w13"].shape
    assert_close(found, {n: sum(sums[0][n] for _, sums, _ in passes) for n in ("w13", "w2")})


BLOCKS, OPERANDS, TABLE = "cta/blocks.cuh", "gemm/operands.cuh", "rows/kept.cuh"
FLAWS: dict[str, Flaw] = {
    "the half of a last block that is not there is read": (TABLE, "<< 1 | half", "<< 1"),
    "rows of another pass": (BLOCKS, "entry_ += stride_;", "entry_ += 0 * stride_;"),
    "maps of another pass": (BLOCKS, "return map + pass *", "return map + 0 *"),
    "weights of another pass": (BLOCKS, "weights.first[weights.rows.pass]", "weights.first[0]"),
    "slots of a pass from its second on": (BLOCKS, "+ slot - begin_)", "+ slot)"),
    "e4m3: A's scales of another pass": (OPERANDS, "passes[pass].a_scale", "passes[0].a_scale"),
    "e4m3: B's scales of another pass": (OPERANDS, "passes[pass].b_scale", "passes[0].b_scale"),
    "e4m3: scales of an expert without rows": (
        OPERANDS,
        "row < 0 ? kept.zeros",
        "row < -1 ? kept.zeros",
    ),
    "lost rows are not seen": (TABLE, "if (rows <= args.pool_rows) continue;", "continue;"),
    "lost rows spoil nothing": (TABLE, "table.lost = lost ? 1 : 0;", "table.lost = 0;"),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_flaws_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flaw: str) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path)
    options = E4M3 if flaw.startswith("e4m3") else {}
    run = partial(test_passes_at_once, options)
    if flaw.startswith("lost"):
        run = test_a_pass_that_filled_its_pool_twice_is_named
    elif "without rows" in flaw:
        run = partial(test_bf16_that_is_written_and_experts_without_rows, options)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run()
