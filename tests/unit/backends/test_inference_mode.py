"""What a layer makes in torch.inference_mode() serves it afterwards: it trains, and its copies follow new weights."""

from dataclasses import replace

import pytest
import torch
from trained import gradients, leaves, made, same, train

import megamoe

BACKENDS = ("saving", "staged", "reference", "emulate")


def rows(layer, seed=0):
    return [t.detach() for t in leaves(layer, seed)]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_trains_behind_it(backend, precision):
    layer, expected = made(backend, precision=precision), train(made(backend, precision=precision))
    with torch.inference_mode():
        y = layer(*rows(layer))
    same({"y": y.clone()}, {"y": expected["y"]})
    same(train(layer), expected)
    with torch.inference_mode():  # and between a forward pass and its backward pass
        layer(*rows(layer, seed=3))
    call = leaves(layer)
    layer.zero_grad()
    loss = layer(*call).float().square().sum()
    with torch.inference_mode():
        layer(*rows(layer, seed=3))
    loss.backward()
    same(gradients(layer, call), {name: g for name, g in expected.items() if name != "y"})


@pytest.mark.parametrize("first", ["call", "prepare"])
@pytest.mark.parametrize(
    "precision", ["fp8", "fp8_channel", "fp8xmxfp4", "bf16xmxfp4", "bf16xnvfp4"]
)
def test_copies_follow_new_weights(precision, first):
    sizes = {"max_tokens": 32, "backend": "staged", "precision": precision, "init_seed": 1}
    layer, fresh = (megamoe.MegaMoE(64, 32, 5, 2, **sizes).requires_grad_(False) for _ in range(2))
    with torch.inference_mode():
        old = layer(*rows(layer)) if first == "call" else layer.prepare()
    for of in (layer, fresh):
        of.w13.mul_(2)
        of.w2.mul_(-1)
    y = layer(*rows(layer))
    assert torch.equal(y, fresh(*rows(fresh)))
    assert old is None or not torch.equal(y, old)
    with torch.inference_mode():
        layer.w13.copy_(layer.w13.flip(0))
        y = layer(*rows(layer))
    with torch.no_grad():
        fresh.w13.copy_(fresh.w13.flip(0))
    assert torch.equal(y, fresh(*rows(fresh)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_recorded_in_it_whatever_grad_mode_says(backend):
    layer = made(backend)
    with torch.inference_mode(), torch.enable_grad():
        assert not layer(*rows(layer)).requires_grad
    same(train(layer), train(made(backend)))


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "weights.w2"])
def test_its_tensors_are_refused_where_gradients_are_recorded(name):
    """By name, and before the other ranks take part: autograd would refuse them behind the call."""
    layer = megamoe.Layer(megamoe.Problem(64, 32, 5, 2, max_tokens=32), backend="staged")
    weights = megamoe.testing.make_weights(layer.problem)
    inputs = megamoe.testing.make_inputs(layer.problem, 6)
    given = {"x": inputs.x, "topk_ids": inputs.topk_ids, "topk_weights": inputs.topk_weights}
    weights.w13.requires_grad_()
    with torch.inference_mode():
        wrong = {n: t.clone() for n, t in given.items()} | {"weights.w2": weights.w2.clone()}
    call = {**given, "weights": weights}
    if name in given:
        call[name] = wrong[name]
    else:
        call["weights"] = replace(weights, w2=wrong[name])
    for _ in range(2):
        with pytest.raises(megamoe.ArgumentError, match=f"^{name} is an inference tensor"):
            layer(**call)
        with torch.no_grad():
            for _ in range(2):
                layer(**call)  # known by now
    layer(**given, weights=weights).sum().backward()
