"""Weight gradients that backward_dw() makes later: the bits that the backward pass would have made."""

import warnings

import pytest
import saving  # noqa: F401, registers the backend
import torch
from outcomes import outcome
from saving import Saving
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from trained import backward, gradients, leaves, made, of_ranks, same, train, waits_for_weights

import megamoe
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.layer import delayed
from megamoe.testing import launch

WEIGHTS = ("w13", "w2", "b13", "b2")
BACKENDS = pytest.mark.parametrize("backend", ["saving", "staged"])


def late(backend, **options):
    return made(backend, delay_wgrad=True, **options)


@pytest.mark.parametrize("backend", ["saving", "staged", "emulate"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bits_are_those_of_an_undelayed_pass(backend, precision):
    expected = [train(made(backend, precision=precision), seed=seed) for seed in range(2)]
    layer = late(backend, precision=precision)
    calls = [backward(layer, seed) for seed in range(2)]
    waits_for_weights(layer, calls, expected)
    for seed in range(2):  # the oldest first
        assert layer.num_delayed == 2 - seed
        layer.backward_dw()
        found = gradients(layer, calls[seed])
        same(
            {name: found[name] for name in WEIGHTS},
            {name: sum(e[name] for e in expected[: seed + 1]) for name in WEIGHTS},
        )
    assert layer.num_delayed == 0


def test_what_is_made_when():
    Saving.calls.clear()
    layer = late("saving")
    backward(layer)
    layer.backward_dw()
    assert [call[1] for call in Saving.calls if call[0] == "backward"] == [
        (True, True, False, False, False, False),
        (False, False, True, True, True, True),
    ]


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad(backend, dtype):
    layer, expected = late(backend, accumulate_into_main_grad=True), train(made(backend))
    seen = []
    for name in ("w13", "w2"):
        p = getattr(layer, name)
        p.main_grad, p.grad_added_to_main_grad = torch.ones(p.shape, dtype=dtype), False

        def hook(*_, p=p, name=name):  # Megatron's, with overlap_grad_reduce
            assert p.grad is not None
            assert p.grad_added_to_main_grad
            p.grad = None
            seen.append(name)

        node = p.expand_as(p).grad_fn.next_functions[0][0]
        node.register_hook(hook)
        p.kept = node
    backward(layer)
    assert not seen
    assert (layer.w13.main_grad == 1).all()
    layer.backward_dw()
    assert sorted(seen) == ["w13", "w2"]
    for name in ("w13", "w2"):
        wanted = torch.ones_like(getattr(layer, name).main_grad).add_(expected[name])
        assert torch.equal(getattr(layer, name).main_grad, wanted)
    assert torch.equal(layer.b2.grad, expected["b2"])


@BACKENDS
def test_hooks_run_when_gradients_are_made(backend):
    layer, expected, seen = late(backend), train(made(backend)), []
    layer.w13.register_hook(lambda grad: grad / 2)
    layer.w13.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    backward(layer)
    assert not seen
    layer.backward_dw()
    assert len(seen) == 1
    assert torch.equal(seen[0], expected["w13"] / 2)


@BACKENDS
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "offload", "count", "3d"])
def test_ways(backend, way):
    options = {"num_tokens_device": torch.tensor([11], dtype=torch.int32)} if way == "count" else {}
    layer, expected = late(backend), train(made(backend), **options)

    def through(f, *a):
        if way.endswith("reentrant"):
            return checkpoint(f, *a, use_reentrant=way == "reentrant")
        if way == "offload":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                return f(*a)
        if way == "3d":
            return f(*(t.unflatten(0, (2, -1)) for t in a)).flatten(0, 1)
        return f(*a, **options)

    backward(layer, through=through)
    layer.backward_dw()
    same({n: getattr(layer, n).grad for n in WEIGHTS}, {n: expected[n] for n in WEIGHTS})


@BACKENDS
def test_a_pass_that_is_not_asked_for_weights_leaves_none_waiting(backend):
    layer, expected = late(backend), train(made(backend))
    x, ids, scores = leaves(layer)
    loss = layer(x, ids, scores).float().square().sum()
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(dx, expected["x"])
    assert layer.num_delayed == 0
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert layer.num_delayed == 2


@BACKENDS
def test_only_weights_need_gradients(backend):
    layer, expected = late(backend), train(made(backend))
    x, ids, scores = (t.detach() for t in leaves(layer))
    Saving.calls.clear()
    layer(x, ids, scores).float().square().sum().backward()
    assert not [call for call in Saving.calls if call[0] == "backward"]
    layer.backward_dw()
    same({n: getattr(layer, n).grad for n in WEIGHTS}, {n: expected[n] for n in WEIGHTS})


@BACKENDS
def test_frozen(backend):
    layer, expected = late(backend), train(made(backend))
    layer.w2.requires_grad_(False)
    backward(layer)
    layer.backward_dw()
    assert layer.w2.grad is None
    assert torch.equal(layer.w13.grad, expected["w13"])
    layer.requires_grad_(False)
    backward(layer)
    layer.backward_dw()  # as often as there were passes
    assert torch.equal(layer.w13.grad, expected["w13"])


@pytest.mark.parametrize(
    ("backend", "delay"), [("saving", True), ("staged", True), ("emulate", "keep")]
)
def test_what_a_call_had_frozen_gets_no_gradient_of_it(backend, delay):
    """As of a critic that is frozen while its judgement is asked for, and thawed before the backward pass."""
    layer, expected = made(backend, delay_wgrad=delay), train(made(backend))
    layer.w2.requires_grad_(False)
    call = leaves(layer)
    y = layer(*call)
    layer.requires_grad_(True)
    y.float().square().sum().backward()
    backward(layer)
    if delay == "keep":
        with pytest.raises(ArgumentError, match="number 1 had other weights than number 0"):
            layer.backward_dw(2)
    layer.backward_dw()
    assert layer.w2.grad is None
    assert torch.equal(layer.w13.grad, expected["w13"])
    layer.backward_dw()
    assert torch.equal(layer.w2.grad, expected["w2"])


def test_gradients_of_views_reach_what_they_are_views_of():
    module = made("staged")
    found = []
    for delay in (False, True):
        layer = megamoe.Layer(module.problem, backend="staged", delay_wgrad=delay)
        held, hidden, width = module.w2.shape
        stacked = module.w13.detach().reshape(held, 2, width, hidden).clone()
        pairs = nn.Parameter(stacked.transpose(1, 2).reshape(held, -1, hidden))
        w1, w3 = (nn.Parameter(w) for w in stacked.transpose(0, 1).contiguous())
        w2, b13 = module.w2.detach(), module.b13.detach()
        b2 = nn.Parameter(module.b2.detach().bfloat16())
        biases = (*b13.view(held, 2, width).unbind(1), b2.float())
        planes = pairs.unflatten(1, (width, 2)).transpose(1, 2)
        for weights in (
            megamoe.ExpertWeights.from_w1_w3(w1, w3, w2, biases=biases),
            megamoe.ExpertWeights(planes, w2, b13, b2.float()),
        ):
            layer(*leaves(module), weights).float().square().sum().backward()
            if delay:
                assert layer.num_delayed == 1
                assert any(delayed._waiting)
                with pytest.raises(MegaMoEError, match="1 backward passes"):
                    torch.optim.SGD([w1, pairs]).step()
                layer.backward_dw()
        found.append({"w1": w1.grad, "w3": w3.grad, "pairs": pairs.grad, "b2": b2.grad})
    same(found[1], found[0])


@BACKENDS
def test_steps_and_norms_do_not_come_before_gradients(backend):
    layer, other = late(backend), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    for seed in range(2):
        backward(layer, seed)
    before = layer.w13.detach().clone()
    for waiting in (2, 1):
        with pytest.raises(MegaMoEError, match=f"while {waiting} backward passes .* backward_dw"):
            optimizer.step()
        with pytest.raises(ArgumentError, match=f"is {waiting} backward passes that wait"):
            megamoe.clip_grad_norm_(nn.Sequential(layer), 1.0)
        torch.optim.SGD(other.parameters()).step()  # another's
        layer.backward_dw()
    assert torch.equal(layer.w13, before)
    megamoe.clip_grad_norm_(nn.Sequential(layer), 1.0)
    optimizer.step()
    assert not torch.equal(layer.w13, before)


@BACKENDS
@pytest.mark.parametrize("name", ["x", "w2", "b13", "topk_ids"])
def test_what_has_changed_meanwhile_is_named(backend, name):
    layer = late(backend)
    x, ids, scores = backward(layer)
    changed = {"x": x, "topk_ids": ids}.get(name)
    with torch.no_grad():
        (getattr(layer, name) if changed is None else changed).mul_(1)
    for call in (layer.backward_dw, lambda: backward(layer)):
        with pytest.raises(ArgumentError, match=f"{name} is changed in place"):
            call()
    assert layer.w13.grad is None


@BACKENDS
def test_weights_of_other_memory_are_named(backend):
    """`p.data = ...` is no write that torch counts: gradients were those of other weights, without a word."""
    layer = late(backend)
    backward(layer)
    held = layer.w2.data
    layer.w2.data = held * 2
    with pytest.raises(ArgumentError, match="w2 is changed in place, or given other memory, exp"):
        layer.backward_dw()
    layer.w2.data = held
    layer.backward_dw()
    same(
        {n: getattr(layer, n).grad for n in WEIGHTS}, {n: train(made(backend))[n] for n in WEIGHTS}
    )


@BACKENDS
def test_errors(backend):
    with pytest.raises(ConfigError, match="delay_wgrad is False"):
        made(backend).backward_dw()
    layer = late(backend)
    with pytest.raises(ConfigError, match="layer is closed"):
        layer.backward_dw()
    call = leaves(layer)
    layer(*call)
    with pytest.raises(ArgumentError, match="while no backward pass waits"):
        layer.backward_dw()
    with pytest.raises(ArgumentError, match="create_graph is True"):
        torch.autograd.grad(layer(*call).float().sum(), call[0], create_graph=True)
    backward(layer)
    with pytest.warns(RuntimeWarning, match="1 backward passes wait for backward_dw"):
        layer.close()
    assert layer.num_delayed == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.close()


def test_compiled():
    layer, expected = late("saving"), train(made())
    layer.prepare()
    torch._dynamo.reset()
    call = leaves(layer)
    torch.compile(layer, backend="aot_eager")(*call).float().square().sum().backward()
    layer.backward_dw()
    same({n: getattr(layer, n).grad for n in WEIGHTS}, {n: expected[n] for n in WEIGHTS})
    with pytest.raises(torch._dynamo.exc.Unsupported, match="delays weight gradients"):
        torch.compile(layer, fullgraph=True, backend="eager")(*call)
    torch._dynamo.reset()


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = late("staged").bfloat16()

    def forward(self, *call):
        return self.moe(*call)


def under_fsdp(rank):
    own, parent = late("staged").bfloat16(), Parent()
    fully_shard(own)
    fully_shard(parent)
    call = leaves(parent.moe)
    parent(*call).float().square().sum().backward()
    errors = []
    for run in (lambda: own(*call), parent.moe.backward_dw):
        try:
            run()
        except (ArgumentError, ConfigError) as error:
            errors.append(str(error))
    return errors


def test_fsdp_is_refused():
    own, parent = launch(under_fsdp, 1, timeout_s=60)[0]
    assert "False under fully_shard()" in own
    assert "freed, as FSDP2 does" in parent


def over_ranks(rank, backend):
    expected = [train(of_ranks(backend), seed=10 * rank + seed) for seed in range(2)]
    found = of_ranks(backend, delay_wgrad=True)
    for seed in range(2):
        backward(found, 10 * rank + seed)
    for _ in range(2):
        found.backward_dw()
    equal = all(
        torch.equal(p.grad, sum(e[n] for e in expected)) for n, p in found.named_parameters()
    )
    backward(found, rank)
    if rank:
        found._layer._delayed.forget(1)  # as if a pass had been done twice
    errors = [
        outcome(found.backward_dw),
        outcome(lambda: of_ranks(backend, delay_wgrad=bool(rank))),
    ]
    return equal, errors


@pytest.mark.parametrize("backend", ["staged", "emulate"])
def test_over_ranks(backend):
    for rank, (equal, errors) in enumerate(launch(over_ranks, 2, backend, timeout_s=120)):
        assert equal
        refused = "while no backward pass waits" if rank else "rank 1 raised "
        assert refused in str(errors[0])
        assert "delay_wgrad" in str(errors[1])
