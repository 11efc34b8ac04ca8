"""FP8 layers: the backward pass computes with bf16 masters, or with bf16 values of the e4m3 weights that were given."""

import pytest
import torch
from saving import Saving
from test_training import gradients, leaves, made, no_calls, train  # noqa: F401

import megamoe
from megamoe.errors import MegaMoEError
from megamoe.formats.quantization import E4M3
from megamoe.formats.weights import ExpertWeights
from megamoe.testing import make_weights


def fp8_layer():
    """A layer that was given e4m3 weights, and what the backward pass should compute with."""
    layer = made(precision="fp8", seed=3)
    w = make_weights(layer.problem, seed=5)
    layer.load_fp8_weights(w.w13, w.w2, w.w13_scale, w.w2_scale)
    return layer, layer.expert_weights().dense(layer.problem, torch.bfloat16)


def test_the_backward_pass_gets_masters():
    layer = made(precision="fp8")
    train(layer)
    given = Saving.calls[-1][2]
    assert given.w13 is layer.w13
    assert given.w2 is layer.w2
    assert given.w13_scale is None


def test_e4m3_weights_are_made_bf16_once_a_version():
    layer, dense = fp8_layer()
    assert layer.w13.dtype == E4M3
    addresses = set()
    for _ in range(3):
        train_inputs(layer)
        given = Saving.calls[-1][2]
        assert Saving.calls[-1][1] == (True, True, False, False, True, True)
        assert torch.equal(given.w13, dense.w13)
        assert torch.equal(given.w2, dense.w2)
        assert given.b13 is layer.b13
        addresses.add(given.w13.data_ptr())
    assert len(addresses) == 1
    with torch.no_grad():  # new contents, a new version, the same storage
        layer.w13.copy_(layer.w13.float().mul(-1).to(E4M3))
    train_inputs(layer)
    given = Saving.calls[-1][2]
    assert torch.equal(given.w13, -dense.w13)
    assert {given.w13.data_ptr()} == addresses
    layer.w13_scale.data.mul_(2)  # not counted
    layer.invalidate()
    train_inputs(layer)
    assert torch.equal(Saving.calls[-1][2].w13, -2 * dense.w13)


def test_steps_of_optimizers_leave_e4m3_weights_alone(monkeypatch):
    made_dense, dense = [], ExpertWeights.dense
    monkeypatch.setattr(ExpertWeights, "dense", lambda *a: made_dense.append(1) or dense(*a))
    layer, _ = fp8_layer()
    made_dense.clear()
    router = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([router, layer.b2], lr=0.1)

    def step():
        router.grad = torch.ones(2)
        train_inputs(layer)
        of_backward = sum(made_dense)
        optimizer.step()
        made_dense.clear()
        return of_backward

    first = step()
    second = step()
    assert first - second == 1  # forward is staged mathematics here, and makes its own
    megamoe.invalidate()
    assert step() == first


def train_inputs(layer):
    call = leaves(layer)
    layer(*call).float().sum().backward()
    return gradients(layer, call)


def test_bf16_values_are_not_made_while_a_graph_is_captured(monkeypatch):
    layer, _ = fp8_layer()
    call = leaves(layer)
    y = layer(*call)
    monkeypatch.setattr("megamoe.formats.cache._capturing", lambda w: True)
    with pytest.raises(MegaMoEError, match="before the capture"):
        y.float().sum().backward(retain_graph=True)
    monkeypatch.undo()
    y.float().sum().backward(retain_graph=True)
    monkeypatch.setattr("megamoe.formats.cache._capturing", lambda w: True)
    y.float().sum().backward()  # made by now
