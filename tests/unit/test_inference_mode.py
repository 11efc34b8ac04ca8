"""What a layer makes in torch.inference_mode() serves it afterwards: it trains, and its copies follow new weights."""

import pytest
import torch
from test_training import gradients, leaves, made, same, train

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
@pytest.mark.parametrize("precision", ["fp8", "fp8xmxfp4", "bf16xmxfp4", "bf16xnvfp4"])
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
