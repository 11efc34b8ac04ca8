"""Weight gradients in e4m3, emulated: against the oracle with the same roundings, and beside those of bf16 products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flaws import SEEN, Flaw, names, plant
from torch import Tensor
from training_cases import Call, adding_to, check, judge, least_pool, zeros

from megamoe.backends.call import GradRequest, Needs
from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.core.errors import ConfigError
from megamoe.jit.source import Variant, variants
from megamoe.testing.compare import compare, rounding_step

SMALL = {"num_experts": 5, "top_k": 3, "ep_size": 2, "max_tokens": 70, "precision": "fp8"}


def emulation_of(problem: Problem, **options: Any) -> Emulation:
    return Emulation(problem, weight_gradients="e4m3", **options)


@pytest.mark.parametrize(
    "activation",
    [
        a if a in ("swiglu", "relu2") else pytest.param(a, marks=pytest.mark.slow)
        for a in ACTIVATIONS
    ],
)
def test_every_region_and_gradient(activation: str) -> None:
    """Biases, ragged sizes, tiles of several halves, dropped ids, experts and ranks without rows, two ranks."""
    problem = Problem(272, 400, **SMALL, activation=activation, bias=True)
    emulation = emulation_of(problem)
    for seed, (routing, tokens) in enumerate([("uniform", [70, 33]), ("dropped", [0, 64])]):
        check(emulation, Call.make(problem, tokens, seed=seed, routing=routing), seed=seed)
    grads = check(emulation, Call.make(problem, [0, 0]))
    assert all(g is None or not g.any() for of_rank in grads for g in of_rank)


def test_several_passes() -> None:
    """Pre-activations are made again; blocks of later passes hold rows of other experts where those of earlier did."""
    problem = Problem(144, 80, 4, 4, ep_size=2, max_tokens=200, precision="fp8", bias=True)
    emulation = emulation_of(problem, pool_rows=least_pool(problem))
    for seed, routing in enumerate(["uniform", "one_rank"]):
        check(emulation, Call.make(problem, [200, 130], seed=seed, routing=routing), seed=seed)
        assert max(int(emulation.statistics(r).passes) for r in range(2)) >= 3


def test_beside_bf16_products() -> None:
    """dx and the gradients of routing weights have the same bits; each rounding to e4m3 is 2.6e-2 of the others."""
    problem = Problem(272, 144, **SMALL, bias=True)
    call = Call.make(problem, [70, 33])
    found: dict[str, list[list[Tensor | None]]] = {}
    for products in ("bf16", "e4m3"):
        emulation = Emulation(problem, weight_gradients=products)
        _, states = call.forward(emulation)
        found[products] = call.backward(emulation, states)
    for ours, theirs in zip(found["e4m3"], found["bf16"], strict=True):
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)
        for a, b in zip(ours[2:], theirs[2:], strict=True):
            assert a is not None
            assert b is not None
            assert 2.0e-2 < compare(a, b).relative < 4.2e-2


def test_bits_depend_on_nothing_but_the_inputs() -> None:
    problem = Problem(272, 272, 6, 4, ep_size=2, max_tokens=130, bias=True, precision="fp8")
    call, first = Call.make(problem, [130, 57]), None
    for num_ctas, step_blocks, seed in ((2, 0, 0), (6, 17, 2), (4, 0, 4)):
        emulation = emulation_of(problem, num_ctas=num_ctas, step_blocks=step_blocks)
        _, states = call.forward(emulation, seed=seed)
        grads = call.backward(emulation, states, seed=seed)
        first = first or grads
        for of_a, of_b in zip(grads, first, strict=True):
            for a, b in zip(of_a, of_b, strict=True):
                assert a is not None
                assert b is not None
                assert torch.equal(a, b)


def test_added_to_fp32_and_alone() -> None:
    """main_grad, and a launch of weight gradients alone, which delay_wgrad=True makes: the same sums."""
    problem = Problem(144, 80, **SMALL, bias=True)
    call, emulation = Call.make(problem, [70, 33]), emulation_of(problem)
    _, states = call.forward(emulation)
    plain = call.backward(emulation, states)
    into = [{n: torch.randn(t.shape) for n, t in w.named().items()} for w in call.masters]
    before = [{n: t.clone() for n, t in sums.items()} for sums in into]
    call.backward(emulation, states, adding_to(into))
    only = [GradRequest(Needs(x=False, topk_weights=False), only_weights=True)] * 2
    alone = call.backward(emulation, states, only)
    for r, of_rank in enumerate(plain):
        assert alone[r][:2] == [None, None]
        for name, got, single in zip(
            ("w13", "w2", "b13", "b2"), alone[r][2:], of_rank[2:], strict=True
        ):
            assert got is not None
            assert single is not None
            assert torch.equal(got, single)
            sums, old = into[r][name], before[r][name]
            step = rounding_step(torch.maximum(single.abs(), old.abs()) * 2, torch.float32)
            step = step + rounding_step(single, single.dtype)
            assert bool(((old + single.double() - sums.double()).abs() <= step).all()), (r, name)


def test_channels_apart_in_size() -> None:
    """A channel of dgu that is small beside its block keeps its bits: it has a scale of its own."""
    problem = Problem(128, 256, 2, 1, max_tokens=100, precision="fp8")
    call = Call.make(problem, [100])
    master = call.masters[0]
    small = 2.0**-12
    w2 = master.w2.clone()
    w2[:, :, 3] *= small
    call = replace(call, masters=[replace(master, w2=w2)])
    emulation = emulation_of(problem)
    _, states = call.forward(emulation)
    got = [{"w13": zeros(master.w13), "w2": zeros(master.w2)}]
    call.backward(emulation, states, adding_to(got))
    other = Emulation(problem)
    _, states = call.forward(other)
    want = [{"w13": zeros(master.w13), "w2": zeros(master.w2)}]
    call.backward(other, states, adding_to(want))
    dw13, exact = got[0]["w13"][:, 3], want[0]["w13"][:, 3]
    assert 0 < float(exact.abs().max()) < 1e-2 * float(want[0]["w13"].abs().max())
    assert compare(dw13, exact).relative < 5e-2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_lost_token_is_seen_in_its_experts(value: float) -> None:
    """dx and routing weights of other tokens, and gradients of other experts, keep their bits."""
    problem = Problem(144, 80, 6, 2, ep_size=2, max_tokens=40, bias=True, precision="fp8")
    call = Call.make(problem, [40, 9])
    call.dys[0][3, 5] = value
    call.inputs[0].topk_ids[3] = torch.tensor([1, 4])  # an expert of each rank
    found = []
    for products in ("bf16", "e4m3"):
        emulation = Emulation(problem, weight_gradients=products)
        _, states = call.forward(emulation)
        found.append(call.backward(emulation, states))
    for theirs, ours in zip(*found, strict=True):
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            assert a is not None
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        for gradient in ours[2:]:
            assert gradient is not None
            assert gradient.isfinite().flatten(1).all(1).tolist() == [True, False, True]


def test_who_has_such_kernels() -> None:
    assert {v.precision for v in variants() if v.weight_gradients == "e4m3"} == {"fp8"}
    assert {v.kernel for v in variants() if v.weight_gradients == "e4m3"} == {"backward"}
    assert str(Variant("fp8", "swiglu", kernel="backward", weight_gradients="e4m3")) == (
        "backward-fp8-swiglu-e4m3-weights"
    )
    for precision, kernel in (("bf16", "backward"), ("fp8", "train"), ("fp8", "forward")):
        with pytest.raises(ConfigError, match=f"variant is .*{precision}-swiglu-e4m3-weights"):
            Variant(precision, "swiglu", kernel=kernel, weight_gradients="e4m3")


EPILOGUE, ROWS = "epilogue/transposed_gradient.cuh", "rows/transpose.cuh"
BIAS, GEMM, OPERANDS = "gemm/bias_gradient.cuh", "gemm/gemm.cuh", "gemm/operands.cuh"
UP_TO_128 = "T::WeightTiles::transposed ? T::Tiling::rows : warpgroup_rows"
FLAWS: dict[str, Flaw] = {
    "rows behind the last are not zeros": (
        EPILOGUE, "if (arch::ballot(s.mask(1) == 0) != 0)", "if (false)"
    ),
    "a column's scale is that of its pair's first": (EPILOGUE, "of_half % 2 == 0 ?", "true ?"),
    "a column's scale is that of one warp's rows": (
        EPILOGUE, "arch::larger_u16x2(m, of_warp[plane][of_half / 2])", "of_warp[plane][of_half / 2]"
    ),
    "planes of dgu change places": (
        EPILOGUE, "int plane = i > 2 ? 1 : 0;", "int plane = i > 2 ? 0 : 1;"
    ),
    "rows in another order than the epilogue's": (ROWS, "j / 2 + j % 2 * 8", "j % 2 + j / 2 * 8"),
    "x of another token": (ROWS, "row_tokens[at]", "row_tokens[block * T::Tiling::rows]"),
    "scales of another row": (ROWS, "rows.at[j]} * stride", "rows.at[0]} * stride"),
    "dy is not awaited": (ROWS, "if (block != awaited) {", "if (false) {"),
    "blocks are filled up to 64 rows": (OPERANDS, UP_TO_128, "warpgroup_rows"),
    "columns of a plane are not rounded up": (
        GEMM, "padded_rows(gemm_of<T>(args, id).m, scale_group)", "gemm_of<T>(args, id).m"
    ),
    "a bias' rows in the order of memory": (
        BIAS, "int of_16 = 2 * w + j / 2 + j % 2 * 8;", "int of_16 = 4 * w + j;"
    ),
    "weights of a bias' first slot in all": ("cta/blocks.cuh", "weights += block_rows;", "weights += 0;"),
}  # fmt: skip


def trained(seed: int) -> None:
    """Each expert has a block of 128 rows, and one of fewer than 64."""
    problem = Problem(144, 144, 3, 2, max_tokens=250, precision="fp8", bias=True)
    call, emulation = Call.make(problem, [250], seed=seed), emulation_of(problem)
    _, states = call.forward(emulation, seed=seed)
    judge(emulation, call, states, call.backward(emulation, states, seed=seed))


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_flaws_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flaw: str) -> None:
    plant(FLAWS[flaw], monkeypatch, tmp_path)
    with pytest.raises(SEEN):
        trained(seed=3)
