"""Gradients of weights that were joined of several parameters, added to the main_grad of each."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megamoe import ExpertWeights, Layer, Problem, SharedExperts
from megamoe.core.errors import ArgumentError
from megamoe.testing import assert_close, make_inputs, make_weights

TOKENS = 12
PROBLEM = Problem(64, 48, 5, 2, max_tokens=16)
NAMES = ("w13", "w2")
SHARED = SharedExperts(PROBLEM, 96)
ORDER = 2e-6  # the same gradients, added to 0.5 in fp32 in any order
ADDING = {"accumulate_into_main_grad": True}


def halves_of(together=True, seed=3):
    """Return routed experts and a shared one as parameters, in one tensor or apart."""
    weights = make_weights(SHARED.problem, quantize=False, seed=seed)
    halves = SHARED.split(weights)
    if not together:
        halves = [replace(h, w13=h.w13.clone(), w2=h.w2.clone()) for h in halves]
    return [ExpertWeights(nn.Parameter(h.w13), nn.Parameter(h.w2)) for h in halves]


def parameters_of(halves):
    return {f"{i} {n}": getattr(half, n) for i, half in enumerate(halves) for n in NAMES}


def give_main_grads(halves, lie="together", dtype=torch.float32):
    """Give the parameters a main_grad full of 0.5; both of a kind lie together, or apart."""
    for name in NAMES:
        routed, shared = (getattr(half, name) for half in halves)
        first, last = len(routed), len(shared)
        if lie == "together":
            main = torch.full((first + last, *routed.shape[1:]), 0.5, dtype=dtype)
            routed.main_grad, shared.main_grad = main[:first], main[first:]
        else:
            for p in (routed, shared):
                p.main_grad = torch.full(p.shape, 0.5, dtype=dtype)


def call_of(seed=0):
    inputs = make_inputs(PROBLEM, TOKENS, seed=seed)
    return inputs.x, *SHARED.routes(inputs.topk_ids, inputs.topk_weights)


def loss_of(layer, weights, seed=0):
    return layer(*call_of(seed), weights).float().square().sum()


def plain(together=True, seeds=(0,), backend="staged"):
    """Return the sums over the calls, in fp32; of one call as autograd gives them."""
    halves, layer = halves_of(together), Layer(SHARED.problem, backend=backend)
    found = []
    for seed in seeds:
        loss_of(layer, SHARED.join(*halves), seed).backward()
        found.append({name: p.grad for name, p in parameters_of(halves).items()})
        for p in parameters_of(halves).values():
            p.grad = None
    first, *others = found
    return {n: sum((of[n].float() for of in others), g) for n, g in first.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lie", ["together", "apart"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("backend", ["staged", "emulate"])
def test_added(backend, together, lie, dtype):
    halves = halves_of(together)
    give_main_grads(halves, lie, dtype)
    last = halves[1].w2
    last.overwrite_main_grad = True
    halves[0].w13.grad_added_to_main_grad = False
    layer = Layer(SHARED.problem, backend=backend, **ADDING)
    loss_of(layer, SHARED.join(*halves, **ADDING)).backward()
    for name, expected in plain(together, backend=backend).items():
        p = parameters_of(halves)[name]
        before = 0 if p is last else 0.5
        assert expected.float().norm() > p.numel() ** 0.5 / 10
        assert_close(p.main_grad, expected.float() + before, relative=4e-3, name=name)
        assert (p.grad is None) == (p is not halves[0].w13)
    assert halves[0].w13.grad_added_to_main_grad


@pytest.mark.parametrize("lie", ["together", "apart"])
def test_several_calls_of_one_join(lie):
    """Between two calls and their backward passes nothing is lost, in whatever order joins and calls came."""
    expected = plain(seeds=(0, 1))
    halves, layer = halves_of(), Layer(SHARED.problem, backend="staged", **ADDING)
    give_main_grads(halves, lie)
    weights = SHARED.join(*halves, **ADDING)
    (loss_of(layer, weights, 0) + loss_of(layer, weights, 1)).backward()
    for name, p in parameters_of(halves).items():
        assert_close(p.main_grad - 0.5, expected[name], relative=ORDER, name=name)


@pytest.mark.parametrize("backend", ["staged", "emulate"])
def test_delayed_passes_overwrite_a_main_grad_once(backend):
    """Red before behind staged: each pass overwrote what the one before had made."""
    expected = plain(seeds=(0, 1), backend=backend)
    halves = halves_of()
    layer = Layer(SHARED.problem, backend=backend, delay_wgrad="keep", **ADDING)
    give_main_grads(halves)
    overwritten = halves[1].w2, halves[0].w13
    for p in overwritten:
        p.overwrite_main_grad = True
    for _ in range(2):  # and once in each call of backward_dw()
        give_main_grads(halves)
        weights = SHARED.join(*halves, **ADDING)
        for seed in (0, 1):
            if backend == "staged":  # as loops do; what is kept together is of one tensor
                weights = SHARED.join(*halves, **ADDING)
            loss_of(layer, weights, seed).backward()
        layer.backward_dw(passes=2)
        for name, p in parameters_of(halves).items():
            before = 0.0 if any(p is other for other in overwritten) else 0.5
            assert_close(p.main_grad - before, expected[name], relative=4e-3, name=name)


@pytest.mark.parametrize("lie", ["together", "apart"])
def test_layers_whose_weights_are_joined_before_both_are_called(lie):
    made = [halves_of(seed=3), halves_of(seed=3)]
    layers = [Layer(SHARED.problem, backend="staged", **ADDING) for _ in made]
    for halves in made:
        give_main_grads(halves, lie)
    joined = [SHARED.join(*halves, **ADDING) for halves in made]
    sum(
        loss_of(*pair, seed) for seed, pair in enumerate(zip(layers, joined, strict=True))
    ).backward()
    for seed, halves in enumerate(made):
        expected = plain(seeds=(seed,))
        for name, p in parameters_of(halves).items():
            assert_close(p.main_grad - 0.5, expected[name], relative=ORDER, name=name)


def test_frozen_parameters_keep_their_main_grad():
    halves, layer = halves_of(), Layer(SHARED.problem, backend="staged", **ADDING)
    give_main_grads(halves)
    halves[0].w13.requires_grad_(False)
    del halves[0].w13.main_grad
    loss_of(layer, SHARED.join(*halves, **ADDING)).backward()
    expected = plain()
    for name, p in parameters_of(halves).items():
        if p.requires_grad:
            assert_close(p.main_grad - 0.5, expected[name], relative=ORDER, name=name)
        else:
            assert p.grad is None


def test_planes_apart():
    halves, layer = halves_of(False), Layer(SHARED.problem, backend="staged", **ADDING)
    halves[0].w13 = nn.Parameter(halves[0].w13.data.view(5, 2, 48, 64))
    give_main_grads(halves, "apart")
    loss_of(layer, SHARED.join(*halves, **ADDING)).backward()
    expected = plain(False)
    for name, p in parameters_of(halves).items():
        assert_close(p.main_grad.flatten() - 0.5, expected[name].flatten(), relative=ORDER)


def test_weight_gradients_that_wait():
    halves, expected = halves_of(), plain(seeds=(0, 1))
    layer = Layer(SHARED.problem, backend="staged", delay_wgrad=True, **ADDING)
    give_main_grads(halves, "apart")
    for seed in range(2):
        loss_of(layer, SHARED.join(*halves, **ADDING), seed).backward()
    assert all((p.main_grad == 0.5).all() for p in parameters_of(halves).values())
    for _ in range(2):
        layer.backward_dw()
    for name, p in parameters_of(halves).items():
        assert_close(p.main_grad - 0.5, expected[name], relative=ORDER, name=name)


def test_a_layer_that_does_not_add_gives_gradients():
    halves, layer = halves_of(), Layer(SHARED.problem, backend="staged")
    give_main_grads(halves, "apart")
    loss_of(layer, SHARED.join(*halves, **ADDING)).backward()
    for name, expected in plain().items():
        assert torch.equal(parameters_of(halves)[name].grad, expected)


def test_what_is_missing_is_named():
    halves, layer = halves_of(), Layer(SHARED.problem, backend="staged", **ADDING)
    with pytest.raises(ArgumentError, match=r"weights.w13.main_grad is None"):
        loss_of(layer, SHARED.join(*halves, **ADDING))
    give_main_grads(halves)
    halves[1].w2.main_grad = torch.zeros(3)
    with pytest.raises(ArgumentError, match=r"weights.w2.main_grad"):
        loss_of(layer, SHARED.join(*halves, **ADDING))
    give_main_grads(halves)
    with pytest.raises(ArgumentError, match=r"join\(.*accumulate_into_main_grad=True"):
        loss_of(layer, SHARED.join(*halves))


def penalty_of(weights):
    return sum(getattr(weights, name).float().square().sum() for name in NAMES)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("lie", ["together", "apart"])
def test_gradients_by_other_ways_are_not_lost(lie, flag):
    """A penalty goes to grad, or to main_grad where grad is given a tensor of no meaning."""
    expected, halves = plain(), halves_of()
    layer = Layer(SHARED.problem, backend="staged", **ADDING)
    give_main_grads(halves, lie)
    for p in parameters_of(halves).values() if flag else ():
        p.grad_added_to_main_grad = False
    weights = SHARED.join(*halves, **ADDING)
    (loss_of(layer, weights) + penalty_of(weights)).backward()
    for name, p in parameters_of(halves).items():
        found = p.main_grad - 0.5 + (0 if flag else p.grad)
        assert_close(found, expected[name].float() + 2 * p.detach(), relative=ORDER, name=name)


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("lie", ["together", "apart"])
def test_what_is_not_asked_for_is_not_added(lie, join):
    """A gradient of x alone, as a penalty on it takes: the next pass adds to main_grad once."""
    expected, halves = plain(), halves_of()
    layer = Layer(SHARED.problem, backend="staged", **ADDING)
    give_main_grads(halves, lie)
    if join:
        weights = SHARED.join(*halves, **ADDING)
    else:
        whole = SHARED.join(*halves)
        weights = ExpertWeights(nn.Parameter(whole.w13), nn.Parameter(whole.w2))
        for name in NAMES:
            w = getattr(weights, name)
            w.main_grad = torch.full(w.shape, 0.5)
    x, *routes = call_of()
    x.requires_grad_()
    loss = layer(x, *routes, weights).float().square().sum()
    (dx,) = torch.autograd.grad(loss, [x], retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert torch.equal(dx, x.grad)
    loss.backward()
    found = {name: p.main_grad for name, p in parameters_of(halves).items()}
    if not join:
        parts = SHARED.split(replace(weights, **{n: getattr(weights, n).main_grad for n in NAMES}))
        found = parameters_of(parts)
    for name, main in found.items():
        assert_close(main - 0.5, expected[name], relative=ORDER, name=name)
