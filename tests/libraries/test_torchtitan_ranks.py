"""Two ranks of torchtitan's expert parallelism: a megamoe layer beside its all-to-all dispatcher."""

import pytest
import torch
from copies import watched
from torch.distributed.tensor import DTensor

from megamoe.core.errors import MegaMoEError
from megamoe.testing import assert_close, launch

pytest.importorskip("torchtitan", reason="torchtitan is missing: make libraries")
import torchtitan_models  # noqa: E402
from outcomes import outcome  # noqa: E402
from torchtitan_models import dims_of, fill, loss_of, parallel_model, parallel_pair, results, rows  # noqa: E402

from megamoe.adapters import torchtitan as adapter  # noqa: E402


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step(model, dims, seed):
    loss = loss_of(model, dims, seed=seed)
    return {"loss": loss.detach()} | {n: local(p.grad).clone() for n, p in model.named_parameters()}


def compare(found, expected, case):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, relative=0.03, name=f"{name} {case}")


def run(rank):
    dims = dims_of("partial_dtensor", 2)
    theirs, ours = parallel_pair("gpt-oss", dims)
    x, dy = rows(7 + rank, seed=1 + rank), rows(7 + rank, seed=3 + rank)
    expected, found = results(theirs, x, dy), results(ours, x, dy)
    compare({n: local(t) for n, t in found.items()}, {n: local(t) for n, t in expected.items()}, "")
    assert local(ours.routed_experts.inner_experts.mlp1_weight_EGD).shape[0] == 3
    compared = 0
    for fsdp in (True, False):
        theirs, ours = (parallel_model(kind, dims, fsdp=fsdp) for kind in (False, True))
        experts = ours.layers["0"].moe.routed_experts
        assert type(experts) is adapter.MegaRoutedExperts
        expected = step(theirs, dims, rank)
        compare(step(ours, dims, rank), expected, f"fsdp {fsdp}")
        assert experts._layer.problem.ep_size == 2
        compared += len(expected)
    try:
        loss_of(ours, dims, length=33 if rank == 1 else 12)
        error = "none"
    except MegaMoEError as raised:
        error = str(raised)
    adapter.close(ours)
    # torchtitan's own default; its dispatcher does not run there on CPUs, so beside its other one.
    dims = dims_of("spmd_types", 2)
    ours = parallel_model(True, dims, fsdp=False)
    compare(step(ours, dims, rank), expected, "spmd_types")
    adapter.close(ours)
    return compared, error


def train(rank):
    """Train over FSDP2, whose gathering no counter of torch shows, then write to its shards."""
    dims = dims_of("partial_dtensor", 2)
    model = parallel_model(True, dims, fsdp=True, precision="fp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with watched() as seen:
        for number in range(3):
            for micro in range(2):
                loss_of(model, dims, seed=10 * number + micro)
            optimizer.step()
        loss_of(model, dims)
        steps = dict(seen)
        state = model.state_dict()
        with torch.no_grad():
            for value in state.values():  # as dcp.load() does
                local(value).mul_(0.5)
        loss_of(model, dims)
        model.load_state_dict({n: torch.zeros_like(value) for n, value in state.items()})
        loss_of(model, dims)
    adapter.close(model)
    return steps, dict(seen)


def test_sharded_experts_are_quantized_once_a_step():
    layers, due = 2, 2 * (1 + 3)
    for steps, end in launch(train, 2, timeout_s=240):
        assert steps == {"stale": 0, "q": layers * due}
        assert end == {"stale": 0, "q": layers * (due + 4)}


def test_models_over_two_ranks():
    (compared, told), (_, error) = launch(run, 2, timeout_s=240)
    assert compared == 2 * 24
    assert "rank 1 raised " in told
    assert "x.shape[0] is 66, expected at most max_tokens = 64" in error


def share_sequences(rank):
    torchtitan_models.EXPERTS = 8
    for ep in (2, 4):
        dims = dims_of("partial_dtensor", ep, ranks=4, tp=2)
        theirs, ours = (fill(parallel_model(k, dims, fsdp=True, layers=1)) for k in (False, True))
        compare(step(ours, dims, rank // 2), step(theirs, dims, rank // 2), f"ep {ep}")
        problem = ours.layers["0"].moe.routed_experts._layer.problem
        assert (problem.ep_size, problem.rank) == (ep, rank % ep)
        adapter.close(ours)


def test_experts_over_ranks_that_share_sequences():
    """Two of tensor parallelism have a sequence each half; experts lie over them, or over these and the data's."""
    launch(share_sequences, 4, timeout_s=240)


def refuse(rank):
    """Rank 1 alone has something that this adapter refuses by itself: before its layer is made, and behind that."""
    _, ours = parallel_pair("gpt-oss", dims_of("partial_dtensor", 2))
    experts, x = ours.routed_experts.inner_experts, rows(7 + rank, seed=1 + rank)
    hook = experts.register_forward_hook(lambda *_: None) if rank else None
    found = [outcome(lambda: ours(x))]
    if hook:
        hook.remove()
    found.append(outcome(lambda: ours(x)))
    whole = experts.mlp2_weight_EDF
    if rank:
        narrow = local(whole.detach())[..., :32].contiguous()
        experts.mlp2_weight_EDF = torch.nn.Parameter(narrow)
    found.append(outcome(lambda: ours(x)))
    experts.mlp2_weight_EDF = whole
    found.append(outcome(lambda: ours(x)))
    ours.routed_experts.close()
    return found


def test_what_one_rank_refuses_raises_on_all():
    there, here = launch(refuse, 2, timeout_s=60)
    none = (None, "")
    assert there[1::2] == here[1::2] == [none] * 2  # a later call is as good as ever
    assert [kind for kind, _ in there[::2]] == ["PeerFault"] * 2, there
    assert "rank 1 raised ConfigError: experts is hooks of" in there[0][1]
    assert "rank 1 raised " in there[2][1]
    assert "experts is hooks of" in here[0][1]
    assert "experts and their hidden_dim on this rank is (3, 32)" in here[2][1]
