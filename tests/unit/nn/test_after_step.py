"""after_step() and quantize_experts(): what a layer does at its next call is done behind the step, once."""

import gc
import weakref

import pytest
import torch
from copies import watched
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import _global_optimizer_post_hooks

import megamoe
from megamoe.core.errors import ArgumentError
from megamoe.launch import cache as cache_module
from megamoe.testing import launch

SHAPE = {"hidden": 32, "intermediate": 16, "num_experts": 4, "top_k": 2, "max_tokens": 32}
STEPS, MICRO_BATCHES = 3, 2
KINDS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, 1e-2),
    "Adam": (torch.optim.Adam, 1e-2),
    "Adagrad": (torch.optim.Adagrad, 1e-1),
    "SGD": (torch.optim.SGD, 1e-1),
}


def make(dtype=torch.bfloat16, **options):
    options = {"backend": "staged", "precision": "fp8", "init_seed": 3} | options
    return megamoe.MegaMoE(**SHAPE, dtype=dtype, **options)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 32, generator=generator).bfloat16()
    weights, ids = torch.randn(12, 4, generator=generator).softmax(-1).topk(2)
    return x, ids, weights


def micro_batch(net, seed):
    net(*batch(seed)).float().square().sum().backward()


def counts(net, step, backward=micro_batch):
    """Return the quantizations of the first micro-batch, of each step, of later micro-batches; and stale uses."""
    first = of_calls = 0
    of_steps = []
    with watched() as seen:
        for number in range(STEPS):
            for micro in range(MICRO_BATCHES):
                before = seen["q"]
                backward(net, 10 * number + micro)
                if number or micro:
                    of_calls += seen["q"] - before
                else:
                    first = seen["q"]
            before = seen["q"]
            step()
            of_steps.append(seen["q"] - before)
        with torch.no_grad():
            before = seen["q"]
            net(*batch())
            of_calls += seen["q"] - before
    return first, of_steps, of_calls, seen["stale"]


ONCE_A_STEP = 2, [2] * STEPS, 0, 0  # w13 and w2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_quantizes(name, kind, dtype):
    layer, (make_optimizer, lr) = make(dtype), OPTIMIZERS[name]
    optimizer = make_optimizer(layer.parameters(), lr=lr, **KINDS[kind])
    megamoe.after_step(optimizer, layer)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    assert counts(layer, step) == ONCE_A_STEP


def test_without_it_the_next_call_does():
    layer = make(torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    assert counts(layer, optimizer.step) == (2, [0] * STEPS, 2 * STEPS, 0)


def test_accelerate():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    layer = make(torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    net, wrapped = accelerator.prepare(layer, optimizer)
    megamoe.after_step(wrapped, net)

    def backward(net, seed):
        accelerator.backward(net(*batch(seed)).float().square().sum())

    def step():
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        wrapped.step()
        wrapped.zero_grad()

    assert counts(net, step, backward) == ONCE_A_STEP


@pytest.mark.parametrize("kind", KINDS)
def test_grad_scaler(kind):
    layer = make(torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, **KINDS[kind])
    megamoe.after_step(optimizer, layer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward(net, seed):
        scaler.scale(net(*batch(seed)).float().square().sum()).backward()

    def step():
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert counts(layer, step, backward) == ONCE_A_STEP
    with watched() as seen:  # a step that the scaler skips changes nothing
        backward(layer, 0)
        layer.w13.grad[0, 0, 0] = torch.inf
        step()
        backward(layer, 0)
    assert seen["stale"] == 0
    assert scaler.get_scale() < 4.0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_iteration_quantizes_in_its_step_alone(monkeypatch, compiled):
    """Without after_step() each micro-batch of a graph does, see test_staleness.py."""
    layer = make()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    megamoe.after_step(optimizer, layer)
    with watched():
        micro_batch(layer, 0)
        step()
    monkeypatch.setattr(cache_module, "_capturing", lambda w: True)
    assert counts(layer, step) == (0, [2] * STEPS, 0, 0)
    monkeypatch.undo()
    assert counts(layer, step) == (0, [2] * STEPS, 0, 0)


def test_a_layer_that_is_opened_again_follows_too(monkeypatch):
    layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    megamoe.after_step(optimizer, layer)
    optimizer.step()  # of a layer that is not open
    layer.close()
    layer.prepare()
    with watched(trains=False) as seen:
        monkeypatch.setattr(cache_module, "_capturing", lambda w: True)
        micro_batch(layer, 0)
    assert seen == {"stale": 0, "q": 0}


def test_two_optimizers_of_two_layers():
    first, second = make(), make()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, second)]
    for optimizer, layer in zip(optimizers, (first, second), strict=True):
        megamoe.after_step(optimizer, layer)
    with watched() as seen:
        for layer in (first, second):
            micro_batch(layer, 0)
        assert seen["q"] == 4
        optimizers[0].step()
        assert seen == {"stale": 0, "q": 6}


def test_quantize_experts_behind_a_foreign_optimizer():
    """Megatron's copies fp32 masters to what lies behind param.data; its inner optimizer is torch's."""
    layer = make()
    masters = [torch.nn.Parameter(p.detach().float()) for p in layer.parameters()]
    inner = torch.optim.AdamW(masters, lr=1e-2)

    def step():
        for master, p in zip(masters, layer.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        inner.step()
        for master, p in zip(masters, layer.parameters(), strict=True):
            p.data.copy_(master.detach())
        megamoe.quantize_experts(layer)

    assert counts(layer, step) == ONCE_A_STEP
    with pytest.raises(ArgumentError, match=r"without experts of the model.*quantize_experts"):
        megamoe.after_step(inner, layer)


def test_transposes_are_made_behind_the_step_too():
    layer = make(backend="reference")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    megamoe.after_step(optimizer, layer)
    micro_batch(layer, 0)
    cache = layer._layer._runtime.cache
    before = cache._entries["w13"].transposed[0].view(torch.uint8).clone()
    optimizer.step()
    assert not torch.equal(before, cache._entries["w13"].transposed[0].view(torch.uint8))


def test_nothing_is_kept_alive():
    layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    hooks = len(_global_optimizer_post_hooks)
    megamoe.after_step(optimizer, layer)
    assert len(_global_optimizer_post_hooks) == hooks + 1
    gone = weakref.ref(layer)
    del layer, optimizer
    gc.collect()
    assert gone() is None
    assert len(_global_optimizer_post_hooks) == hooks


def test_wrong_arguments():
    layer = make()
    with pytest.raises(ArgumentError, match="optimizer is object, expected a torch.optim.Optim"):
        megamoe.after_step(object(), layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"model is list, expected a torch.nn.Module"):
        megamoe.after_step(optimizer, [layer])
    with pytest.raises(ArgumentError, match=r"model is list, expected a torch.nn.Module"):
        megamoe.quantize_experts([layer])


def on_two_ranks(rank):
    found = {}
    for name in ("ddp", "fsdp"):
        net = torch.nn.Sequential(make(torch.float32))
        model, optimizer_of = net[0], lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)
        if name == "fsdp":
            fully_shard(model)
        wrapped = DDP(model) if name == "ddp" else model
        optimizer = optimizer_of(model.parameters())
        megamoe.after_step(optimizer, wrapped)

        def step(optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        found[name] = counts(wrapped, step)
    return found


def test_two_ranks():
    """FSDP2's shards are quantized when they are gathered."""
    for found in launch(on_two_ranks, 2, timeout_s=100):
        assert found["ddp"] == ONCE_A_STEP
        assert found["fsdp"] == (2, [0] * STEPS, 2 * STEPS, 0)
