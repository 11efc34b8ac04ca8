"""Two ranks of Megatron-Core's expert parallelism: a megamoe layer beside its all-gather dispatcher."""

import pytest
import torch
import torch.distributed as dist

from megamoe.core.errors import MegaMoEError
from megamoe.testing import assert_close, launch

pytest.importorskip("megatron.core", reason="megatron-core is missing: make libraries")
from megatron_models import pair_of, results, rows, spread, start  # noqa: E402

from megamoe.adapters import megatron as adapter  # noqa: E402

CHANGES = {"moe_shared_expert_intermediate_size": 32, "moe_expert_capacity_factor": 1.0}


def run(rank):
    start(ep_size=2)
    theirs, ours = pair_of(**CHANGES)
    assert len(ours.experts.local_experts) == 3
    x, dy = rows(seed=1 + rank), rows(seed=3 + rank)
    expected, found = results(theirs, x, dy), results(ours, x, dy)
    for name, value in expected.items():
        assert_close(found[name], value, relative=0.02, name=name)
    spread(ours)
    assert ours.experts.local_experts[0].linear_fc1.weight.storage_offset()
    adapter.close(ours)
    descending = results(ours, x, dy)
    assert ours._descending
    for name, value in expected.items():
        assert_close(descending[name], value, relative=0.02, name=f"{name}, descending")
    with torch.no_grad():
        mine = rows(5 + 12 * rank, seed=5 + rank)  # ranks bring as many tokens as they have
        y = ours(mine)[0]
        whole = theirs.router.weight.clone()
        assert y.shape == mine.shape
        # A token's result does not depend on who else is there, unless tokens are dropped.
        theirs, ours = pair_of()
        assert torch.equal(ours(mine)[0][:3], ours(mine[:3])[0])
        alone = theirs(mine[:4])[0]
        assert_close(ours(mine)[0][:4], alone, relative=0.02)
    try:
        ours(rows(9 + 30 * rank))
        error = "none"
    except MegaMoEError as raised:
        error = str(raised)
    adapter.close(ours)
    gathered = [torch.empty_like(whole) for _ in range(2)]
    dist.all_gather(gathered, whole)
    return len(expected), torch.equal(*gathered), error


def test_layers_over_two_ranks():
    found = launch(run, 2)
    for compared, same_router, _ in found:
        assert compared == 2 + 1 + 2 + 2 * 3
        assert same_router
    assert "rank 1 refused its arguments" in found[0][2]
    assert "x.shape[0] is 78, expected at most max_tokens = 64" in found[1][2]
