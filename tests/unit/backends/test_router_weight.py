"""apply_router_weight_on_input: what is computed, gradients, tokens that are not computed, what is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome

from megamoe import ExpertWeights, Layer, MegaMoE, Problem
from megamoe.core.config import ACTIVATIONS
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.testing import assert_close, launch, make_inputs, make_weights, same_bits

PROBLEM = Problem(64, 48, 5, 1, max_tokens=16, bias=True)
TOKENS = 11


def call_of(problem=PROBLEM, scale=1.5):
    inputs = make_inputs(problem, TOKENS)
    scores = torch.rand(TOKENS, 1, generator=torch.Generator().manual_seed(3)) * scale + 0.1
    return inputs.x, inputs.topk_ids, scores


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_x_is_multiplied_before_the_layer(backend, precision):
    problem = replace(PROBLEM, precision=precision)
    x, ids, scores = call_of(problem)
    weights = make_weights(problem)
    layer = Layer(problem, backend=backend, apply_router_weight_on_input=True)
    plain = Layer(problem, backend=backend)
    product = (x.float() * scores).bfloat16()
    expected = plain(product, ids, torch.ones_like(scores), weights)
    for _ in range(2):  # the second call is like one that passed all checks
        y = layer(x, ids, scores, weights)
        assert same_bits(y, expected)
    behind = plain(x, ids, scores, weights)
    assert float((y.float() - behind.float()).norm() / y.float().norm()) > 0.1


@pytest.mark.parametrize("way", ["layer", "module"])
def test_values_and_gradients(way):
    """Beside autograd of the formula in fp32, biases and a factor on y included."""
    x, ids, scores = (t.clone() for t in call_of())
    masters = make_weights(PROBLEM)
    factor = {"routed_scaling_factor": 2.0, "apply_router_weight_on_input": True}
    if way == "module":
        module = MegaMoE(64, 48, 5, 1, bias=True, max_tokens=16, backend="staged", **factor)
        module.load_state_dict(masters.named())
        leaves = {"x": x, "scores": scores, **dict(module.named_parameters())}
    else:
        leaves = {"x": x, "scores": scores, **masters.named()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    weights = ExpertWeights(*(leaves[n] for n in ("w13", "w2", "b13", "b2")))
    if way == "module":
        y = module(x, ids, scores)
    else:
        layer = Layer(PROBLEM, backend="staged", **factor)
        y = layer(x, ids, scores, weights)
    dy = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(dy)
    wide = {n: t.detach().float().requires_grad_() for n, t in leaves.items()}
    of_token = {n: wide[n][ids[:, 0]] for n in ("w13", "w2", "b13", "b2")}
    gate_up = (of_token["w13"] @ (wide["x"] * wide["scores"])[..., None])[..., 0] + of_token["b13"]
    h = ACTIVATIONS["swiglu"](gate_up)
    expected = 2 * ((of_token["w2"] @ h[..., None])[..., 0] + of_token["b2"])
    expected.backward(dy.float())
    assert_close(y.float(), expected, relative=1e-2)
    for name, leaf in leaves.items():
        assert wide[name].grad.abs().max() > 0
        assert_close(leaf.grad.float(), wide[name].grad, relative=2e-2, name=name)


def test_tokens_that_are_not_computed_have_no_gradient():
    """Whatever they hold: the product's derivative would make a NaN of zero times NaN."""
    x, ids, scores = (t.clone() for t in call_of())
    ids[2], ids[3] = -1, 5
    for row in (2, 3, 9, 10):
        x[row], scores[row] = float("nan"), float("inf")
    weights = make_weights(PROBLEM)
    leaves = [t.requires_grad_() for t in (x, scores, *weights.named().values())]
    count = torch.tensor([9], dtype=torch.int32)
    layer = Layer(PROBLEM, backend="staged", apply_router_weight_on_input=True)
    y = layer(x, ids, scores, weights, num_tokens_device=count)
    assert not y[2:4].any()
    y[:9].float().square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    used = [0, 1, 4, 5, 6, 7, 8]
    for grad in (x.grad, scores.grad):
        assert grad[used].any(1).all()
        assert not grad[[2, 3, 9, 10]].any()


def test_compiled_it_has_the_same_bits():
    x, ids, scores = call_of()
    weights = make_weights(PROBLEM)
    layer = Layer(PROBLEM, backend="staged", apply_router_weight_on_input=True)
    x = x.view(1, TOKENS, 64).requires_grad_()
    ids, scores = ids.view(1, TOKENS, 1), scores.view(1, TOKENS, 1).requires_grad_()
    found = []
    layer.prepare(weights)
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = call(x, ids, scores, weights)
        found.append((y, *torch.autograd.grad(y.float().sum(), (x, scores))))
    for eager, compiled in zip(*found, strict=True):
        assert same_bits(eager, compiled)


def test_what_is_refused():
    several = replace(PROBLEM, top_k=2)
    refused = "apply_router_weight_on_input is True, expected False with top_k 2"
    for make in (
        partial(Layer, several, backend="staged"),
        partial(MegaMoE, 64, 48, 5, 2, backend="staged"),
    ):
        with pytest.raises(ConfigError, match=refused):
            make(apply_router_weight_on_input=True)
    weights = make_weights(several)
    with pytest.raises(ConfigError, match="apply_router_weight_on_input is 'no', expected a bool"):
        Layer(PROBLEM, backend="staged", apply_router_weight_on_input="no")
    layer = Layer(PROBLEM, backend="staged", apply_router_weight_on_input=True)
    x, ids, scores = call_of()
    with pytest.raises(ArgumentError, match=r"topk_weights.shape is \[11, 2\], expected \[11, 1\]"):
        layer(x, ids, scores.expand(-1, 2), weights)
    with pytest.raises(ArgumentError, match=r"x.dtype is torch.float32"):
        layer(x.float(), ids, scores, weights)


def differ(rank):
    made = partial(Layer, replace(PROBLEM, ep_size=2, rank=rank), dist.group.WORLD)
    return outcome(lambda: made(backend="staged", apply_router_weight_on_input=rank == 1))


def test_ranks_that_differ_are_told():
    text = "apply_router_weight_on_input is True on rank 1, False on rank 0"
    assert [text in str(found) for found in launch(differ, 2)] == [True, True]
