"""The kernel for few tokens of one rank: the bits of the ordinary one, whatever the routes are."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from flaws import SEEN, names, plant
from torch import Tensor

from megamoe.backends.call import Call
from megamoe.backends.emulate import emulation as emulator
from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.select import make_backend
from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.core.errors import MegaMoEError
from megamoe.formats.quantization import quantize_rows
from megamoe.formats.quantized import QuantizedRows
from megamoe.jit.paths import CSRC
from megamoe.launch.layout import FEW_TOKENS, few_kernel, min_pool_rows
from megamoe.testing.compare import same_bits
from megamoe.testing.inputs import ROUTINGS, make_inputs, make_weights


def backend_of(problem: Problem, **options: object) -> Any:
    return make_backend("emulate", problem, device="cpu", **options)


def check(problem: Problem, call: Call, num_ctas: int = 2, seed: int = 0, **options: Any) -> Tensor:
    """Run a call by both kernels; return y."""
    emulation = Emulation(problem, num_ctas=num_ctas, **options)
    (expected,) = emulation.forward_all([call], seed=seed)
    behind = emulation.problem.num_local_experts(0)
    cells = [emulation.region(0, name)[-behind:] for name in ("gemm1_done", "gemm2_done")]
    counted = vars(emulation.statistics(0))
    # The second launch meets what the first one left.
    for _ in range(2):
        emulation.region(0, "chunk_prefix").fill_(-7)
        (found,) = emulation.forward_all([call], seed=seed, kind="few")
        assert same_bits(found, expected)
        assert not any(cell.any() for cell in cells)
        for name, left in vars(emulation.statistics(0)).items():
            assert torch.equal(left, counted[name])
    return found


def call_of(
    problem: Problem,
    tokens: int,
    ids: Tensor | None = None,
    quantized: bool = False,
    **options: object,
) -> Call:
    inputs = make_inputs(problem, tokens, **options)
    x = QuantizedRows(*quantize_rows(inputs.x)) if quantized else inputs.x
    ids = inputs.topk_ids if ids is None else ids
    return Call(x, ids, inputs.topk_weights, make_weights(problem))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 8, 16, 17, 32, 33, 63, 64])
def test_any_count_of_tokens(tokens: int, quantized: bool) -> None:
    problem = Problem(272, 400, 6, 3, max_tokens=64, precision="fp8")
    y = check(problem, call_of(problem, tokens, quantized=quantized), 4)
    assert bool(y.any(1).all())


@pytest.mark.parametrize(
    ("tokens", "quantized"),
    [(0, False), (1, True), (8, False), (17, True), (33, False), (64, True), (64, False)],
)
def test_packed_weights(tokens: int, quantized: bool) -> None:
    """The last slot of K has one step of gemm1 (416 columns), and two of gemm2 (256 and 288)."""
    for sizes, options in (((416, 256), {}), ((160, 288), {"activation": "relu2", "bias": True})):
        problem = Problem(*sizes, 6, 3, max_tokens=64, precision="fp8xmxfp4", **options)
        check(problem, call_of(problem, tokens, quantized=quantized), 4)


@pytest.mark.parametrize("tokens", [5, 64])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing(routing: str, tokens: int) -> None:
    problem = Problem(272, 144, 40, 5, max_tokens=70, precision="fp8")
    check(problem, call_of(problem, tokens, routing=routing), 6)


@pytest.mark.parametrize("tokens", [31, 64])
def test_all_tokens_to_one_expert(tokens: int) -> None:
    problem = Problem(256, 272, 3, 2, max_tokens=64, precision="fp8")
    ids = torch.full((tokens, 2), 1)
    ids[:, 1] = -1
    check(problem, call_of(problem, tokens, ids))


def test_ids_of_no_expert() -> None:
    problem = Problem(144, 144, 5, 3, max_tokens=64, precision="fp8")
    ids = torch.tensor([[-1, 2**32 + 1, 5], [-(2**32) + 1, 1, -7], [2**31 + 2, 2**40, 4]]).repeat(
        5, 1
    )
    check(problem, call_of(problem, 15, ids))


def test_a_count_on_the_device() -> None:
    problem = Problem(144, 144, 5, 2, max_tokens=64, precision="fp8")
    call = call_of(problem, 40)
    for count in (0, 7, 40, 100):
        counted = call._replace(num_tokens_device=torch.tensor([count], dtype=torch.int32))
        ys = Emulation(problem).forward_all([counted])[0], backend_of(problem).forward(counted)[0]
        assert same_bits(*(y[:count] for y in ys))


@pytest.mark.parametrize("few", [True, False])
def test_few_tokens_that_save_nothing_take_it(few: bool) -> None:
    problem = Problem(144, 144, 5, 2, max_tokens=65, precision="fp8")
    backend, kinds = backend_of(problem, few=few), []
    forward_all = backend.emulation.forward_all

    def seen(calls: list[Call], **options: Any) -> list[Tensor]:
        kinds.append(options["kind"])
        return forward_all(calls, **options)

    backend.emulation.forward_all = seen
    first = "few" if few else "forward"
    for tokens, keep, kind in ((64, False, first), (65, False, "forward"), (64, True, "train")):
        y = backend.forward(call_of(problem, tokens), keep)[0]
        assert (len(y), kinds.pop()) == (tokens, kind)
        assert int(backend.statistics().tokens_per_expert.sum()) == 2 * tokens


@pytest.mark.parametrize(
    "changed", [{"precision": "bf16"}, {"precision": "fp8_channel"}, {"intermediate": 304}]
)
def test_a_problem_that_it_cannot_run(changed: dict[str, Any]) -> None:
    problem = Problem(144, 288, 4, 2, max_tokens=8, precision="fp8")
    assert few_kernel(problem, 512) == "few"
    other = replace(problem, **changed)
    assert few_kernel(other, 512) == ""
    backend, call = backend_of(other), call_of(other, 8)
    assert same_bits(backend.forward(call)[0], Emulation(other).forward_all([call])[0])


def test_a_token_alone_has_the_bits_it_has_among_many() -> None:
    problem = Problem(272, 400, 6, 3, max_tokens=300, precision="fp8")
    call = call_of(problem, 300)
    many = backend_of(problem).forward(call)[0]
    for tokens in ([0], [257], list(range(40, 104))):
        part = call._replace(
            x=call.x[tokens], topk_ids=call.topk_ids[tokens], topk_weights=call.topk_weights[tokens]
        )
        assert same_bits(check(problem, part, 4), many[tokens])


def test_passes_of_a_small_pool() -> None:
    """The ordinary kernel takes two passes, with the bits and the statistics of this one."""
    problem = Problem(144, 144, 2, 8, max_tokens=64, precision="fp8")
    check(problem, call_of(problem, 64), pool_rows=min_pool_rows(problem))


def test_the_number_of_tokens_is_the_kernels() -> None:
    text = (CSRC / "megamoe" / "cta" / "smem.h").read_text()
    assert f"constexpr int max_few_tokens = {FEW_TOKENS};" in text


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 28), marks=pytest.mark.slow)])
def test_random_configurations(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        tokens = draw.randint(0, 64)
        problem = Problem(
            hidden=16 * (hidden := draw.randint(1, 40)),
            intermediate=16 * draw.randint(1, min(40, 2 * hidden)),
            num_experts=draw.choice((1, 2, 7, 33, 65)),
            top_k=draw.randint(1, 9),
            max_tokens=64,
            precision="fp8",
            activation=draw.choice(sorted(ACTIVATIONS)),
            bias=draw.random() < 0.5,
        )
        options = {
            "routing": draw.choice(ROUTINGS),
            "seed": seed,
            "ids_dtype": draw.choice((torch.int32, torch.int64)),
        }
        call = call_of(problem, tokens, quantized=draw.random() < 0.5, **options)
        check(problem, call, draw.choice((2, 4, 6)), seed)


FAULTS = {
    "x_ready": ("rows/few.cuh", "        announce_x(ctx);\n", ""),
    "h_ready": (
        "rows/few.cuh",
        "lane == 0 && next.is_last)",
        "lane == 0 && next.is_last && !is_h)",
    ),
    "y_rows_ready": (
        "rows/few.cuh",
        "lane == 0 && next.is_last)",
        "lane == 0 && next.is_last && is_h)",
    ),
}


@pytest.mark.parametrize("edge", [*names(FAULTS), "another rank"])
def test_a_launch_that_is_given_up(edge: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """It is named, no token stays as if it were made, and a reset makes all right again."""
    problem = Problem(272, 144, 5, 2, max_tokens=64, precision="fp8")
    emulation, call = Emulation(problem), call_of(problem, 40)
    (expected,) = emulation.forward_all([call])
    monkeypatch.setattr(emulator, "nan_like", lambda x, dtype: torch.ones_like(x, dtype=dtype))
    with monkeypatch.context() as patch:
        if edge in FAULTS:
            plant(FAULTS[edge], patch, tmp_path / "flaw")
        else:
            emulation.region(0, "window_abort").fill_(1)
        with pytest.raises(MegaMoEError, match=edge):
            emulation.forward_all([call], kind="few")
    assert bool(emulation.written[0][0].isnan().all())
    emulation.reset()
    assert same_bits(emulation.forward_all([call], kind="few")[0], expected)


FLAWS = {
    "rows of the second block": (
        "rows/few.cuh",
        "(expert * max_few_tokens + first)",
        "(expert * max_few_tokens)",
    ),
    "h is not awaited": (
        "rows/few.cuh",
        "Shape<T>::tiles(args, GemmId::gemm1), tile.expert());",
        "0, tile.expert());",
    ),
    "counters keep their counts": (
        "kernels/few.cuh",
        "*few_done<T>(args, GemmId::gemm2, e) = 0;",
        "",
    ),
    "columns past the last": (
        "rows/few.cuh",
        "bool exists = at < from.bytes;",
        "bool exists = true;",
    ),
    "rows are published before they are written": (
        "rows/few.cuh",
        "YRowsReady::ready(ctx.mem, cell, tiles)",
        "true",
    ),
    "the last column of counts is not written": (
        "rows/few.cuh",
        "c <= chunks",
        "c < chunks",
    ),
    "tokens of the upper half": (
        "rows/few.cuh",
        "arch::popc(low) + arch::popc(high & ",
        "arch::popc(high & ",
    ),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_is_seen(flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def run() -> None:
        test_any_count_of_tokens(64, True)
        test_all_tokens_to_one_expert(64)
        test_random_configurations(range(25))

    plant(FLAWS[flaw], monkeypatch, tmp_path / "flaw")
    with pytest.raises(SEEN):
        run()
