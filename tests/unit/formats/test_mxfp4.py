"""MXFP4 weights: the format to the bit, checkpoints' layouts, what is refused, and the layer over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import megamoe
from megamoe import ExpertWeights, MegaMoE, Problem, SharedExperts
from megamoe.backends import reference
from megamoe.backends.call import Call
from megamoe.backends.reference.quant import dequantize_mxfp4 as oracle
from megamoe.backends.select import make_backend
from megamoe.backends.staged import StagedBackend
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.core.table import MXFP4
from megamoe.formats.fp4 import MAGNITUDES
from megamoe.formats.mxfp4 import (
    arrange_scales,
    dequantize_mxfp4,
    plain_scales,
    quantize_mxfp4,
)
from megamoe.formats.weights import expected_weights
from megamoe.jit.source import Variant
from megamoe.testing import make_inputs, make_weights
from megamoe.testing.compare import assert_close

ALL_FP4 = ("fp8xmxfp4", "bf16xmxfp4", "bf16xnvfp4")
PROBLEM = Problem(160, 96, 4, 2, max_tokens=32, precision="fp8xmxfp4", bias=True)


def checkpoint(num: int, rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks [L, N, K/32, 16] and scales [L, N, K/32] of any bits that a checkpoint may have."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (num, rows, width // 32, 16), generator=g).to(torch.uint8)
    return blocks, torch.randint(100, 130, (num, rows, width // 32), generator=g).to(torch.uint8)


def plainly(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a checkpoint by the words of the specification, [L, N, K] fp64."""
    low, high = (blocks & 15).long(), (blocks >> 4).long()
    codes = torch.stack((low, high), dim=-1).flatten(-2)  # the lower nibble is the first
    table = torch.tensor(MAGNITUDES, dtype=torch.float64)
    numbers = torch.where(codes >= 8, -table[codes % 8], table[codes % 8])
    power = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.int() - 127)
    return (numbers * power[..., None]).flatten(-2)


def test_a_block_says_what_its_scales_are() -> None:
    scales = torch.full((1, 130, 8), 100, dtype=torch.uint8)  # two blocks of rows, two of columns
    scales[0, 0, 0], scales[0, 127, 3] = 111, 102
    scales[0, 5, 4], scales[0, 6, 5] = 111, 99
    scales[0, 128, 0] = 255
    scales[0, 129, 4:] = 3
    header = arrange_scales(scales)[0, ..., :2]
    assert header.tolist() == [[[111, 1], [111, 0]], [[255, 0], [100, 0]]]


def test_padding_and_small_scales_are_plain_where_kernels_count_on_it() -> None:
    few = torch.tensor([[[7, 1]]], dtype=torch.uint8)  # a block of one row and 64 columns
    assert arrange_scales(few)[0, 0, 0, :2].tolist() == [7, 1]
    assert arrange_scales(few - 1)[0, 0, 0, :2].tolist() == [6, 1]
    assert arrange_scales(few * 2)[0, 0, 0, :2].tolist() == [14, 0]


@pytest.mark.parametrize(("rows", "width", "planes"), [(96, 160, 2), (130, 64, 1), (256, 288, 2)])
def test_values_are_those_of_the_specification(rows: int, width: int, planes: int) -> None:
    blocks, scales = checkpoint(3, planes * rows, width)
    arranged = arrange_scales(scales, planes)
    assert torch.equal(plain_scales(arranged, planes, rows, width), scales)
    packed, expected = blocks.flatten(-2), plainly(blocks, scales)
    for dtype in (torch.float32, torch.bfloat16):  # exact in both
        found = dequantize_mxfp4(packed, arranged, planes, dtype)
        assert torch.equal(found.double(), expected)
    for e in range(3):
        assert torch.equal(oracle(packed[e], arranged[e], planes).double(), expected[e])


def test_every_number_under_every_scale_is_that_of_the_specification() -> None:
    """Subnormal ones too: the scale 2^-127, and half of it."""
    scales = (torch.arange(254) % 253).to(torch.uint8).view(1, 127, 2)  # of 253 on fp32 has not all
    blocks = torch.arange(16, dtype=torch.uint8) * 17
    blocks = blocks.expand(1, 127, 2, 16).contiguous()
    packed, expected = blocks.flatten(-2), plainly(blocks, scales)
    for found in (
        dequantize_mxfp4(packed, arrange_scales(scales)),
        oracle(packed[0], arrange_scales(scales)[0], 1)[None],
    ):
        assert torch.equal(found.double(), expected)


def test_quantization_rounds_to_nearest_even_of_the_shared_exponent() -> None:
    """Every boundary of e2m1: values, ties, and what is beyond 6."""
    wanted = {
        0.0: 0.0, 0.24: 0.0, 0.25: 0.0, 0.26: 0.5, 0.74: 0.5, 0.75: 1.0, 1.25: 1.0, 1.26: 1.5, 1.75: 2.0, 2.5: 2.0,
        2.51: 3.0, 3.49: 3.0, 3.5: 4.0, 5.0: 4.0, 5.01: 6.0, 7.99: 6.0,
    }  # fmt: skip
    for exponent in (-20, 0, 3):
        w = torch.zeros(1, 1, 32)
        values = torch.tensor(list(wanted))
        w[0, 0, : len(wanted)] = values
        w[0, 0, 16:] = -values[: 32 - 16]
        w = w * 2.0**exponent
        packed, scales = quantize_mxfp4(w)
        assert int(plain_scales(scales, 1, 1, 32)) == 127 + exponent
        found = dequantize_mxfp4(packed, scales)[0, 0] * 2.0**-exponent
        assert found[: len(wanted)].tolist() == list(wanted.values())
        assert found[16:].tolist() == [-v for v in list(wanted.values())[:16]]


def test_zero_groups_do_not_raise_a_blocks_largest_scale_and_nan_stays_nan() -> None:
    w = torch.full((1, 2, 64), 1e-3, dtype=torch.bfloat16)
    w[0, 0, :32] = 0
    w[0, 1, 40] = float("inf")
    packed, scales = quantize_mxfp4(w)
    assert plain_scales(scales, 1, 2, 64)[0].tolist() == [[0, 115], [115, 255]]
    found = dequantize_mxfp4(packed, scales)[0]
    assert torch.equal(found[0, :32], torch.zeros(32))
    assert bool(found[1, 32:].isnan().all())
    assert bool(found[:, :32].isfinite().all())
    with pytest.raises(ArgumentError, match="w.shape.* is 48, expected a multiple of 32"):
        quantize_mxfp4(w[..., :48])


@pytest.mark.parametrize(("h", "i"), [(160, 96), (256, 128)])  # blocks with padding, and without
def test_a_checkpoint_with_interleaved_rows_is_read_in_place(h: int, i: int) -> None:
    p = replace(PROBLEM, hidden=h, intermediate=i, activation="swiglu_oai")
    b13, s13 = checkpoint(4, 2 * i, h, seed=1)
    b2, s2 = checkpoint(4, h, i, seed=2)
    biases = torch.randn(4, 2 * i, dtype=torch.bfloat16), torch.randn(4, h, dtype=torch.bfloat16)
    w = ExpertWeights.from_mxfp4(b13, b2, s13, s2, interleaved=True, biases=biases)
    w.validate(p)
    assert w.w13.data_ptr() == b13.data_ptr()
    dense, rows = w.dense(p, torch.float32), plainly(b13, s13)
    assert torch.equal(dense.w13[:, :i].double(), rows[:, 0::2])  # gate
    assert torch.equal(dense.w13[:, i:].double(), rows[:, 1::2])
    assert torch.equal(dense.w2.double(), plainly(b2, s2))
    assert w.b13 is not None
    assert torch.equal(w.b13[:, i:], biases[0][:, 1::2].float())
    apart = [torch.stack((t[:, 0::2], t[:, 1::2]), dim=1) for t in (b13.flatten(-2), s13)]
    again = ExpertWeights.from_mxfp4(
        apart[0], b2.view(torch.int8), apart[1].view(torch.float8_e8m0fnu), s2
    )
    assert torch.equal(again.dense(p, torch.float32).w13, dense.w13)


def test_a_rank_without_experts_reads_none() -> None:
    (w13, s13), (w2, s2) = checkpoint(0, 192, 160), checkpoint(0, 160, 96)
    w = ExpertWeights.from_mxfp4(w13, w2, s13, s2)
    problem = Problem(160, 96, 2, 2, ep_size=3, rank=2, max_tokens=16, precision="bf16xmxfp4")
    w.validate(problem)
    assert w.dense(problem, torch.float32).w2.shape == (0, 160, 96)


@pytest.mark.parametrize("planes", [1, 2])
def test_scales_for_other_planes_than_the_layers_are_refused(planes: int) -> None:
    """192 rows have two blocks of scales as one plane and as two, so that shapes of scales are equal."""
    b13, s13 = checkpoint(4, 192, 160)
    b2, s2 = checkpoint(4, 160, 192 // planes)
    w = ExpertWeights.from_mxfp4(b13, b2, s13, s2, planes=planes)
    fits, other = (
        replace(PROBLEM, intermediate=192 // p, activation="relu2" if p == 1 else "swiglu", bias=False)
        for p in (planes, 3 - planes)
    )  # fmt: skip
    assert expected_weights(fits)["w13_scale"] == expected_weights(other)["w13_scale"]
    w.validate(fits)
    with pytest.raises(ArgumentError, match=rf"w13.shape is \[4, {planes}, "):
        w.validate(other)


def test_checkpoints_that_do_not_fit_are_refused_by_name() -> None:
    b13, s13 = checkpoint(4, 192, 160)
    b2, s2 = checkpoint(4, 160, 96)
    make = ExpertWeights.from_mxfp4
    with pytest.raises(ArgumentError, match="w13.shape"):
        make(b13[:, :191], b2, s13[:, :191], s2)
    with pytest.raises(ArgumentError, match="w2.shape"):
        make(b13, b2, s13, s2[..., :2])
    with pytest.raises(ArgumentError, match="w13.dtype is torch.bfloat16"):
        make(b13.bfloat16(), b2, s13, s2)
    with pytest.raises(ArgumentError, match="w2_scale.dtype is torch.float32"):
        make(b13, b2, s13, s2.float())
    with pytest.raises(ArgumentError, match="w13_scale is NoneType, expected a tensor"):
        make(b13, b2, None, s2)
    with pytest.raises(ArgumentError, match="planes is 0, expected 1 or 2"):
        make(b13, b2, s13, s2, planes=0)
    with pytest.raises(ArgumentError, match="biases is NoneType, expected"):
        make(b13, b2, s13, s2, biases=(None, torch.zeros(4, 160)))
    planes = torch.zeros(4, 2, 96)  # not in the order of rows that alternate
    with pytest.raises(ArgumentError, match=r"biases is \[4, 2, 96\], expected \[L, 2\*I\]"):
        make(b13, b2, s13, s2, biases=(planes, torch.zeros(4, 160)), interleaved=True)
    s2[1, 2, 1] = 252
    make(b13, b2, s13, s2)
    for scale in (253, 255):
        s2[1, 2, 1] = scale
        with pytest.raises(ArgumentError, match=f"w2_scale is {scale}, expected at most 252"):
            make(b13, b2, s13, s2)


def test_weights_are_checked_before_anything_runs() -> None:
    w = make_weights(PROBLEM)
    w.validate(PROBLEM)
    for name, change, message in (
        ("w13", lambda t: t[..., :-1], r"weights.w13.shape is \[4, 192, 79\]"),
        ("w2", lambda t: t.view(torch.int8), "weights.w2.dtype is torch.int8"),
        ("w13_scale", lambda t: t[..., :-2], r"weights.w13_scale.shape is \[4, 2, 2, 526\]"),
        ("w2_scale", lambda t: None, r"weights.w2_scale is None, expected torch.uint8 \[4, 2, 1, 528\]"),
    ):  # fmt: skip
        changed = replace(w, **{name: change(getattr(w, name))})
        with pytest.raises(ArgumentError, match=message):
            changed.validate(PROBLEM)
    with pytest.raises(ConfigError, match="hidden is 144, expected a multiple of 32 in 32"):
        replace(PROBLEM, hidden=144)
    assert expected_weights(PROBLEM)["w13"] == ((4, 192, 80), torch.uint8)


@pytest.mark.parametrize("precision", ALL_FP4)
def test_staged_and_reference_agree(precision: str) -> None:
    p = replace(PROBLEM, precision=precision)
    w, inputs = make_weights(p), make_inputs(p, 20)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    want = reference.forward(p, *[[t] for t in call], [w])["y"][0]
    assert_close(StagedBackend(p).forward(Call(*call, w))[0], want, relative=5e-3)
    exact = reference.forward(
        replace(p, precision="bf16"), *[[t] for t in call], [w.dense(p, torch.float32)]
    )["y"][0]
    assert_close(want, exact, relative=1e-6 if precision != "fp8xmxfp4" else 6e-2)
    fp32 = reference.forward(
        replace(p, precision="bf16"), *[[t] for t in call], [make_weights(p, quantize=False)]
    )["y"][0]
    assert_close(want, fp32, relative=0.25)
    with pytest.raises(AssertionError):
        assert_close(want, fp32, relative=0.02)  # 4-bit weights are not nothing


def layer_of(precision: str = "fp8xmxfp4", backend: str = "staged", **options: object) -> MegaMoE:
    return MegaMoE(160, 96, 4, 2, "alone", precision=precision, backend=backend, bias=True, init_seed=1,
                   max_tokens=32, **options)  # fmt: skip


def inputs_of() -> tuple[torch.Tensor, ...]:
    i = make_inputs(PROBLEM, 20)
    return i.x, i.topk_ids, i.topk_weights


@pytest.mark.parametrize("backend", ["staged", "reference"])
@pytest.mark.parametrize("precision", ALL_FP4)
def test_a_module_quantizes_its_masters_and_follows_them(precision: str, backend: str) -> None:
    layer, call = layer_of(precision, backend), inputs_of()
    with torch.no_grad():
        y = layer(*call)
        own = layer.expert_weights().quantized(layer.problem)
        made = make_backend(backend, layer.problem, device="cpu")
        want, _ = made.forward(Call(*call, own))
        assert torch.equal(y, want)
        layer.w2.mul_(2)
        assert not torch.equal(layer(*call), y)
    layer.close()


def test_checkpoints_go_round(tmp_path) -> None:
    first, call = layer_of(), inputs_of()
    b13, s13 = checkpoint(4, 192, 160, seed=3)
    b2, s2 = checkpoint(4, 160, 96, seed=4)
    biases = torch.randn(4, 192), torch.randn(4, 160)
    first.load_mxfp4_weights(
        ExpertWeights.from_mxfp4(b13, b2, s13, s2, interleaved=True, biases=biases)
    )
    assert first.w13.dtype == torch.uint8
    assert not first.w13.requires_grad
    torch.save(first.state_dict(), tmp_path / "layer.pt")
    second = layer_of()
    second.load_state_dict(torch.load(tmp_path / "layer.pt"))
    with torch.no_grad():
        y = first(*call)
        assert torch.equal(second(*call), y)
        assert bool(y.isfinite().all())
        second.w13_scale.add_(1)  # written in place: seen
        assert not torch.equal(second(*call), y)
    assert torch.equal(first.b13[:, :96], biases[0][:, 0::2])
    strided = first.b13.detach().view(4, 2, 96).mT.contiguous().mT  # planes of other strides
    second.load_mxfp4_weights(replace(first.expert_weights(), b13=strided))
    assert torch.equal(second.b13, first.b13)
    with pytest.raises(ArgumentError, match="w13.dtype is torch.uint8, expected masters"):
        second.reset_parameters()  # their scales would stay
    assert torch.equal(second.b13, first.b13)
    wrong = MegaMoE(160, 96, 4, 2, "alone", precision="fp8", backend="staged", bias=True)
    lacking = {n: t for n, t in first.state_dict().items() if n != "w13_scale"}
    with pytest.raises(
        ArgumentError, match="w13_scale of the state dict is None, expected torch.u"
    ):
        layer_of().load_state_dict(lacking)
    with pytest.raises(ConfigError, match="precision is 'fp8', expected one whose weights are mx"):
        wrong._take(MXFP4, {})
    with pytest.raises(ArgumentError, match="weights.w13.dtype is torch.uint8"):
        wrong.load_mxfp4_weights(first.expert_weights())
    for layer in (first, second):
        layer.close()


@pytest.mark.parametrize("precision", ALL_FP4)
def test_gradients_of_packed_weights_are_refused_by_name(precision: str) -> None:
    layer, (x, ids, scores) = layer_of(precision), inputs_of()
    message = (
        f"gradients of weights.w13 is recorded, expected torch.no_grad.*'{precision}' are frozen"
    )
    with pytest.raises(ArgumentError, match=message):
        layer(x, ids, scores)
    with torch.no_grad():
        layer(x, ids, scores)  # known from here on
    with pytest.raises(ArgumentError, match=message):
        layer(x, ids, scores)
    w = make_weights(layer.problem)
    plain = megamoe.Layer(layer.problem, "alone", backend="staged")
    plain(x, ids, scores, w)  # nothing is recorded
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    plain(x, ids, scores, w).float().square().mean().backward()
    assert bool(x.grad.any())
    assert bool(scores.grad.any())
    for kernel in ("train", "backward"):
        with pytest.raises(ConfigError, match=f"variant is {kernel}-{precision}-swiglu-panels"):
            Variant(precision, "swiglu", kernel=kernel, panels=True)
    for each in (layer, plain):
        each.close()


def test_either_part_of_joined_weights_may_be_read_from_a_checkpoint() -> None:
    """So w13 has its planes apart there, and behind each other where bf16 was quantized."""
    problem = Problem(128, 128, 3, 2, max_tokens=8, precision="bf16xmxfp4")
    shared, routed = SharedExperts(problem, 256), make_weights(problem)
    of_whole = replace(problem, intermediate=256, num_experts=1, top_k=1)
    whole = ExpertWeights(**{n: t[0] for n, t in make_weights(of_whole, seed=1).named().items()})
    parts = shared.parts(whole)

    def apart(weights: ExpertWeights, dim: int, planes: int = 2) -> ExpertWeights:
        return replace(weights, w13=weights.w13.unflatten(dim, (planes, -1)))

    assert torch.equal(shared.parts(apart(whole, 0)).w13, parts.w13)
    expected = shared.join(routed, parts).w13
    read = apart(routed, 1), apart(parts, 1)
    for pair in ((read[0], parts), (routed, read[1]), read):
        assert torch.equal(shared.join(*pair).w13.reshape(expected.shape), expected)
    with pytest.raises(ArgumentError, match="shared.w13.shape"):
        shared.join(routed, apart(parts, 1, 4))
    with pytest.raises(ArgumentError, match="shared.w13.shape"):
        shared.parts(apart(whole, 0, 4))
