"""FP8 copies follow their parameters: no path through a training loop computes with old ones.

Every use of the copies is compared with fresh ones; the quantizations are counted. Due are two (w13, w2)
at the first use and after each optimizer step, whatever the optimizer, the wrapper or the micro-batches.
"""

import pytest
import torch
import torch.distributed as dist
from copies import watched
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as DDP
from writes import WRITES, other_values

import megamoe
from megamoe.launch import cache as cache_module
from megamoe.testing import launch

STEPS = 3
DUE = 2 * (1 + STEPS)


def make(**options):
    shape = {"hidden": 32, "intermediate": 16, "num_experts": 4, "top_k": 2, "max_tokens": 32}
    return megamoe.MegaMoE(**shape, backend="staged", precision="fp8", init_seed=3, **options)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 32, generator=generator).bfloat16()
    weights, ids = torch.randn(12, 4, generator=generator).softmax(-1).topk(2)
    return x, ids, weights


def train(net, step, micro_batches=1, steps=STEPS):
    """Train, then evaluate once: a step that nothing follows could not show what it left behind."""
    for number in range(steps):
        for micro in range(micro_batches):
            net(*batch(10 * number + micro)).float().square().sum().backward()
        step()
    with torch.no_grad():
        net(*batch())


def stepping(optimizer, step=None):
    def run():
        (step or optimizer.step)()
        optimizer.zero_grad()

    return run


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, 1e-2),
    "Adam": (torch.optim.Adam, 1e-2),
    "Adagrad": (torch.optim.Adagrad, 1e-1),
    "SGD": (torch.optim.SGD, 1e-1),
}
KINDS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, kind):
    layer, (optimizer, lr) = make(), OPTIMIZERS[name]
    with watched() as seen:
        train(layer, stepping(optimizer(layer.parameters(), lr=lr, **KINDS[kind])))
    assert seen == {"stale": 0, "q": DUE}


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_step(kind):
    layer = make()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, **KINDS[kind])
    step = torch.compile(optimizer.step, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    with watched() as seen:
        train(layer, stepping(optimizer, step))
        frames = torch._dynamo.utils.counters["frames"]["ok"]
        train(layer, stepping(optimizer, step))
    assert seen["stale"] == 0
    assert seen["q"] == 2 * (1 + 2 * STEPS)
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames  # counting is no recompilation


def test_a_hook_behind_a_step():
    """An optimizer's own hooks run before those of all optimizers; what they call has the new values."""
    layer = make()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    optimizer.register_step_post_hook(lambda *_: layer(*batch()))
    with watched() as seen:
        train(layer, stepping(optimizer))
    assert seen["stale"] == 0


def test_step_inside_backward():
    layer = make()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    arrived = []

    def step(_):
        arrived.append(1)
        if len(arrived) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(step)
    with watched() as seen:
        train(layer, lambda: None)
    assert len(arrived) == 2 * STEPS
    assert seen == {"stale": 0, "q": DUE}


def test_compiled_layer():
    layer = make()
    layer.prepare()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    with watched() as seen:
        train(torch.compile(layer, backend="aot_eager", fullgraph=True), stepping(optimizer))
    assert seen["stale"] == 0
    assert seen["q"] == 2 * STEPS  # prepare() made the first two


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_writes(name, everywhere):
    layer, write = make(), WRITES[name]
    with watched() as seen, torch.no_grad():
        for number in range(3):
            layer(*batch())
            write(layer, other_values(layer), invalidate=False)
            layer(*batch())
            layer(*batch())
            if not write.counted:  # the documented gap; and watched() sees it
                assert seen == {"stale": 2 * number + 2, "q": 2 * number + 2}
                (megamoe if everywhere else layer).invalidate()
    expected = {"stale": 0, "q": 2 * 4} if write.counted else {"stale": 6, "q": 2 * 3}
    assert seen == expected


def test_inference_tensors(monkeypatch):
    """They count no writes: quantized at every use, but not inside a graph, whose copies the next use refreshes."""
    with torch.inference_mode(), watched(trains=False) as seen:
        layer = make().requires_grad_(False)
        assert layer.w13.is_inference()
        layer.prepare()
        assert seen["q"] == 2
        for name in ("load_state_dict", "copy_"):
            WRITES[name](layer, other_values(layer))
            layer(*batch())
        assert seen == {"stale": 0, "q": 6}
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "_capturing", lambda w: True)
            layer(*batch())
        assert seen["q"] == 6
        WRITES["copy_"](layer, other_values(layer))
        layer.prepare()
    assert seen == {"stale": 0, "q": 8}


class Foreign:
    """An optimizer outside torch.optim that writes behind torch's back."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        for p in self.parameters:
            p.data.sub_(p.grad, alpha=0.1)
            p.grad = None
        megamoe.invalidate()


LEAVING = {
    "moved": lambda net: net.to("meta"),
    "assigned": lambda net: net.load_state_dict(
        {name: p.detach().clone() for name, p in net.state_dict().items()}, assign=True
    ),
    "written elsewhere": lambda net: [setattr(p, "data", p.data.clone()) for p in net.parameters()],
}


@pytest.mark.parametrize("way", LEAVING)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_memory_that_parameters_have_left_is_freed(given, grad, way):
    """Offloaded, say: what is known of copies does not keep what they were made of."""
    net = make()
    if given:
        q = net.expert_weights().quantized(net.problem)
        net.load_fp8_weights(q.w13.flatten(1, -2), q.w2, q.w13_scale, q.w2_scale)
        del q
    x, ids, scores = batch()
    x.requires_grad_(grad)
    y = net(x, ids, scores)
    if grad:
        y.float().sum().backward()
    del y
    net.zero_grad()
    before = [StorageWeakRef(p.untyped_storage()) for p in net.parameters()]
    assert not any(storage.expired() for storage in before)
    LEAVING[way](net)
    if way == "written elsewhere" and given:
        net.invalidate()
    assert all(storage.expired() for storage in before)


@pytest.mark.parametrize("grad", [False, True])
def test_other_memory_at_the_same_address_is_seen(grad):
    """Offloaded weights may come back as others where they lay: `p.data = ...` changes no _version."""
    net, (x, ids, scores) = make(), batch()
    x.requires_grad_(grad)
    # What torch.frombuffer() returns lies there, each time in a storage of its own.
    memory = [bytearray(p.nbytes + 64) for p in net.parameters()]
    for round_ in range(3):
        for p, place in zip(net.parameters(), memory, strict=True):
            content = torch.randn(p.shape, generator=torch.Generator().manual_seed(round_)) / 4
            p.data = torch.empty(0, dtype=p.dtype)
            first = -torch.frombuffer(place, dtype=torch.uint8).data_ptr() % 64
            there = torch.frombuffer(place, dtype=p.dtype, count=content.numel(), offset=first)
            p.data = there.view(content.shape).copy_(content)
        y, fresh = net(x, ids, scores), make()
        fresh.w13.data, fresh.w2.data = net.w13.data, net.w2.data
        assert torch.equal(y, fresh(x, ids, scores))


def test_foreign_optimizer():
    layer, other = make(), make()
    foreign = Foreign(layer.parameters())
    with watched() as seen:
        train(layer, foreign.step)
        assert seen == {"stale": 0, "q": DUE}
        other(*batch())
    assert seen["stale"] == 0


def test_master_weights_behind_data():
    """As in Megatron: fp32 masters are stepped, then copied into the buffer behind param.data."""
    layer = make()
    parameters = list(layer.parameters())
    buffer = torch.cat([p.detach().flatten() for p in parameters])
    for p, view in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        p.data = view.view_as(p)
    masters = torch.nn.Parameter(buffer.float())
    optimizer = torch.optim.AdamW([masters], lr=1e-2, fused=True)

    def step():
        masters.grad = torch.cat([p.grad.flatten() for p in parameters]).float()
        optimizer.step()
        buffer.copy_(masters.detach())
        for p in parameters:
            p.grad = None

    with watched() as seen:
        train(layer, step)
    assert seen == {"stale": 0, "q": DUE}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("grad", [True, False])
def test_graph_capture(monkeypatch, compiled, grad):
    """A capture quantizes at each use, although the versions are current; so do eager calls after it."""
    layer = make()
    layer.prepare()
    net = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with watched() as seen, torch.set_grad_enabled(grad):
        net(*batch())
        assert seen["q"] == 0
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "_capturing", lambda w: True)
            net(*batch())
            net(*batch())
        assert seen["q"] == 4
        for p in layer.parameters():  # what a replay does
            p.data.mul_(2)
        net(*batch())
        net(*batch())
        assert seen["q"] == 8
        for p in layer.parameters():  # no graph knows the new storage
            p.data = p.data.clone()
        net(*batch())
        net(*batch())
    assert seen == {"stale": 0, "q": 10}


def test_graph_capture_of_frozen_weights_quantizes_nothing(monkeypatch):
    layer = make().requires_grad_(False)
    layer.prepare()
    with watched(trains=False) as seen:
        monkeypatch.setattr(cache_module, "_capturing", lambda w: True)
        layer(*batch())
        layer.load_state_dict(other_values(layer))
        monkeypatch.undo()
        layer(*batch())  # refreshes in place what the graph reads
    assert seen == {"stale": 0, "q": 2}


def test_every_layer_of_a_gan_is_right():
    """Another model's optimizer costs a quantization and never a stale copy."""
    first, second = make(), make()
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1, fused=True)
    with watched() as seen:
        train(first, stepping(optimizer))
        train(second, stepping(optimizer))
    assert seen["stale"] == 0
    assert seen["q"] == 2 * DUE


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = make(), make()

    def forward(self, x, ids, weights):
        return self.b(self.a(x, ids, weights), ids, weights)


FSDP_CASES = [  # reshard_after_forward, kind of optimizer, micro-batches
    (True, "foreach", 1),
    (True, "fused", 4),
    (False, "foreach", 1),
]


def sharded(reshard, kind, micro_batches):
    net = Two()
    for part in (net.a, net.b, net):
        fully_shard(part, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **KINDS[kind])
    with watched() as seen:
        train(net, stepping(optimizer), micro_batches)
        steps = dict(seen)
        # a checkpoint into the shards, without an optimizer step: by load_state_dict, then in place
        state = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
        net.load_state_dict(state)
        with torch.no_grad():
            net(*batch())
            for value in net.state_dict().values():
                value.to_local().add_(1.0)
            net(*batch())
    return steps, seen["stale"]


def with_ddp():
    net = DDP(Two())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    with watched() as seen:
        train(net, stepping(optimizer), 4)
    return seen


def with_compiled_step_and_fsdp():
    net = Two()
    for part in (net.a, net.b, net):
        fully_shard(part)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    with watched() as seen:
        train(net, stepping(optimizer, step))
    return seen


def broadcast_parameters():
    layer = make()
    with watched() as seen, torch.no_grad():
        layer(*batch())
        for p in layer.parameters():
            p.add_(dist.get_rank())
            dist.broadcast(p.detach(), 0)
        megamoe.invalidate()
        layer(*batch())
    return seen


def on_two_ranks(rank):
    out = {case: sharded(*case) for case in FSDP_CASES}
    out["ddp"] = with_ddp()
    out["broadcast"] = broadcast_parameters()
    out["compiled step"] = with_compiled_step_and_fsdp()
    return out


def test_two_ranks():
    due = 2 * DUE
    for seen in launch(on_two_ranks, 2, timeout_s=100):
        for reshard, kind, micro_batches in FSDP_CASES:
            steps, stale = seen[reshard, kind, micro_batches]
            assert steps == {"stale": 0, "q": due}, (reshard, kind, micro_batches)
            assert stale == 0, (reshard, kind, micro_batches)
        assert seen["ddp"] == {"stale": 0, "q": due}
        assert seen["broadcast"] == {"stale": 0, "q": 4}
        assert seen["compiled step"]["stale"] == 0
        assert seen["compiled step"]["q"] == due
