"""Shared experts in the layer: slots of tokens, y and gradients as beside it, weights in place, what is refused."""

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from thread_group import ThreadGroup
from torch import nn

from megamoe import ExpertPlacement, ExpertWeights, Layer, PlacedLayer, Problem, SharedExperts
from megamoe.backends.call import Call
from megamoe.backends.emulate.backend import EmulateBackend
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.core.table import PRECISIONS
from megamoe.testing import assert_close, launch, make_inputs, make_weights, same_bits

TOKENS, COUNT = 12, 2
PROBLEM = Problem(64, 48, 5, 2, max_tokens=16)
NAMES = ("w13", "w2", "b13", "b2")


def beside_of(problem, count=COUNT):
    """The problem of the shared expert alone, on one rank: one expert for every token."""
    wide = count * problem.intermediate
    return replace(problem, intermediate=wide, num_experts=1, top_k=1, ep_size=1, rank=0)


def whole_of(problem, count=COUNT, quantize=True):
    """The shared expert's weights, without a first dimension."""
    made = make_weights(beside_of(problem, count), seed=7, quantize=quantize)
    return ExpertWeights(**{name: t[0] for name, t in made.named().items()})


def gates(tokens=TOKENS):
    return torch.rand(tokens, 1, generator=torch.Generator().manual_seed(5))


def test_ids_name_slots_of_the_experts_and_of_this_rank():
    problem = replace(
        PROBLEM, ep_size=2, rank=1
    )  # 3 experts and 2 slots on rank 0, 2 and 2 on rank 1
    shared = SharedExperts(problem, 96, routed_scaling_factor=2.0)
    assert (shared.problem.num_experts, shared.problem.top_k) == (9, 4)
    ids = torch.tensor([[0, 2], [3, 4], [-1, 5], [4, 99]], dtype=torch.int32)
    found, weights = shared.routes(ids, torch.full((4, 2), 0.25), gates(4))
    assert found.dtype == torch.int32
    expected = [[0, 2, 7, 8], [5, 6, 7, 8], [-1, -1, 7, 8], [6, -1, 7, 8]]
    assert found.tolist() == expected
    assert weights[:, :2].eq(0.5).all()
    assert torch.equal(weights[:, 2:], gates(4).expand(-1, 2))
    first = SharedExperts(replace(problem, rank=0), 96)
    found, weights = first.routes(ids.long().view(2, 2, 2), torch.ones(2, 2, 2))
    assert (found.shape, found.dtype) == ((2, 2, 4), torch.int64)
    assert found[..., 2:].eq(torch.tensor([3, 4])).all()
    assert weights.eq(1).all()
    for rank in range(2):
        of_rank = replace(shared.problem, rank=rank)
        end = of_rank.expert_begin(rank + 1)
        assert [of_rank.rank_of_expert(e) for e in (end - 2, end - 1)] == [rank, rank]
    assert shared.routes(ids[:0], torch.ones(0, 2))[0].shape == (0, 4)


CASES = {
    "swiglu": {},
    "biases": {"activation": "swiglu_oai", "bias": True},
    "relu2": {"activation": "relu2"},
}
KINDS = [(precision, case) for precision in ("bf16", "fp8") for case in CASES]
KINDS += [(p.name, "swiglu") for p in PRECISIONS.values() if p.packed or not p.trains]


@pytest.mark.parametrize(("precision", "case"), KINDS)
@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_y_is_that_of_a_shared_expert_beside(backend, precision, case):
    scaled = PRECISIONS[precision].w.scaled
    problem = replace(PROBLEM, intermediate=128 if scaled else 48, precision=precision)
    problem = replace(problem, **CASES[case])
    inputs, routed = make_inputs(problem, TOKENS, routing="dropped"), make_weights(problem)
    shared = SharedExperts(problem, COUNT * problem.intermediate, routed_scaling_factor=2.0)
    whole = whole_of(problem)
    weights = shared.join(routed, shared.parts(whole))
    layer = Layer(shared.problem, backend=backend)
    ids, scores = shared.routes(inputs.topk_ids, inputs.topk_weights, gates())
    y = layer(inputs.x, ids, scores, weights)

    alone = Layer(problem, backend=backend)(
        inputs.x, inputs.topk_ids, inputs.topk_weights * 2, routed
    )
    one = ExpertWeights(**{name: t[None] for name, t in whole.named().items()})
    nought = torch.zeros(TOKENS, 1, dtype=torch.int64)
    beside = Layer(beside_of(problem), backend=backend)(inputs.x, nought, gates(), one)
    # y, and each addend, was rounded once more: 2^-8 of it at most, 1.66e-3 in the norm
    assert_close(y.float(), alone.float() + beside.float(), relative=5e-3)
    assert beside.float().norm() > 0.1 * alone.float().norm()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_over_two_ranks_by_the_kernels_source(precision):
    width = 128 if precision == "fp8" else 48
    problem = replace(PROBLEM, ep_size=2, precision=precision, intermediate=width)
    found = [None, None]

    def rank_main(rank, group):
        of_rank = replace(problem, rank=rank)
        shared, inputs = SharedExperts(of_rank, 2 * width), make_inputs(of_rank, TOKENS)
        weights = shared.join(make_weights(of_rank), shared.parts(whole_of(of_rank)))
        backend = EmulateBackend(shared.problem, group)
        routes = shared.routes(inputs.topk_ids, inputs.topk_weights, gates())
        found[rank], _ = backend.forward(Call(inputs.x, *routes, weights))

    pairs = enumerate(ThreadGroup.create(2))
    threads = [threading.Thread(target=rank_main, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone = replace(problem, ep_size=1)
    shared = SharedExperts(alone, 2 * width)
    weights = shared.join(make_weights(alone), shared.parts(whole_of(alone)))
    for rank, y in enumerate(found):
        inputs = make_inputs(problem, TOKENS, rank=rank)
        routes = shared.routes(inputs.topk_ids, inputs.topk_weights, gates())
        expected = Layer(shared.problem, backend="reference")(inputs.x, *routes, weights)
        assert_close(y, expected, relative=6e-3, name=f"rank {rank}")  # partials are rounded


def test_a_layer_with_biases_takes_a_shared_expert_without():
    problem = replace(PROBLEM, bias=True)
    shared = SharedExperts(problem, 96)
    whole = whole_of(problem)
    parts = shared.parts(replace(whole, b13=None, b2=None))
    assert not parts.b13.any()
    assert not parts.b2.any()
    assert parts.b2.shape == (2, 64)
    both = shared.parts(whole)
    assert same_bits(both.b2.sum(0), whole.b2)
    assert same_bits(both.b13.view(2, 2, 48).transpose(0, 1).reshape(-1), whole.b13)


def over_ranks(rank):
    """y and gradients of both ways, and gradients of the shared expert summed over the ranks."""
    found = {}
    for precision in ("bf16", "fp8"):
        width = 128 if precision == "fp8" else 48
        problem = replace(
            PROBLEM, ep_size=2, rank=rank, precision=precision, intermediate=width, bias=True
        )
        inputs = make_inputs(problem, (TOKENS, 5)[rank])
        dy = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(rank)).bfloat16()
        for way in ("inside", "beside"):
            leaves = {"x": inputs.x, "scores": inputs.topk_weights, "gate": gates(len(inputs.x))}
            leaves |= make_weights(problem, quantize=False).named()
            leaves |= {f"s {n}": t for n, t in whole_of(problem, quantize=False).named().items()}
            leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
            routed = ExpertWeights(*(leaves[n] for n in NAMES))
            whole = ExpertWeights(*(leaves[f"s {n}"] for n in NAMES))
            if way == "inside":
                shared = SharedExperts(problem, 2 * width)
                layer = Layer(shared.problem, dist.group.WORLD, backend="staged")
                call = shared.routes(inputs.topk_ids, leaves["scores"], leaves["gate"])
                y = layer(leaves["x"], *call, shared.join(routed, shared.parts(whole)))
            else:
                layer = Layer(problem, dist.group.WORLD, backend="staged")
                alone = Layer(beside_of(problem), "alone", backend="staged")
                y = layer(leaves["x"], inputs.topk_ids, leaves["scores"], routed)
                one = ExpertWeights(*(leaves[f"s {n}"][None] for n in NAMES))
                y = y + alone(leaves["x"], inputs.topk_ids[:, :1] * 0, leaves["gate"], one)
            y.backward(dy)
            grads = {n: t.grad for n, t in leaves.items()}
            for name, grad in grads.items():
                if name.startswith("s "):
                    dist.all_reduce(grad)
            found[precision, way] = {"y": y.detach(), **grads}
    return found


def test_gradients_over_two_ranks_are_those_of_a_shared_expert_beside():
    ranks = launch(over_ranks, 2)
    for found in ranks:
        for precision in ("bf16", "fp8"):
            inside, beside = found[precision, "inside"], found[precision, "beside"]
            assert len(beside) == 12
            for name, expected in beside.items():
                assert expected.abs().max() > 0
                relative = 1e-2 if precision == "bf16" else 2e-2
                assert_close(inside[name], expected, relative=relative, name=f"{precision} {name}")
    first, second = ranks
    for name in ("s w13", "s w2", "s b13", "s b2"):
        assert same_bits(first["bf16", "inside"][name], second["bf16", "inside"][name])


def parameters_of(weights):
    return ExpertWeights(**{n: nn.Parameter(t) for n, t in weights.named().items()})


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_weights_lie_together_and_writes_to_either_are_seen(precision):
    problem = replace(PROBLEM, precision=precision, intermediate=128)
    shared = SharedExperts(problem, 256)
    whole = shared.empty()
    masters = make_weights(problem, quantize=False)
    routed, dense = (parameters_of(half) for half in shared.split(whole))
    apart = shared.parts(whole_of(problem, quantize=False))
    for into, values in ((routed, masters), (dense, apart)):
        for name, value in values.named().items():
            getattr(into, name).data.copy_(value)
    inputs = make_inputs(problem, TOKENS)
    call = inputs.x, *shared.routes(inputs.topk_ids, inputs.topk_weights)
    layer = Layer(shared.problem, backend="staged")

    def check():
        parts = shared.join(routed, dense)
        assert parts.w13.data_ptr() == whole.w13.data_ptr()
        copies = [
            replace(w, w13=w.w13.detach().clone(), w2=w.w2.detach().clone())
            for w in (routed, dense)
        ]
        joined = shared.join(*copies)
        assert joined.w13.data_ptr() != whole.w13.data_ptr()
        fresh = Layer(shared.problem, backend="staged")(*call, joined)
        assert same_bits(layer(*call, parts), fresh)
        return fresh.detach()

    y = check()
    for _ in range(2):
        with torch.no_grad():
            dense.w2.mul_(1.5)  # the shared expert alone
        y, before = check(), y
        assert not same_bits(y, before)
    optimizer = torch.optim.SGD([routed.w13, routed.w2, dense.w13, dense.w2], lr=0.1)
    layer(*call, shared.join(routed, dense)).float().square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in (routed.w13, dense.w13, routed.w2, dense.w2))
    optimizer.step()
    assert not same_bits(check(), y)
    planes = replace(routed, w13=routed.w13.view(5, 2, -1, 64))
    assert same_bits(shared.join(planes, dense).w13.flatten(1, 2), whole.w13)
    apart = replace(dense, w2=nn.Parameter(torch.zeros_like(dense.w2)))
    assert not shared.join(routed, apart).w2[5:].any()


@pytest.mark.parametrize("which", [0, 1])
def test_a_write_before_backward_is_refused(which):
    shared, inputs = SharedExperts(PROBLEM, 96), make_inputs(PROBLEM, TOKENS)
    whole = shared.empty()
    for value in whole.named().values():
        value.normal_()
    halves = [
        ExpertWeights(nn.Parameter(half.w13.data), nn.Parameter(half.w2.data))  # counted apart
        for half in shared.split(whole)
    ]
    routes = shared.routes(inputs.topk_ids, inputs.topk_weights)
    x = inputs.x.clone().requires_grad_()
    layer = Layer(shared.problem, backend="staged")
    y = layer(x, *routes, shared.join(*halves))
    with torch.no_grad():
        halves[which].w2.mul_(2)
    with pytest.raises(RuntimeError, match="modified (by an )?in-?place"):
        y.float().sum().backward()


def test_statistics_without_shared_slots_and_no_placement():
    shared, inputs = SharedExperts(PROBLEM, 96), make_inputs(PROBLEM, TOKENS)
    weights = shared.join(make_weights(PROBLEM), shared.parts(whole_of(PROBLEM)))
    layer = Layer(shared.problem, backend="staged")
    layer(inputs.x, *shared.routes(inputs.topk_ids, inputs.topk_weights), weights)
    statistics = layer.statistics()
    assert statistics.tokens_per_expert[5:].tolist() == [TOKENS] * 2
    counted = torch.bincount(inputs.topk_ids.flatten(), minlength=5).tolist()
    assert shared.routed(statistics).tokens_per_expert.tolist() == counted
    placement = ExpertPlacement([3, 0, 1, 2, 4, 3])
    with pytest.raises(ConfigError, match="placement is given, expected None for a layer with"):
        PlacedLayer(shared.problem, placement=placement)
    # of all slots: join() would put their weights elsewhere
    moved = ExpertPlacement([6, 1, 2, 3, 4, 5, 0])
    with pytest.raises(ConfigError, match="placement is given, expected None for a layer with"):
        PlacedLayer(shared.problem, placement=moved)
    same = replace(PROBLEM, num_experts=7, top_k=4)
    assert same == shared.problem
    assert hash(same) == hash(shared.problem)
    assert same.fingerprint() == shared.problem.fingerprint()
    assert PlacedLayer(same, placement=moved).placement is moved


@pytest.mark.parametrize(
    "change",
    [
        lambda problem: replace(problem, max_tokens=64),
        lambda problem: replace(problem, precision="fp8"),
        lambda problem: pickle.loads(pickle.dumps(problem)),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_no_placement_of_a_problem_made_from_it(change):
    """It would be taken, and y be that of other experts: join() knows nothing of it."""
    problem = change(SharedExperts(PROBLEM, 96).problem)
    assert SharedExperts(problem, 96).problem != problem
    with pytest.raises(ConfigError, match="placement is given, expected None for a layer with"):
        PlacedLayer(problem, placement=ExpertPlacement([6, 1, 2, 3, 4, 5, 0]))


def test_compiled_in_one_graph():
    shared, inputs = SharedExperts(PROBLEM, 96), make_inputs(PROBLEM, TOKENS)
    weights = shared.join(make_weights(PROBLEM), shared.parts(whole_of(PROBLEM)))
    layer = Layer(shared.problem, backend="staged")
    layer.prepare(weights)

    def call(x, ids, scores, gate):
        return layer(x, *shared.routes(ids, scores, gate), weights)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    given = inputs.x, inputs.topk_ids, inputs.topk_weights, gates()
    with torch.no_grad():
        assert same_bits(compiled(*given), call(*given))


def test_what_is_refused():
    for options, message in (
        ({"intermediate": 100}, "intermediate is 100, expected a multiple of 48"),
        ({"intermediate": 0}, "intermediate is 0"),
        ({"intermediate": 48.0}, "intermediate is 48.0"),
        ({"intermediate": 48 * 31}, "intermediate is 1488, 31 times 48, expected at most 30 times"),
        ({"intermediate": 48, "activation": "geglu"}, "activation is geglu, expected Activation"),
        ({"intermediate": 48, "activation": "gelu"}, "activation is 'gelu', expected one of"),
        ({"intermediate": 48, "routed_scaling_factor": "2"}, "routed_scaling_factor is 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            SharedExperts(PROBLEM, **options)
    with pytest.raises(ConfigError, match="problem is str, expected megamoe.Problem"):
        SharedExperts("dsv3", 96)
    shared, whole = SharedExperts(PROBLEM, 96, activation="swiglu"), whole_of(PROBLEM)
    routed, parts = make_weights(PROBLEM), shared.parts(whole)
    ids, scores = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    for call, message in (
        (lambda: shared.routes([[0, 1]], scores), "topk_ids is list, expected a tensor"),
        (lambda: shared.routes(ids[:, :1], scores), r"topk_ids.shape is \[4, 1\]"),
        (lambda: shared.routes(ids, scores[:3]), r"topk_weights.shape is \[3, 2\]"),
        (lambda: shared.routes(ids, ids), "topk_weights.dtype is torch.int64"),
        (lambda: shared.routes(ids.short(), scores), "topk_ids.dtype is torch.int16"),
        (lambda: shared.routes(ids, scores, scores), r"shared_weights.shape is \[4, 2\]"),
        (lambda: shared.parts(replace(whole, w13=whole.w13[1:])), r"shared.w13.shape is \[191, 64"),
        (lambda: shared.parts(replace(whole, w2=whole.w2.float())), "shared.w2.dtype is torch.fl"),
        (lambda: shared.parts(replace(whole, b2=whole.w2[:, 0])), "shared.b2 is given"),
        (lambda: shared.parts(None), "shared is NoneType"),
        (lambda: shared.join(routed, whole), r"shared.w13.shape is \[192, 64\]"),
        (lambda: shared.join(routed, replace(parts, w2=None)), "shared.w2 is NoneType"),
        (lambda: shared.join(parts, parts), r"weights.w13.shape is \[2, 96, 64\]"),
        (lambda: shared.join(routed, replace(parts, b2=scores)), "shared.b2 is given"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    fp8 = replace(PROBLEM, precision="fp8")
    given = SharedExperts(fp8, 96)
    with pytest.raises(
        ArgumentError, match="shared.w13 is of parts of 48, which end within a block"
    ):
        given.parts(whole_of(fp8))
    with pytest.raises(
        ArgumentError, match="shared.w13.dtype is torch.bfloat16, expected torch.fl"
    ):
        given.join(make_weights(fp8), given.parts(whole))
