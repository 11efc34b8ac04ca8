"""Experts of several ranks: checkpoints into any number of ranks, wrong ranks' files, wrappers, norms; 4 gloo ranks."""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

import megamoe
from megamoe import ArgumentError
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.experts.tensors import Experts
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


def adam(net, **options):
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **options)


def train(net, optimizer, steps=2):
    for step in range(steps):
        # copies of a group get the same tokens: they must stay equal
        net(tokens(10 * step + net.moe.problem.rank)).float().square().sum().backward()
        average_dense(net)
        optimizer.step()
        optimizer.zero_grad()


def average_dense(net):
    for name, p in net.named_parameters():
        if "moe" not in name and not isinstance(p, DTensor):
            dist.all_reduce(p.grad, dist.ReduceOp.AVG if p.is_cuda else dist.ReduceOp.SUM)


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def moments(net, optimizer):
    """Return parameters and moments of the experts by name: plain, this rank's."""
    found = {}
    for name, p in net.moe.named_parameters():
        found[name] = local(p).detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = local(optimizer.state[p][key]).clone()
    return found


def all_experts(net, optimizer):
    """Return the same of all experts; collective over the layer's group."""
    mine = moments(net, optimizer)
    gathered = [None] * net.moe.problem.ep_size
    if net.moe.group is None:
        return mine
    dist.all_gather_object(gathered, mine, group=net.moe.group)
    return {name: torch.cat([part[name] for part in gathered]) for name in mine}


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


def saved(folder, net, optimizer):
    state = {"model": net.state_dict(), "optim": megamoe.get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def loaded(folder, net, optimizer):
    state = {"model": net.state_dict(), "optim": megamoe.get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    megamoe.set_optimizer_state_dict(net, optimizer, state["optim"])
    assert not any(isinstance(p, Experts) for p in net.parameters())
    for entries in optimizer.state.values():
        assert not any(isinstance(value, Experts) for value in entries.values())


def round_trips(experts, pair, folder):
    """EP2 (twice, side by side) -> EP1 -> EP4 -> EP2; returns which differ from what EP2 trained."""
    net = Net(experts, pair)
    optimizer = adam(net)
    train(net, optimizer)
    expected = all_experts(net, optimizer)
    wrong = []
    for number, group in enumerate((None, dist.group.WORLD, pair)):
        saved(f"{folder}/{experts}-{number}", net, optimizer)
        net = Net(experts, group, seed=4 + number)
        optimizer = adam(net, foreach=True)
        loaded(f"{folder}/{experts}-{number}", net, optimizer)
        if not equal(all_experts(net, optimizer), expected):
            wrong.append(number)
    train(net, optimizer, 1)
    return wrong


def with_dtensors(pair, mesh, folder):
    """Plain EP2 -> DTensors over EP2 -> FSDP2 on top of them -> FSDP2 of plain parameters; each -> EP1."""
    net = Net(4, pair, bias=False)
    optimizer = adam(net)
    train(net, optimizer)
    expected = all_experts(net, optimizer)
    saved(f"{folder}/d0", net, optimizer)
    wrong = []
    for number, (distribute, shard) in enumerate(((1, 0), (1, 1), (0, 1))):
        net = Net(4, mesh["ep"], seed=5 + number, bias=False)
        if distribute:
            net.moe.distribute(mesh["ep"])
        if shard:
            fully_shard(net.moe, mesh=mesh["copies"])
        net.moe.reset_parameters()
        optimizer = adam(net, foreach=False)
        loaded(f"{folder}/d{number}", net, optimizer)
        saved(f"{folder}/d{number + 1}", net, optimizer)
        y = net(tokens(dist.get_rank()))  # the same code runs on all of them
        y.float().square().sum().backward()
        other = Net(4, None, seed=8, bias=False)
        alone = adam(other)
        loaded(f"{folder}/d{number + 1}", other, alone)
        if not equal(moments(other, alone), expected):
            wrong.append(number)
    return wrong


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


def files(rank, folder):
    """torch.save of each rank, read by the same and by another rank; a file of all experts."""
    out = {}
    net = Net(4, dist.group.WORLD)
    whole = Net(4, None, seed=7)
    torch.save(net.state_dict(), f"{folder}/rank{rank}.pt")
    torch.save({"net": whole.state_dict()}, f"{folder}/whole{rank}.pt")
    dist.barrier()
    other = Net(4, dist.group.WORLD, seed=5)
    own = torch.load(f"{folder}/rank{rank}.pt", weights_only=True)
    out["plain"] = all(type(value) is torch.Tensor for value in own.values())
    other.load_state_dict(own)
    out["own"] = torch.equal(other.moe.w13, net.moe.w13)
    wrong = torch.load(f"{folder}/rank{(rank + 1) % 4}.pt", weights_only=True)
    before = other.moe.w13.clone()
    out["wrong"] = refused(lambda: other.load_state_dict(wrong))
    out["assign"] = refused(lambda: other.load_state_dict(wrong, assign=True))
    out["alone"] = refused(lambda: whole.load_state_dict(wrong))
    out["untouched"] = torch.equal(other.moe.w13, before)
    everything = torch.load(f"{folder}/whole{rank}.pt", weights_only=True)["net"]
    other.load_state_dict(everything)
    out["sliced"] = torch.equal(other.moe.w13, whole.moe.w13[rank : rank + 1])
    other.load_state_dict(dict(everything), assign=True)  # without the metadata
    out["sliced, assigned"] = torch.equal(other.moe.w2, whole.moe.w2[rank : rank + 1])
    out["other experts"] = refused(
        lambda: Net(6, dist.group.WORLD).load_state_dict(Net(8, dist.group.WORLD).state_dict())
    )
    return out


def fp8_files(rank):
    layer = Net(4, dist.group.WORLD, precision="fp8").moe
    q = layer.expert_weights().quantized(layer.problem)
    layer.load_fp8_weights(q.w13, q.w2, q.w13_scale, q.w2_scale)
    whole = Net(4, None, precision="fp8").moe
    q = whole.expert_weights().quantized(whole.problem)
    whole.load_fp8_weights(q.w13, q.w2, q.w13_scale, q.w2_scale)
    other = Net(4, dist.group.WORLD, precision="fp8", seed=5).moe
    other.load_state_dict(whole.state_dict())
    return all(torch.equal(a.float(), b.float()) for a, b in same_names(other, layer))


def same_names(a, b):
    b = b.state_dict()
    return [(value.local(), b[name].local()) for name, value in a.state_dict().items()]


def uneven_traps(world):
    """E = 6 over 4 ranks: the layer holds 2, 2, 1, 1; DTensor's Shard(0) 2, 2, 2, 0."""
    net = Net(6, dist.group.WORLD)
    out = {"distribute": refused(lambda: net.moe.distribute(world))}
    state = {}
    for name, value in net.moe.state_dict().items():
        shape = (6, *value.shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        state[name] = DTensor.from_local(
            value.local(), world, (Shard(0),), shape=shape, stride=stride
        )
    out["load"] = refused(lambda: net.moe.load_state_dict(state))
    return out


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


def torchs_own_helpers(pair, folder):
    """get_model_state_dict and set_model_state_dict take the same values."""
    net, other = Net(5, pair), Net(5, dist.group.WORLD, seed=4)
    dcp.save(torch_state_dict.get_model_state_dict(net), checkpoint_id=f"{folder}/torch")
    state = torch_state_dict.get_model_state_dict(other)
    dcp.load(state, checkpoint_id=f"{folder}/torch")
    torch_state_dict.set_model_state_dict(other, state)
    begin = other.moe.problem.expert_begin()
    end = begin + other.moe.problem.num_local_experts()
    dcp.async_save(net.state_dict(), checkpoint_id=f"{folder}/async").result()
    third = Net(5, None, seed=5)
    dcp.load(third.state_dict(), checkpoint_id=f"{folder}/async")
    whole = Net(5, None)
    same = torch.equal(other.moe.w13, whole.moe.w13[begin:end])
    return same, torch.equal(third.moe.w13, whole.moe.w13)


def full_state_dicts(experts):
    """get_model_state_dict(full_state_dict=True) on rank 0, broadcast into other layers."""
    options = torch_state_dict.StateDictOptions
    net, other = Net(experts, dist.group.WORLD), Net(experts, dist.group.WORLD, seed=4)
    full = torch_state_dict.get_model_state_dict(
        net, options=options(full_state_dict=True, cpu_offload=True)
    )
    torch_state_dict.set_model_state_dict(
        other, full, options=options(full_state_dict=True, broadcast_from_rank0=True)
    )
    if dist.get_rank() == 0:
        Net(experts, None).load_state_dict(full)
    return torch.equal(other.moe.w13, net.moe.w13) and torch.equal(other.moe.b2, net.moe.b2)


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


def on_four_ranks(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep"))
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    pair = mesh.get_group("ep")
    out = {"trips": {experts: round_trips(experts, pair, folder) for experts in (4, 6, 5)}}
    out["dtensors"] = with_dtensors(pair, mesh, folder)
    out["reset"] = reset_is_by_expert(mesh)
    out["files"] = files(rank, folder)
    out["fp8"] = fp8_files(rank)
    out["uneven"] = uneven_traps(world)
    out["norms"] = norms(pair, mesh)
    out["ddp"] = [under_ddp(average) for average in (True, False)]
    wide = init_device_mesh("cpu", (1, 4), mesh_dim_names=("copies", "ep"))
    out["fsdp"] = [under_fsdp(m, d) for m in (mesh, wide) for d in (False, True)]
    out["averaged wrongly"] = averaged_wrongly(mesh)
    out["outer"] = hooks_of_an_outer_fsdp(mesh)
    out["torch"] = torchs_own_helpers(pair, folder)
    out["full"] = full_state_dicts(8)
    out["full, uneven"] = refused(lambda: full_state_dicts(6))
    out["meshes"] = meshes_as_groups(mesh)
    out["overwritten"] = overwritten()
    out["views"] = views(pair, mesh)
    out["prepare"] = unsharded_prepare(mesh)
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(on_four_ranks, 4, str(tmp_path_factory.mktemp("shards")), timeout_s=200)


def test_dcp_ep2_ep1_ep4_and_back(results):
    assert [r["trips"] for r in results] == [{4: [], 6: [], 5: []}] * 4


def test_dcp_with_dtensors_and_fsdp2(results):
    assert [r["dtensors"] for r in results] == [[]] * 4


def test_dcp_through_torchs_helpers_and_async_save(results):
    assert [r["torch"] for r in results] == [(True, True)] * 4


def test_full_state_dicts_hold_all_experts(results):
    for result in results:
        assert result["full"]
        error = "ArgumentError: full_state_dict is True, expected False where ranks do not divide"
        assert result["full, uneven"].startswith(error)


def test_reset_parameters_of_dtensors(results):
    assert [r["reset"] for r in results] == [[]] * 4


def test_files_of_torch_save(results):
    for rank, result in enumerate(results):
        found, other = result["files"], (rank + 1) % 4
        assert found["plain"]
        assert found["own"]
        assert found["untouched"]
        assert found["sliced"]
        assert found["sliced, assigned"]
        for key in ("wrong", "assign"):
            assert found[key] == (
                f"ArgumentError: state_dict['moe.w13'] is experts [{other}, {other + 1}) of 4, "
                f"expected [{rank}, {rank + 1}) of 4, what rank {rank} holds"
            )
        assert f"is experts [{other}, {other + 1}) of 4, expected [0, 4) of 4" in found["alone"]
        assert "of 8, expected" in found["other experts"]
        assert result["fp8"]


def test_uneven_shard_0_is_refused(results):
    for result in results:
        assert "num_experts is 6, expected a multiple of 4 ranks" in result["uneven"]["distribute"]
        assert "expected 6 experts, (Shard(0),), on ranks that divide" in result["uneven"]["load"]


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


def test_experts_behave_as_plain_tensors():
    local = torch.randn(2, 3)
    experts = Experts.of(local, 2, 5)
    assert experts.shape == (2, 3)
    assert experts.size() == (2, 3)
    assert experts.size(0) == 2
    assert "[2, 4) of 5" in repr(experts)
    for same in (experts.clone(), experts.detach(), experts.cpu(), copy.deepcopy(experts)):
        assert (same.begin, same.total) == (2, 5)
        assert torch.equal(same.local(), local)
    file = io.BytesIO()
    torch.save({"w": experts}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)["w"]
    assert type(read) is torch.Tensor
    assert torch.equal(read, local)
    other = Net(5, None)
    with pytest.raises(ArgumentError, match=r"is experts \[2, 4\) of 5, expected \[0, 5\) of 5"):
        other.load_state_dict(other.state_dict() | {"moe.w13": read})
    with pytest.raises(ArgumentError, match=r"stager is BlockingAsyncStager"):
        BlockingAsyncStager().stage({"w": experts})
    experts.zero_()
    assert local.abs().max() == 0


DERIVED = {
    "float": lambda v: v.float(),
    "half": lambda v: v.half(),
    "bfloat16": lambda v: v.bfloat16(),
    "type": lambda v: v.type(torch.float64),
    "product": lambda v: v * 1,
    "from the right": lambda v: 2 - v,
    "lerp": lambda v: torch.lerp(v, v + 1, 0.5),
    "a plain tensor's": lambda v: torch.lerp(v.local(), v, 0.5),
    "all of it": lambda v: v[:],
    "foreach": lambda v: torch._foreach_mul([v, v], 2)[1],
    "in place": lambda v: torch.zeros_like(v).add_(v),
    "copied": lambda v: torch.empty_like(v).copy_(v),
    "copied into a buffer": lambda v: torch.empty(v.shape).copy_(v),
    "out": lambda v: torch.add(v, v, out=torch.empty_like(v)),
    "data": lambda v: v.data,
    "flat": lambda v: v.flatten(1),
    "turned": lambda v: v.mT,
    "chained": lambda v: (v.float() * 0.9 + v * 0.1).bfloat16().cpu(),
    "parameter": lambda v: torch.nn.Parameter(v),
    "no gradient": lambda v: v.requires_grad_().detach(),
}


@pytest.mark.parametrize("way", DERIVED)
def test_what_is_made_of_experts_says_which_they_are(way):
    """A checkpoint of what was derived holds all experts: not one rank's as if there were no others."""
    experts = Experts.of(torch.randn(2, 3, 4), 2, 5)
    made = DERIVED[way](experts)
    (item,) = made.__create_write_items__("w", made)
    assert item.tensor_data.size[0] == 5
    assert (*item.tensor_data.chunk.offsets[:1], item.tensor_data.chunk.sizes[0]) == (2, 2)


def test_some_of_the_experts():
    experts = Experts.of(torch.randn(4, 3), 2, 9)
    some = experts[1:3]
    assert (some.begin, some.total, some.shape) == (3, 9, (2, 3))
    assert (experts[-1:, :2].begin, experts[::2].__class__) == (5, torch.Tensor)
    assert not any(isinstance(t, Experts) for t in (experts[0], experts.sum(), experts.T))


def test_one_rank_has_no_shards():
    state = Net(4, None).state_dict()
    assert not any(isinstance(value, Experts) for value in state.values())
    assert state._metadata["moe"]["experts"] == [4, 0, 4]
    with pytest.raises(ArgumentError, match=r"is experts \[2, 4\) of 4, expected \[0, 4\) of 4"):
        Net(4, None).load_state_dict({"moe.w13": Experts.of(torch.zeros(2, 32, 32), 2, 4)})
