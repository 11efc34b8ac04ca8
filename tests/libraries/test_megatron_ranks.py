"""Two ranks of Megatron-Core's expert parallelism: a megamoe layer beside its all-gather dispatcher."""

import pytest
import torch
import torch.distributed as dist

from megamoe.core.errors import MegaMoEError
from megamoe.testing import assert_close, launch

pytest.importorskip("megatron.core", reason="megatron-core is missing: make libraries")
from megatron_models import pair_of, results, rows, spread, start  # noqa: E402
from outcomes import outcome  # noqa: E402

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
    assert "rank 1 raised " in found[0][2]
    assert "x.shape[0] is 78, expected at most max_tokens = 64" in found[1][2]


def refuse(rank):
    """Rank 1 alone has something that this adapter refuses by itself: before its layer is made, and behind that."""
    start(ep_size=2)
    _, ours = pair_of()
    route, linear = ours.router.forward, ours.experts.local_experts[0].linear_fc1
    found = []

    def calls(change, undo):
        if rank:
            change()
        found.append(outcome(lambda: ours(rows())))
        if rank:
            undo()
        found.append(outcome(lambda: ours(rows())))

    def route_to_all(*given, **options):
        probs, routing_map = route(*given, **options)
        return probs, torch.ones_like(routing_map)

    def hook(*_):
        pass

    for _ in range(2):
        calls(
            lambda: setattr(ours.config, "moe_pad_expert_input_to_capacity", True),
            lambda: setattr(ours.config, "moe_pad_expert_input_to_capacity", False),
        )
        calls(
            lambda: setattr(ours.router, "forward", route_to_all),
            lambda: setattr(ours.router, "forward", route),
        )
        calls(lambda: linear.register_forward_hook(hook), linear._forward_hooks.clear)
        adapter.close(ours)
    return found


def test_what_one_rank_refuses_raises_on_all():
    there, here = launch(refuse, 2, timeout_s=60)
    none = (None, "")
    assert there[1::2] == here[1::2] == [none] * 6  # a later call is as good as ever
    for (kind, told), (own, error), expected in zip(
        there[::2],
        here[::2],
        2
        * (
            "moe_pad_expert_input_to_capacity is True",
            "more than 2 experts",
            "experts is hooks of",
        ),
        strict=True,
    ):
        assert kind == "PeerFault", told
        assert f"rank 1 raised {own}" in told
        assert own in ("ConfigError", "RuntimeError")
        assert expected in error
