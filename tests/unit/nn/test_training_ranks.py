"""Training over two gloo ranks behind backends that save: loops give what they give behind staged, errors are named."""

import re
import warnings
from functools import partial

import pytest
import saving  # noqa: F401, registers the backend
import torch
import torch.distributed as dist
from outcomes import outcome
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import megamoe
from megamoe.backends.call import GradRequest
from megamoe.layer import autograd
from megamoe.layer.backward import Pass, gradients
from megamoe.layer.inputs import Inputs
from megamoe.testing import assert_close, launch, make_inputs

HIDDEN, TOKENS = 48, (10, 6)


class Net(nn.Module):
    def __init__(self, group, **options):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(HIDDEN, 6, bias=False)
        shape = {"intermediate": 32, "num_experts": 6, "top_k": 2, "max_tokens": 16}
        self.moe = megamoe.MegaMoE(HIDDEN, group=group, init_seed=1, **shape, **options)

    def forward(self, x):
        weights, ids = self.router(x.float()).softmax(-1).topk(2)
        return x + self.moe(x, ids, weights)


def wrapped(net, kind, mesh):
    if kind == "fsdp over experts":  # every rank uses all of them, and keeps half
        fully_shard(net.moe)
        return fully_shard(net)
    if kind == "fsdp":
        fully_shard(net.moe, mesh=mesh["copies"])
        fully_shard(net)
        megamoe.average_expert_gradients(net, 2)
        return net
    megamoe.ignore_experts_in_ddp(net)
    megamoe.average_expert_gradients(net, 2)
    return DDP(net)


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def loop(rank, kind, backend, reentrant=None):
    """Two steps of two micro-batches each; return all gradients before the last step and all parameters after it."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "experts"))
    group = "alone" if kind == "fsdp over experts" else mesh["experts"]
    net = Net(group, backend=backend)
    model = wrapped(net, kind, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(rank)
    for step in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(TOKENS[rank], HIDDEN, generator=generator).bfloat16()
            if reentrant is None:
                y = model(x)
            else:
                y = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            y.float().square().mean().backward()
        if step:
            found = {f"d {n}": whole(p.grad) for n, p in net.named_parameters()}
        optimizer.step()
    found |= {n: whole(p) for n, p in net.named_parameters()}
    net.moe.close()
    return found


LOOPS = {
    "ddp": ("ddp", None),
    "ddp, checkpoint": ("ddp", False),
    "fsdp": ("fsdp", None),
    "fsdp, checkpoint": ("fsdp", False),
    "fsdp over experts": ("fsdp over experts", None),
}


def loops(rank):
    found = {}
    for name, (kind, reentrant) in LOOPS.items():
        for backend in ("staged", "saving", "reference"):
            found[name, backend] = loop(rank, kind, backend, reentrant)
    return found


@pytest.fixture(scope="module")
def of_loops():
    return launch(loops, 2, timeout_s=120)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("backend", ["saving", "reference"])
def test_loops(of_loops, name, backend):
    for rank, found in enumerate(of_loops):
        expected = found[name, "staged"]
        assert len(expected) == 6
        for what, value in expected.items():
            assert value.abs().max() > 0
            # reference rounds gu, h and dgu to bf16 on the way, as the kernel does
            relative = {"saving": 0, "reference": 1e-2}[backend]
            assert_close(
                found[name, backend][what], value, relative=relative, name=f"{rank}, {what}"
            )


def errors(rank):
    """What one rank does wrong in its backward pass, and what both are told."""
    found = {}
    for backend in ("saving", "reference", "staged"):
        layer = Net(dist.group.WORLD, backend=backend).moe
        i = make_inputs(layer.problem, TOKENS[rank], rank=rank)
        x = i.x.clone().requires_grad_()

        def call(layer=layer, i=i, x=x):
            scores = i.topk_weights.clone()
            return layer(x, i.topk_ids, scores), scores

        class Cut(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return y.clone()

            @staticmethod
            def backward(ctx, dy):
                return None if rank else dy

        y, scores = call()
        if rank:
            scores.add_(1)  # saved for the backward pass
        found[backend, "changed in place"] = outcome(lambda y=y: y.float().sum().backward())
        y, _ = call()
        dy = torch.ones_like(y)
        runtime, w = layer._layer._runtime, layer.expert_weights()
        inputs = Inputs.of(x, i.topk_ids, i.topk_weights, w)
        state = y.grad_fn.saved_tensors[-1]
        inputs = Inputs(*[t if t is None else t.detach() for t in inputs])
        given = Pass(inputs, dy[:-1] if rank else dy, state)
        call_of_rank = runtime, given, GradRequest()

        def backward(call=call_of_rank, runtime=runtime):
            with runtime.together:
                gradients(*call)

        found[backend, "wrong dy"] = outcome(backward)
        y, _ = call()
        found[backend, "undefined dy"] = outcome(lambda y=y: Cut.apply(y).float().sum().backward())
        found[backend, "dx"] = x.grad.abs().max().item()
        y, _ = call()
        weights = layer.w13.data
        if rank:
            layer.w13.data = torch.empty(0, dtype=torch.bfloat16)
        found[backend, "freed"] = outcome(lambda y=y: y.float().sum().backward())
        layer.w13.data = weights
        run = checkpoint if rank else lambda run, use_reentrant: run()
        y, _ = run(call, use_reentrant=False)
        found[backend, "checkpoint"] = outcome(lambda y=y: y.float().sum().backward())
        layer.close()
    return found


@pytest.fixture(scope="module")
def of_errors():
    return launch(errors, 2, timeout_s=60)


@pytest.mark.parametrize("backend", ["saving", "reference", "staged"])
def test_what_one_rank_does_wrong_is_named_on_both(of_errors, backend):
    there, here = of_errors
    for what, kind, message in (
        ("changed in place", "RuntimeError", "modified by an inplace operation"),
        ("wrong dy", "ArgumentError", "dy.shape"),
        ("freed", "ArgumentError", "weights.w13.shape is [0]"),
    ):
        assert here[backend, what][0] == kind, here
        assert message in here[backend, what][1]
        assert there[backend, what][0] == "PeerFault", there
        assert "rank 1 raised " in there[backend, what][1]
    for found in of_errors:  # and nobody waits for an answer that nobody gives
        kind, message, *_ = found[backend, "checkpoint"]
        assert kind == "RankMismatch", found
        assert "for backward of layer" in message
        assert "for forward of layer" in message
        assert found[backend, "undefined dy"][0] is None, found
    assert there[backend, "dx"] > 0


def grads(layer, rank):
    layer.zero_grad()
    i = make_inputs(layer.problem, TOKENS[rank], rank=rank)
    layer(i.x, i.topk_ids, i.topk_weights).float().square().sum().backward()
    return {n: rows(p.grad) for n, p in layer.named_parameters() if p.grad is not None}


def rows(value):
    """This rank's part."""
    return value.to_local() if hasattr(value, "to_local") else value


def onto_meta(layer, average):
    with torch.device("meta"):
        empty = Net(layer.group, backend="staged", bias=True).moe
    average(empty)
    empty.to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    return empty


def assigned(layer, average):
    average(layer)
    layer.load_state_dict({n: v.clone() for n, v in layer.state_dict().items()}, assign=True)
    return layer


def replaced(layer, average):
    average(layer)
    layer.w13 = nn.Parameter(layer.w13.detach().clone())
    return layer


def unfrozen(layer, average):
    average(layer.requires_grad_(False))
    return layer.requires_grad_(True)


def as_dtensors(layer, average):
    average(layer)
    return layer.distribute(init_device_mesh("cpu", (2,)))


def before_the_call(layer, average):
    layer.prepare()
    average(layer)
    return layer


WAYS = {
    f.__name__: f for f in (onto_meta, assigned, replaced, unfrozen, as_dtensors, before_the_call)
}


def means(rank):
    """Gradients of layers that were asked for means over 8 ranks, more than the group has, by what came after."""
    group, found = dist.group.WORLD, {}

    def average(layer):
        megamoe.average_expert_gradients(layer, 8)

    def made(**options):
        return Net(group, backend="staged", bias=True, **options).moe

    found["plain"] = grads(made(), rank)
    for name, way in WAYS.items():
        found[name] = grads(way(made(), average), rank)
    layer = made(delay_wgrad=True)
    average(layer)
    i = make_inputs(layer.problem, TOKENS[rank], rank=rank)
    layer(i.x, i.topk_ids, i.topk_weights).float().square().sum().backward()
    layer.backward_dw()
    found["delayed"] = {n: whole(p.grad) for n, p in layer.named_parameters()}
    pair = nn.ModuleList([made(), made()])
    pair[1].w13 = pair[0].w13
    average(pair)
    grads(pair[0], rank)
    pair[1].zero_grad = lambda: None
    found["shared"] = grads(pair[1], rank)
    return found


def test_means_are_those_of_the_layer_whatever_becomes_of_its_parameters():
    for found in launch(means, 2, timeout_s=60):
        plain = found.pop("plain")
        assert len(plain) == 4
        for way, gradients_of in found.items():
            assert gradients_of.keys() == plain.keys()
            for name, grad in gradients_of.items():
                times = 2 if way == "shared" and name == "w13" else 1
                assert torch.equal(grad, plain[name] / 8 * times), (way, name)


def wrapped_too_late(rank):
    """Wrappers that mix experts, behind a first call."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    x = torch.ones(TOKENS[rank], HIDDEN).bfloat16()
    wrappers = {
        "ddp": lambda net: DDP(net)(x),
        "ddp of copies": lambda net: DDP(net, process_group=alone)(x),  # which nobody else holds
        "fsdp": lambda net: fully_shard(net.moe),
        "fsdp around": lambda net: fully_shard(net, ignored_params=set(net.router.parameters())),
    }

    def wrap(wrapper):
        net = Net(dist.group.WORLD, backend="staged")
        grads(net.moe, rank)
        grads(net.moe, rank)  # a known call
        wrapper(net)

    return {kind: outcome(partial(wrap, of))[:2] for kind, of in wrappers.items()}


def test_wrappers_behind_a_first_call_are_found():
    for found in launch(wrapped_too_late, 2, timeout_s=60):
        assert found.pop("ddp of copies") == (None, "")
        for kind, (error, message) in found.items():
            assert error == "RankMismatch", (kind, error, message)
            assert "ranks [0, 1]" in message
            assert ("DistributedDataParallel" in message) == (kind == "ddp")


def mixed_precision(rank):
    """FSDP2 with a policy: the warnings of two calls, and whether y has the bits of fp32 and of bf16 weights."""
    plain = Net(dist.group.WORLD, backend="staged").moe
    i = make_inputs(plain.problem, TOKENS[rank], rank=rank)
    expected = [plain(i.x, i.topk_ids, w) for w in (i.topk_weights, i.topk_weights.bfloat16())]
    mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "experts")), []
    for casts, param, output in (
        (True, 16, None),
        (True, 16, 32),
        (False, 16, 32),
        (True, None, 32),
    ):
        types = {16: torch.bfloat16, 32: torch.float32, None: None}
        policy = MixedPrecisionPolicy(types[param], None, types[output], casts)
        moe = Net(mesh["experts"], backend="staged").moe
        fully_shard(moe, mesh=mesh["copies"], mp_policy=policy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = [moe(i.x, i.topk_ids, i.topk_weights) for _ in range(2)][1]
        told = [str(w.message) for w in caught if "topk_weights" in str(w.message)]
        found.append((told, y.dtype, [torch.equal(y.bfloat16(), e) for e in expected]))
    return found


def test_rounding_of_routing_weights_by_fsdp2_is_told_once():
    for found in launch(mixed_precision, 2, timeout_s=60):
        for told, _, bits in found[:2]:
            assert len(told) == 1
            assert told[0].startswith("FSDP2 rounds topk_weights to bfloat16")
            assert bits == [False, True]
        for told, dtype, bits in found[2:]:
            assert told == []
            assert dtype == torch.float32
            assert bits == [True, False]


def zero_bubble(rank, backend):
    """Gradients and backward passes of a schedule that splits backward, and of one that does not: two stages a rank."""
    found, passes, once = {}, [], autograd.gradients

    def counted(*arguments):
        passes.append(1)
        return once(*arguments)

    autograd.gradients = counted
    for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        nets = [Net("alone", backend=backend) for _ in range(2)]
        places = (rank, rank + 2)
        stages = [
            PipelineStage(n, p, 4, torch.device("cpu")) for n, p in zip(nets, places, strict=True)
        ]
        made = schedule(stages, 4, loss_fn=lambda y, target: (y - target).float().square().mean())
        generator = torch.Generator().manual_seed(0)
        x, target = torch.randn(2, 32, HIDDEN, generator=generator).bfloat16()
        passes.clear()
        made.step(*([] if rank else [x]), target=target if rank else None)
        grads = [p.grad for net in nets for p in net.parameters()]
        found[schedule.__name__] = grads, len(passes)
    autograd.gradients = once
    return found


@pytest.mark.parametrize("backend", ["staged", "reference"])
def test_split_backward_has_equal_bits_at_the_price_of_a_launch(backend):
    for found in launch(zero_bubble, 2, backend, timeout_s=60):
        (whole, once), (split, twice) = found.values()
        assert len(whole) == 6
        assert all(torch.equal(a, b) and a.any() for a, b in zip(whole, split, strict=True))
        assert 8 <= once < twice <= 2 * once  # two stages, four micro-batches; some are split


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("model is generator", lambda net: megamoe.clip_grad_norm_(net.parameters(), 1.0)),
        ("model is Identity", lambda net: megamoe.grad_norm(nn.Identity())),
        ("max_norm is '1'", lambda net: megamoe.clip_grad_norm_(net, "1")),
        ("max_norm is nan", lambda net: megamoe.clip_grad_norm_(net, float("nan"))),
        *(
            (f"norm_type is {order!r}", lambda net, order=order: megamoe.grad_norm(net, order))
            for order in (0, -1.0, -float("inf"), float("nan"), "inf", None)
        ),
    ],
)
def test_norms_name_what_they_do_not_take(message, call):
    net = Net(None, backend="staged")
    grads(net.moe, 0)
    before = net.moe.w13.grad.clone()
    with pytest.raises(megamoe.ArgumentError, match=re.escape(message)):
        call(net)
    assert torch.equal(net.moe.w13.grad, before)


def test_norms_refuse_sparse_gradients():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(megamoe.ArgumentError, match=r"weight\.grad\.layout is torch\.sparse_coo"):
        megamoe.grad_norm(table)
