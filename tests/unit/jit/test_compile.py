"""torch.compile: the operator is one opaque call in one graph, forward and backward."""

import re

import pytest
import torch
from functorch.compile import make_boxed_func
from saving import count_no_calls
from torch._dynamo.backends.common import aot_autograd  # partitions: fake kernels run too

from megamoe import ArgumentError, Layer, MegaMoE, Problem
from megamoe.formats.quantization import quantize_rows
from megamoe.layer.autograd import apply
from megamoe.layer.inputs import Inputs
from megamoe.testing import assert_close, make_inputs, make_weights

OPS = torch.ops.megamoe


def make(precision="bf16"):
    layer = MegaMoE(48, 32, 5, 2, precision=precision, backend="staged", init_seed=1, bias=True)
    layer.prepare()
    return layer, make_inputs(layer.problem, 16)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_opcheck(precision, monkeypatch):
    count_no_calls(monkeypatch)
    layer, inputs = make(precision)
    w = layer.expert_weights()
    x = inputs.x.clone().requires_grad_()
    count = torch.tensor([13], dtype=torch.int32)
    arguments = Inputs.of(x, inputs.topk_ids, inputs.topk_weights, w, count)
    handle, state_bytes = layer._layer.handle, layer._layer._runtime.state_bytes
    for keep in (False, True):
        torch.library.opcheck(OPS.moe_forward.default, (*arguments, handle, state_bytes, keep))
    if precision == "fp8":
        q, scale = quantize_rows(inputs.x)
        frozen = Inputs(*[a if a is None else a.detach() for a in arguments])
        kinds = (
            "test_faketensor",
            "test_autograd_registration",
        )  # others multiply e4m3, torch cannot
        call = *frozen._replace(x=q, x_scale=scale), handle, 0, False
        torch.library.opcheck(OPS.moe_forward.default, call, test_utils=kinds)
    dy = torch.ones_like(inputs.x)
    detached = [a if a is None else a.detach() for a in arguments]
    needs = [True, False, True, True, False, True]
    with torch.no_grad():
        _, state = OPS.moe_forward(*detached, handle, state_bytes, True)
    torch.library.opcheck(OPS.moe_backward.default, (dy, *detached, handle, needs, state))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fullgraph_forward_and_backward(precision):
    layer, inputs = make(precision)

    def model(x, ids, scores):
        return layer(x * 1.5, ids, scores.softmax(-1)).float().square()

    graphs = []

    def record(graph, example):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)

    def run(function):
        x = inputs.x.clone().requires_grad_()
        scores = inputs.topk_weights.clone().requires_grad_()
        layer.zero_grad()
        y = function(x, inputs.topk_ids, scores)
        y.mean().backward()
        return [y.detach(), x.grad, scores.grad, *(p.grad.clone() for p in layer.parameters())]

    eager = run(model)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = run(torch.compile(model, fullgraph=True, backend=backend))
    for found, expected in zip(compiled, eager, strict=True):
        assert expected.abs().max() > 0
        assert_close(found, expected, relative=1e-2)
    assert len(graphs) == 2
    assert graphs[0].count(OPS.moe_forward.default) == 1
    assert graphs[1].count(OPS.moe_backward.default) == 1


@torch._dynamo.config.patch(recompile_limit=1)
def test_equal_layers_share_one_graph():
    torch._dynamo.reset()
    layers, inputs = [make()[0] for _ in range(3)], make()[1]
    with torch.no_grad():
        layers[1].w2.mul_(2)
    for layer in layers:  # as torchtitan does: each block by itself
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        y = compiled(inputs.x, inputs.topk_ids, inputs.topk_weights)
        assert torch.equal(y, layer(inputs.x, inputs.topk_ids, inputs.topk_weights))


def test_closed_layer_is_a_named_error():
    layer, inputs = make()
    handle = layer._layer.handle
    weights = layer.expert_weights()
    layer.close()
    call = Inputs.of(inputs.x, inputs.topk_ids, inputs.topk_weights, weights)
    with pytest.raises(RuntimeError, match=f"the layer of handle {int(handle)} is closed"):
        apply(call, handle)


def test_layers_of_several_sizes_in_one_process():
    """torch takes sizes that differ between compilations as symbols."""
    torch._dynamo.reset()
    for experts, hidden, top_k in ((5, 64, 1), (7, 48, 3), (9, 80, 2)):
        problem = Problem(hidden, 32, experts, top_k, max_tokens=8)
        layer, weights = Layer(problem, backend="staged"), make_weights(problem)
        i = make_inputs(problem, 8)
        layer.prepare(weights)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        call = i.x, i.topk_ids, i.topk_weights, weights
        with torch.no_grad():
            assert_close(compiled(*call), layer(*call), relative=0)


def test_wrong_arguments_are_named_in_a_whole_graph():
    layer, i = make()
    torch._dynamo.reset()

    def model(x, ids, scores):
        return torch.nn.functional.silu(layer(x, ids, scores)) * 2

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    good = i.x, i.topk_ids, i.topk_weights
    expected = compiled(*good)
    for wrong, message in (
        ((i.x.float(), *good[1:]), "x.dtype is torch.float32, expected torch.bfloat16"),
        ((i.x[:, :32], *good[1:]), "x.shape is [16, 32], expected [16, 48]"),
        ((i.x, i.topk_ids[:, :1], i.topk_weights), "topk_ids.shape is [16, 1], expected"),
        (
            [t.repeat(513, 1) for t in good],
            "x.shape[0] is 8208, expected at most max_tokens = 8192",
        ),
        (
            [t.repeat(514, 1) for t in good],
            "x.shape[0] is 8224, expected at most max_tokens = 8192",
        ),
    ):
        with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
            compiled(*wrong)
    assert torch.equal(compiled(*good), expected)
