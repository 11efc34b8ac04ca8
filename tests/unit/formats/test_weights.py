"""Quantization bit by bit, validation of ExpertWeights, and the cache of quantized copies."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.backends.reference import quant
from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.core.errors import ArgumentError
from megamoe.formats.quantization import (
    dequantize_blockwise,
    dequantize_channels,
    dequantize_rows,
    dequantize_tokens,
    quantize_blockwise,
    quantize_channels,
    quantize_rows,
    quantize_tokens,
)
from megamoe.formats.versions import made_of, version_of
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.launch import cache as cache_module
from megamoe.launch.cache import QuantizedCache, quantize_weights
from megamoe.testing import assert_close, make_weights

E4M3 = torch.float8_e4m3fn


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@given(
    st.integers(0, 2**20), st.sampled_from([16, 128, 144, 400]), st.sampled_from([1e-12, 1, 1e4])
)
@settings(max_examples=20, deadline=None)
def test_rows_agree_with_the_oracle_bit_for_bit(seed, width, size):
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(seed)) * size
    x = x.bfloat16()
    q, scale = quantize_rows(x)
    q_oracle, scale_oracle = quant.quantize_rows(x)
    assert same_bits(q, q_oracle)
    assert torch.equal(scale, scale_oracle)
    assert torch.equal(dequantize_rows(q, scale), quant.dequantize_rows(q, scale))


@pytest.mark.parametrize(("width", "size"), [(16, 1e-12), (144, 1), (400, 1e4)])
def test_tokens_and_channels_agree_with_the_oracle_bit_for_bit(width, size):
    """A row has one scale, that of its largest value, whichever plane it is of."""
    x = (torch.randn(10, width) * size).bfloat16()
    x[3] *= 100
    q, scale = quantize_tokens(x)
    assert scale.shape == (10, 1)
    q_oracle, scale_oracle = quant.quantize_tokens(x)
    assert same_bits(q, q_oracle)
    assert torch.equal(scale, scale_oracle)
    assert torch.equal(dequantize_tokens(q, scale), quant.dequantize_tokens(q, scale))
    w = x.view(2, 5, width).transpose(1, 2).contiguous().transpose(1, 2)  # of any strides
    out = torch.empty(2, 5, width, dtype=E4M3), torch.empty(2, 5, 1)
    for planes, split in ((1, w), (5, w.unflatten(1, (5, 1)))):
        made = quantize_channels(split, planes, out if planes == 1 else None)
        assert same_bits(made[0].flatten(0, 1), q)
        assert torch.equal(made[1].flatten(0, 1), scale)
    assert made[0].data_ptr() != out[0].data_ptr()
    dense = dequantize_channels(*out, 1, torch.bfloat16)
    for expert in range(2):
        of_expert = out[0][expert], out[1][expert]
        assert torch.equal(dense[expert], quant.dequantize_tokens(*of_expert, 1).bfloat16())
    assert_close(dense.float(), w.float(), relative=0.05 if size > 1e-9 else 1)


def test_rows_edge_values():
    x = torch.zeros(3, 160)
    x[1] = 3.0
    x[2, 5] = -1e30
    q, scale = quantize_rows(x)
    assert q.dtype == E4M3
    assert scale.shape == (3, 2)
    assert not q.float().isnan().any()
    assert torch.equal(q[0].float(), torch.zeros(160))
    assert scale[0, 0] == torch.tensor(1e-10) / 448
    assert torch.equal(q[1].float(), torch.full((160,), 448.0))
    assert q[2, 5].float() == -448
    torch.testing.assert_close(dequantize_rows(q, scale)[1:], x[1:])


def test_largest_value_never_becomes_nan():
    # v * (448 / amax) can round past 448; without the clamp older torch casts that to NaN
    amax = torch.rand(4096, 1) * 100 + 1e-3
    q, _ = quantize_rows(amax.expand(4096, 128))
    assert torch.equal(q.float(), torch.full((4096, 128), 448.0))


@pytest.mark.parametrize(("planes", "rows", "width"), [(2, 80, 144), (2, 128, 128), (1, 200, 272)])
def test_blocks_restart_at_each_plane(planes, rows, width):
    w = torch.randn(2, planes * rows, width).bfloat16()
    w[:, rows // 2] *= 100  # the first plane's blocks get other scales than the second's
    q, scale = quantize_blockwise(w, planes)
    blocks = -(-rows // 128)
    assert scale.shape == (2, planes * blocks, -(-width // 128))
    for expert in range(2):
        for plane in range(planes):
            for n in range(blocks):
                first = plane * rows + n * 128
                last = min(first + 128, (plane + 1) * rows)
                for k in range(scale.shape[2]):
                    block = w[expert, first:last, k * 128 : (k + 1) * 128].float()
                    amax = block.abs().max()
                    assert scale[expert, plane * blocks + n, k] == amax / 448
                    expected = (block * (torch.tensor(448.0) / amax)).clamp(-448, 448).to(E4M3)
                    assert same_bits(
                        q[expert, first:last, k * 128 : (k + 1) * 128].contiguous(), expected
                    )
    dense = dequantize_blockwise(q, scale, planes)
    assert_close(dense, w.float(), relative=0.04)
    for expert in range(2):
        oracle = quant.dequantize_block(q[expert], scale[expert], planes)
        assert torch.equal(dense[expert], oracle)


PROBLEM = Problem(48, 32, 3, 2, precision="fp8", bias=True)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_channel"])
def test_valid_weights_pass(precision):
    problem = replace(PROBLEM, precision=precision)
    make_weights(problem).validate(problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w13": torch.zeros(3, 64, 48)}, r"weights.w13.dtype is torch.float32"),
        (
            {"w2": torch.zeros(3, 48, 16).to(E4M3)},
            r"weights.w2.shape is \[3, 48, 16\], expected \[3, 48, 32\]",
        ),
        ({"w13_scale": None}, r"weights.w13_scale is None, expected torch.float32 \[3, 2, 1\]"),
        ({"b2": torch.zeros(3, 48, dtype=torch.bfloat16)}, r"weights.b2.dtype"),
        ({"b2": torch.zeros(48, 3).T}, r"weights.b2.stride\(\)"),
        ({"b13": None}, r"weights.b13 is None"),
        ({"b13": [1, 2]}, r"weights.b13 is list, expected a tensor"),
    ],
)
def test_invalid_weights_are_named(change, message):
    with pytest.raises(ArgumentError, match=message):
        replace(make_weights(PROBLEM), **change).validate(PROBLEM)


@pytest.mark.parametrize("precision", ["fp8", "fp8_channel", "bf16xmxfp4", "bf16xnvfp4"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_planes_of_another_number_are_not_quantized_away(precision, activation):
    """Copies are [L, P*I, H], with scales of equal shapes where 128 divides rows: layers would take them."""
    problem = Problem(128, 256, 2, 1, precision=precision, activation=activation)
    planes = problem.activation.planes
    w13 = torch.randn(2, planes * 256, 128).bfloat16()
    masters = ExpertWeights(w13, torch.randn(2, 128, 256).bfloat16())
    masters.quantized(problem).validate(problem)
    by_plane = replace(masters, w13=w13.unflatten(1, (planes, 256)))
    same = by_plane.quantized(problem).named(), masters.quantized(problem).named()
    assert all(same_bits(mine, its) for mine, its in zip(*(n.values() for n in same), strict=True))
    other = replace(masters, w13=w13.unflatten(1, (3 - planes, -1)))
    shape = rf"weights.w13.shape is .*, expected \[L, {planes * 256}, 128\] or \[L, {planes}, 256, "
    with pytest.raises(ArgumentError, match=shape):
        other.quantized(problem)
    with pytest.raises(ArgumentError, match=r"weights.w2.shape is .2, 256, 128., expected .L, 128"):
        replace(masters, w2=masters.w2.mT).quantized(problem)
    stored = masters.quantized(problem)
    apart = replace(stored, w13=stored.w13.unflatten(1, (3 - planes, -1)))
    with pytest.raises(ArgumentError, match="weights.w13.shape"):
        apart.dense(problem, torch.float32)


def test_blocks_of_unsplit_rows_are_seen_where_the_problem_is_given():
    """Gate and up of 112 rows each, quantized as 224 rows: as many blocks, of other rows."""
    gated = Problem(128, 112, 2, 1, precision="fp8")
    w = ExpertWeights(torch.randn(2, 224, 128).bfloat16(), torch.randn(2, 128, 112).bfloat16())
    with pytest.raises(ArgumentError, match=r"weights.w13.shape is \[2, 224, 128\]"):
        w.quantized(replace(gated, activation=ACTIVATIONS["relu2"]))


def test_scales_of_blocks_are_none_of_channels():
    problem = replace(PROBLEM, precision="fp8_channel")
    expected = r"weights.w13_scale.shape is \[3, 2, 1\], expected \[3, 64, 1\]"
    with pytest.raises(ArgumentError, match=expected):
        make_weights(PROBLEM).validate(problem)


def test_superfluous_weights_are_named():
    problem = replace(PROBLEM, bias=False)
    with pytest.raises(ArgumentError, match=r"weights.b(13|2) is given, expected None"):
        make_weights(PROBLEM).validate(problem)


def test_cache_quantizes_once_per_version():
    w = torch.nn.Parameter(torch.randn(2, 64, 48).bfloat16())
    cache = QuantizedCache()
    q, scale = cache.get("w13", w, 2)
    q[0, 0, 0] = 1.0  # a mark that a second quantization would erase
    mark = q.clone()
    assert cache.get("w13", w, 2)[0] is q
    assert same_bits(q, mark)
    with torch.no_grad():
        w.mul_(2.0)
    again, scale_again = cache.get("w13", w, 2)
    assert again.data_ptr() == q.data_ptr()
    assert scale_again.data_ptr() == scale.data_ptr()
    expected, expected_scale = quantize_blockwise(w, 2)
    assert same_bits(again, expected)
    assert torch.equal(scale_again, expected_scale)


def test_cache_does_not_confuse_temporaries_at_one_address():
    cache = QuantizedCache()
    for size in (1.0, 2.0, 3.0):
        w = torch.full((1, 16, 16), size).bfloat16()
        _, scale = cache.get("w2", w)
        assert scale.item() == torch.tensor(size) / 448
        (kept,) = cache._entries["w2"].kept  # so that its address is not given out again
        assert kept.cdata == w.untyped_storage()._cdata
        del w


def test_an_error_between_two_copies_leaves_no_old_ones(monkeypatch):
    """Of a device without memory, say: w13's copy was written over by then, where it lies."""
    problem = replace(PROBLEM, precision="fp8", bias=False)
    first, second = (make_weights(problem, seed=seed, quantize=False) for seed in (1, 2))
    cache = QuantizedCache()
    expected = cache.weights(problem, first).w13.clone()

    def fails(w, *args):
        if w.shape == first.w2.shape:
            raise RuntimeError("out of memory")
        return quantize_weights(w, *args)

    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "quantize_weights", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            cache.weights(problem, second)
    assert same_bits(cache.weights(problem, first).w13, expected)


@pytest.mark.gpu
def test_cuda_has_the_same_bits():
    w = torch.randn(3, 400, 272, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, expected_scale = quantize_blockwise(w, 2)
    for q, scale in (quantize_blockwise(w.cuda(), 2), QuantizedCache().get("w13", w.cuda(), 2)):
        assert same_bits(q.cpu(), expected)
        assert torch.equal(scale.cpu(), expected_scale)
    rows, row_scale = quantize_rows(w[0].cuda())
    assert same_bits(rows.cpu(), quantize_rows(w[0])[0])
    assert torch.equal(row_scale.cpu(), quantize_rows(w[0])[1])


def test_cache_invalidate():
    w = torch.ones(1, 16, 16).bfloat16()
    cache = QuantizedCache()
    _, scale = cache.get("w2", w)
    w.data.mul_(2)  # not counted by torch
    cache.invalidate()
    assert cache.get("w2", w)[1].item() == torch.tensor(2.0) / 448
    assert cache.get("w2", w)[1].data_ptr() == scale.data_ptr()


def test_transposed_weights_are_validated_with_those_of_the_forward_pass():
    problem = Problem(144, 272, 3, 2, precision="fp8")
    weights = make_weights(problem).quantized(problem)
    made = TransposedWeights.of(problem, weights)
    made.validate(problem, weights.w2.device)
    broken = replace(made, forward=replace(weights, w2_scale=None))
    with pytest.raises(ArgumentError, match="weights.w2_scale is None"):
        broken.validate(problem, weights.w2.device)


def test_weights_must_be_on_the_device_of_a_call():
    problem = Problem(144, 272, 3, 2)
    weights = make_weights(problem)
    elsewhere = ExpertWeights(*(t.to("meta") for t in weights.named().values()))
    elsewhere.validate(problem)
    with pytest.raises(ArgumentError, match="weights.w13.device is meta, expected cpu"):
        elsewhere.validate(problem, torch.device("cpu"))


def test_a_parameter_that_stands_for_itself_may_get_other_memory():
    p = torch.nn.Parameter(torch.zeros(3, 4))
    before = version_of(made_of(p, (p,)))
    p.data = torch.ones(3, 4)
    assert version_of(p) != before
