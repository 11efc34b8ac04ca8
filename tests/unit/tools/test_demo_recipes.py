"""bench/demo/recipes.py: simulated recipes of FP8 training, against the oracle and against each other."""

import argparse
import re
import statistics

import pytest
import torch

import megamoe
from bench.demo import curves, screen, step
from bench.demo.curves import draw_again, read, summarize
from bench.demo.model import ModelConfig
from bench.demo.recipes import (
    E4M3,
    E5M2,
    Fp8Recipe,
    SimulatedExperts,
    power,
    quantize_rows,
    transposed,
)
from bench.ranks import Rank
from megamoe.backends.reference import quant

SHAPE = {"hidden": 272, "intermediate": 144, "num_experts": 4, "top_k": 2}
NAMES = ("y", "dx", "d_weights", "dw13", "dw2")


def inputs(hidden=SHAPE["hidden"]):
    generator = torch.Generator().manual_seed(0)
    tokens = 500  # several blocks of an expert, none of them full at its end
    x = torch.randn(tokens, hidden, generator=generator)
    x *= torch.randn(tokens, 1, generator=generator).exp()
    scores, ids = torch.randn(tokens, 4, generator=generator).softmax(-1).topk(2)
    ids[:, 0], ids[:, 1] = ids[:, 0] % 3, 3  # an expert that all take
    dy = torch.randn(tokens, hidden, generator=generator)
    dy *= torch.randn(1, hidden, generator=generator).exp()
    return x.bfloat16(), ids, scores, dy.bfloat16()


def weights_into(layer):
    generator = torch.Generator().manual_seed(1)
    for p in (layer.w13, layer.w2):
        p.data = (torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5).bfloat16()
    return layer


def trained(layer, x, ids, scores, dy):
    weights_into(layer)
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    y = layer(x, ids, scores)
    y.backward(dy)
    found = y.detach(), x.grad, scores.grad, layer.w13.grad, layer.w2.grad
    return dict(zip(NAMES, found, strict=True))


def simulated(recipe, given, **shape):
    return trained(SimulatedExperts(**SHAPE | shape, recipe=recipe), *given)


def exact(given):
    """Return the gradients in fp32 of weights and activations that nobody quantized."""
    layer = megamoe.MegaMoE(**SHAPE, max_tokens=512, backend="reference", rounding="none")
    return trained(layer, *given)


def apart(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("products", ["bf16", "e4m3"])
def test_the_kernels_recipe_is_the_oracles(products):
    given = inputs()
    found = simulated(Fp8Recipe(products=products), given)
    layer = megamoe.MegaMoE(
        **SHAPE,
        **{"max_tokens": 512, "precision": "fp8", "backend": "reference"},
        weight_gradients=products,
    )
    expected = trained(layer, *given)
    for name in NAMES:  # sums in another order, which turn a rounding over here and there
        assert apart(found[name], expected[name]) < 5e-3, name


@pytest.mark.parametrize(
    ("recipe", "dw13", "dw2"),
    [
        (Fp8Recipe(products="bf16"), (0.04, 0.068), (0.04, 0.068)),
        (Fp8Recipe(), (0.055, 0.085), (0.055, 0.085)),
        (Fp8Recipe(rows="power"), (0.05, 0.085), (0.05, 0.085)),
        (Fp8Recipe(rows="token"), (0.05, 0.085), (0.05, 0.085)),
        (Fp8Recipe(gradients=E5M2), (0.08, 0.14), (0.07, 0.14)),
    ],
)
def test_errors_are_those_of_a_recipe(recipe, dw13, dw2):
    given = inputs()
    found, expected = simulated(recipe, given), exact(given)
    for name, (least, most) in {"dw13": dw13, "dw2": dw2}.items():
        assert least < apart(found[name], expected[name]) < most, name


def test_a_second_rounding_is_exact_for_powers_of_two():
    """Where no number is below 2^-14 of the largest of its block."""
    v = inputs()[0][:384].float()
    v = v.sign() * v.abs().clamp(min=0.1, max=8)
    for rows, equal in (("power", True), ("group", False)):
        made = quantize_rows(v, rows)
        again = transposed(made.values, made.scale * 448, quant.GROUP)
        assert torch.equal(again, made.values) == equal
        assert apart(again, made.values) < 0.05


def test_a_token_of_one_group_has_its_scale():
    given = inputs(hidden=128)
    one, other = (
        simulated(Fp8Recipe(rows=rows, products="bf16"), given, hidden=128)
        for rows in ("group", "token")
    )
    for name in NAMES:
        assert torch.equal(one[name], other[name]), name


def test_scales_are_those_of_the_formats():
    v = inputs()[0].float()
    q, scale = quant.quantize_rows(v)
    assert torch.equal(quantize_rows(v, "group").q, q.float())
    assert torch.equal(quantize_rows(v, "group").values, quant.dequantize_rows(q, scale))
    q, scale = quant.quantize_tokens(v[:9])
    assert torch.equal(quantize_rows(v[:9], "token").values, quant.dequantize_tokens(q, scale))
    amax = torch.tensor([448.0, 449.0, 57344.0, 57345.0, 1.0])
    assert power(amax, E4M3).tolist() == [1.0, 2.0, 128.0, 256.0, 2.0**-8]
    assert power(amax, E5M2).tolist() == [2.0**-7, 2.0**-6, 1.0, 2.0, 2.0**-15]


@pytest.fixture
def screened(alone, monkeypatch, capsys, tmp_path):
    """Return a function that screens tiny models: seeds -> the CSV, what was printed."""
    small = ModelConfig(hidden=32, intermediate=32, num_experts=4, num_heads=2, context=16)
    monkeypatch.setattr(step, "CPU_MODEL", small)
    monkeypatch.setattr(curves, "draw", lambda *_: True)  # test_tools_training.py has a picture
    monkeypatch.setattr(step, "shared_corpus", lambda: torch.arange(2048).mul(7).to(torch.uint8))

    def call(*seeds):
        path = tmp_path / f"{seeds[0]}.csv"
        given = {"csv": [path], "seeds": seeds, "cases": None, "steps": 4, "batch": 2, "window": 2}
        assert screen.worker(Rank(0, 1, torch.device("cpu")), argparse.Namespace(**given)) == 0
        return path, capsys.readouterr().out

    return call


def test_recipes_are_trained_in_pairs(screened, capsys):
    one, said = screened(1)
    _, found = read(one)
    kinds = [("staged", "bf16"), *(("simulated", name) for name in screen.SIMULATED)]
    assert list(found) == [(*kind, 1) for kind in kinds]
    assert {len(losses) for losses in found.values()} == {4}
    first = [losses[0] for losses in found.values()]
    assert 0 < max(first) - min(first) < 5e-3  # one start, other arithmetic
    assert len({tuple(losses) for losses in found.values()}) == len(kinds)
    assert "simulated token: " in said
    rows = one.with_name("1-gradients.csv").read_text().splitlines()[2:]
    apart = {row.split(",")[1]: float(row.split(",")[3]) for row in rows}
    assert list(apart) == [" ".join(kind) for kind in kinds]
    assert apart["staged bf16"] < 1e-3 < 0.02 < apart["simulated fp8"]
    assert apart["simulated fp8"] < apart["simulated group"] < apart["simulated e5m2"] < 0.3

    two, _ = screened(2)  # as another process does
    draw_again(argparse.Namespace(csv=[one, two], window=2))
    table = capsys.readouterr().out
    each = []
    for path in (one, two):
        _, found = read(path)
        by_name = {key[1]: statistics.mean(losses[-2:]) for key, losses in found.items()}
        each.append(100 * (by_name["power"] / by_name["bf16"] - 1))
    error = statistics.stdev(each) / 2**0.5
    line = f"{statistics.mean(each):+.2f}% from staged bf16, standard error {error:.2f}%"
    assert re.search(rf"simulated power: [\d.]+, {re.escape(line)}", table)
    written = one.with_name("1-differences.csv").read_text()
    figures = f"{statistics.mean(each):.2f}", f"{error:.2f}", "2"
    names = '"difference, %"', '"standard error, %"', "seeds"
    for name, figure in zip(names, figures, strict=True):
        assert f"recipes,simulated power,{name},{figure}\n" in written.replace("\r", "")


def test_runs_that_were_cut_off_are_left_out_of_pairs(capsys):
    found = {
        ("staged", "bf16", 1): [2.0],
        ("staged", "bf16", 2): [4.0],
        ("simulated", "token", 2): [5.0],
    }
    summarize(found, print, 1)
    assert "simulated token: 5.0000, +25.00% from staged bf16, 1 seeds" in capsys.readouterr().out
