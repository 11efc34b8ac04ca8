"""A token's y has the same bits in every batch, with one GPU and with two: docs/numerics.md, "Batch invariance"."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from crowds import crowds

from megamoe import Problem
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.launch.layout import min_pool_rows
from megamoe.testing import Inputs, launch, make_inputs, make_weights

PRECISIONS = ("bf16", "fp8", "fp8_channel", "fp8xmxfp4", "bf16xmxfp4", "bf16xnvfp4")
SIZES = {"hidden": 1024, "intermediate": 640, "num_experts": 17, "top_k": 4, "max_tokens": 2000}
WATCHED = 40
MEGA = ("mega", "cuda", SIZES)


def cases(problem, watched):
    """Yield crowds, and some of the watched tokens, each alone."""
    yield from crowds(problem, watched)
    for t in range(0, WATCHED, 13):
        columns = (c[t : t + 1] for c in vars(watched).values())
        yield t, next(crowds(problem, Inputs(*columns)))


def plans(problem, backend):
    """Return options that change who shares a tile, a pass or a CTA with whom."""
    ranks = range(problem.ep_size)
    least = max(min_pool_rows(replace(problem, rank=r)) for r in ranks)
    few = {"reserve_sms": 100} if backend == "mega" else {"num_ctas": 4}
    return {}, {"pool_rows": least} | few


def of_rank(rank, precision, backend, device, sizes):
    """Return of each case its title, which watched tokens were this rank's, and their y."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.group.WORLD if ranks > 1 else None
    problem = Problem(**sizes, precision=precision, ep_size=ranks, rank=rank)
    weights = make_weights(problem, device=device)
    watched = make_inputs(problem, WATCHED, rank=0, seed=5, device=device)
    found = []
    for options in plans(problem, backend):
        layer = make_backend(backend, problem, group, device=device, **options)
        for case in cases(problem, watched):
            token, crowd = case if isinstance(case, tuple) else (None, case)
            given = crowd.inputs[rank]
            count = torch.tensor([crowd.counts[rank]]).to(device, torch.int32)
            call = Call(given.x, given.topk_ids, given.topk_weights, weights, count)
            y, _ = layer.forward(call)
            (mine,) = torch.where(crowd.homes == rank)
            ours = y[crowd.rows[mine].to(device)].cpu()
            found.append((f"{crowd.name} {token} {options}", mine + (token or 0), ours))
        layer.check()
        layer.close()
    return found


def assert_invariant(results):
    """results: of_rank() of each rank."""
    first = None
    for of_ranks in zip(*results, strict=True):
        tokens, rows = (torch.cat([part[i] for part in of_ranks]) for i in (1, 2))
        if first is None:
            first = rows[tokens.argsort()]
            assert first.shape[0] == WATCHED
            assert first.isfinite().all()
            assert first.any(1).all()
        assert torch.equal(rows, first[tokens]), of_ranks[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_gpu(precision):
    assert_invariant([of_rank(0, precision, *MEGA)])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ep(n)) for n in (2, 4)])
def test_ranks(ranks, precision):
    given = {"timeout_s": 240, "backend": "cpu:gloo,cuda:nccl"}
    assert_invariant(launch(of_rank, ranks, precision, *MEGA, **given))
