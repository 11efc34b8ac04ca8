"""A layer trains through the kernel's own source, emulated: its gradients are the oracle's, whatever the way there."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from trained import gradients, leaves, made, train

from megamoe.backends.emulate import backend as emulate
from megamoe.testing import assert_close

PRECISIONS = ("bf16", "fp8")
# both round in the same places; sums of fp32 come in another order
ORDER = 1e-6


@pytest.fixture(autouse=True)
def trains(monkeypatch):
    monkeypatch.setattr(emulate, "TRAINS", True, raising=False)


def close(found, expected, relative=ORDER):
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert_close(found[name], value, relative=relative, name=name)


@pytest.fixture(scope="module")
def oracle():
    return {precision: train(made("reference", precision=precision)) for precision in PRECISIONS}


def offloaded(function, *arguments):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return function(*arguments)


WAYS = {
    "plain": None,
    "checkpoint": lambda f, *a: checkpoint(f, *a, use_reentrant=False),
    "checkpoint, reentrant": lambda f, *a: checkpoint(f, *a, use_reentrant=True),
    "offloaded": offloaded,
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_oracles(oracle, precision, way):
    layer = made("emulate", precision=precision)
    assert layer.prepare() is None
    assert layer._layer._runtime.state_bytes > 0
    close(train(layer, WAYS[way]), oracle[precision])


def test_the_comparison_sees_other_routes(oracle):
    assert not torch.equal(train(made("emulate"), seed=1)["w13"], oracle["bf16"]["w13"])


def test_two_layers_and_four_microbatches_in_flight():
    layers = [made("emulate", seed=1), made("emulate", seed=2)]
    alone = [train(layers[n % 2], seed=n) for n in range(4)]
    calls = [leaves(layers[n % 2], seed=n) for n in range(4)]
    ys = [layers[n % 2](*call) for n, call in enumerate(calls)]
    for n in (3, 0, 1, 2):
        layers[n % 2].zero_grad()
        ys[n].float().square().sum().backward()
        found = gradients(layers[n % 2], calls[n])
        assert all(torch.equal(found[name], alone[n][name]) for name in found)


def test_main_grad_and_a_count(oracle):
    count = torch.tensor([11], dtype=torch.int32)
    expected = train(made("reference"), num_tokens_device=count)
    layer = made("emulate", accumulate_into_main_grad=True)
    for p in (layer.w13, layer.w2):
        p.main_grad = torch.ones(p.shape)
    found = train(layer, num_tokens_device=count)
    assert not found["x"][11:].any()
    assert found["w13"] is None
    assert found["y"][11:].isnan().all()  # undefined, and so is what is given as their gradient
    assert torch.equal(found["y"][:11], expected["y"][:11])
    close(found, {name: expected[name] for name in ("x", "topk_weights", "b13", "b2")})
    for name in ("w13", "w2"):  # not rounded to bf16 before it is added
        close({name: getattr(layer, name).main_grad - 1}, {name: expected[name]}, 4e-3)
