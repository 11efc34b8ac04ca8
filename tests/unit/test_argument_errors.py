"""Inputs that gave a wrong result in silence, or somebody else's error: each is right now, or refused by name."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from megamoe import ArgumentError, MegaMoE, Problem
from megamoe.frontend.functional import make_backend
from megamoe.testing import make_inputs, make_weights

PROBLEM = Problem(48, 32, 5, 2, max_tokens=64)
SHAPE = {"hidden": 48, "intermediate": 32, "num_experts": 5, "top_k": 2, "max_tokens": 64}


def make(**options):
    return MegaMoE(**{**SHAPE, "backend": "staged", "init_seed": 3, **options})


@contextmanager
def default_dtype(dtype):
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_nothing_follows_the_default_dtype(dtype):
    expected = make(bias=True)
    i = make_inputs(PROBLEM, 40)
    y = expected(i.x, i.topk_ids, i.topk_weights)
    with default_dtype(dtype):
        layer = make(bias=True)
        again = make_inputs(PROBLEM, 40)
        weights = make_weights(replace(PROBLEM, bias=True))
        found = layer(i.x, i.topk_ids, i.topk_weights)
    assert layer.b13.dtype == layer.b2.dtype == torch.float32
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert torch.equal(found, y)  # a sum over k in bf16 would differ
    assert torch.equal(again.x, i.x)
    assert torch.equal(again.topk_weights, i.topk_weights)
    assert torch.equal(weights.b2, make_weights(replace(PROBLEM, bias=True)).b2)


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_a_layer_made_under_another_default_device_is_right(backend):
    i = make_inputs(PROBLEM, 9)
    with torch.device("meta"):
        layers = [make(device="cpu", backend=backend) for _ in range(2)]
        for layer in layers:
            layer.prepare()
    with torch.no_grad():
        layers[1].w2.mul_(2)
    ys = [layer(i.x, i.topk_ids, i.topk_weights) for layer in layers]
    plain = make(backend=backend)
    assert torch.equal(ys[0], plain(i.x, i.topk_ids, i.topk_weights))
    assert not torch.equal(ys[1], ys[0])
    with torch.device("meta"):
        assert torch.equal(layers[0](i.x, i.topk_ids, i.topk_weights), ys[0])


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: replace(w, w13=w.w13.float()), "weights.w13.dtype is torch.float32"),
        (lambda w: replace(w, w2=w.w2[:3].contiguous()), r"weights.w2.shape is \[3, 48, 32\]"),
        (lambda w: replace(w, w2=w.w2.to("meta")), "weights.w2.device is meta"),
        (lambda w: replace(w, b2=torch.zeros(5, 48)), "weights.b2 is given"),
    ],
    ids=["dtype", "number", "device", "bias"],
)
def test_backends_refuse_weights_that_do_not_fit(backend, change, message):
    made = make_backend(backend, PROBLEM, device="cpu")
    i = make_inputs(PROBLEM, 4)
    with pytest.raises(ArgumentError, match=message):
        made.forward(i.x, i.topk_ids, i.topk_weights, change(make_weights(PROBLEM)))
