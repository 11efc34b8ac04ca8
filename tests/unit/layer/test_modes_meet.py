"""Modes of torch that meet in one call or on one rank alone, what `out` may be, and parameters that are gone."""

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.flop_counter import FlopCounterMode

import megamoe
from megamoe import ArgumentError
from megamoe.testing import launch, make_inputs, same_bits

HIDDEN, WIDTH, EXPERTS, TOP_K, MOST = 64, 48, 6, 2, 16


def made(backend="staged", group="alone", of=megamoe.MegaMoE, **options):
    torch.manual_seed(0)
    sizes = (HIDDEN, WIDTH, EXPERTS, TOP_K, group)
    return of(*sizes, max_tokens=MOST, backend=backend, init_seed=0, **options)


def drawn(layer, tokens=5):
    found = make_inputs(layer.problem, tokens)
    return found.x, found.topk_ids, found.topk_weights


@pytest.mark.parametrize("backend", ["reference", "staged", "emulate"])
def test_grad_mode_inside_inference_mode_records_nothing_in_any_call(backend):
    layer = made(backend)
    x, *routes = drawn(layer)
    with torch.no_grad():
        expected = layer(x, *routes)
    with torch.inference_mode(), torch.enable_grad():
        for _ in range(2):  # the second one is known
            assert same_bits(layer(x, *routes), expected)


@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_a_backward_pass_may_run_in_inference_mode(backend):
    layer = made(backend)
    call = drawn(layer)
    grads = []
    for mode in (nullcontext, torch.inference_mode):
        layer.zero_grad()
        loss = layer(*call).sum()
        with mode():
            loss.backward()
        grads.append(layer.w13.grad.clone())
    assert torch.equal(*grads)
    assert grads[0].abs().sum() > 0


class Lora(megamoe.MegaMoE):
    """Changes the weights where they are asked for."""

    def expert_weights(self):
        weights = super().expert_weights()
        return replace(weights, w13=weights.w13 + self.delta)


def test_expert_weights_that_a_class_overrides_are_used():
    plain, layer = made(), made(of=Lora)
    layer.delta = nn.Parameter(torch.randn_like(layer.w13) * 0.1)
    call = drawn(layer)
    y = layer(*call)
    y.sum().backward()
    assert layer.delta.grad.abs().sum() > 0
    assert same_bits(plain._layer(*call, layer.expert_weights()), y)
    assert not same_bits(plain(*call), y)


def gradient(x):
    return torch.ones_like(x).requires_grad_() * 2


def inferred(x):
    with torch.inference_mode():
        return torch.empty_like(x)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("make", "said"), [(gradient, "a tensor with a gradient"), (inferred, "an inference tensor")]
)
def test_an_out_that_torch_would_have_to_record_is_refused(make, said, known):
    layer = made("reference").requires_grad_(False)
    x, *routes = drawn(layer)
    if known:
        layer(x, *routes, out=torch.empty_like(x))
    with pytest.raises(ArgumentError, match=f"out is {said}"):
        layer(x, *routes, out=make(x))
    with torch.no_grad():
        y = layer(x, *routes)
    assert same_bits(layer(x, *routes, out=torch.empty_like(x)), y)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("where", ["w13", "w2", "topk_weights", "topk_ids"])
def test_an_out_in_what_the_call_reads_is_refused(where, known):
    layer = made("reference").requires_grad_(False)
    x, ids, weights = drawn(layer)
    room = torch.zeros_like(x)
    bytes_of = room.view(torch.uint8).view(-1)
    if where == "topk_weights":
        weights = bytes_of[: weights.nbytes].view(torch.float32).view_as(weights).copy_(weights)
    if where == "topk_ids":
        ids = bytes_of[: ids.nbytes].view(ids.dtype).view_as(ids).copy_(ids)
    inside = {"w13": layer.w13, "w2": layer.w2}.get(where, room)
    out = inside.detach().view(-1)[: x.numel()].view_as(x)
    before = layer.w13.clone(), layer.w2.clone(), weights.clone()
    if known:
        layer(x, ids, weights, out=torch.zeros_like(x))
    with pytest.raises(ArgumentError, match="out is in a storage that the call reads"):
        layer(x, ids, weights, out=out)
    assert all(map(torch.equal, before, (layer.w13, layer.w2, weights)))


@pytest.mark.parametrize("backend", ["reference", "staged", "emulate"])
def test_what_a_layer_returns_may_be_written_over(backend):
    """Red before behind reference: y was a view, which torch does not let be changed where it is recorded."""
    x, *routes = drawn(made(backend))
    grads = []
    for write in (lambda y: y.add_(x).mul_(2), lambda y: (y + x) * 2):
        layer = made(backend)
        write(layer(x, *routes)).sum().backward()
        grads.append(layer.w13.grad)
    assert torch.equal(*grads)


# --- two ranks ---


def prepared_again(rank, backend, hosts):
    """Prepare a layer twice; rank 1 refuses the second time. Then call it."""
    if hosts:
        os.environ["MEGAMOE_HOST"] = f"host-{rank}"
    layer = made(backend, group=dist.group.WORLD)
    weights = layer.expert_weights()
    layer._layer.prepare(weights)
    other = replace(weights, w2=weights.w2.detach()[:, :-1]) if rank else weights
    begin = time.monotonic()
    said = outcome(lambda: layer._layer.prepare(other))[0]
    seconds = time.monotonic() - begin
    layer(*drawn(layer))
    layer.close()
    return said, seconds


@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("backend", ["reference", "emulate"])
def test_a_refusal_to_prepare_again_leaves_nobody_waiting(backend, hosts):
    """Red before behind emulate and over hosts: the other rank waited for it, and met what came next."""
    found = launch(prepared_again, 2, backend, hosts, timeout_s=60)
    assert [said for said, _ in found] == [None, "ArgumentError"]
    assert all(seconds < 2 for _, seconds in found)


def beyond_the_recompile_limit(rank):
    """Rank 1 brings other numbers of tokens than dynamo compiles for, and goes on in eager mode."""
    torch._dynamo.config.recompile_limit = limit = 2
    layer = made(group=dist.group.WORLD)
    layer.prepare()
    compiled = torch.compile(layer, backend="eager", dynamic=False)
    for step in range(limit + 2):
        compiled(*drawn(layer, 4 if rank == 0 else 1 + step)).sum().backward()
    return True


def overwritten_by_ddp(rank):
    """Return what a compiled call says where DDP synchronizes experts; in silence, ranks would train rank 0's."""

    def said(wrap):
        layer = made(group=dist.group.WORLD)
        call = drawn(layer)
        layer.prepare()
        return outcome(lambda: wrap(layer)(*call))

    compiled = partial(torch.compile, backend="eager")
    return [said(lambda layer: DDP(compiled(layer))), said(lambda layer: compiled(DDP(layer)))]


def watched_on_one_rank(rank, prepared):
    """Rank 0 counts operations in its first two steps."""
    layer = made(group=dist.group.WORLD)
    if prepared:
        layer.prepare()
    for step in range(3):
        mode = FlopCounterMode(display=False) if rank == 0 and step < 2 else nullcontext()
        with mode:
            layer(*drawn(layer)).sum().backward()
    return True


def a_parameter_is_gone(rank, name, value):
    layer = made(group=dist.group.WORLD, bias=True)
    call = drawn(layer)
    layer(*call)
    if rank == 1:
        delattr(layer, name)
        if value is not None:
            setattr(layer, name, value)
    try:
        layer(*call)
    except megamoe.MegaMoEError as error:
        return str(error)
    return "none"


def test_a_rank_that_dynamo_leaves_in_eager_mode_asks_nothing_alone():
    assert launch(beyond_the_recompile_limit, 2, timeout_s=60) == [True, True]


def test_compiled_calls_notice_that_ddp_has_overwritten_experts():
    """Red before: both trained on."""
    for found in launch(overwritten_by_ddp, 2, timeout_s=60):
        assert all(name == "RankMismatch" and "has overwritten" in said for name, said in found)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_mode_that_watches_one_rank_keeps_it_in_step(prepared):
    assert launch(watched_on_one_rank, 2, prepared, timeout_s=60) == [True, True]


@pytest.mark.parametrize(("name", "value"), [("w13", None), ("b13", [1.0])])
def test_a_parameter_that_is_gone_on_one_rank_is_named_on_all(name, value):
    other, own = launch(a_parameter_is_gone, 2, name, value, timeout_s=60)
    kind = "NoneType" if value is None else "list"
    assert own == f"{name} is {kind}, expected a parameter of the layer"
    assert "rank 1 raised " in other
