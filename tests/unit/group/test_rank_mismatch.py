"""Ranks that differ: another order of layers, another backend, an error on one rank. Each is named on all ranks."""

import os
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome
from torch._subclasses.fake_tensor import FakeTensorMode

from megamoe import (
    ExpertPlacement,
    Layer,
    MegaMoE,
    Problem,
    average_expert_gradients,
    clip_grad_norm_,
    grad_norm,
)
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.testing import launch, make_inputs, make_weights

PROBLEM = Problem(48, 32, 5, 2, ep_size=2, max_tokens=32)
SHAPE = {"hidden": 48, "intermediate": 32, "num_experts": 5, "top_k": 2, "max_tokens": 32}


def in_order(rank, name, count):
    """Call two layers in one order on rank 0 and in the other on rank 1, and then all in one order."""
    problems = [replace(PROBLEM, rank=rank), replace(PROBLEM, rank=rank, num_experts=count)]
    backends = [make_backend(name, p, dist.group.WORLD, device="cpu") for p in problems]

    def call(which):
        i = make_inputs(problems[which], 3 + rank)
        arguments = i.x, i.topk_ids, i.topk_weights, make_weights(problems[which])
        return backends[which].forward(Call(*arguments))

    found = outcome(lambda: call(rank))
    alike = outcome(lambda: [call(0), call(1), call(1)])
    for backend in backends:
        backend.close()
    return found, alike


NAMES, COUNTS = ("staged", "reference", "emulate"), (5, 12)


def all_orders(rank):
    return {(name, count): in_order(rank, name, count) for name in NAMES for count in COUNTS}


@pytest.fixture(scope="module")
def orders():
    return launch(all_orders, 2, timeout_s=60)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", COUNTS, ids=["equal layers", "other sizes"])
def test_layers_in_opposite_order_are_named(orders, name, count):
    for rank, results in enumerate(orders):
        (kind, text), alike = results[name, count]
        assert kind == "RankMismatch", text
        numbers = re.findall(r"forward of layer (\d+)", text)
        assert text.startswith(f"rank {1 - rank} comes for forward of layer")
        assert int(numbers[0]) - int(numbers[1]) == (1 if rank == 0 else -1)
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
        assert f"rank {other} comes for backward of layer {other + 1}" in opposite[1]
        assert f"rank {rank} for backward of layer {rank + 1}" in opposite[1]
        if name == "staged":  # reference computes all of them, wherever one is wanted
            assert differing[0] == "RankMismatch", differing
            assert "gradients of x, gradients of the experts' rows" in differing[1]
        else:
            assert differing[0] is None, differing
        assert alike[0] is None, alike


def staged_gradients(rank):
    """The same for staged called directly, where autograd records the exchanges themselves."""
    problem = replace(PROBLEM, rank=rank)
    backend = make_backend("staged", problem, dist.group.WORLD, device="cpu")
    i, weights = make_inputs(problem, 4), make_weights(problem)
    x = i.x.clone().requires_grad_(rank == 0)

    def call():
        return backend.forward(Call(x, i.topk_ids, i.topk_weights, weights))[0]

    found = outcome(call)
    x.requires_grad_()
    with torch.no_grad():  # nobody will go back: nothing to agree on
        weights.w13.requires_grad_(rank == 0)
        free = outcome(call)
        weights.w13.requires_grad_(False)
    assert free[0] is None, free
    return found, outcome(lambda: call().float().sum().backward())


def test_gradients_of_other_tensors_are_named():
    for found, alike in launch(staged_gradients, 2, timeout_s=60):
        assert found[0] == "RankMismatch", found
        assert alike[0] is None, alike


def differing_options(rank, how):
    """Make and call a layer with something that differs on rank 1."""
    group = dist.group.WORLD
    other = rank == 1
    problem = replace(PROBLEM, rank=rank)
    i, weights = make_inputs(problem, 4), make_weights(problem)
    arguments = i.x, i.topk_ids, i.topk_weights

    def module(**options):
        options = {**SHAPE, "backend": "staged", **(options if other else {})}
        return MegaMoE(**options, group=group)(*arguments)

    def function(backend="staged", problem=problem, **options):
        return Layer(problem, group, backend=backend, **options)(*arguments, weights)

    def with_variable(call):
        if other:
            os.environ["MEGAMOE_BACKEND"] = "nonsense" if how == "bad variable" else "reference"
        try:
            return call()
        finally:
            os.environ.pop("MEGAMOE_BACKEND", None)

    calls = {
        "backend": lambda: module(backend="reference"),
        "bad backend": lambda: module(backend="fast"),
        "hidden": lambda: module(hidden=64),
        "bad hidden": lambda: module(hidden=50),
        "dtype": lambda: module(dtype=torch.float32),
        "no such device": lambda: module(device="cuda"),
        "variable": lambda: with_variable(lambda: function("auto")),
        "bad variable": lambda: with_variable(lambda: function("auto")),
        "function": lambda: function("reference" if other else "staged"),
        "function, bad": lambda: function("fast" if other else "staged"),
        "option": lambda: function(**({"reserve": 1} if other else {})),
        "rank": lambda: function(problem=replace(problem, rank=0)),
        "mega": lambda: function("mega" if other else "staged"),
        "factor": lambda: module(routed_scaling_factor=2.5),
    }
    found = outcome(calls[how])
    return found, outcome(lambda: function())


# what differs -> exception and text on rank 0, exception and text on rank 1
DIFFERING = {
    "backend": ("RankMismatch", "backend is 'reference' on rank 1, 'staged' on rank 0") * 2,
    "bad backend": ("PeerFault", "rank 1 raised ConfigError: backend is 'fast'")
    + ("ConfigError", "backend is 'fast', expected auto"),
    "hidden": ("RankMismatch", "Problem.hidden is 64 on rank 1") * 2,
    "bad hidden": ("PeerFault", "rank 1 raised ConfigError: hidden is 50")
    + ("ConfigError", "hidden is 50"),
    "dtype": ("PeerFault", "rank 1 raised ConfigError: dtype is torch.float32")
    + ("ConfigError", "dtype is torch.float32"),
    "no such device": ("PeerFault", "rank 1 raised ConfigError: device is cuda")
    + ("ConfigError", "device is cuda"),
    "bad variable": ("PeerFault", "raised ConfigError: MEGAMOE_BACKEND is 'nonsense'")
    + ("ConfigError", "MEGAMOE_BACKEND is 'nonsense'"),
    "variable": ("RankMismatch", "backend is 'reference' on rank 1, 'auto' on rank 0") * 2,
    "function": ("RankMismatch", "backend is 'reference' on rank 1, 'staged' on rank 0") * 2,
    "function, bad": ("PeerFault", "rank 1 raised ConfigError: backend is 'fast'")
    + ("ConfigError", "backend is 'fast', expected auto"),
    "option": ("PeerFault", "rank 1 raised ConfigError: option is 'reserve'")
    + ("ConfigError", "option is 'reserve'"),
    "rank": ("RankMismatch", "rank 1 of the group was given Problem.rank = 0") * 2,
    "mega": ("RankMismatch", "backend is 'mega' on rank 1, 'staged' on rank 0") * 2,
    "factor": ("RankMismatch", "routed_scaling_factor is 2.5 on rank 1, 1.0 on rank 0") * 2,
}


def all_that_differ(rank):
    return {how: differing_options(rank, how) for how in DIFFERING}


@pytest.fixture(scope="module")
def differing():
    return launch(all_that_differ, 2, timeout_s=60)


@pytest.mark.parametrize("how", DIFFERING)
def test_ranks_that_ask_for_something_else_are_named_everywhere(differing, how):
    for rank, results in enumerate(differing):
        found, alike = results[how]
        kind, text = DIFFERING[how][2 * rank : 2 * rank + 2]
        assert found[0] == kind, found
        assert text in found[1]
        assert alike[0] is None, alike  # the group still works


def outside(rank):
    """A group of the first rank only: the others hold a group that they are not in."""
    group = dist.new_group([0])
    problem = replace(PROBLEM, ep_size=1)
    found = [
        outcome(lambda: MegaMoE(**SHAPE, group=group, backend="staged")),
        outcome(lambda: Layer(problem, group, backend="staged")),
        outcome(lambda: make_backend("staged", problem, group, device="cpu")),
    ]
    return found, rank


def test_a_process_outside_the_group_is_told_so():
    inside, out = (found for found, _ in launch(outside, 2, timeout_s=30))
    assert [kind for kind, _ in inside] == [None] * 3
    for kind, text in out:
        assert kind == "ConfigError"
        assert "group is one that process 1 is not in" in text


def one_refuses(rank, name, by, late):
    """Rank 1's arguments do not fit, in the first call or in a later one; then all call rightly."""
    group, problem = dist.group.WORLD, replace(PROBLEM, rank=rank)
    i, weights = make_inputs(problem, 4 + rank), make_weights(problem)
    good = i.x, i.topk_ids, i.topk_weights
    options = {"group": group, "backend": name}
    layer = Layer(problem, **options) if by == "layer" else MegaMoE(**SHAPE, **options)

    def call(x, ids, scores, weights=weights):
        return layer(x, ids, scores, *([weights] if by == "layer" else []))

    wrong = {
        "x": (i.x.float(), *good[1:]),
        "no x": (None, *good[1:]),
        "device": (i.x.to("meta"), *good[1:]),
        "tokens": tuple(t.repeat(20, 1) for t in good),
        "ids": (i.x, i.topk_ids.float(), i.topk_weights),
        "scores": (i.x, i.topk_ids, i.topk_weights[:2]),
    }
    with torch.inference_mode():
        wrong["inference"] = (i.x.clone(), *good[1:])
    if by == "layer":
        weights.w13.requires_grad_()
        wrong["weights"] = (*good, replace(weights, w2=weights.w2.float()))
        wrong["no weights"] = (*good, None)
    found = {}
    with torch.no_grad():
        if late:
            call(*good)
        for what, arguments in wrong.items():
            with torch.set_grad_enabled(what == "inference"):
                found[what] = outcome(lambda a=arguments: call(*(a if rank == 1 else good)))
            if not late:
                break
        both = outcome(lambda: call(*wrong["x"]))
        alike = outcome(lambda: call(*good))
    return found, both, alike


REFUSING = tuple(product(NAMES, ("module", "layer"), (False, True)))


def all_refusals(rank):
    return {case: one_refuses(rank, *case) for case in REFUSING}


@pytest.fixture(scope="module")
def refusals():
    return launch(all_refusals, 2, timeout_s=100)


@pytest.mark.parametrize(("name", "by", "late"), REFUSING)
def test_arguments_that_one_rank_refuses_hang_nobody(refusals, name, by, late):
    for rank, results in enumerate(refusals):
        found, both, alike = results[name, by, late]
        for what, (kind, text) in found.items():
            assert kind == ("ArgumentError" if rank == 1 else "PeerFault"), (what, text)
            assert rank == 1 or text.startswith("rank 1 raised ArgumentError: "), (what, text)
        assert both[0] == "ArgumentError"
        assert alike[0] is None, alike


def faked(call, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return call(mode.from_tensor(x))


# Ways to call that are refused: what is said of them must not be traced, mapped or faked itself.
WAYS = {
    "a fake tensor": faked,
    "forward-mode tangent": lambda call, x: torch.func.jvp(call, (x,), (x,)),
}


def one_calls_otherwise(rank):
    group, problem, found = dist.group.WORLD, replace(PROBLEM, rank=rank), {}
    i, weights = make_inputs(problem, 4), make_weights(problem)
    for late, (name, way) in product((False, True), WAYS.items()):
        layer = Layer(problem, group, backend="staged")

        def call(x, layer=layer):
            return layer(x, i.topk_ids, i.topk_weights, weights)

        if late and name == "a fake tensor":
            continue  # a layer that is made says what y looks like
        if late:
            call(i.x)
        told = outcome(lambda way=way, call=call: way(call, i.x) if rank == 1 else call(i.x))
        found[name, late] = told, outcome(lambda call=call: call(i.x))
        layer.close()
    return found


def test_a_refusal_inside_of_transforms_and_modes_reaches_the_others():
    for rank, results in enumerate(launch(one_calls_otherwise, 2, timeout_s=60)):
        for (name, late), ((kind, text), after) in results.items():
            assert kind == ("ArgumentError" if rank == 1 else "PeerFault"), (name, late, text)
            assert rank == 0 or name in text
            assert after[0] is None, (name, late, after)


def recorded(layer, frozen, arguments):
    """Call a layer whose experts need no gradient where they are frozen."""
    with torch.enable_grad():
        layer.requires_grad_(not frozen)
        layer(*arguments)


def crossing(rank, name):
    """Layers exist and work; then rank 1 does something else than rank 0, which calls."""
    group, problem = dist.group.WORLD, replace(PROBLEM, rank=rank)
    i, weights = make_inputs(problem, 4), make_weights(problem)
    layers = [Layer(problem, group, backend=name) for _ in "ab"]
    module = MegaMoE(**{**SHAPE, "num_experts": 6}, group=group, backend=name)
    rows = i.x, i.topk_ids, i.topk_weights
    here, there = ExpertPlacement([0, 1, 2, 3, 0, 1]), ExpertPlacement([3, 2, 1, 0, 0, 1])
    placed = MegaMoE(**{**SHAPE, "num_experts": 4}, group=group, backend=name, placement=here)

    def call(of=layers[0]):
        return of(*rows, weights)

    def move(target):
        placed.move_experts(target)

    def norm(of=module):
        return grad_norm(of)

    def count():
        return here.counters(module.statistics(), group)

    # what rank 0 does, what rank 1 does, both as errors name them; None: they say something else
    forward, prepared = "forward of layer", layers[1].prepare
    cases = {
        "making": (call, lambda: Layer(problem, group, backend=name), forward, "a new layer"),
        "first call": (call, lambda: call(layers[1]), forward, "a first call"),
        "preparing": (
            lambda: call(layers[1]),
            lambda: prepared(weights),
            "a first call",
            "prepare()",
        ),
        "backend": (
            call,
            lambda: make_backend(name, problem, group, device="cpu"),
            forward,
            "make_backend()",
        ),
        "closing": (call, layers[0].close, forward, "close()"),
        "resetting": (call, layers[0].reset, forward, "reset()"),
        "norm": (call, norm, forward, "grad_norm() or clip_grad_norm_()"),
        "clip": (norm, lambda: move(there), "grad_norm() or", "move_experts()"),
        "counters": (count, norm, "ExpertPlacement.counters()", "grad_norm() or clip_grad_norm_()"),
        "frozen": (
            *(lambda: recorded(module, rank == 1, rows),) * 2,
            *("gradients recorded)", "forward of layer"),
        ),
        "making wrongly": (
            call,
            lambda: MegaMoE(**{**SHAPE, "hidden": 50}, group=group, backend=name),
            *("rank 1 raised ConfigError: hidden is 50", "ConfigError"),
        ),
        "clip wrongly": (
            norm,
            lambda: clip_grad_norm_(module, -1.0),
            *("rank 1 raised ", "ArgumentError"),
        ),
        "counters wrongly": (
            count,
            lambda: here.counters(None, group),
            *("rank 1 raised ", "ArgumentError"),
        ),
        "move wrongly": (
            lambda: move(there),
            lambda: move(None),
            *("rank 1 raised ConfigError", "ConfigError"),
        ),
        "move differently": (
            lambda: move(there),
            lambda: move(here),
            *("placement is [0, 1, 2, 3, 0, 1] on", "[3, 2, 1, 0, 0, 1] on rank 0"),
        ),
    }
    found = {}
    with torch.no_grad():
        call()
        module(*rows)
        for what, (*calls, first, second) in cases.items():
            kind, text = outcome(calls[rank])
            found[what] = kind, text, (first, second), outcome(call), outcome(norm)
        closed = outcome(lambda: [layer.close() for layer in layers])
    return found, closed


def all_crossings(rank):
    return {name: crossing(rank, name) for name in NAMES}


def test_ranks_that_do_something_else_are_named():
    """Red before: ranks waited for the group's time-out, or exchanged what was another call's."""
    for rank, by_name in enumerate(launch(all_crossings, 2, timeout_s=60)):
        for name, (found, closed) in by_name.items():
            for what, (kind, text, words, *alike) in found.items():
                other, case = 1 - rank, (name, what, kind, text)
                if what.endswith("wrongly"):
                    assert kind == ("PeerFault", words[1])[rank], case
                    assert rank or words[0] in text, case
                else:
                    assert kind == "RankMismatch", case
                    assert all(word in text for word in words), case
                    if what != "move differently":
                        assert f"rank {other} comes for " in text, case
                        assert f", rank {rank} for {words[rank]}" in text or what == "frozen", case
                assert alike == [(None, "")] * 2, (name, what, alike)
            assert closed[0] is None, closed


def opened_in_turns(rank):
    """Two layers of one problem, whose first calls come in another order on each rank."""
    group = dist.group.WORLD
    problem = Problem(48, 32, 5, 2, ep_size=2, rank=rank, max_tokens=16)
    layers = [Layer(problem, group, backend="staged") for _ in range(2)]
    i, weights = make_inputs(problem, 6, rank=rank), make_weights(problem)
    turns = layers[::-1] if rank else layers
    return [outcome(lambda f=f: f(i.x, i.topk_ids, i.topk_weights, weights))[:2] for f in turns]


def test_equal_layers_that_are_opened_in_another_order_are_told_apart():
    for found in launch(opened_in_turns, 2, timeout_s=60):
        for kind, message in found:
            assert kind == "RankMismatch", message
            assert "what is opened is layer" in message


def passes_in_turns(rank, name):
    """Two calls, whose backward passes come in another order on each rank, and then two of rank 1's order."""
    torch.manual_seed(0)
    layer = MegaMoE(**SHAPE, group=dist.group.WORLD, init_seed=1, backend=name)
    rows = [make_inputs(layer.problem, 5, rank=rank, seed=n) for n in range(2)]

    def calls():
        leaves = [i.x.clone().requires_grad_() for i in rows]
        return leaves, [
            layer(x, i.topk_ids, i.topk_weights) for x, i in zip(leaves, rows, strict=True)
        ]

    def gradients(turns):
        leaves, ys = calls()
        for turn in turns:
            ys[turn].float().square().sum().backward()
        layer.zero_grad()
        return [x.grad for x in leaves]

    expected = gradients((0, 1))
    found = outcome(lambda: gradients((0, 1)[:: 1 - 2 * rank]))
    if name == "emulate":
        layer.reset()  # ranks inside a kernel do not come out of it alike
    again = gradients((1, 0))
    layer.close()
    return found[:2], [torch.equal(*pair) for pair in zip(expected, again, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_backward_passes_in_opposite_order_are_named(name):
    """Red before but with emulate: ranks brought gradients of different calls together, in silence."""
    for rank, (found, alike) in enumerate(launch(passes_in_turns, 2, name, timeout_s=60)):
        assert alike == [True, True]
        kind, text = found
        assert kind == "RankMismatch", text
        if name != "emulate":
            assert f"rank {1 - rank} comes for backward of call " in text, text


def averaged_over(rank):
    """Rank 1 forgets to average, or averages over fewer ranks."""
    found = []
    for ranks in ((2, None), (4, 2), (2, 2)):
        module = MegaMoE(**SHAPE, group=dist.group.WORLD, init_seed=1, backend="staged")
        if ranks[rank]:
            average_expert_gradients(module, ranks[rank])
        i = make_inputs(module.problem, 5, rank=rank)
        found.append(outcome(lambda m=module, i=i: m(i.x, i.topk_ids, i.topk_weights))[:2])
    return found


def test_ranks_that_average_gradients_otherwise_are_named():
    """Red before: each rank's experts had gradients of another scale."""
    name = r"num_ranks of average_expert_gradients\(\)"
    for forgotten, fewer, alike in launch(averaged_over, 2, timeout_s=60):
        for (kind, text), (one, other) in ((forgotten, (1, 2)), (fewer, (2, 4))):
            assert kind == "RankMismatch"
            assert re.search(f"{name} is {one} on rank 1, {other} on rank 0", text), text
        assert alike == (None, "")
