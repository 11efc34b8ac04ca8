"""What layers do beside steps, over hosts that are fake: as on one rank, or as over ranks of one host."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fake_hosts import FP8, MAX_TOKENS, ROUNDED_ONCE_MORE, Case, be_on_host, inputs, made, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megamoe
from megamoe.backends.hosts.backend import inside
from megamoe.formats.quantization import quantize_rows
from megamoe.group.hosts import Hosts
from megamoe.launch.layout import min_pool_rows
from megamoe.testing import assert_close, launch, make_inputs, make_weights

CHUNKED = {"chunks": 2}
EVEN = [0, 1, 2, 3, 4, 5, 0, 1]


def held(layer, whole):
    problem = layer.problem
    begin = problem.expert_begin()
    return whole[begin : begin + problem.num_local_experts()]


class Net(nn.Module):
    """A router and a layer, as training loops have them."""

    def __init__(self, layer):
        super().__init__()
        self.moe = layer
        torch.manual_seed(3)
        self.gate = nn.Linear(48, 11, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        weights, ids = self.gate(x).float().softmax(-1).topk(3)
        return self.moe(x, ids, weights)


def calls(rank):
    """Return what is wrong with calls in other forms."""
    case = Case(layer=FP8)
    layer = made(case, dist.group.WORLD, **CHUNKED)
    x, ids, weights, dy = inputs(case, rank)
    found = {}
    with torch.no_grad():
        y = layer(x, ids, weights)
        q, scale = quantize_rows(x)
        mine = {"x_scale": scale} if rank % 2 else {}  # ranks need not agree
        found["x in FP8"] = torch.equal(y, layer(q if mine else x, ids, weights, **mine))
        out = torch.empty_like(y)
        found["out"] = layer(x, ids, weights, out=out) is out and torch.equal(out, y)
        found["3 dimensions"] = torch.equal(y, layer(x[None], ids.int()[None], weights[None])[0])
    with torch.inference_mode():
        found["inference_mode"] = torch.equal(y, layer(x, ids, weights))
    everyone = [inputs(case, r)[1] for r in range(4)]
    counts = torch.bincount(torch.cat(everyone).flatten(), minlength=11)
    statistics = layer._layer.statistics()
    found["statistics"] = torch.equal(statistics.tokens_per_expert.long(), held(layer, counts))
    found["statistics"] &= statistics.passes.tolist() == [1]
    layer.close()
    found["opened again"] = torch.equal(y, layer(x, ids, weights))
    return found


def compiled(rank):
    case = Case()
    layer = made(case, dist.group.WORLD, **CHUNKED)
    expected = step(layer, case, *inputs(case, rank))
    graph = torch.compile(layer, fullgraph=True, backend="eager")
    for p in layer.parameters():
        p.grad = None
    x, ids, weights, dy = inputs(case, rank)
    x.requires_grad_()
    y = graph(x, ids, weights)
    y.backward(dy)
    return {
        "compiled y": torch.equal(y, expected["y"]),
        "compiled x": torch.equal(x.grad, expected["x"]),
        "compiled w13": torch.equal(layer.w13.grad, expected["w13"]),
    }


def loops(rank, folder):
    """Return what is wrong with norms, checkpoints, and dense parameters of DDP and FSDP2 beside experts."""
    world, found = dist.group.WORLD, {}
    case = Case((MAX_TOKENS,))
    xs = [inputs(case, r)[0] for r in range(4)]
    one = Net(made(case, "alone", max_tokens=4 * MAX_TOKENS))
    one(torch.cat(xs)).float().square().sum().backward()
    norm = megamoe.grad_norm(one)

    def trained(net, scale):
        net(xs[rank]).float().square().sum().backward()
        gate = next(p for n, p in net.named_parameters() if n.endswith("gate.weight")).grad
        gate = gate.full_tensor() if hasattr(gate, "full_tensor") else gate
        assert_close(gate * scale, one.gate.weight.grad, relative=2 * ROUNDED_ONCE_MORE)
        moe = net.module.moe if hasattr(net, "module") else net.moe
        expected = held(moe, one.moe.w13.grad)
        assert_close(moe.w13.grad, expected, relative=2 * ROUNDED_ONCE_MORE)
        return moe

    net = Net(made(case, world, **CHUNKED))
    megamoe.ignore_experts_in_ddp(net)
    moe = trained(DistributedDataParallel(net), 4)
    net.gate.weight.grad *= 4  # the loss is a sum, DDP takes means
    assert_close(megamoe.grad_norm(net), norm, relative=ROUNDED_ONCE_MORE)
    found["DDP"] = True

    dcp.save({"moe": moe.state_dict()}, checkpoint_id=folder)
    again = made(case, world, init_seed=7)
    loaded = {"moe": again.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    again.load_state_dict(loaded["moe"])
    found["checkpoint"] = torch.equal(again.w13, moe.w13)

    net = Net(made(case, world, **CHUNKED))
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)), ignored_params=set(net.moe.parameters()))
    trained(net, 4)
    found["FSDP2"] = True
    return found


def more_experts(rank):
    """Return what is wrong with redundant and shared experts."""
    found, world = {}, dist.group.WORLD
    small = {"hidden": 48, "intermediate": 32, "num_experts": 6, "top_k": 2, "max_tokens": 32}
    x, ids, weights, _ = inputs(Case(layer=small), rank)

    def run(backend, **options):
        even = megamoe.ExpertPlacement(EVEN)
        layer = megamoe.MegaMoE(
            **small, group=world, placement=even, backend=backend, init_seed=1, **options
        )
        with torch.no_grad():
            y = layer(x, ids, weights)
            load = even.counters(layer.statistics(), world)
            layer.move_experts(megamoe.ExpertPlacement.balanced(load, 8, 4))
            return y, layer(x, ids, weights)

    pairs = zip(run("reference", **CHUNKED), run("staged"), strict=True)
    for name, (got, expected) in zip(("placed", "moved"), pairs, strict=True):
        assert_close(got, expected, relative=2 * ROUNDED_ONCE_MORE)
        found[name] = True

    problem = megamoe.Problem(**small, ep_size=4, rank=rank)
    shared = megamoe.SharedExperts(problem, intermediate=64, device="cpu")
    torch.manual_seed(4)
    gate_up, down = torch.randn(128, 48) / 8, torch.randn(48, 64) / 8
    parts = shared.parts(megamoe.ExpertWeights(gate_up.bfloat16(), down.bfloat16()))
    whole = [torch.randn(6, *shape).bfloat16() / 8 for shape in ((64, 48), (48, 32))]
    begin = problem.expert_begin()
    mine = [w[begin : begin + problem.num_local_experts()] for w in whole]
    joined = shared.join(megamoe.ExpertWeights(*mine), parts)
    ys = [
        megamoe.Layer(shared.problem, world, backend=backend, **options)(
            x, *shared.routes(ids, weights), joined
        )
        for backend, options in (("reference", CHUNKED), ("staged", {}))
    ]
    assert_close(*ys, relative=2 * ROUNDED_ONCE_MORE)
    found["shared"] = True
    return found


def several_passes(rank):
    """Return what is wrong where the pool of a host is filled more than once."""
    problem = megamoe.Problem(48, 32, 11, 3, ep_size=4, rank=rank, max_tokens=300)
    weights, drawn = make_weights(problem), make_inputs(problem, 300, rank=rank)
    here = inside(problem, Hosts(("host-0", "host-1"), 2), 2)
    found = []
    for rows in (None, min_pool_rows(replace(here, rank=0))):
        layer = megamoe.Layer(
            problem, dist.group.WORLD, backend="emulate", pool_rows=rows, **CHUNKED
        )
        x = drawn.x.clone().requires_grad_()
        y = layer(x, drawn.topk_ids, drawn.topk_weights, weights)
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad, layer.statistics().passes.tolist()))
    (y, dx, once), (y2, dx2, twice) = found
    return {"passes": torch.equal(y, y2) and torch.equal(dx, dx2)}, once, twice


def on_hosts(rank, function):
    be_on_host(rank, 2)
    return function(rank)


@pytest.mark.slow
def test_passes_change_no_bit():
    for rank, (found, once, twice) in enumerate(launch(on_hosts, 4, several_passes, timeout_s=120)):
        assert found == {"passes": True}
        assert (once, twice) == ([1], [1 if rank == 3 else 2])  # which holds two experts


def program(rank, folder):
    be_on_host(rank, 2)
    return calls(rank) | compiled(rank) | loops(rank, folder) | more_experts(rank)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(program, 4, str(tmp_path_factory.mktemp("checkpoint")), timeout_s=120)


def test_all_that_a_layer_does_is_done_over_hosts(results):
    for found in results:
        assert len(found) == 15
        assert [name for name, right in found.items() if not right] == []
