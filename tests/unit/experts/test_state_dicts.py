"""State dicts of experts over several ranks: what torch's functions for checkpoints give, as a table; 4 gloo ranks."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import megamoe
from megamoe.experts.tensors import ExpertRows
from megamoe.testing import launch

HIDDEN, TOP_K = 32, 2
# How experts are held: form -> (group, DTensors, FSDP2's mesh)
FORMS = {
    "one rank": (None, False, None),
    "EP4": ("world", False, None),
    "EP2 twice": ("ep", False, None),
    "FSDP2": ("ep", False, "copies"),
    "FSDP2, experts first": ("first", False, "copies"),
    "HSDP": ("ep", False, ("same", "copies")),
    "DTensors": ("ep", True, None),
    "DTensors, FSDP2": ("ep", True, "copies"),
}


class Net(nn.Module):
    """A router and a layer."""

    def __init__(self, experts, group, seed=3, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        options = {"backend": "staged", "max_tokens": 32, "init_seed": seed} | options
        self.moe = megamoe.MegaMoE(HIDDEN, 16, experts, TOP_K, group=group, **options)

    def forward(self, x):
        weights, ids = self.router(x.float()).softmax(-1).topk(TOP_K)
        return self.moe(x, ids, weights)


class Meshes:
    def __init__(self):
        names = ("same", "copies", "ep")
        self.all = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
        self.world = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "copies"))
        self.copies = {"first": first, "ep": self.all}  # the mesh of FSDP2
        self.groups = {
            "first": first["ep"],
            "world": dist.group.WORLD,
            "ep": self.all["ep"],
            None: None,
        }

    def made(self, form, experts, seed=5, steps=0):
        """Return a net in a form and its AdamW, which has stepped `steps` times."""
        group, dtensors, sharded = FORMS[form]
        net = Net(experts, self.groups[group], seed)
        if dtensors:
            net.moe.distribute(self.all["ep"])
        if sharded:
            fully_shard(net.moe, mesh=self.copies[group][sharded])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
        for step in range(steps):
            x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(step)).bfloat16()
            net(x).float().square().sum().backward()
            dist.all_reduce(net.router.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        return net, optimizer


def held(net, optimizer=None):
    """Return (first expert, rows) of parameters and moments by name: plain, this rank's."""
    found = {}
    for name, p in net.moe.named_parameters():
        moments = optimizer.state[p] if optimizer else {}
        for key, value in {"": p, **moments}.items():
            if value.dim():
                assert isinstance(value, DTensor) == isinstance(p, DTensor)
                assert not isinstance(value, ExpertRows)
                rows, begin = net.moe.place.rows(value.detach())
                found[name + key] = begin, rows.clone()
    return found


def gathered(net, optimizer):
    """Return the same of all experts."""
    parts = [None] * 4
    dist.all_gather_object(parts, held(net, optimizer))
    return {
        name: torch.cat([rows for _, rows in sorted({p[name][0]: p[name] for p in parts}.values())])
        for name in parts[0]
    }


def equal(net, whole, optimizer=None):
    mine = held(net, optimizer)
    assert optimizer is None or mine.keys() == whole.keys()
    assert all(len(rows) for _, rows in mine.values())
    return all(torch.equal(rows, whole[n][b : b + len(rows)]) for n, (b, rows) in mine.items())


def state_of(net, optimizer):
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


def saved(source, folder, save=dcp.save):
    pending = save(state_of(*source), checkpoint_id=folder)
    if save is dcp.async_save:
        pending.result()
        dist.barrier()


def loaded(folder, whole, target):
    state = state_of(*target)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*target, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return equal(target[0], whole, target[1])


def file_of(*objects):
    file = io.BytesIO()
    torch.save(objects, file)
    return file.getvalue()


def read(file):
    return torch.load(io.BytesIO(file), weights_only=True)


def full(source, whole, cpu_offload):
    """All experts in a file of rank 0: plain tensors, which a layer of one rank takes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    model, optim = get_state_dict(*source, options=options)
    if dist.get_rank() or not cpu_offload:
        return file_of(model) and True
    model, optim = read(file_of(model, optim))
    assert all(type(value) is torch.Tensor for value in model.values())
    alone = Net(whole["w13"].shape[0], None, 6)
    alone.load_state_dict(model)
    same = torch.equal(optim["state"]["moe.w2"]["exp_avg"], whole["w2exp_avg"])
    return same and equal(alone, whole)


def broadcast(source, whole, target):
    """A full state dict of rank 0 into another form."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optim = get_state_dict(*source, options=options)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target[0], model, options=options)
    set_optimizer_state_dict(*target, optim, options=options)
    return equal(target[0], whole, target[1])


def files(source, whole, target, fresh):
    """torch.save on each rank. Return outcomes of its own file and of the next rank's."""
    every = [None] * 4
    dist.all_gather_object(every, file_of(source[0].state_dict(), source[1].state_dict()))
    model, optim = read(every[dist.get_rank()])
    theirs, their_optim = read(every[(dist.get_rank() + 1) % 4])

    def own():
        target[0].load_state_dict(model)
        target[1].load_state_dict(optim)
        fresh[0].load_state_dict(dict(model), assign=True)  # without metadata
        return equal(target[0], whole, target[1]) and equal(fresh[0], whole)

    def before_a_first_step(loaded):
        optimizer = torch.optim.AdamW(fresh[0].parameters(), lr=0.0, foreach=False)
        optimizer.load_state_dict(loaded)
        for p in fresh[0].parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return held(fresh[0], optimizer).keys() == whole.keys()

    return {
        "own file": tried(own),
        "own file before a step": tried(lambda: before_a_first_step(optim)),
        "other rank's file": tried(lambda: bool(target[0].load_state_dict(theirs))),
        "other rank's file, assigned": tried(
            lambda: bool(target[0].load_state_dict(dict(theirs), assign=True))
        ),
        "other rank's optimizer": tried(lambda: not target[1].load_state_dict(their_optim)),
        "other rank's optimizer before a step": tried(lambda: before_a_first_step(their_optim)),
    }


def averaged(net, target):
    """An EMA over state dicts, which a layer loads."""
    ema = {name: value.clone() for name, value in net.state_dict().items()}
    for name, value in target.state_dict().items():
        ema[name].lerp_(value.detach(), 0.25)
    expected = held(net)["w13"][1].lerp(held(target)["w13"][1], 0.25)
    target.load_state_dict(ema)
    return torch.equal(held(target)["w13"][1], expected)


def whole_file(net, experts):
    """A plain file of all experts, as of one rank."""
    alone = Net(experts, None, seed=9)
    net.load_state_dict({name: value.clone() for name, value in alone.state_dict().items()})
    return equal(net, {name: p.detach() for name, p in alone.moe.named_parameters()})


def sizes_in_dcp(state, folder):
    dcp.save(state, checkpoint_id=folder)
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["w13"].size[0]


DERIVED = {
    "float": lambda net: {n: v.float() for n, v in net.moe.state_dict().items()},
    "keep_vars": lambda net: net.moe.state_dict(keep_vars=True),
    "copied": lambda net: {
        n: torch.empty_like(v).copy_(v) for n, v in net.moe.state_dict().items()
    },
}


def tried(function):
    """Return what a function returns or the error, of the first rank that has one: all ranks try the same."""
    try:
        found = function()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    every = [None] * 4
    dist.all_gather_object(every, found)
    return next((f for f in every if isinstance(f, str)), found)


def kind(value):
    return str(value.placements) if isinstance(value, DTensor) else type(value).__name__


def of_a_form(meshes, form, experts, folder):
    source = meshes.made(form, experts, 3, steps=2)
    whole = gathered(*source)
    found = {"holds": kind(source[0].moe.state_dict()["w13"])}
    found["optimizer holds"] = kind(source[1].state_dict()["state"][1]["exp_avg"])
    forms = [f for f in FORMS if experts % 2 == 0 or not FORMS[f][1]]
    forms = forms if form == "EP2 twice" else forms[:3]
    saved(source, f"{folder}/sync")
    for other in forms:
        target = meshes.made(other, experts)
        found[f"DCP to {other}"] = tried(lambda t=target: loaded(f"{folder}/sync", whole, t))
    target, fresh = meshes.made(form, experts, steps=1), meshes.made(form, experts)
    found["async DCP"] = tried(
        lambda: (
            saved(source, f"{folder}/async", dcp.async_save)
            or loaded(f"{folder}/async", whole, target)
        )
    )
    for offload in (False, True):
        name = f"full, {'cpu' if offload else 'in place'}"
        found[name] = tried(lambda offload=offload: full(source, whole, offload))
    if found["full, cpu"] is True:
        found["broadcast"] = tried(
            lambda: broadcast(source, whole, meshes.made(form, experts, steps=1))
        )
    found["files"] = tried(lambda: files(source, whole, target, fresh))
    found["EMA"] = tried(lambda: averaged(source[0], meshes.made(form, experts)[0]))
    found["copy"] = tried(lambda: bool(AveragedModel(copy.copy(source[0]))))
    found["whole file"] = tried(lambda: whole_file(meshes.made(form, experts)[0], experts))
    for name, derive in DERIVED.items():
        place = f"{folder}/{name}"
        found[name] = tried(lambda d=derive, p=place: sizes_in_dcp(d(source[0]), p) == experts)
    return found


def refused(meshes):
    """What cannot be right, by name."""
    net, optimizer = meshes.made("EP2 twice", 4, steps=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    moments = optimizer.state[net.moe.w13]
    good, state = moments["exp_avg"], optimizer.state_dict()
    found = {"another number": tried(lambda: net.load_state_dict(Net(8, None).state_dict()))}
    smaller = Net(2, None).moe.state_dict()  # as many as this rank holds
    found["as many as a rank's"] = tried(lambda: net.moe.load_state_dict(smaller))
    state["state"][1]["exp_avg"] = torch.zeros(5, 32, HIDDEN)
    found["optimizer of another size"] = tried(lambda: optimizer.load_state_dict(state))
    moments["exp_avg"] = torch.zeros(73)  # as 8-bit optimizers have it
    found["optimizer of blocks"] = tried(optimizer.state_dict)
    moments["exp_avg"] = good
    few = meshes.made("FSDP2", 2)[
        0
    ]  # torch copies a row of all experts into a shard of each rank's
    full = Net(2, None).state_dict()
    found["broadcast into FSDP2"] = tried(lambda: set_model_state_dict(few, full, options=options))
    every = [None] * 4
    dist.all_gather_object(every, file_of(net.state_dict()))
    found["a rank's file alone"] = tried(lambda: Net(4, None).load_state_dict(read(every[2])[0]))
    shard = Net(4, meshes.all["ep"]).moe  # of another mesh than the layer's
    apart = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "other"))
    fully_shard(shard, mesh=DeviceMesh.from_group(apart.get_group("copies"), "cpu"))
    found["a mesh apart"] = tried(lambda: shard.state_dict()["w13"].lerp(torch.ones(()), 0.5))
    for name, group in (
        ("ZeRO", dist.group.WORLD),
        ("ZeRO of copies", meshes.all["copies"].get_group()),
    ):
        zero = ZeroRedundancyOptimizer(net.moe.parameters(), torch.optim.SGD, group, lr=1e-2)
        found[name] = tried(zero.step)
    found["distribute"] = tried(lambda: meshes.made("EP4", 6)[0].moe.distribute(meshes.world))
    return found


def flat(meshes):
    """Flattened optimizer states; FP8 weights and their scales."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    source, target = (meshes.made("EP4", 4, seed, steps=1) for seed in (3, 4))
    state = get_optimizer_state_dict(*source, options=options)
    set_optimizer_state_dict(*target, state, options=options)
    w = "state.moe.w13.exp_avg"
    same = state[w].shape[0] == 4 and torch.equal(
        state[w].to_local(), target[1].state[target[0].moe.w13]["exp_avg"]
    )
    layers = [Net(4, g, precision="fp8").moe for g in (None, dist.group.WORLD)]
    for layer in layers:
        q = layer.expert_weights().quantized(layer.problem)
        layer.load_fp8_weights(q.w13, q.w2, q.w13_scale, q.w2_scale)
    other = Net(4, dist.group.WORLD, precision="fp8", seed=5).moe
    other.load_state_dict(layers[0].state_dict())
    there = layers[1].state_dict()
    fp8 = all(torch.equal(v.to_local(), there[n].to_local()) for n, v in other.state_dict().items())
    return same, fp8, sorted(there)


CASES = [(form, 4) for form in FORMS]
CASES += [("EP4", 6), ("FSDP2", 6), ("EP2 twice", 5), ("FSDP2", 5)]
UNEVEN = {("EP4", 6), ("EP2 twice", 5), ("FSDP2", 5)}


def on_four_ranks(rank, folder):
    meshes = Meshes()
    found = {case: of_a_form(meshes, *case, f"{folder}/{case}") for case in CASES}
    return found, refused(meshes), flat(meshes)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(on_four_ranks, 4, str(tmp_path_factory.mktemp("states")), timeout_s=300)


STRIDED = "_StridedShard(dim=0, sf=2), Shard(dim=0))"
ROWS = "ArgumentError: ExpertRows of a state dict is used by "


def expected(form, experts):
    """What differs from equal bits: what tensors are, and the beginning of an error."""
    sharded, uneven = FORMS[form][2], (form, experts) in UNEVEN
    holds = "Tensor" if form == "one rank" else "(Shard(dim=0),)"
    if form == "FSDP2, experts first":
        holds = "(Shard(dim=0), Shard(dim=0))"
    elif sharded:
        holds = f"({STRIDED}" if form != "HSDP" else f"(Replicate(), {STRIDED}"
    want = {"holds": "ExpertRows" if uneven else holds}
    want["optimizer holds"] = want["holds"]
    if form != "one rank":
        want["copy"] = "MegaMoEError: a MegaMoE layer over "
        error = "ArgumentError: state_dict["
        want |= dict.fromkeys(("other rank's file", "other rank's file, assigned"), error)
        want |= dict.fromkeys(
            ("other rank's optimizer", "other rank's optimizer before a step"), error
        )
    if sharded:
        want["copy"] = "AssertionError: FSDP does not support deepcopy"
    if sharded and not FORMS[form][1]:
        want["broadcast"] = "RuntimeError: "  # of torch: sizes of a rank's experts and of all
    if uneven:
        names = ("async DCP", "full, in place", "full, cpu", "files", "EMA", "copied")
        want |= dict.fromkeys(names, ROWS)
    return want


@pytest.mark.parametrize(("form", "experts"), CASES)
def test_state_dicts(results, form, experts):
    """Every way through a state dict gives equal bits or an error that says why not."""
    want = expected(form, experts)
    for of_rank, _, _ in results:
        found = of_rank[form, experts]
        found = found | (found["files"] if isinstance(found["files"], dict) else {})
        for way in want.keys() - found.keys():
            assert (form, experts) in UNEVEN, way
        assert len(found) > 14
        for way, outcome in found.items():
            if way in want:
                assert str(outcome).startswith(want[way]), (way, outcome)
            elif way != "files":
                assert outcome is True, (way, outcome)


def test_what_cannot_be_right_is_refused(results):
    messages = {
        "another number": "is experts [0, 8) of 8, expected [0, 2) of 4",
        "as many as a rank's": "is experts [0, 2) of 2, expected [0, 2) of 4",
        "optimizer of another size": "state of w13 is [5, 32, 32], expected [2, ...]",
        "optimizer of blocks": "state of w13 is [73], expected [2, ...]",
        "broadcast into FSDP2": "is FSDP2's own shard, as set_model_state_dict",
        "a rank's file alone": "is experts [0, 2) of 4, expected [0, 4) of 4",
        "a mesh apart": "ExpertRows of a state dict is used by aten.lerp",
        "ZeRO": "RankMismatch: ZeroRedundancyOptimizer would broadcast experts to ranks [0, 1, 2, 3]",
        "ZeRO of copies": "None",  # they hold the same experts
        "distribute": "num_experts is 6, expected a multiple of 4 ranks",
    }
    for _, found, _ in results:
        assert found.keys() == messages.keys()
        for way, message in messages.items():
            assert message in str(found[way]), (way, found[way])


def test_flattened_optimizer_states_and_fp8_weights(results):
    for _, _, (same, fp8, names) in results:
        assert same
        assert fp8
        assert names == ["w13", "w13_scale", "w2", "w2_scale"]
