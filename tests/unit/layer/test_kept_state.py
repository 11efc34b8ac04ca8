"""What a layer keeps serves calls in every mode of torch, whatever mode its first caller was in.

A tensor that is made in inference_mode() cannot be written outside of it, and one that is made while somebody traces
has no memory. So no such tensor may be reachable from a layer, or from what a module of megamoe keeps.
"""

import contextlib
import functools
import gc
import itertools
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_hosts import be_on_host
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import megamoe
from megamoe.backends.statistics import Statistics
from megamoe.group import group as group_module
from megamoe.launch.cache import QuantizedCache
from megamoe.layer import delayed, placed
from megamoe.layer import layer as layer_module
from megamoe.layer.layer import Layer
from megamoe.nn import shared_experts as shared_experts_module
from megamoe.testing import launch, make_inputs, make_weights

CONTAINERS = (dict, list, tuple, set, frozenset, types.CellType, types.MappingProxyType)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, type(functools.cache(len)))


def ours(thing):
    """Whether it is an object or a class of megamoe."""
    kind = thing if isinstance(thing, type) else type(thing)
    return (kind.__module__ or "").split(".")[0] == "megamoe"


def tensors_kept(*roots, given=()):
    """Return the tensors that are reachable from `roots` and from the modules of megamoe, except those in `given`."""
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "megamoe"]
    todo = [*roots, *itertools.chain.from_iterable(vars(m).values() for m in modules)]
    seen, found = {id(t) for t in given}, []
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, Statistics):  # of the last call, until the next one
            continue
        elif isinstance(thing, types.FunctionType):
            todo += [thing.__closure__, thing.__defaults__, thing.__dict__]
        elif ours(thing) or isinstance(thing, (*CONTAINERS, *FUNCTIONS)):
            todo += gc.get_referents(thing)
    return found


def of_one_mode(tensors):
    return [t for t in tensors if isinstance(t, FakeTensor) or t.is_inference()]


def calls(layer, weights, inputs):
    return layer(inputs.x, inputs.topk_ids, inputs.topk_weights, weights)


KINDS = {
    "BF16": {},
    "FP8": {"precision": "fp8"},
    "delayed": {"delay_wgrad": True},
    "kept rows": {"delay_wgrad": "keep"},
    "placement": {"placement": megamoe.ExpertPlacement([3, 0, 1, 2, 4, 5, 3, 3])},
    "scaled": {"routed_scaling_factor": 2.5},
}


def made(kind, backend, group="alone", **more):
    options = KINDS[kind] | more
    ranks = 1 if group == "alone" else dist.get_world_size()
    rank = 0 if group == "alone" else dist.get_rank()
    precision = options.pop("precision", "bf16")
    problem = megamoe.Problem(64, 48, 6, 2, ranks, rank, max_tokens=40, precision=precision)
    make = megamoe.PlacedLayer if "placement" in options else megamoe.Layer
    layer = make(problem, group, backend=backend, **options)
    slots = megamoe.Problem(64, 48, layer.problem.num_experts, 2, ranks, rank, max_tokens=40)
    return layer, make_weights(slots), make_inputs(problem, 20, rank=rank)


def serve(layer, weights, inputs):
    """Open a layer in inference_mode(), write to its weights there, and call it with one token less."""
    with torch.inference_mode():
        calls(layer, weights, inputs)
        weights.w13.mul_(2)
        calls(layer, weights, inputs)
        layer(inputs.x[1:], inputs.topk_ids[1:], inputs.topk_weights[1:], weights)
    last = getattr(
        layer._runtime.backend, "_emulation", None
    )  # keeps results until its next launch
    results = [] if last is None else [*itertools.chain(*last.written), *last._prefixes]
    given = *weights.named().values(), *vars(inputs).values(), *results
    return tensors_kept(layer, given=given)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "staged") for kind in KINDS), ("FP8", "reference"), ("kept rows", "emulate")],
)
def test_a_first_call_in_inference_mode(kind, backend):
    with torch.inference_mode():
        layer, *_ = made(kind, backend)
    _, weights, inputs = made(kind, backend)
    found = serve(layer, weights, inputs)
    assert len(found) >= {"FP8": 5, "placement": 4}.get(
        kind, 1
    )  # the handle; copies and scales; tables
    assert not of_one_mode(found)
    calls(layer, weights, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_somebody_traces(kind):
    layer, weights, inputs = made(kind, "staged")
    layer.prepare(weights)
    expected = calls(layer, weights, inputs)
    given = [*weights.named().values(), *vars(inputs).values()]

    def fake():
        with FakeTensorMode() as mode:
            x, ids, scores = map(mode.from_tensor, (inputs.x, inputs.topk_ids, inputs.topk_weights))
            layer(x, ids, scores, weights)

    def function():
        def call(x):
            return layer(x, inputs.topk_ids, inputs.topk_weights, weights)

        make_fx(call, tracing_mode="fake")(inputs.x)

    def export():
        class Holder(torch.nn.Module):
            def forward(self, x, ids, scores):
                return layer(x, ids, scores, weights)

        torch.export.export(Holder(), (inputs.x, inputs.topk_ids, inputs.topk_weights))

    for trace in (fake, function, export):
        with contextlib.suppress(
            Exception
        ):  # refused, as torch does where real weights meet fake tokens
            trace()
        assert not of_one_mode(tensors_kept(layer, given=given)), trace
        assert torch.equal(calls(layer, weights, inputs), expected), trace


def shared_experts():
    with torch.inference_mode():
        shared = megamoe.SharedExperts(megamoe.Problem(64, 48, 6, 2), 96)
        shared.routes(torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2))
    return tensors_kept(shared)


def test_shared_experts_made_in_inference_mode():
    assert len(shared_experts()) >= 2
    assert not of_one_mode(shared_experts())


def lazy_tables(layer, topk_ids):
    layer._tables = layer._tables or placed._tables(layer.placement)
    return SLOTS(layer, topk_ids)


SLOTS = placed.PlacedLayer._slots
OPEN = layer_module, "lasting", contextlib.nullcontext
GET = QuantizedCache, "get", QuantizedCache.get.__wrapped__.__wrapped__
LAZY = (placed.PlacedLayer, "_keep", Layer._keep), (placed.PlacedLayer, "_slots", lazy_tables)
# What would make each cache in the mode of its first caller, and how many tensors that are.
PLANTS = {
    "handle": ("BF16", [OPEN], 1),
    "tables": ("placement", LAZY, 3),
    "copies": ("FP8", [OPEN, GET], 5),  # and the handle
    "anchor": ("delayed", [(delayed, "lasting", contextlib.nullcontext)], 1),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_cache_of_its_first_callers_mode_is_seen(plant):
    kind, patches, number = PLANTS[plant]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        with torch.inference_mode():
            layer, *_ = made(kind, "staged")
        _, weights, inputs = made(kind, "staged")
        assert len(of_one_mode(serve(layer, weights, inputs))) == number


def test_shared_slots_of_one_mode_are_seen():
    with mock.patch.object(shared_experts_module, "lasting", contextlib.nullcontext):
        assert len(of_one_mode(shared_experts())) == 2


def over_hosts(rank, exchange, plant):
    be_on_host(rank, 2)
    if plant:
        group_module.lasting = contextlib.nullcontext
    layer, weights, inputs = made("FP8", "reference", dist.group.WORLD, exchange=exchange, chunks=2)
    found = serve(layer, weights, inputs)
    return len(found), len(of_one_mode(found))


@pytest.mark.parametrize(
    ("exchange", "plant"), [("exact", False), ("static", False), ("exact", True)]
)
def test_a_first_call_over_hosts(exchange, plant):
    for number, wrong in launch(over_hosts, 2, exchange, plant, timeout_s=60):
        assert number > 5
        assert (wrong > 0) == plant
