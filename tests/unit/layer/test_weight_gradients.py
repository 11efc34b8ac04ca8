"""weight_gradients: the default, who takes which, what a layer's gradients are, and the oracle's rounding."""

from dataclasses import replace

import pytest
import torch

from megamoe import ConfigError, ExpertWeights, Layer, MegaMoE, Problem, memory_report
from megamoe.backends.reference.backward import backward
from megamoe.backends.reference.quant import power_of_two, round_blocks
from megamoe.formats.quantization import rows_of_blocks
from megamoe.testing import compare, make_inputs, make_weights
from megamoe.testing.gradients import GradientChecker

PROBLEM = Problem(144, 80, 3, 2, max_tokens=40, bias=True, precision="fp8")
NAMES = ("w13", "w2", "b13", "b2")


def gradients(backend, **options):
    """Return those of x, topk_weights and the weights, by name."""
    inputs, masters = make_inputs(PROBLEM, 40), make_weights(PROBLEM, quantize=False)
    leaves = {"x": inputs.x, "topk_weights": inputs.topk_weights, **masters.named()}
    leaves = {name: t.clone().requires_grad_() for name, t in leaves.items()}
    weights = ExpertWeights(**{name: leaves[name] for name in NAMES})
    layer = Layer(PROBLEM, backend=backend, **options)
    y = layer(leaves["x"], inputs.topk_ids, leaves["topk_weights"], weights)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).bfloat16())
    if options.get("delay_wgrad"):
        layer.backward_dw()
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("delay_wgrad", [False, True])
def test_a_layer_has_the_oracles_gradients(delay_wgrad):
    found = gradients("emulate", delay_wgrad=delay_wgrad)  # in e4m3, by default
    oracle = gradients("reference", weight_gradients="e4m3")
    plain = gradients("emulate", weight_gradients="bf16")
    assert torch.equal(found["x"], plain["x"])
    assert torch.equal(found["topk_weights"], plain["topk_weights"])
    for name in NAMES:
        assert compare(found[name], oracle[name]).relative < 4e-3
        assert compare(found[name], plain[name]).relative > 2e-2


@pytest.mark.parametrize(
    ("precision", "given", "expected"),
    [
        ("bf16", "e4m3", "weight_gradients is 'e4m3', expected 'bf16' with precision 'bf16'"),
        ("fp8_channel", "e4m3", "expected 'bf16' with precision 'fp8_channel'"),
        ("fp8", "fp8", "weight_gradients is 'fp8', expected 'e4m3' or 'bf16' with precision 'fp8'"),
    ],
)
def test_other_choices_are_named(precision, given, expected):
    with pytest.raises(ConfigError, match=expected):
        Layer(replace(PROBLEM, precision=precision), weight_gradients=given)
    with pytest.raises(ConfigError, match=expected):
        MegaMoE(144, 80, 3, 2, precision=precision, weight_gradients=given)


def test_what_does_not_have_it_is_named():
    with pytest.raises(
        ConfigError, match="weight_gradients is 'e4m3', expected 'bf16' with backend 'staged'"
    ):
        gradients("staged", weight_gradients="e4m3")


def test_memory_is_reported_as_the_layer_has_it():
    wide = replace(PROBLEM, hidden=2048, intermediate=768)
    plain = memory_report(Layer(wide, backend="emulate", weight_gradients="bf16"))
    found = memory_report(Layer(wide, backend="emulate"))
    assert "row_tokens" in found["training_regions"]
    assert "row_tokens" not in plain["training_regions"]
    assert found["backward_bytes"] < 0.8 * plain["backward_bytes"]
    assert memory_report(wide)["training_regions"] == found["training_regions"]


def test_powers_of_two_hold_the_largest():
    amax = torch.tensor([448.0, 448.1, 1.75, 1.76, 1.0, 3.4e-5, 0.0])
    scale = power_of_two(amax)
    assert torch.equal(scale.log2(), scale.log2().round())
    assert bool((amax / scale <= 448).all())
    assert bool((amax[:-1] / scale[:-1] > 224).all())
    assert scale[0] == 1
    assert scale[1] == 2


def test_rounding_by_block_and_column():
    """A column keeps its bits beside one that is 2^20 times as large; a row of another block has another scale."""
    v = torch.tensor([[1.0, 2.0**20], [0.3, 3.0], [2.0**-20, 2.0**-3]])
    block = torch.tensor([0, 0, 1])
    by_column = round_blocks(v, block, v.abs(), 1)
    assert by_column[1, 0] == torch.tensor(0.3).to(torch.float8_e4m3fn).float()
    assert by_column[2, 0] == 2.0**-20
    together = round_blocks(v, block, v.abs().amax(1, keepdim=True), 128)
    assert together[1, 0] == 0
    with pytest.raises(ValueError, match="weight_gradients is 'e4m3', expected bf16"):
        backward(replace(PROBLEM, precision="bf16"), [], [], [], [], [], weight_gradients="e4m3")


def test_rows_of_blocks():
    rows = torch.randn(256, 5).to(torch.float8_e4m3fn)
    order = [16 * (p // 16) + p % 16 // 2 + p % 2 * 8 for p in range(128)]
    blocks = rows.view(torch.uint8).unflatten(0, (2, 128))[:, order].transpose(1, 2)
    scale = torch.tensor([[1.0], [4.0]]).expand(2, 5)
    found = rows_of_blocks(blocks.contiguous().view(rows.dtype), scale)
    assert torch.equal(
        found, rows.float() * torch.tensor([1.0, 4.0]).repeat_interleave(128)[:, None]
    )


@pytest.mark.parametrize(
    ("name", "flaw", "good"),
    [
        ("hs", lambda t: t.clone(), True),
        ("hs", lambda t: t * 2, False),
        ("x_rows", lambda t: t * (1 + 2**-6), False),
        ("dw13", lambda t: t * 1.02, False),
        ("dw13", lambda t: t.roll(1, dims=1), False),
    ],
)
def test_the_judge_sees_a_wrong_scale(name, flaw, good):
    generator = torch.Generator().manual_seed(0)
    shape = (3, 160, 144) if name == "dw13" else (300, 144)
    value = torch.randn(shape, generator=generator)
    checker = GradientChecker(PROBLEM, weight_gradients="e4m3")
    checker.compare_kernel(name, flaw(value), value)
    assert checker.good == good


def test_a_sum_that_cancels_is_judged_by_its_terms():
    """As seen on four GPUs: one token, relu2, 1,696 terms."""
    sum_of_terms, size = torch.tensor([5.74e-2]), torch.tensor([37.0])
    for error, given, good in ((1.83e-3, None, False), (1.83e-3, size, True), (1.0, size, False)):
        checker = GradientChecker(PROBLEM, weight_gradients="e4m3")
        checker.compare_kernel("d_s", sum_of_terms + error, sum_of_terms, size=given)
        assert checker.good == good
