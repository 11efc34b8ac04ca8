"""Weights in other layouts, read in place: rows of gate and up interleaved, w1 and w3 apart, gaps between experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from layouts import LAYOUTS, apart, interleaved, with_gaps
from saving import count_no_calls
from torch import Tensor

import megamoe
from megamoe.backends import reference
from megamoe.backends.call import Call
from megamoe.backends.gathered import pack, unpack
from megamoe.backends.staged import StagedBackend
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import by_plane, map_strides, plane_strides
from megamoe.formats.quantization import quantize_blockwise
from megamoe.formats.versions import origin_of
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.launch.cache import QuantizedCache
from megamoe.layer.inputs import Inputs
from megamoe.testing import make_inputs, make_weights

PROBLEM = Problem(144, 80, 5, 3, max_tokens=40, bias=True, activation="swiglu_oai")


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_channel"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_backends_give_the_bits_of_contiguous_weights(layout: str, precision: str) -> None:
    problem = replace(PROBLEM, precision=precision)
    inputs, weights = make_inputs(problem, 33), make_weights(problem)
    strided = LAYOUTS[layout](weights)
    assert strided.w13.stride() != weights.w13.stride()
    call = (inputs.x, inputs.topk_ids, inputs.topk_weights)
    staged = StagedBackend(problem)

    def y_of(w):
        return staged.forward(Call(*call, w))[0]

    assert torch.equal(y_of(strided), y_of(weights))
    columns = [[t] for t in call]
    found = reference.forward(problem, *columns, [strided])
    expected = reference.forward(problem, *columns, [weights])
    for name in ("gate_up", "y"):
        assert torch.equal(found[name][0], expected[name][0])
    # the checks can fail: rows of the other order are another layer
    swapped = replace(strided, w13=by_plane(strided.w13, 2).flip(1))
    assert not torch.equal(y_of(swapped), y_of(weights))


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_transposes_of_given_e4m3_are_those_of_contiguous_weights(layout: str) -> None:
    """What a backward pass by the kernel multiplies."""
    problem = replace(PROBLEM, precision="fp8")
    weights = make_weights(problem)
    strided = LAYOUTS[layout](weights)
    found = TransposedWeights.of(problem, strided)
    found.validate(problem, strided.w13.device)
    expected = TransposedWeights.of(problem, weights).named()
    for name, tensor in found.named().items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_gradients_are_equal_and_in_the_callers_layout(layout: str, precision: str) -> None:
    problem = replace(PROBLEM, precision=precision)
    inputs, masters = make_inputs(problem, 33), make_weights(problem, quantize=False)
    layer = megamoe.Layer(problem, backend="staged")

    def train(weights: ExpertWeights) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {n: t.detach().requires_grad_() for n, t in weights.named().items()}
        y = layer(inputs.x, inputs.topk_ids, inputs.topk_weights, ExpertWeights(**leaves))
        y.float().square().sum().backward()
        return y, {n: leaf.grad for n, leaf in leaves.items()}

    y, grads = train(masters)
    strided = LAYOUTS[layout](masters)
    found_y, found = train(strided)
    assert torch.equal(found_y, y)
    for name, grad in found.items():
        assert torch.equal(grad.reshape(grads[name].shape), grads[name]), name
        if layout != "gaps":  # dense memory
            assert grad.stride() == getattr(strided, name).stride(), name
    layer.close()


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_channel"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_operators_state_the_layout_of_gradients(
    layout: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake and real outputs of the operators have the same strides. What else opcheck() tests: test_compile.py."""
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    count_no_calls(monkeypatch)
    problem = replace(PROBLEM, precision=precision)
    inputs, masters = make_inputs(problem, 8), make_weights(problem, quantize=False)
    e, layer = LAYOUTS[layout](masters), megamoe.Layer(problem, backend="staged")
    layer.prepare(e)
    call = Inputs.of(inputs.x, inputs.topk_ids, inputs.topk_weights, e)
    size = layer._runtime.backend.state_bytes
    for keep in (False, True):
        given = (*call, layer.handle, size, keep)
        check(torch.ops.megamoe.moe_forward.default, given)
    with torch.no_grad():
        _, state = torch.ops.megamoe.moe_forward(*given)
    needs = [True] * 6
    gradient = (torch.ones_like(inputs.x), *call, layer.handle, needs, state)
    check(torch.ops.megamoe.moe_backward.default, gradient)
    layer.close()


def test_w1_and_w3_are_joined_without_a_copy() -> None:
    masters = make_weights(PROBLEM)
    w1, w3 = (torch.nn.Parameter(p) for p in apart(masters.w13).unbind(1))
    b1, b3 = masters.b13.chunk(2, dim=1)
    weights = ExpertWeights.from_w1_w3(w1, w3, masters.w2, biases=(b1, b3, masters.b2))
    assert weights.w13.data_ptr() == w1.data_ptr()
    assert torch.equal(weights.w13.flatten(1, 2), masters.w13)
    weights.validate(PROBLEM)
    inputs, layer = make_inputs(PROBLEM, 20), megamoe.Layer(PROBLEM, backend="staged")
    call = (inputs.x, inputs.topk_ids, inputs.topk_weights)
    y = layer(*call, weights)
    y.float().sum().backward()
    joined = replace(masters, w13=masters.w13.clone().requires_grad_())
    expected = layer(*call, joined)
    expected.float().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(torch.cat((w1.grad, w3.grad), dim=1), joined.w13.grad)
    layer.close()


@pytest.mark.parametrize("counted_apart", [False, True])
def test_writes_to_either_of_w1_and_w3_make_new_fp8_copies(counted_apart: bool) -> None:
    problem = replace(PROBLEM, precision="fp8", bias=False)
    masters = make_weights(problem, quantize=False)
    w1, w3 = (torch.nn.Parameter(p) for p in apart(masters.w13).unbind(1))
    if counted_apart:
        w3 = torch.nn.Parameter(w3.data)
    weights, cache = ExpertWeights.from_w1_w3(w1, w3, masters.w2), QuantizedCache()
    q = cache.weights(problem, weights).w13
    for w in (w1, w3):
        with torch.no_grad():
            w.mul_(-1)
        found = cache.weights(problem, weights)
        assert found.w13.data_ptr() == q.data_ptr()
        expected, _ = quantize_blockwise(torch.cat((w1, w3), dim=1), 2)
        assert torch.equal(found.w13.view(torch.uint8), expected.view(torch.uint8))
    other, _ = quantize_blockwise(masters.w13, 2)
    assert not torch.equal(found.w13.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("written", [0, 1])
def test_a_write_between_forward_and_backward_is_an_error(written: int) -> None:
    masters = make_weights(PROBLEM)
    pair = [torch.nn.Parameter(p.data) for p in apart(masters.w13).unbind(1)]
    y = ExpertWeights.from_w1_w3(*pair, masters.w2).w13.float().square().sum()
    with torch.no_grad():
        pair[written].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_equal_addresses_with_other_strides_are_other_weights() -> None:
    problem = replace(PROBLEM, precision="fp8", bias=False)
    masters, cache = make_weights(problem, quantize=False), QuantizedCache()
    plain = cache.weights(problem, masters).w13.clone()
    as_pairs = masters.w13.unflatten(1, (-1, 2)).transpose(1, 2)
    assert as_pairs.data_ptr() == masters.w13.data_ptr()
    other = cache.weights(problem, replace(masters, w13=as_pairs)).w13
    expected, _ = quantize_blockwise(as_pairs.flatten(1, 2), 2)
    assert torch.equal(other.view(torch.uint8), expected.view(torch.uint8))
    assert not torch.equal(other.view(torch.uint8), plain.view(torch.uint8))


def test_map_strides() -> None:
    w = torch.empty(5, 160, 144, dtype=torch.bfloat16)
    row = 144 * 2
    assert map_strides(by_plane(w, 2)) == (row, 80 * row, 160 * row)
    assert map_strides(interleaved(w)) == (2 * row, row, 160 * row)
    assert map_strides(apart(w)) == (row, 5 * 80 * row, 80 * row)
    odd = w.as_strided((1, 2, 80, 144), (7, 80 * 144, 144, 1))  # of one expert any stride will do
    assert map_strides(odd) == (row, 80 * row, row)


@pytest.mark.parametrize("experts", [1, 5])
def test_plane_strides_are_those_of_the_view(experts: int) -> None:
    w = torch.empty(experts, 160, 144, dtype=torch.bfloat16)
    for given in (w, interleaved(w), apart(w), with_gaps(w), w[:, ::2], w.float()):
        for planes in (1, 2):
            if given.dim() == 3 or planes == 2:
                assert plane_strides(given, planes) == map_strides(by_plane(given, planes))


# --- what is refused ---


def refused(name: str, **changes: Tensor) -> str:
    weights = replace(make_weights(PROBLEM), **changes)
    with pytest.raises(ArgumentError) as caught:
        weights.validate(PROBLEM)
    assert caught.value.argument.startswith(f"weights.{name}")
    return str(caught.value)


def test_strides_that_tma_cannot_read_are_refused_by_name() -> None:
    w = make_weights(PROBLEM)
    transposed = w.w2.transpose(1, 2).contiguous().transpose(1, 2)
    assert "expected 1 in the last dimension" in refused("w2", w2=transposed)
    odd = torch.zeros(5, 160, 145, dtype=torch.bfloat16)[..., :144]
    assert "multiples of 8" in refused("w13", w13=odd)
    assert "positive" in refused("w13", w13=w.w13[:1].expand(5, -1, -1))
    far = torch.empty(0, dtype=torch.bfloat16, device="meta")
    far = far.new_empty_strided((5, 160, 144), (1 << 40, 144, 1))
    with pytest.raises(ArgumentError, match=r"w13.stride\(\)"):
        replace(w, w13=far).validate(PROBLEM, far.device)
    assert "[5, 2, 80, 144]" in refused("w13", w13=w.w13.view(5, 1, 160, 144))
    assert "[5, 144, 80]" in refused("w2", w2=w.w2.view(5, 1, 144, 80))
    assert "contiguous" in refused("b2", b2=torch.zeros(5, 288)[:, ::2])


def test_w1_and_w3_that_cannot_be_joined_are_refused_by_name() -> None:
    masters = make_weights(PROBLEM)
    w1, w3 = apart(masters.w13).unbind(1)

    def refuse(match: str, *pair: Tensor) -> None:
        with pytest.raises(ArgumentError, match=match):
            ExpertWeights.from_w1_w3(*pair, masters.w2)

    refuse("another storage", w1, w3.clone())
    refuse("positive distance", w3, w1)
    refuse("positive distance", w1, w1)
    refuse(r"w3.stride\(\)", w1, w3.as_strided(w3.shape, (8, 144, 1)))
    refuse("expected torch.bfloat16 .L, I, H., like w1", w1, w3[:2])
    refuse("expected torch.bfloat16 .L, I, H., like w1", w1, w3.view(torch.float16))


def test_joined_weights_are_saved_as_tensors(tmp_path: Path) -> None:
    w1, w3 = torch.randn(2, 3, 4, 5).unbind(0)
    weights = ExpertWeights.from_w1_w3(w1, w3, torch.randn(3, 5, 4))
    torch.save(weights.w13, tmp_path / "w13.pt")
    loaded = torch.load(tmp_path / "w13.pt")
    assert torch.equal(loaded, weights.w13)
    assert origin_of(loaded) is None


@pytest.mark.parametrize("kind", ["biases", "scales"])
def test_biases_and_scales_of_w1_and_w3_belong_together(kind: str) -> None:
    """One alone would be dropped, and joined scales of unequal shapes may have the shape of others."""
    masters = make_weights(PROBLEM)
    w1, w3 = apart(masters.w13).unbind(1)
    shape = (5, 80) if kind == "biases" else (5, 3, 2)
    of_w1, of_w3, of_w2 = torch.zeros(shape), torch.zeros(shape), torch.zeros(5, 144)
    for other in (None, of_w3[:, :1]):
        for first, second in ((of_w1, other), (other, of_w3)):
            with pytest.raises(
                ArgumentError, match=f"{kind} of w1 and w3 is .*, expected both, of equal"
            ):
                ExpertWeights.from_w1_w3(w1, w3, masters.w2, **{kind: (first, second, of_w2)})
    ExpertWeights.from_w1_w3(w1, w3, masters.w2, **{kind: (of_w1, of_w3, of_w2)})


def test_the_bias_is_copied_only_if_it_has_to_be() -> None:
    weights = make_weights(PROBLEM)
    assert weights.with_flat_bias() is weights
    split = replace(weights, b13=weights.b13.view(5, 2, 80))
    assert split.with_flat_bias() is split
    strided = replace(weights, b13=interleaved(weights.b13)).with_flat_bias()
    assert torch.equal(strided.b13.flatten(1), weights.b13)
    assert strided.b13.is_contiguous()


def test_scales_of_one_column_may_have_any_stride() -> None:
    """Weights go to another process as bytes; view() refuses the stride that a transpose leaves one column."""
    weights = make_weights(replace(PROBLEM, intermediate=32, precision="fp8"))
    scale = weights.w2_scale
    assert scale is not None
    assert scale.shape[-1] == 1
    transposed = replace(weights, w2_scale=scale.as_strided(scale.shape, (*scale.stride()[:-1], 2)))
    packed = pack(transposed)
    assert torch.equal(packed.w2_scale.numbers.view(torch.float32), scale.flatten())
    assert torch.equal(unpack(packed).w2_scale, scale)
