"""Tokens per expert and passes of a call, by every backend; the report of memory."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from calls import calls_of

from megamoe import ConfigError, Layer, MegaMoE, MegaMoEError, Problem, memory_report
from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.statistics import _num_passes
from megamoe.launch import layout
from megamoe.testing import launch, make_inputs, make_weights

PROBLEM = Problem(64, 48, 6, 3, max_tokens=200)


def counts_of(problem, ids):
    begin, local = problem.expert_begin(problem.rank), problem.num_local_experts(problem.rank)
    flat = ids.flatten().long()
    flat = flat[(flat >= begin) & (flat < begin + local)] - begin
    return torch.bincount(flat, minlength=local).int()


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_one_rank(backend):
    layer = Layer(PROBLEM, backend=backend)
    weights = make_weights(PROBLEM)
    with pytest.raises(MegaMoEError, match="needs a call of the layer before it"):
        layer.statistics()
    layer.prepare(weights)
    with pytest.raises(MegaMoEError, match="needs a call of the layer before it"):
        layer.statistics()
    for seed, routing in ((1, "uniform"), (2, "dropped"), (3, "one_rank"), (4, "duplicates")):
        inputs = make_inputs(PROBLEM, 90, seed=seed, routing=routing)
        call = inputs.x, inputs.topk_ids, inputs.topk_weights, weights
        layer(*call)
        found = layer.statistics()
        assert torch.equal(found.tokens_per_expert, counts_of(PROBLEM, inputs.topk_ids))
        assert (found.tokens_per_expert.dtype, found.passes.dtype) == (torch.int32, torch.int32)
        assert found.passes.tolist() == [1]
        count = torch.tensor([17], dtype=torch.int32)
        layer(*call, num_tokens_device=count)
        short = layer.statistics().tokens_per_expert
        assert torch.equal(short, counts_of(PROBLEM, inputs.topk_ids[:17]))
        assert not torch.equal(short, found.tokens_per_expert)


def test_module_while_training():
    layer = MegaMoE(64, 48, 6, 3, backend="staged", init_seed=1)
    inputs = make_inputs(layer.problem, 40)
    x = inputs.x.clone().requires_grad_()
    layer(x, inputs.topk_ids, inputs.topk_weights).float().sum().backward()
    expected = counts_of(layer.problem, inputs.topk_ids)
    assert torch.equal(layer.statistics().tokens_per_expert, expected)
    assert not layer.statistics().tokens_per_expert.requires_grad


def on_two_ranks(rank):
    problem = Problem(64, 48, 7, 3, ep_size=2, rank=rank, max_tokens=200)
    weights = make_weights(problem)
    calls = [make_inputs(problem, num[rank], rank=rank) for num in ((90, 40), (40, 90))]
    found = {}
    for backend in ("staged", "reference", "emulate"):
        layer, found[backend] = Layer(problem, dist.group.WORLD, backend=backend), []
        for i in calls:  # one rank has more tokens, then the other
            layer(i.x, i.topk_ids, i.topk_weights, weights)
            found[backend].append(layer.statistics().tokens_per_expert.tolist())
        layer.close()
    return found, [i.topk_ids for i in calls]


def test_two_ranks():
    results = launch(on_two_ranks, 2, timeout_s=200)
    of_calls = [torch.cat(ids) for ids in zip(*(ids for _, ids in results), strict=True)]
    for rank, (found, _) in enumerate(results):
        problem = Problem(64, 48, 7, 3, ep_size=2, rank=rank)
        expected = [counts_of(problem, ids).tolist() for ids in of_calls]
        assert found == dict.fromkeys(("staged", "reference", "emulate"), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_are_those_of_the_kernel(ranks):
    """The grid barrier opens twice before the plan, once at the end of a plan, once between passes."""
    problem = replace(PROBLEM, num_experts=2 * ranks, ep_size=ranks, max_tokens=420)
    emulation = Emulation(problem, pool_rows=layout.min_pool_rows(problem))
    seen = set()
    for seed, tokens, routing in (
        (1, 420, "uniform"),
        (2, 130, "one_rank"),
        (3, 0, "uniform"),
        (4, 33, "uniform"),
    ):
        problems = [replace(problem, rank=r) for r in range(ranks)]
        inputs = [make_inputs(p, tokens, rank=p.rank, seed=seed, routing=routing) for p in problems]
        before = [int(emulation.region(r, "generation")) for r in range(ranks)]
        emulation.forward_all(
            calls_of(
                [i.x for i in inputs],
                [i.topk_ids for i in inputs],
                [i.topk_weights for i in inputs],
                [make_weights(p) for p in problems],
            )
        )
        for rank in range(ranks):
            opened = int(emulation.region(rank, "generation")) - before[rank]
            found = emulation.statistics(rank)
            assert found.passes.tolist() == [(opened - 1) // 2]
            ids = torch.cat([i.topk_ids for i in inputs])
            assert torch.equal(found.tokens_per_expert, counts_of(problems[rank], ids))
            seen.add(int(found.passes))
    assert len(seen) >= 3
    assert min(seen) == 1


def passes_one_by_one(prefix, pool_rows, block_rows):
    chunks, begin, passes = prefix.shape[1] - 1, 0, 0
    while begin < chunks:
        end = begin + 1
        while end < chunks:
            rows = prefix[:, end + 1] - prefix[:, begin]
            if int((-(-rows // block_rows) * block_rows).sum()) > pool_rows:
                break
            end += 1
        begin, passes = end, passes + 1
    return max(passes, 1)


def test_passes_of_any_counts():
    generator = torch.Generator().manual_seed(0)
    for case in range(60):
        local, chunks = case % 5, 1 + case
        counts = torch.randint(0, 96, (local, chunks), generator=generator, dtype=torch.int32)
        prefix = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int()
        pool_rows = 128 * (local + 1 + case % 7)
        expected = passes_one_by_one(prefix, pool_rows, 128)
        assert _num_passes(prefix, pool_rows, 128).tolist() == [expected], case


def test_memory_report():
    report = memory_report(PROBLEM)
    assert report["workspace_bytes"] == layout.workspace_regions(PROBLEM, report["pool_rows"]).bytes
    assert f"{report['pool_rows']} pool rows" in report["line"]
    assert "\n" not in report["line"]
    least = layout.min_pool_rows(PROBLEM)
    assert memory_report(PROBLEM, least)["workspace_bytes"] < report["workspace_bytes"]
    with pytest.raises(ConfigError, match="pool_rows is 1280.0, expected an int"):
        memory_report(PROBLEM, 1280.0)
    with pytest.raises(
        ConfigError, match="of is NoneType, expected a Problem, a Layer or a MegaMoE"
    ):
        memory_report(None)
    assert memory_report(Layer(PROBLEM)) == report
    assert memory_report(Layer(PROBLEM, pool_rows=least))["pool_rows"] == least
    module = MegaMoE(64, 48, 6, 3, max_tokens=200, backend="staged")
    assert memory_report(module)["line"] == report["line"]
