"""FP8 layers: the backward pass multiplies the transposed copies that forward made, whoever gave the weights."""

import pytest
import torch
from saving import Saving
from trained import gradients, leaves, made, no_calls, train  # noqa: F401

import megamoe
from megamoe.core.errors import MegaMoEError
from megamoe.formats import weights as weights_module
from megamoe.formats.quantization import E4M3
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.testing import make_weights


def fp8_layer():
    """A layer that was given e4m3 weights."""
    layer = made(precision="fp8", seed=3)
    w = make_weights(layer.problem, seed=5)
    layer.load_fp8_weights(w.w13, w.w2, w.w13_scale, w.w2_scale)
    return layer


def same(got, expected):
    """Whether two TransposedWeights have equal bits, forward's beside the transposes."""
    pairs = [(got.named()[n], t) for n, t in expected.named().items()]
    pairs += [
        (getattr(got.forward, n), getattr(expected.forward, n))
        for n in ("w13", "w2", "w13_scale", "w2_scale")
    ]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def turned_of(layer):
    given = layer.expert_weights()
    return TransposedWeights.of(layer.problem, given.quantized(layer.problem))


def test_the_backward_pass_gets_masters_and_what_forward_made_of_them():
    layer = made(precision="fp8")
    train(layer)
    _, _, given, transposed = Saving.calls[-1]
    assert given.w13 is layer.w13
    assert given.w2 is layer.w2
    assert given.w13_scale is None
    assert transposed.forward.b13 is layer.b13
    assert same(transposed, turned_of(layer))


def test_transposes_are_those_of_the_numbers():
    problem = made(precision="fp8").problem
    w = make_weights(problem, seed=5)
    transposed = TransposedWeights.of(problem, w)
    planes, i, h = problem.activation.planes, problem.intermediate, problem.hidden
    dense = w.dense(problem, torch.float32)
    back = ExpertWeights(
        transposed.w13.transpose(2, 3).reshape(-1, planes * i, h),
        transposed.w2[:, 0].transpose(1, 2),
        None,
        None,
        transposed.w13_scale.transpose(1, 2).contiguous(),
        transposed.w2_scale.transpose(1, 2).contiguous(),
    ).dense(problem, torch.float32)
    assert torch.equal(back.w13, dense.w13)
    assert torch.equal(back.w2, dense.w2)


def test_e4m3_weights_are_turned_around_once_a_version():
    layer = fp8_layer()
    assert layer.w13.dtype == E4M3
    addresses = set()

    def transposed():
        train_inputs(layer)
        _, needs, given, found = Saving.calls[-1]
        assert needs == (True, True, False, False, True, True)
        assert given.b13 is layer.b13
        assert found.forward.w13 is layer.w13
        expected = TransposedWeights.of(layer.problem, layer.expert_weights())
        assert same(found, expected)
        addresses.add(found.w13.data_ptr())
        return found

    for _ in range(3):
        transposed()
    with torch.no_grad():  # new contents, a new version, the same storage
        layer.w13.copy_(layer.w13.float().mul(-1).to(E4M3))
    transposed()
    layer.w13_scale.data.mul_(2)  # not counted
    layer.invalidate()
    transposed()
    assert len(addresses) == 1


def test_steps_of_optimizers_leave_e4m3_weights_alone(monkeypatch):
    made_now, turn = [], weights_module.transpose_blocks
    monkeypatch.setattr(
        weights_module, "transpose_blocks", lambda *a: made_now.append(1) or turn(*a)
    )
    layer = fp8_layer()
    router = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([router, layer.b2], lr=0.1)

    def step():
        made_now.clear()
        router.grad = torch.ones(2)
        train_inputs(layer)
        optimizer.step()
        return sum(made_now)

    assert (step(), step()) == (2, 0)
    megamoe.invalidate()
    assert step() == 2


def train_inputs(layer):
    call = leaves(layer)
    layer(*call).float().sum().backward()
    return gradients(layer, call)


def test_transposes_are_not_made_while_a_graph_is_captured(monkeypatch):
    layer = fp8_layer()
    call = leaves(layer)
    y = layer(*call)
    monkeypatch.setattr("megamoe.launch.cache._capturing", lambda w: True)
    with pytest.raises(MegaMoEError, match="before the capture"):
        y.float().sum().backward(retain_graph=True)
    monkeypatch.undo()
    y.float().sum().backward(retain_graph=True)
    monkeypatch.setattr("megamoe.launch.cache._capturing", lambda w: True)
    y.float().sum().backward()  # made by now


def test_a_layer_has_transposes_once_it_trains_and_follows_with_both():
    layer = made(precision="fp8")
    call = leaves(layer)
    with torch.no_grad():
        layer(*call)
    cache = layer._layer._runtime.cache
    assert all(entry.transposed is None for entry in cache._entries.values())
    train(layer)
    q = cache._entries["w13"].transposed[0]
    with torch.no_grad():
        layer.w13.mul_(-2)
        layer(*call)  # evaluation, after a step: the copy and its transpose
    assert cache._entries["w13"].transposed[0] is q
    train(layer)
    assert same(Saving.calls[-1][3], turned_of(layer))
