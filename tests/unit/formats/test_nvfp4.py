"""NVFP4 weights: the format to the bit, checkpoints' layouts, what is refused, and the layer over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nvfp4_cases import PROBLEM, SCALES, checkpoint, plainly

from megamoe import ExpertWeights, MegaMoE
from megamoe.backends.reference.quant import dequantize_nvfp4 as oracle
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.formats.nvfp4 import (
    arrange_scales,
    dequantize_nvfp4,
    plain_scales,
    quantize_nvfp4,
)
from megamoe.formats.weights import expected_weights
from megamoe.testing import make_inputs, make_weights


def every_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed [1, 256, 16] and scales [1, 256, 2]: each row's are one byte, beside it all codes, twice."""
    codes = torch.cat((torch.arange(16), torch.arange(16).flip(0))).to(torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).expand(1, 256, 16).contiguous()
    return packed, torch.arange(256).to(torch.uint8)[None, :, None].expand(1, 256, 2).contiguous()


def test_every_pair_of_number_and_scale_is_exact() -> None:
    """16 x 256, in fp32 and in bf16, which they have to fit."""
    packed, scales = every_pair()
    expected = plainly(packed, scales)
    arranged = arrange_scales(scales, torch.ones(1, 1))
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantize_nvfp4(packed, arranged, 1, dtype)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=0, equal_nan=True)
    found = oracle(packed[0], arranged[0], 1)
    torch.testing.assert_close(found.double(), expected[0], rtol=0, atol=0, equal_nan=True)
    assert expected.isnan().sum() == 2 * 32
    exponents = torch.frexp(expected[expected.isfinite() & (expected != 0)])
    assert torch.equal(exponents.mantissa * 64, (exponents.mantissa * 64).round())  # six bits


@pytest.mark.parametrize(("rows", "width", "planes"), [(96, 160, 2), (130, 64, 1), (256, 288, 2)])
def test_scales_go_to_the_kernels_order_and_back(rows: int, width: int, planes: int) -> None:
    packed, scales, _ = checkpoint(3, planes * rows, width)
    outer = torch.rand(3, planes) + 0.5
    arranged = arrange_scales(scales.view(torch.uint8), outer, planes)
    back, of_planes = plain_scales(arranged, planes, rows, width)
    assert torch.equal(back, scales.view(torch.uint8))
    assert torch.equal(of_planes, outer)
    assert not arranged[..., :4].any()
    assert not arranged[..., 8:16].any()
    factor = outer.repeat_interleave(rows, 1)[..., None]
    expected = plainly(packed, scales).float() * factor
    assert torch.equal(dequantize_nvfp4(packed, arranged, planes), expected)
    for e in range(3):
        assert torch.equal(oracle(packed[e], arranged[e], planes), expected[e])


def test_outer_scales_may_have_any_strides() -> None:
    _, scales, outer = checkpoint(3, 128, 64)
    expected = arrange_scales(scales.view(torch.uint8), outer[:, None])
    transposed = outer[None].t()  # [3, 1], of strides 1 and 3
    assert transposed.stride() == (1, 3)
    assert torch.equal(arrange_scales(scales.view(torch.uint8), transposed), expected)


def test_quantization_is_to_the_nearest_of_two_scales() -> None:
    """The plane's largest becomes 6 * 448; scales and numbers are rounded to the nearest, ties to even."""
    w = torch.zeros(2, 2, 1, 64)
    w[0, 0, 0, :4] = torch.tensor([2688.0, -2688.0, 224.0 * 2.5, 224.0 * 7.5])
    w[0, 0, 0, 16:20] = torch.tensor([12.0, 1.0, 1.5 - 1e-3, -0.49])  # scale 2: 6, 0.5, 0.5, -0
    w[0, 0, 0, 32] = 6 * 2.0**-11  # below half of the least scale
    w[0, 1] = w[0, 0] * 2.0**-20  # the other plane has its own outer scale
    packed, scales = quantize_nvfp4(w, 2)
    plain, outer = plain_scales(scales, 2, 1, 64)
    assert outer[0].tolist() == [1.0, 2.0**-20]
    assert outer[1].tolist() == [1.0, 1.0]  # nothing but zeros
    assert SCALES[plain[0, 0].long()].tolist() == [448.0, 2.0, 0.0, 0.0]
    found = dequantize_nvfp4(packed, scales, 2)
    assert found[0, 0, :4].tolist() == [2688.0, -2688.0, 448.0, 1792.0]
    assert found[0, 0, 16:20].tolist() == [12.0, 1.0, 1.0, 0.0]
    assert not found[0, 0, 32:].any()
    assert torch.equal(found[0, 1], found[0, 0] * 2.0**-20)
    assert not found[1].any()


def test_nan_stays_nan_and_moves_no_other_group() -> None:
    w = torch.full((1, 2, 64), 1e-3)
    w[0, 1, 40] = float("inf")
    w[0, 1, 60] = float("nan")
    packed, scales = quantize_nvfp4(w)
    found = dequantize_nvfp4(packed, scales)[0]
    assert bool(found[1, 32:].isnan().all())
    torch.testing.assert_close(found[0], w[0, 0])
    torch.testing.assert_close(found[1, :32], w[0, 1, :32])
    with pytest.raises(ArgumentError, match="w.shape.* is 48, expected a multiple of 32"):
        quantize_nvfp4(w[..., :48])


def test_checkpoints_are_read_in_place() -> None:
    """ModelOpt's, with gate and up apart; the same with inverse scales; rows that alternate."""
    w13, s13, o13 = checkpoint(4, 2 * 96, 160, seed=1)
    w2, s2, o2 = checkpoint(4, 160, 96, seed=2)
    of_planes = torch.stack((o13, o13 * 3), dim=1)
    w = ExpertWeights.from_nvfp4(w13, w2, (s13, s2), (of_planes, o2))
    w.validate(replace(PROBLEM, bias=False))
    assert w.w13.data_ptr() == w13.data_ptr()
    dense = w.dense(PROBLEM, torch.float32)
    numbers = plainly(w13, s13).float()
    assert torch.equal(dense.w13[:, :96], numbers[:, :96] * o13[:, None, None])
    assert torch.equal(dense.w13[:, 96:], numbers[:, 96:] * (o13 * 3)[:, None, None])
    assert torch.equal(dense.w2, plainly(w2, s2).float() * o2[:, None, None])
    dead = ExpertWeights.from_nvfp4(w13, w2, (s13, s2), (o13 * torch.tensor([1, 0, 1, 1]), o2))
    assert dead.dense(PROBLEM, torch.float32).w13.flatten(1).any(1).tolist() == [
        True,
        False,
        True,
        True,
    ]
    powers = torch.tensor([0.5, 2.0**-12, 1.0, 2.0**9])
    there = ExpertWeights.from_nvfp4(w13, w2, (s13, s2), (1 / powers, powers))
    back = ExpertWeights.from_nvfp4(w13, w2, (s13, s2), (powers, 1 / powers), inverse=True)
    assert all(torch.equal(t, back.named()[n]) for n, t in there.named().items())
    transposed = ExpertWeights.from_nvfp4(
        w13, w2, (s13.view(torch.uint8), s2), (o13[:, None], o2), interleaved=True,
        biases=(torch.arange(192.0).expand(4, 192), torch.zeros(4, 160)),
    )  # fmt: skip
    found = transposed.dense(PROBLEM, torch.float32)
    assert torch.equal(found.w13[:, :96], numbers[:, 0::2] * o13[:, None, None])
    assert found.b13[0, :3].tolist() == [0, 2, 4]


def hostile() -> list[tuple[str, dict[str, object], str]]:
    w13, s13, o13 = checkpoint(4, 192, 160)
    w2, s2, o2 = checkpoint(4, 160, 96)
    nan, negative_nan = s2.clone(), s13.clone()
    nan.view(torch.uint8)[1, 2, 3] = 0x7F
    negative_nan.view(torch.uint8)[0, 5, 1] = 0xFF
    zero, inf = o2.clone(), o13.clone()
    zero[3], inf[1] = 0.0, float("inf")
    pair = {"scales": (s13, s2), "outer": (o13, o2)}

    def made(**changed: object) -> dict[str, object]:
        return {"w13": w13, "w2": w2, **pair, **changed}

    return [
        ("rows", made(w13=w13[:, :191], scales=(s13[:, :191], s2)), r"w13.shape is \[\[4, 191, 80\]"),
        ("groups of 32", made(scales=(s13, s2[..., :3])), "w2.shape .* beside scales .*K/16"),
        ("numbers' dtype", made(w13=w13.bfloat16()), "w13.dtype is torch.bfloat16"),
        ("scales' dtype", made(scales=(s13.float(), s2)), "w13_scale.dtype is torch.float32, expected torch.float8"),
        ("E8M0", made(scales=(s13.view(torch.float8_e8m0fnu), s2)), "w13_scale.dtype is torch.float8_e8m0fnu"),
        ("no scales", made(scales=(None, s2)), "w13_scale is NoneType, expected a tensor"),
        ("one scale", made(scales=s13), "scales is Tensor, expected a pair"),
        ("three", made(outer=(o13, o2, o2)), "outer is tuple, expected a pair"),
        ("NaN", made(scales=(s13, nan)), r"w2_scale is NaN at \[1, 2, 3\], expected e4m3 numbers"),
        ("-NaN", made(scales=(negative_nan, s2)), r"w13_scale is NaN at \[0, 5, 1\]"),
        ("zero divisor", made(outer=(o13, zero), inverse=True), r"outer of w2 is 0.0 at \[3\]"),
        ("negative", made(outer=(-o13, o2)), r"outer of w13 is -.* at \[0\], expected 0 or more"),
        ("inf", made(outer=(inf, o2)), r"outer of w13 is inf at \[1\]"),
        ("nan", made(outer=(inf - inf + o13, o2)), r"outer of w13 is nan at \[1\]"),
        ("too small to invert", made(outer=(o13 * 1e-39, o2), inverse=True), "outer of w13 is .*e-4"),
        ("outer's shape", made(outer=(o13[:3], o2)), r"w13.shape is \[3\], expected \[4\] or \[4, 1\] or \[4, 2\]"),
        ("by plane, of w2", made(outer=(o13, o2[:, None].expand(4, 2))), r"outer of w2.shape is \[4, 2\], expected"),
        ("a scalar", made(outer=(o13[0], o2)), r"outer of w13.shape is \[\]"),
        ("outer's dtype", made(outer=(o13.bfloat16(), o2)), "outer of w13.dtype is torch.bfloat16"),
        ("outer is no tensor", made(outer=(1.0, o2)), "outer of w13 is float, expected a tensor"),
        ("planes", made(planes=3), "planes is 3, expected 1 or 2"),
        ("planes of another type", made(planes=True), "planes is True, expected 1 or 2"),
        ("biases", made(biases=(None, o2)), "biases is NoneType"),
        ("whole biases", made(biases=(o2.int(), o2)), "biases is torch.int32, expected of any float type"),
        ("one bias", made(biases=(o2,)), "biases is tuple, expected a pair"),
        ("a number", made(biases=5), "biases is int, expected a pair"),
        ("odd", made(interleaved=True, biases=(torch.zeros(4, 3), o2[:, None])), r"biases\[0\].shape is \[4, 3\]"),
    ]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), [pytest.param(g, m, id=i) for i, g, m in hostile()])
def test_checkpoints_that_do_not_fit_are_refused_by_name(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        ExpertWeights.from_nvfp4(**given)  # type: ignore[arg-type]


def test_what_is_no_precision_says_why() -> None:
    with pytest.raises(ConfigError, match="precision is 'fp8xnvfp4', expected bf16xnvfp4: .*six"):
        replace(PROBLEM, precision="fp8xnvfp4")
    with pytest.raises(ConfigError, match="hidden is 144, expected a multiple of 32 in 32"):
        replace(PROBLEM, hidden=144)
    assert expected_weights(PROBLEM)["w13_scale"] == ((4, 2, 2, 1040), torch.uint8)
    w = make_weights(PROBLEM)
    with pytest.raises(ArgumentError, match=r"weights.w2_scale.shape is \[4, 2, 1, 1024\]"):
        replace(w, w2_scale=w.w2_scale[..., 16:]).validate(PROBLEM)


def layer_of(precision: str = "bf16xnvfp4", backend: str = "staged") -> MegaMoE:
    options = {"bias": True, "init_seed": 1, "max_tokens": 32}
    return MegaMoE(160, 96, 4, 2, "alone", precision=precision, backend=backend, **options)


def test_a_rank_without_experts_reads_none() -> None:
    (w13, s13, o13), (w2, s2, o2) = checkpoint(0, 192, 160), checkpoint(0, 160, 96)
    w = ExpertWeights.from_nvfp4(w13, w2, (s13, s2), (o13, o2))
    problem = replace(PROBLEM, num_experts=2, ep_size=3, rank=2, bias=False)
    w.validate(problem)
    assert w.dense(problem, torch.float32).w13.shape == (0, 192, 160)


@pytest.mark.parametrize("planes", [1, 2])
def test_scales_for_other_planes_than_the_layers_are_refused(planes: int) -> None:
    w13, s13, o13 = checkpoint(4, 192, 160)
    w2, s2, o2 = checkpoint(4, 160, 192 // planes)
    w = ExpertWeights.from_nvfp4(w13, w2, (s13, s2), (o13, o2), planes=planes)
    fits, other = (
        replace(PROBLEM, intermediate=192 // p, activation="relu2" if p == 1 else "swiglu", bias=False)
        for p in (planes, 3 - planes)
    )  # fmt: skip
    w.validate(fits)
    with pytest.raises(ArgumentError, match=rf"w13.shape is \[4, {planes}, "):
        w.validate(other)


def test_checkpoints_go_round(tmp_path) -> None:
    first, second, i = layer_of(), layer_of(), make_inputs(PROBLEM, 20)
    call = i.x, i.topk_ids, i.topk_weights
    w13, s13, o13 = checkpoint(4, 192, 160, seed=3)
    w2, s2, o2 = checkpoint(4, 160, 96, seed=4)
    biases = torch.randn(4, 192), torch.randn(4, 160)
    given = ExpertWeights.from_nvfp4(w13, w2, (s13, s2), (o13, o2), biases=biases)
    first.load_nvfp4_weights(given)
    torch.save(first.state_dict(), tmp_path / "layer.pt")
    second.load_state_dict(torch.load(tmp_path / "layer.pt"))
    with torch.no_grad():
        y = first(*call)
        assert bool(y.isfinite().all())
        assert torch.equal(second(*call), y)
        transposed = ExpertWeights.from_nvfp4(w13, w2, (s13, s2), (2 * o13, o2), biases=biases)
        second.w13_scale.copy_(transposed.w13_scale)  # written in place: seen
        assert not torch.equal(second(*call), y)
    mxfp4 = layer_of("bf16xmxfp4")
    with pytest.raises(ArgumentError, match="weights.w13_scale.shape"):
        mxfp4.load_nvfp4_weights(given)
    with pytest.raises(ConfigError, match="'bf16xmxfp4', expected one whose weights are nvfp4"):
        mxfp4.load_nvfp4_weights(mxfp4.expert_weights().quantized(mxfp4.problem))
    with pytest.raises(ArgumentError, match="weights is dict, expected ExpertWeights"):
        mxfp4.load_mxfp4_weights(given.named())
    with pytest.raises(ArgumentError, match="w13 is NoneType, expected a tensor"):
        layer_of("fp8").load_fp8_weights(None, None, None, None)
    for layer in (first, second, mxfp4):
        layer.close()
