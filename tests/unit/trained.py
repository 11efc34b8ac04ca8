"""A small layer, a step of its training, and its gradients."""

import pytest
import torch
import torch.distributed as dist
from saving import Saving

import megamoe
from megamoe.testing import make_inputs

SHAPE = {"hidden": 48, "intermediate": 32, "num_experts": 5, "top_k": 2, "max_tokens": 32}
TOKENS = 16
INPUTS = "x", "topk_weights"


@pytest.fixture(autouse=True)
def no_calls():
    Saving.calls.clear()


def made(backend="saving", seed=1, **options):
    layer = megamoe.MegaMoE(**SHAPE, backend=backend, init_seed=seed, bias=True, **options)
    with torch.no_grad():
        layer.b13.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
        layer.b2.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed + 1))
    return layer


def of_ranks(backend, **options):
    """Return one of all ranks, without biases."""
    return megamoe.MegaMoE(**SHAPE, group=dist.group.WORLD, backend=backend, init_seed=1, **options)


def leaves(layer, seed=0):
    inputs = make_inputs(layer.problem, TOKENS, seed=seed)
    x, scores = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
    return x, inputs.topk_ids, scores


def backward(layer, seed=0, through=None, **options):
    """Make one call and its backward pass; return its leaves. through: as run of train()."""
    call = leaves(layer, seed)
    run = through or (lambda f, *a: f(*a))
    run(lambda *a, **more: layer(*a, **options, **more), *call).float().square().sum().backward()
    return call


def gradients(layer, call):
    found = {"x": call[0].grad, "topk_weights": call[2].grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    return {name: g if g is None else g.clone() for name, g in found.items()}


def waits_for_weights(layer, calls, expected):
    """Assert that passes have made what does not wait for backward_dw(), with the bits of `expected`."""
    for call, of_pass in zip(calls, expected, strict=False):
        found = gradients(layer, call)
        same({n: found.pop(n) for n in INPUTS}, {n: of_pass[n] for n in INPUTS})
        assert all(gradient is None for gradient in found.values())


def train(layer, run=None, seed=0, **options):
    """Return y and the gradients of one call. run: (function, *arguments) -> y."""
    call = leaves(layer, seed)
    layer.zero_grad()
    y = (run or (lambda f, *a: f(*a)))(lambda *a: layer(*a, **options), *call)
    y.float().square().sum().backward()
    return {"y": y.detach(), **gradients(layer, call)}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert torch.equal(found[name], value), name
