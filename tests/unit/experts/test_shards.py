"""Experts of several ranks: what overwrites them, wrappers, norms; 4 gloo ranks."""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import megamoe
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.testing import launch

HIDDEN, TOP_K = 32, 2


class Net(nn.Module):
    """A router, a layer, a dense projection."""

    def __init__(self, experts, group, seed=3, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.moe = megamoe.MegaMoE(
            *(HIDDEN, 16, experts, TOP_K),
            **{"group": group, "backend": "staged", "max_tokens": 32, "bias": True} | options,
            init_seed=seed,
        )
        self.out = nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)

    def forward(self, x):
        weights, ids = self.router(x.float()).softmax(-1).topk(TOP_K)
        return self.out(self.moe(x, ids, weights))


def tokens(seed):
    return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def reset_is_by_expert(mesh):
    """reset_parameters() draws the same experts, however they are spread."""
    expected = Net(4, None, bias=False).moe.w13
    wrong = []
    for distribute, shard in ((1, 0), (1, 1), (0, 1)):
        moe = Net(4, mesh["ep"], seed=9, bias=False).moe
        if distribute:
            moe.distribute(mesh["ep"])
        if shard:
            fully_shard(moe, mesh=mesh["copies"])
        moe._init_seed = 3
        moe.reset_parameters()
        rows, begin = moe.place.rows(moe.w13.detach())
        if not torch.equal(rows, expected[begin : begin + rows.shape[0]]) or not len(rows):
            wrong.append((distribute, shard))
    return wrong


def refused(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def halve(module):
    module.set_gradient_divide_factor(2.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def norms(pair, mesh):
    """Return (norm, norm after clipping to 1) of each way to hold the parameters, and of one rank."""
    out = {}
    for form in ("plain", "fsdp", "dtensor", "dtensor+fsdp", "one rank"):
        net = Net(4, None if form == "one rank" else pair, bias=False)  # FSDP2 wants one dtype
        if form.startswith("dtensor"):
            net.moe.distribute(mesh["ep"])
        if form.endswith("fsdp"):
            fully_shard(net.moe, mesh=mesh["copies"])
            halve(net.moe)  # both copies get the same tokens here
            for part in (net.router, net.out):
                fully_shard(part)
                halve(part)
        inner = dist.get_rank() % 2  # place in the EP group
        batches = (0, 1) if form == "one rank" else (inner,)
        for seed in batches:
            net(tokens(seed)).float().square().sum().backward()
        if form in ("plain", "dtensor"):
            for part in (net.router, net.out):
                for p in part.parameters():
                    dist.all_reduce(p.grad, group=pair)
        for p in (2.0, 3.0, torch.inf):
            before = float(megamoe.grad_norm(net, p))
            out[form, p] = before, float(megamoe.clip_grad_norm_(net, 1e9, p))
        megamoe.clip_grad_norm_(net, 1.0)
        out[form, "clipped"] = float(megamoe.grad_norm(net))
    return out


def under_ddp(experts_average):
    """Train EP4 under DDP; compare gradients with those of one rank that has all tokens."""
    group = dist.group.WORLD
    net = Net(4, group)
    names = megamoe.ignore_experts_in_ddp(net)
    wrapped = DDP(net)
    if experts_average:
        megamoe.average_expert_gradients(wrapped, 4)
    expected = Net(4, None)
    for seed in range(4):
        (expected(tokens(seed)).float().square().sum() / 4).backward()
    for _ in range(2):  # accumulated: each arrival is divided once
        wrapped(tokens(dist.get_rank())).float().square().sum().backward()
    errors = {}
    for name, p in net.named_parameters():
        wanted = expected.get_parameter(name).grad
        if name.startswith("moe."):
            wanted = wanted[dist.get_rank()] * (1 if experts_average else 4)
            errors[name] = relative(p.grad[0], 2 * wanted)
        else:
            errors[name] = relative(p.grad, 2 * wanted)
    return names, errors


def under_fsdp(mesh, distribute):
    """Do the same under FSDP2; every rank its own tokens, on meshes (copies, ranks of a group)."""
    net = Net(4, mesh["ep"], bias=False)
    if distribute:
        net.moe.distribute(mesh["ep"])
    fully_shard(net.moe, mesh=mesh["copies"])
    fully_shard(net.router)
    fully_shard(net.out)
    megamoe.average_expert_gradients(net, 4)
    expected = Net(4, None, bias=False)
    for seed in range(4):
        (expected(tokens(seed)).float().square().sum() / 4).backward()
    net(tokens(dist.get_rank())).float().square().sum().backward()
    errors = []
    for name in ("w13", "w2"):
        rows, begin = net.moe.place.rows(net.moe.get_parameter(name).grad)
        wanted = expected.moe.get_parameter(name).grad
        errors.append(relative(rows, wanted[begin : begin + rows.shape[0]]))
    errors.append(relative(net.out.weight.grad.full_tensor(), expected.out.weight.grad))
    return max(errors)


def hooks_of_an_outer_fsdp(mesh):
    net = nn.Sequential(Net(4, mesh["ep"], bias=False).moe)
    fully_shard(net, mesh=mesh["copies"])
    return refused(lambda: megamoe.average_expert_gradients(net, 4))


def averaged_wrongly(mesh):
    twice, early, around = (Net(4, mesh["ep"], bias=False) for _ in range(3))
    for net in (twice, early, around):
        megamoe.average_expert_gradients(net, 4)
    return [
        refused(lambda: megamoe.average_expert_gradients(twice, 4)),
        refused(lambda: fully_shard(early.moe, mesh=mesh["copies"])),
        refused(lambda: fully_shard(around, mesh=mesh["copies"])),
    ]


def relative(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def meshes_as_groups(mesh):
    ep = mesh["ep"]
    layer = Net(4, ep).moe
    out = {"rank": (layer.problem.rank, layer.problem.ep_size)}
    x, weights = tokens(1), torch.full((8, TOP_K), 0.5)
    ids = torch.arange(16).reshape(8, TOP_K) % 4
    y = layer(x, ids, weights)
    found = megamoe.Layer(layer.problem, ep, backend="staged")(
        x, ids, weights, layer.expert_weights()
    )
    out["Layer"] = torch.equal(found, y)
    made = make_backend("staged", layer.problem, ep, device="cpu")
    call = Call(x, ids, weights, layer.expert_weights())
    out["make_backend"] = torch.equal(made.forward(call)[0], y)
    out["2-D"] = refused(lambda: Net(4, mesh))
    out["2-D, make_backend"] = refused(
        lambda: make_backend("staged", layer.problem, mesh, device="cpu")
    )
    return out


def one_step(net):
    y = net(tokens(dist.get_rank()))
    y.float().square().sum().backward()


def overwritten():
    """What overwrites experts behind the layer's back, and what the first call then says."""
    group = dist.group.WORLD
    out = {"ddp": refused(lambda: one_step(DDP(Net(8, group))))}
    prepared = Net(8, group)
    prepared.moe.prepare()
    out["ddp after prepare"] = refused(lambda: one_step(DDP(prepared)))
    out["one expert a rank"] = refused(lambda: one_step(DDP(Net(4, group))))
    sharded = Net(8, group, bias=False)
    out["fsdp"] = refused(lambda: fully_shard(sharded.moe))
    out["fsdp, state_dict"] = refused(sharded.state_dict)
    out["fsdp, prepare"] = refused(sharded.moe.prepare)
    out["copied"] = refused(lambda: copy.deepcopy(prepared))
    out["saved"] = refused(lambda: torch.save(prepared, io.BytesIO()))
    return out


def views(pair, mesh):
    """FSDP2 warns of outputs that are views."""
    net = Net(4, pair, bias=False)
    fully_shard(net.moe, mesh=mesh["copies"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in ((8, HIDDEN), (2, 4, HIDDEN)):
            weights = torch.full((*shape[:-1], TOP_K), 0.5)
            y = net.moe(tokens(1).view(shape), weights.long(), weights)
            assert y.shape == shape
            assert y.requires_grad
            y.float().sum().backward()
    return True


def unsharded_prepare(mesh):
    """FSDP2's shards are refused by name; between unshard() and reshard() the layer can be prepared."""
    moe = Net(4, mesh["ep"], bias=False).moe
    fully_shard(moe, mesh=mesh["copies"])
    error = refused(moe.prepare)
    moe.unshard()
    moe.prepare()
    moe.reshard()
    return error


def on_four_ranks(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep"))
    pair = mesh.get_group("ep")
    out = {"reset": reset_is_by_expert(mesh)}
    out["norms"] = norms(pair, mesh)
    out["ddp"] = [under_ddp(average) for average in (True, False)]
    wide = init_device_mesh("cpu", (1, 4), mesh_dim_names=("copies", "ep"))
    out["fsdp"] = [under_fsdp(m, d) for m in (mesh, wide) for d in (False, True)]
    out["averaged wrongly"] = averaged_wrongly(mesh)
    out["outer"] = hooks_of_an_outer_fsdp(mesh)
    out["meshes"] = meshes_as_groups(mesh)
    out["overwritten"] = overwritten()
    out["views"] = views(pair, mesh)
    out["prepare"] = unsharded_prepare(mesh)
    return out


@pytest.fixture(scope="module")
def results():
    return launch(on_four_ranks, 4, timeout_s=200)


def test_reset_parameters_of_dtensors(results):
    assert [r["reset"] for r in results] == [[]] * 4


def test_gradient_norm_is_that_of_one_rank(results):
    for result in results:
        norms = result["norms"]
        for form in ("plain", "fsdp", "dtensor", "dtensor+fsdp"):
            for p in (2.0, 3.0, torch.inf):
                # bf16 gradients of sums in another order
                assert norms[form, p] == pytest.approx(norms["one rank", p], rel=1e-2)
                assert norms[form, p] == results[0]["norms"][form, p]
            assert norms[form, "clipped"] == pytest.approx(1.0, rel=1e-2)


def test_ddp_with_experts_ignored(results):
    for result in results:
        for names, errors in result["ddp"]:
            assert names == ["moe.w13", "moe.w2", "moe.b13", "moe.b2"]
            assert max(errors.values()) < 2e-2
            assert len(errors) == 7


def test_gradients_under_fsdp2_are_means(results):
    for result in results:
        assert len(result["fsdp"]) == 4
        assert max(result["fsdp"]) < 2e-2
        twice, *early = result["averaged wrongly"]
        assert twice == "ArgumentError: moe is averaged already, expected one call"
        for error in early:
            assert error.startswith("ArgumentError: average_expert_gradients is called before full")
        assert result["outer"].startswith("ArgumentError: w13 is sharded by a module around the")


def test_device_mesh_as_group(results):
    for rank, result in enumerate(results):
        found = result["meshes"]
        assert found["rank"] == (rank % 2, 2)
        assert found["Layer"]
        assert found["make_backend"]
        for key in ("2-D", "2-D, make_backend"):
            assert found[key].startswith(
                "ConfigError: group is a mesh of 2 dimensions ('copies', 'ep'), exp"
            )


def test_overwritten_experts_are_noticed(results):
    same = "RankMismatch: DistributedDataParallel has overwritten the experts of moe on ranks [0, 1, 2, 3]"
    for result in results:
        found = result["overwritten"]
        for case in ("ddp", "ddp after prepare", "one expert a rank"):
            assert str(found[case]).startswith(same), case
        for case in ("fsdp", "fsdp, state_dict", "fsdp, prepare"):
            assert "fully_shard() was given the experts over ranks [0, 1, 2, 3]" in found[case]
        assert "over 4 ranks shares memory with them and cannot be copied" in found["copied"]
        assert "over 4 ranks belongs to their process group and cannot be pickled" in found["saved"]


def test_fsdp2_of_one_layer(results):
    for result in results:
        assert result["views"]
        assert result["prepare"].startswith("ArgumentError: w13 is FSDP2's shard of it, expected")
