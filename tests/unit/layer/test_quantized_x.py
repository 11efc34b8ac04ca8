"""x in FP8 with scales: the bits of the x that it was made of, any scales, ranks that differ, what is refused."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from calls import calls_of
from outcomes import outcome

from megamoe import Layer, MegaMoE, Problem
from megamoe.backends.call import Call
from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.staged import StagedBackend
from megamoe.core.errors import ArgumentError
from megamoe.formats.quantization import codec, quantize_rows
from megamoe.formats.quantized import QuantizedRows
from megamoe.testing import assert_close, launch, make_inputs, make_weights, same_bits

# the second group of 128 has 16 columns
PROBLEM = Problem(144, 80, 5, 2, max_tokens=40, precision="fp8")
TOKENS = 21
E4M3 = torch.float8_e4m3fn


def call_of(problem=PROBLEM, **options):
    i = make_inputs(problem, TOKENS, routing="dropped", **options)
    return i.x, i.topk_ids, i.topk_weights


def given(tokens=TOKENS, problem=PROBLEM):
    """Numbers and scales that no quantization would make."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(tokens, problem.hidden, generator=generator) * 3
    groups = -(-problem.hidden // 128)
    scale = torch.rand(tokens, groups, generator=generator) * 0.5 + 0.01
    scale[::3] = 0.25  # powers of two
    scale[1] = 0
    return q.to(E4M3), scale


@pytest.mark.parametrize("precision", ["fp8", "fp8_channel", "fp8xmxfp4"])
@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_y_has_the_bits_of_the_x_that_was_quantized(backend, precision):
    problem = replace(PROBLEM, precision=precision, hidden=160, intermediate=96)
    x, ids, scores = call_of(problem)
    weights = make_weights(problem)
    layer = Layer(problem, backend=backend)
    expected = layer(x, ids, scores, weights)
    q, scale = codec(problem.formats.x).quantize(x)
    assert same_bits(layer(q, ids, scores, weights, x_scale=scale), expected)
    assert expected.any(1).sum() > TOKENS // 2
    strided = scale.T.contiguous().T  # as kernels of DeepGEMM want them
    out = torch.empty_like(x)
    batched = q.view(3, 7, -1), ids.view(3, 7, -1), scores.view(3, 7, -1)
    y = layer(*batched, weights, x_scale=strided.unflatten(0, (3, 7)), out=out.view(3, 7, -1))
    assert y.shape == (3, 7, problem.hidden)
    assert same_bits(out, expected)
    count = torch.tensor([9], dtype=torch.int32)
    y = layer(q, ids, scores, weights, x_scale=scale, num_tokens_device=count)
    assert same_bits(y[:9], expected[:9])
    assert layer(q[:0], ids[:0], scores[:0], weights, x_scale=scale[:0]).shape == (0, x.shape[1])
    assert same_bits(layer(x, ids, scores, weights), expected)  # bf16 again


@pytest.mark.parametrize("backend", ["staged", "emulate"])
def test_any_scales(backend):
    _, ids, scores = call_of()
    weights = make_weights(PROBLEM)
    q, scale = given()
    y = Layer(PROBLEM, backend=backend)(q, ids, scores, weights, x_scale=scale)
    expected = Layer(PROBLEM, backend="reference")(q, ids, scores, weights, x_scale=scale)
    assert_close(y, expected, relative=6e-3)
    # Without a quantization of x: the values as bf16 weights' layer takes them
    dense = weights.dense(PROBLEM, torch.float32)
    values = q.float() * scale.repeat_interleave(128, 1)[:, :144]
    plain = replace(PROBLEM, precision="bf16")
    wide = replace(dense, w13=dense.w13.bfloat16(), w2=dense.w2.bfloat16())
    near = Layer(plain, backend="reference")(values.bfloat16(), ids, scores, wide)
    assert_close(y, near, relative=5e-2)  # h is quantized


def test_the_window_holds_what_was_given():
    _, ids, scores = call_of()
    q, scale = given()
    emulation = Emulation(PROBLEM)
    weights = make_weights(PROBLEM)
    emulation.forward_all(calls_of([QuantizedRows(q, scale)], [ids], [scores], [weights]))
    assert torch.equal(
        emulation.region(0, "window_x")[:TOKENS].view(torch.uint8), q.view(torch.uint8)
    )
    assert same_bits(emulation.region(0, "window_x_scale")[:TOKENS], scale)


def test_a_rank_may_bring_fp8_and_another_bf16():
    problem = replace(PROBLEM, ep_size=2)
    calls = [call_of(problem, rank=rank) for rank in range(2)]
    weights = [make_weights(problem, rank=rank) for rank in range(2)]
    xs, ids, scores = (list(column) for column in zip(*calls, strict=True))
    expected = Emulation(problem).forward_all(calls_of(xs, ids, scores, weights))
    for rank in range(2):
        mixed = [QuantizedRows(*quantize_rows(x)) if r == rank else x for r, x in enumerate(xs)]
        found = Emulation(problem).forward_all(calls_of(mixed, ids, scores, weights))
        for y, want in zip(found, expected, strict=True):
            assert same_bits(y, want)


def over_ranks(rank):
    found = {}
    problem = replace(PROBLEM, ep_size=2, rank=rank)
    x, ids, scores = call_of(problem)
    weights = make_weights(problem)
    for backend in ("staged", "reference", "emulate"):
        layer = Layer(problem, dist.group.WORLD, backend=backend)
        expected = layer(x, ids, scores, weights)
        q, scale = quantize_rows(x)
        first = (q, scale) if rank else (x, None)
        y = layer(first[0], ids, scores, weights, x_scale=first[1])
        found[backend] = same_bits(y, expected)
        wrong = scale[:, :1] if rank else None
        found[f"{backend}, wrong"] = outcome(
            lambda q=q, w=wrong, f=first, layer=layer: layer(
                q if rank else f[0], ids, scores, weights, x_scale=w
            )
        )
        if backend == "emulate":
            leaf = x.clone().requires_grad_(rank == 0)  # only rank 0 records
            found["mixed"] = outcome(lambda x=leaf, c=layer: c(x, ids, scores, weights))
        layer.close()
    return found


def test_over_two_ranks():
    for rank, found in enumerate(launch(over_ranks, 2)):
        for backend in ("staged", "reference", "emulate"):
            assert found[backend] is True
            text = str(found[f"{backend}, wrong"])
            assert found["mixed"][0] == "RankMismatch", found["mixed"]
            assert ("x_scale.shape is [21, 1]" in text) if rank else ("PeerFault" in text), text


def test_compiled_module_and_backend():
    module = MegaMoE(144, 80, 5, 2, precision="fp8", max_tokens=40, backend="staged", init_seed=1)
    x, ids, scores = call_of()
    q, scale = quantize_rows(x)
    with torch.no_grad():
        expected = module(x, ids, scores)
        assert same_bits(module(q, ids, scores, x_scale=scale), expected)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        assert same_bits(compiled(q, ids, scores, x_scale=scale), expected)
        weights = module.expert_weights().quantized(PROBLEM)
        rows = QuantizedRows(q, scale)
        y, _ = StagedBackend(PROBLEM).forward(Call(rows, ids, scores, weights))
        assert same_bits(y, expected)


def test_known_calls_are_checked_again_when_anything_changes(monkeypatch):
    x, ids, scores = call_of()
    q, scale = quantize_rows(x)
    weights, layer = make_weights(PROBLEM), Layer(PROBLEM, backend="staged")
    checked, check = [], Layer._checked
    monkeypatch.setattr(Layer, "_checked", lambda *a: checked.append(1) or check(*a))
    expected = layer(q, ids, scores, weights, x_scale=scale)
    other = layer(x * 2, ids, scores, weights)
    for _ in range(2):
        assert same_bits(layer(q, ids, scores, weights, x_scale=scale.clone()), expected)
        assert same_bits(layer(x * 2, ids, scores, weights), other)
        assert same_bits(layer(q, ids, scores, weights, x_scale=scale * 2), other)
    assert len(checked) == 2
    wide = scale.repeat_interleave(2, 1)[:, ::2]
    assert same_bits(layer(q, ids, scores, weights, x_scale=wide), expected)
    assert len(checked) == 3
    for wrong, options in ((q, {}), (q, {"x_scale": scale[:9]}), (x, {"x_scale": scale})):
        with pytest.raises(ArgumentError):
            layer(wrong, ids, scores, weights, **options)
    recorded = scores.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="gradients is recorded"):
        layer(q, ids, recorded, weights, x_scale=scale)


def test_weights_on_the_input_scale_the_scales():
    problem = replace(PROBLEM, top_k=1)
    x, ids, _ = call_of(problem)
    scores = torch.full((TOKENS, 1), 0.5)
    q, scale = quantize_rows(x)
    weights = make_weights(problem)
    layer = Layer(problem, backend="staged", apply_router_weight_on_input=True)
    expected = layer(x, ids, scores, weights)  # a power of two: the same numbers
    assert same_bits(layer(q, ids, scores, weights, x_scale=scale), expected)


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_no_gradient_is_lost_by_way_of_scales(backend):
    problem = replace(PROBLEM, top_k=1)
    x, ids, scores = call_of(problem)
    q, scale = quantize_rows(x)
    weights, leaf = make_weights(problem), scores.clone().requires_grad_()
    for on_input, given_scores, given_scale in (
        (True, leaf, scale),  # a factor of the scales
        (False, scores, scale.clone().requires_grad_()),
    ):
        on = {"apply_router_weight_on_input": on_input}
        layer = Layer(problem, backend=backend, **on)
        call = ids, given_scores, weights
        expected = layer(q, ids, scores, weights, x_scale=scale)  # known from here on
        with pytest.raises(ArgumentError, match="gradients is recorded"):
            layer(q, *call, x_scale=given_scale)
        with torch.no_grad():
            assert same_bits(layer(q, *call, x_scale=given_scale), expected)


def test_what_is_refused():
    x, ids, scores = call_of()
    q, scale = quantize_rows(x)
    weights, layer = make_weights(PROBLEM), Layer(PROBLEM, backend="staged")
    for x_given, s_given, message in (
        (q, None, "x.dtype is torch.float8_e4m3fn, expected torch.bfloat16"),
        (x, scale, "x.dtype is torch.bfloat16, expected torch.float8_e4m3fn"),
        (q, scale[:, :1], r"x_scale.shape is \[21, 1\], expected \[21, 2\]"),
        (q, scale[:20], r"x_scale.shape is \[20, 2\], expected \[21\] \+ "),
        (q, scale.double(), "x_scale.dtype is torch.float64"),
        (q, scale.to("meta"), "x_scale.device is meta"),
        (q, 1.0, "x_scale is float"),
        (q.view(torch.uint8), scale, "x.dtype is torch.uint8"),
        (q[:, :128], scale[:, :1], r"x.shape is \[21, 128\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            layer(x_given, ids, scores, weights, x_scale=s_given)
    memory = torch.empty(TOKENS, 144, dtype=torch.bfloat16)
    first = memory.view(-1).view(E4M3)[: TOKENS * 144].view(TOKENS, 144)
    with pytest.raises(
        ArgumentError, match="out is in a storage that the call reads"
    ):  # rows of y are twice as long
        layer(first, ids, scores, weights, x_scale=scale, out=memory)
    recorded = scores.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="gradients is recorded, expected torch.no_grad"):
        layer(q, ids, recorded, weights, x_scale=scale)
    with torch.no_grad():
        layer(q, ids, recorded, weights, x_scale=scale)
    plain = replace(PROBLEM, precision="bf16")
    masters = make_weights(plain)
    with pytest.raises(
        ArgumentError, match="x_scale is given, expected None with precision 'bf16'"
    ):
        Layer(plain, backend="staged")(q, ids, scores, masters, x_scale=scale)


def test_scales_by_token_are_another_precisions():
    """By name, whichever way round; and this precision has no backward pass."""
    for precision, of, found, expected in (
        ("fp8_channel", "fp8", r"\[21, 2\]", r"\[21, 1\]"),
        ("fp8", "fp8_channel", r"\[21, 1\]", r"\[21, 2\]"),
    ):
        problem = replace(PROBLEM, precision=precision)
        x, ids, scores = call_of(problem)
        weights = make_weights(problem)
        q, scale = codec(replace(PROBLEM, precision=of).formats.x).quantize(x)
        layer = Layer(problem, backend="staged")
        with pytest.raises(ArgumentError, match=f"x_scale.shape is {found}, expected {expected}"):
            layer(q, ids, scores, weights, x_scale=scale)
        if not problem.formats.trains:
            with pytest.raises(ArgumentError, match="precision 'fp8_channel' has no backward pass"):
                layer(x.requires_grad_(), ids, scores, weights)
