"""Shared experts, weights on the input and a quantized x on one GPU: beside staged, and in graphs."""

from dataclasses import replace

import pytest
import torch

from megamoe import ExpertWeights, Layer, Problem, SharedExperts
from megamoe.formats.quantization import quantize_rows
from megamoe.testing import assert_close, make_inputs, make_weights, same_bits

pytestmark = pytest.mark.gpu
BACKEND, DEVICE = "mega", "cuda"
LIMITS = {"bf16": 1e-2, "fp8": 4e-2}  # as in test_layer.py
GRADIENTS = "bf16"  # what staged multiplies for weights in FP8, too


def problem_of(precision, top_k=3):
    return Problem(512, 384, 9, top_k, max_tokens=256, precision=precision)


def captured(call):
    """Return what a replay of the call's graph gives; on a CPU, the call."""
    if DEVICE == "cpu":
        return call()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return y


def step(call, leaves):
    """Return y and the gradients of the leaves of one step on a fixed target."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
    y = call(**leaves)
    generator = torch.Generator(DEVICE).manual_seed(4)
    dy = torch.randn(y.shape, device=DEVICE, generator=generator).bfloat16()
    y.backward(dy)
    return {"y": y.detach(), **{n: t.grad for n, t in leaves.items()}}


@pytest.mark.parametrize("precision", LIMITS)
def test_shared_experts(precision):
    problem = problem_of(precision)
    shared = SharedExperts(problem, 2 * 384, routed_scaling_factor=2.5, device=DEVICE)
    i = make_inputs(problem, 200, routing="dropped", device=DEVICE)
    wide = replace(problem, intermediate=768, num_experts=1, top_k=1)
    whole = make_weights(wide, seed=1, device=DEVICE, quantize=False)
    whole = ExpertWeights(whole.w13[0], whole.w2[0])
    masters = make_weights(problem, device=DEVICE, quantize=False)
    gate = torch.rand(200, 1, device=DEVICE)
    leaves = {"x": i.x, "scores": i.topk_weights, "gate": gate, "w13": masters.w13}
    leaves |= {"w2": masters.w2, "shared13": whole.w13, "shared2": whole.w2}
    found = {}
    for backend in (BACKEND, "staged"):
        layer = Layer(shared.problem, backend=backend, weight_gradients=GRADIENTS)

        def call(x, scores, gate, w13, w2, shared13, shared2, layer=layer):
            parts = shared.parts(ExpertWeights(shared13, shared2))
            weights = shared.join(ExpertWeights(w13, w2), parts)
            return layer(x, *shared.routes(i.topk_ids, scores, gate), weights)

        found[backend] = step(call, leaves)
        if backend == BACKEND:
            with torch.no_grad():
                y = captured(lambda call=call: call(**leaves))
            assert_close(y, found[backend]["y"], relative=0)
        layer.check()
        layer.close()
    for name, expected in found["staged"].items():
        assert expected.abs().max() > 0
        assert_close(found[BACKEND][name], expected, relative=LIMITS[precision], name=name)


@pytest.mark.parametrize("precision", LIMITS)
def test_weights_on_the_input(precision):
    problem = problem_of(precision, top_k=1)
    i = make_inputs(problem, 200, routing="dropped", device=DEVICE)
    scores = torch.rand(200, 1, device=DEVICE) + 0.5
    masters = make_weights(problem, device=DEVICE, quantize=False)
    found = {}
    for backend in (BACKEND, "staged"):
        options = {"apply_router_weight_on_input": True, "weight_gradients": GRADIENTS}
        layer = Layer(problem, backend=backend, **options)

        def call(x, scores, w13, w2, layer=layer):
            return layer(x, i.topk_ids, scores, ExpertWeights(w13, w2))

        found[backend] = step(call, {"x": i.x, "scores": scores, **masters.named()})
        layer.check()
        layer.close()
    for name, expected in found["staged"].items():
        assert expected.abs().max() > 0
        assert_close(found[BACKEND][name], expected, relative=LIMITS[precision], name=name)


def test_a_quantized_x_in_a_graph():
    problem = problem_of("fp8")
    i = make_inputs(problem, 200, routing="dropped", device=DEVICE)
    weights = make_weights(problem, device=DEVICE)
    layer = Layer(problem, backend=BACKEND)
    expected = layer(i.x, i.topk_ids, i.topk_weights, weights)
    q, scale = quantize_rows(i.x)
    call = q, i.topk_ids, i.topk_weights, weights
    assert same_bits(captured(lambda: layer(*call, x_scale=scale)), expected)
    assert same_bits(layer(i.x, i.topk_ids, i.topk_weights, weights), expected)
    layer.check()
    layer.close()
