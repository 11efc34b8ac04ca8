"""Ranks that differ: another order of layers, another backend, an error on one rank. Each is named on all ranks."""

import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from megamoe import MegaMoE, Problem, moe_forward
from megamoe.frontend.functional import make_backend
from megamoe.testing import launch, make_inputs, make_weights

PROBLEM = Problem(48, 32, 5, 2, ep_size=2, max_tokens=32)
SHAPE = {"hidden": 48, "intermediate": 32, "num_experts": 5, "top_k": 2, "max_tokens": 32}


def outcome(function):
    """Return what happened, picklable: (name of the exception or None, its text, seconds)."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None, "", time.monotonic() - start


def in_order(rank, name, count):
    """Call two layers in one order on rank 0 and in the other on rank 1, and then all in one order."""
    problems = [replace(PROBLEM, rank=rank), replace(PROBLEM, rank=rank, num_experts=count)]
    backends = [make_backend(name, p, dist.group.WORLD, device="cpu") for p in problems]

    def call(which):
        i = make_inputs(problems[which], 3 + rank)
        arguments = i.x, i.topk_ids, i.topk_weights, make_weights(problems[which])
        return moe_forward(*arguments, problem=problems[which], backend=backends[which])

    found = outcome(lambda: call(rank))
    alike = outcome(lambda: [call(0), call(1), call(1)])
    for backend in backends:
        backend.close()
    return found, alike


@pytest.mark.parametrize("name", ["staged", "reference", "emulate"])
@pytest.mark.parametrize("count", [5, 12], ids=["equal layers", "other sizes"])
def test_layers_in_opposite_order_are_named(name, count):
    for rank, (found, alike) in enumerate(launch(in_order, 2, name, count, timeout_s=60)):
        kind, text, seconds = found
        assert kind == "RankMismatch", text
        other = 1 - rank
        assert f"rank {other} calls forward of layer {other + 1}" in text
        assert f"rank {rank} forward of layer {rank + 1}" in text
        assert seconds < 5
        assert alike[0] is None, alike


def backward_in_order(rank, trained):
    """Backward of two layers in opposite order; then of one layer whose gradients differ by rank."""
    layers = [MegaMoE(**SHAPE, group=dist.group.WORLD, backend=trained, init_seed=1) for _ in "ab"]
    i = make_inputs(layers[0].problem, 4)
    ys = [layer(i.x, i.topk_ids, i.topk_weights) for layer in layers]
    found = [outcome(lambda: ys[rank].float().sum().backward())]
    x = i.x.clone().requires_grad_(rank == 0)
    y = layers[0](x, i.topk_ids, i.topk_weights)
    found.append(outcome(lambda: y.float().sum().backward()))
    found.append(outcome(lambda: ys[0].float().sum().backward()))
    for layer in layers:
        layer.close()
    return found


@pytest.mark.parametrize("name", ["staged", "reference"])
def test_backward_in_opposite_order_is_named(name):
    for rank, found in enumerate(launch(backward_in_order, 2, name, timeout_s=60)):
        opposite, differing, alike = found
        assert opposite[0] == "RankMismatch", opposite
        other = 1 - rank
        assert f"rank {other} calls backward of layer {other + 1}" in opposite[1]
        assert f"rank {rank} backward of layer {rank + 1}" in opposite[1]
        assert differing[0] == "RankMismatch", differing
        assert "gradients of x and the experts' rows" in differing[1]
        assert alike[0] is None, alike


def staged_gradients(rank):
    """The same for staged called directly, where autograd records the exchanges themselves."""
    problem = replace(PROBLEM, rank=rank)
    backend = make_backend("staged", problem, dist.group.WORLD, device="cpu")
    i, weights = make_inputs(problem, 4), make_weights(problem)
    x = i.x.clone().requires_grad_(rank == 0)

    def call():
        return moe_forward(x, i.topk_ids, i.topk_weights, weights, problem=problem, backend=backend)

    found = outcome(call)
    x.requires_grad_()
    return found, outcome(lambda: call().float().sum().backward())


def test_gradients_of_other_tensors_are_named():
    for found, alike in launch(staged_gradients, 2, timeout_s=60):
        assert found[0] == "RankMismatch", found
        assert alike[0] is None, alike
