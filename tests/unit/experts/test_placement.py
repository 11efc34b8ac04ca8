"""Redundant experts: slots for ids, counters, in-place moves between ranks, and what a layer makes of them."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome
from torch.distributed.device_mesh import init_device_mesh

import megamoe
from megamoe.backends.statistics import Statistics
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.experts.moves import Moves
from megamoe.formats.weights import ExpertWeights
from megamoe.testing import launch, make_inputs, make_weights

EXPERTS, SLOTS = 6, 8
LOAD = [40, 3, 17, 90, 0, 5]
CPU = torch.device("cpu")
PROBLEM = megamoe.Problem(64, 48, EXPERTS, 2, max_tokens=40)


def of_slots(placement, problem):
    """Weights in which replicas are equal."""
    rows, weights = torch.tensor(placement.expert_of), make_weights(problem)
    return ExpertWeights(**{name: t[rows] for name, t in weights.named().items()})


def slots_taken(placement, ids, backend="staged"):
    """How often each slot of a layer is taken."""
    ids = torch.as_tensor(ids)
    problem = megamoe.Problem(64, 48, placement.num_logical, ids.shape[-1], max_tokens=40)
    layer = megamoe.PlacedLayer(problem, "alone", backend=backend, placement=placement)
    x = torch.ones(*ids.shape[:-1], 64, dtype=torch.bfloat16)
    y = layer(x, ids, torch.ones(ids.shape), of_slots(placement, problem))
    assert y.shape == x.shape
    return layer.statistics().tokens_per_expert.tolist()


def test_tokens_take_the_slots_of_an_expert_in_turns():
    placement = megamoe.ExpertPlacement([3, 0, 1, 2, 4, 5, 3, 3])
    ids = [[3, 0], [3, -1], [3, 6], [3, 5], [1, 3]]  # slots 0, 6, 7, 0, 6 of expert 3
    for dtype in (torch.int32, torch.int64):
        assert slots_taken(placement, torch.tensor(ids, dtype=dtype)) == [2, 1, 1, 0, 0, 1, 2, 1]
    assert slots_taken(placement, [[[3, 0], [3, 7]], [[3, 3], [6, 5]]]) == [1, 1, 0, 0, 0, 1, 1, 2]
    assert slots_taken(placement, torch.zeros(0, 2, dtype=torch.int64)) == [0] * 8


def test_balanced_evens_out_slots_and_ranks():
    placement = megamoe.ExpertPlacement.balanced(LOAD, SLOTS, 2)
    assert sorted(map(len, placement.slots_of)) == [1, 1, 1, 1, 1, 3]
    assert len(placement.slots_of[3]) == 3  # 30 tokens a slot; another slot for 0 would leave 45
    share = [LOAD[e] / len(placement.slots_of[e]) for e in placement.expert_of]
    assert max(share) == 40
    halves = sum(share[:4]), sum(share[4:])
    assert abs(halves[0] - halves[1]) <= 30
    assert {s // 4 for s in placement.slots_of[3]} == {0, 1}
    # A replica counts its part of the load: with all of it, rank 0 would have 54 and 30, rank 1 the rest.
    shared = megamoe.ExpertPlacement.balanced([108, 50, 40, 30, 20, 10], 8, 2)
    share = [[108, 50, 40, 30, 20, 10][e] / len(shared.slots_of[e]) for e in shared.expert_of]
    assert len(shared.slots_of[0]) == 3
    assert abs(sum(share[:4]) - sum(share[4:])) <= 10
    # Replicas are apart, even where the emptiest rank has one: of 1 they would have 60 and 56.
    apart = megamoe.ExpertPlacement.balanced([55, 60, 1], 4, 2)
    assert [set(apart.expert_of[:2]), set(apart.expert_of[2:])] == [{0, 1}, {1, 2}]
    plain = megamoe.ExpertPlacement.balanced([1] * 6, 6, 2)
    assert sorted(plain.expert_of) == list(range(6))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_layer_with_slots_computes_what_one_with_experts_does(precision):
    problem = megamoe.Problem(64, 48, EXPERTS, 2, max_tokens=40, precision=precision)
    weights = make_weights(problem)
    inputs = make_inputs(problem, 40, routing="dropped")
    placement = megamoe.ExpertPlacement.balanced(LOAD, SLOTS, 1)
    physical = of_slots(placement, problem)
    want = megamoe.Layer(problem, "alone", backend="reference")
    have = megamoe.PlacedLayer(problem, "alone", backend="reference", placement=placement)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    for _ in range(2):  # the second call is known
        assert torch.equal(have(*call, physical), want(*call, weights))
    dropped = (inputs.topk_ids < 0) | (inputs.topk_ids >= EXPERTS)
    assert bool(dropped.any())
    assert int(have.statistics().tokens_per_expert.sum()) == int((~dropped).sum())


def test_counters_are_of_logical_experts():
    placement = megamoe.ExpertPlacement([3, 0, 1, 2, 4, 5, 3, 3])
    inputs = make_inputs(PROBLEM, 40)
    layer = megamoe.PlacedLayer(PROBLEM, "alone", backend="staged", placement=placement)
    layer(inputs.x, inputs.topk_ids, inputs.topk_weights, of_slots(placement, PROBLEM))
    counted = placement.counters(layer.statistics())
    assert (
        counted.tolist() == torch.bincount(inputs.topk_ids.flatten().long(), minlength=6).tolist()
    )
    with pytest.raises(ArgumentError, match="of 8 slots, expected 6"):
        megamoe.ExpertPlacement(range(6)).counters(layer.statistics())
    layer.close()


def module_of(placement, **options):
    given = {"backend": "staged", "init_seed": 3, "max_tokens": 40} | options
    return megamoe.MegaMoE(64, 48, EXPERTS, 2, "alone", placement=placement, **given)


def test_recorded_gradients_are_refused():
    placement = megamoe.ExpertPlacement([3, 0, 1, 2, 4, 5, 3, 3])
    inputs, message = make_inputs(PROBLEM, 40), "a layer with a placement is for inference"
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    module = module_of(placement)
    with pytest.raises(ArgumentError, match=message):
        module(*call)
    with torch.no_grad():
        expected = module(*call)
    with pytest.raises(ArgumentError, match=message):  # a known call
        module(*call)
    with pytest.raises(ArgumentError, match=message):
        torch.compile(module, backend="aot_eager")(*call)
    layer = megamoe.PlacedLayer(PROBLEM, "alone", backend="staged", placement=placement)
    weights = ExpertWeights(module.w13.detach(), module.w2.detach())
    assert torch.equal(layer(*call, weights), expected)
    with pytest.raises(ArgumentError, match=message):
        layer(inputs.x.clone().requires_grad_(), *call[1:], weights)
    assert torch.equal(layer(*call, weights), expected)


def test_state_dicts_are_of_logical_experts():
    placement = megamoe.ExpertPlacement([3, 0, 1, 2, 4, 5, 3, 3])
    plain, module = module_of(None, init_seed=4), module_of(placement)
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.w13, plain.w13[placement.expert_of])
    assert torch.equal(module.w2, plain.w2[placement.expert_of])
    with pytest.raises(ConfigError, match=r"None where state_dict\(\) is called"):
        module.state_dict()
    with pytest.raises(ArgumentError, match="a plain tensor of all 6 logical experts"):
        module.load_state_dict({"w13": module.w13.detach(), "w2": module.w2.detach()})
    with pytest.raises(MegaMoEError, match="placement cannot be copied"):
        copy.deepcopy(module)


def held_by(placement, room, rank):
    """Weights whose numbers say which expert they are, with two tensors of other types and one that is missing."""
    experts = torch.tensor(placement.expert_of[rank * room : (rank + 1) * room])
    w13 = experts[:, None, None].expand(-1, 4, 8).bfloat16().contiguous()
    scale = experts[:, None].float() / 8
    return ExpertWeights(w13, w13.to(torch.float8_e4m3fn), b13=scale.clone())


def moves(rank, size):
    group = init_device_mesh("cpu", (size,)) if size > 1 else "alone"  # as a layer takes them
    room = 12 // size
    lists = [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], [5, 5, 5, 5, 5, 5, 5, 4, 3, 2, 1, 0]]
    lists += [[3, 1, 4, 1, 5, 0, 2, 5, 3, 5, 0, 4], lists[0]]
    placements = [megamoe.ExpertPlacement(experts) for experts in lists]
    problem = megamoe.Problem(64, 48, 6, 2, size, rank, max_tokens=40)
    layer = megamoe.PlacedLayer(problem, group, backend="staged", placement=placements[0])
    weights = held_by(placements[0], room, rank)
    before = {n: t.data_ptr() for n, t in vars(weights).items() if t is not None}
    row = sum(t[0].nbytes for t in vars(weights).values() if t is not None)
    for old, new in zip(placements, placements[1:], strict=False):
        mine = slice(rank * room, (rank + 1) * room)
        lacking = set(new.expert_of[mine]) - set(old.expert_of[mine])
        with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sends:
            layer.move_experts(new, weights)
        outs = [call.args[0] for call in sends.call_args_list if call.args[0].dim() == 1]
        assert sum(t.nbytes for t in outs) == len(lacking) * row  # what it held did not travel
        assert layer.placement is new
        for name, expected in vars(held_by(new, room, rank)).items():
            if expected is not None:
                assert torch.equal(getattr(weights, name).float(), expected.float()), (rank, name)
    assert before == {n: t.data_ptr() for n, t in vars(weights).items() if t is not None}


def test_experts_move_in_place_on_one_rank():
    moves(0, 1)


def ranks_move(rank):
    size = dist.get_world_size()
    moves(rank, size)
    placement = megamoe.ExpertPlacement([0, 1, 2] * size)
    counts = Statistics.without_pool(torch.tensor([1, 2, 3]))
    counted = placement.counters(counts, init_device_mesh("cpu", (size,)))
    assert counted.tolist() == [size, 2 * size, 3 * size]
    if size == 3:
        pair = dist.new_group([1, 2])
        if rank:
            counted = megamoe.ExpertPlacement([0, 1, 2] * 2).counters(counts, pair)
            assert counted.tolist() == [2, 4, 6]


def move_fails(rank):
    """Rank 1 has no memory for what has arrived: on both ranks weights and routing stay as they were."""
    group, room = dist.group.WORLD, 4
    old, new = (megamoe.ExpertPlacement(of) for of in ([*range(6), 0, 1], [5, 4, 3, 2, 1, 0, 3, 3]))
    problem = megamoe.Problem(64, 48, EXPERTS, 2, 2, rank, max_tokens=40)
    layer = megamoe.PlacedLayer(problem, group, backend="staged", placement=old)
    whole = make_weights(PROBLEM).named()
    slots = old.expert_of[rank * room : (rank + 1) * room]
    weights = ExpertWeights(**{name: t[slots] for name, t in whole.items()})
    inputs = make_inputs(PROBLEM, 40)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights, weights
    expected, before = layer(*call), [t.clone() for t in weights.named().values()]
    fetch = Moves.fetch

    def fail(*given):
        fetch(*given)
        if rank == 1:
            raise MemoryError("none left")

    with mock.patch.object(Moves, "fetch", fail):
        kind, message = outcome(lambda: layer.move_experts(new, weights))
    kept = all(map(torch.equal, before, weights.named().values()))
    kept = kept and layer.placement is old and torch.equal(layer(*call), expected)
    layer.move_experts(new, weights)
    moved = not torch.equal(before[0], weights.w13) and layer.placement is new
    apart = (layer(*call).float() - expected.float()).norm() / expected.float().norm()
    return kind, message, kept, moved, float(apart)


def test_a_move_is_all_or_nothing():
    for rank, (kind, message, kept, moved, apart) in enumerate(launch(move_fails, 2)):
        assert (kind, "none left" in message) == (("PeerFault", "MemoryError")[rank], True)
        assert kept
        assert moved
        assert apart < 2**-8  # y is summed over other ranks


@pytest.mark.parametrize("size", [2, 3])
def test_experts_move_in_place_between_ranks(size):
    launch(ranks_move, size)


def test_what_is_no_placement_is_refused():
    for wrong, match in (
        ([0, 2], r"without \[1\]"),
        ([0, -1], "with -1"),
        ([], r"\[0\]"),
        ([[0]], r"\[1, 1\]"),
        ([0.5], "float32"),
    ):
        with pytest.raises(ConfigError, match=match):
            megamoe.ExpertPlacement(wrong)
    with pytest.raises(ConfigError, match=r"\(5, 1\), expected at least 6"):
        megamoe.ExpertPlacement.balanced(LOAD, 5, 1)
    with pytest.raises(ConfigError, match="multiple of num_ranks"):
        megamoe.ExpertPlacement.balanced(LOAD, 7, 2)
    with pytest.raises(ConfigError, match="not negative"):
        megamoe.ExpertPlacement.balanced([1, -1], 2, 1)
    six = megamoe.ExpertPlacement(range(6))
    layer = megamoe.PlacedLayer(PROBLEM, "alone", backend="staged", placement=six)
    weights, x = make_weights(PROBLEM), torch.zeros(3, 64, dtype=torch.bfloat16)
    ids, scores = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    for wrong in (ids[:, 0], ids.float(), ids[:, :1], ids.to("meta"), [[0, 1]]):
        with pytest.raises(ArgumentError, match="topk_ids"):
            layer(x, wrong, scores, weights)
    with pytest.raises(ConfigError, match="placement is list, expected an ExpertPlacement"):
        layer.move_experts([0, 1, 2, 3, 4, 5], weights)
    with pytest.raises(ConfigError, match="placement is 5 experts in 6 slots"):
        layer.move_experts(megamoe.ExpertPlacement([0, 1, 2, 3, 4, 4]), weights)
    with pytest.raises(ArgumentError, match=r"w13 is \[8, 4, 8\], expected \[6, ...\]"):
        layer.move_experts(six, held_by(megamoe.ExpertPlacement([*range(6), 0, 0]), 8, 0))
    module = megamoe.MegaMoE(64, 48, EXPERTS, 2, "alone", backend="staged", max_tokens=40)
    with pytest.raises(ConfigError, match="placement is None, expected a placement"):
        module.move_experts(six)
    with pytest.raises(ConfigError, match="placement is list, expected an ExpertPlacement"):
        megamoe.PlacedLayer(PROBLEM, "alone", placement=[0])
    two = megamoe.Problem(64, 48, 6, 2, ep_size=2, max_tokens=40)
    with pytest.raises(ConfigError, match="num_physical is 7, expected a multiple of 2 ranks"):
        megamoe.ExpertPlacement([*range(6), 0]).problem(two)
    with pytest.raises(ConfigError, match=r"problem.num_experts is 6, expected 5"):
        megamoe.ExpertPlacement(range(5)).problem(PROBLEM)


def test_what_is_of_another_kind_is_refused_by_name():
    placement = megamoe.ExpertPlacement([0, 1, 1])
    for value in (
        [0, "a"],
        [[0], [1, 2]],
        None,
        "01",
        [0, 10**12],
    ):  # the last: before memory is taken
        with pytest.raises(ConfigError, match="physical_to_logical"):
            megamoe.ExpertPlacement(value)
    for load in (None, "ab", [1, float("inf")], [1, "a"]):
        with pytest.raises(ConfigError, match="load is .*, expected .E. finite numbers"):
            megamoe.ExpertPlacement.balanced(load, 4, 2)
    with pytest.raises(ConfigError, match="num_physical is 4.0, expected an int"):
        megamoe.ExpertPlacement.balanced([1, 2], 4.0, 2)
    with pytest.raises(ConfigError, match="num_ranks is '2', expected an int"):
        megamoe.ExpertPlacement.balanced([1, 2], 4, "2")
    with pytest.raises(ArgumentError, match="statistics is Tensor, expected layer.statistics"):
        placement.counters(torch.ones(3))
    layer = megamoe.PlacedLayer(
        megamoe.Problem(64, 48, 2, 2), "alone", backend="staged", placement=placement
    )
    with pytest.raises(ArgumentError, match="weights is PlacedLayer, expected ExpertWeights"):
        layer.move_experts(placement, layer)
    with pytest.raises(ConfigError, match="problem is NoneType, expected a Problem"):
        placement.problem(None)
