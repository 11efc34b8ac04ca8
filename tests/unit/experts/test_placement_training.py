"""Training with redundant experts: replicas stay equal bit for bit, and learn what one expert would."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from outcomes import outcome
from torch import nn
from torch.distributed.fsdp import fully_shard

import megamoe
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError, RankMismatch
from megamoe.testing import launch

SLOTS = [0, 1, 2, 3, 4, 5, 0, 0]  # expert 0 in slots of both ranks
OTHERS = [3, 0, 5, 4, 0, 3, 2, 1]
NAMES = ("w13", "w2", "b13", "b2")
MODES = {
    "plain": {},
    "main_grad": {"accumulate_into_main_grad": True},
    "delayed": {"delay_wgrad": True},
    "both": {"accumulate_into_main_grad": True, "delay_wgrad": True},
}


def made(group, slots=SLOTS, **options):
    placement = None if slots is None else megamoe.ExpertPlacement(slots)
    given = {"backend": "staged", "max_tokens": 16, "init_seed": 1, "bias": True} | options
    return megamoe.MegaMoE(32, 32, 6, 2, group=group, placement=placement, **given)


def backward(layer, rank, ranks, seed, tokens=6):
    """One pass over this rank's part of what all ranks bring."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, tokens, 32, generator=generator).bfloat16()
    ids = torch.rand(2, tokens, 6, generator=generator).topk(2, -1).indices
    ids[:, ::2, 0] = 0
    ids[:, ::2, 1] = ids[:, ::2, 1].clamp(min=1)
    own = slice(rank, rank + 1) if ranks == 2 else slice(None)
    layer(x[own], ids[own], torch.full(ids[own].shape, 0.5)).float().square().sum().backward()
    if layer.num_delayed:
        layer.backward_dw()


def trained(layer, rank=0, ranks=1, *, moves=None, steps=3):
    """Return the last gradients and, of every step, the norm; parameters are the layer's."""
    adds = layer.accumulate_into_main_grad
    optimizer, norms = torch.optim.AdamW(layer.parameters(), lr=1e-2), []
    for name in ("w13", "w2") if adds else ():
        p = getattr(layer, name)
        p.main_grad = torch.zeros(p.shape)
    for step in range(steps):
        for micro_batch in range(2):
            backward(layer, rank, ranks, 2 * step + micro_batch)
        last = {n: getattr(p, "main_grad", p.grad).clone() for n, p in layer.named_parameters()}
        if moves and step == 1:  # gradients are there, too
            layer.move_experts(megamoe.ExpertPlacement(moves))
        for p in (layer.w13, layer.w2) if adds else ():
            p.grad = p.main_grad.to(p.dtype)
            p.main_grad.zero_()
        norms.append(
            [float(megamoe.grad_norm(layer, p)) if not adds else 0 for p in (2.0, torch.inf)]
        )
        optimizer.step()
        optimizer.zero_grad()
    return last, norms


def everything(rank):
    """Train in all backends and modes; return parameters, last gradients and norms by name."""
    found = {}
    for backend in ("staged", "emulate", "reference"):
        for mode, options in MODES.items():
            if backend == "staged" or mode in ("plain", "main_grad"):
                layer = made(dist.group.WORLD, backend=backend, **options)
                grads, norms = trained(layer, rank, 2)
                found[backend, mode] = dict(layer.named_parameters()), grads, norms
    for mode in ("fp8", "moved", "moved to main_grad"):
        options = {"precision": "fp8"} if mode == "fp8" else {}
        options |= MODES["main_grad"] if mode == "moved to main_grad" else {}
        layer = made(dist.group.WORLD, **options)
        grads, norms = trained(layer, rank, 2, moves=OTHERS if "moved" in mode else None)
        found["staged", mode] = dict(layer.named_parameters()), grads, norms
    return found


@pytest.fixture(scope="module")
def of_ranks():
    return launch(everything, 2)


def joined(of_ranks, key, part=0):
    return {n: torch.cat([of[key][part][n].detach() for of in of_ranks]) for n in NAMES}


def test_replicas_are_equal_bit_for_bit(of_ranks):
    for key in of_ranks[0]:
        slots = OTHERS if "moved" in key[1] else SLOTS
        for name, p in joined(of_ranks, key).items():
            for slot, expert in enumerate(slots):
                assert torch.equal(p[slot], p[slots.index(expert)]), (key, name, slot)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_learns_what_one_without_replicas_does(of_ranks, mode):
    # staged rounds the gradient of each pass to bf16, the others add in fp32
    options = {"backend": "reference" if "accumulate_into_main_grad" in MODES[mode] else "staged"}
    alone = made("alone", None, **options, **MODES[mode])
    grads, norms = trained(alone, steps=1)
    layer = made("alone", **options, **MODES[mode])
    mine, own_norms = trained(layer, steps=1)
    for name in NAMES:
        scale = float(grads[name].abs().max())
        # fp32 sums in another order; a rounding to bf16 of each slot, pass and sum where gradients are bf16
        step = 2**-20 if grads[name].dtype == torch.float32 else 2**-7
        torch.testing.assert_close(mine[name][:6], grads[name], rtol=step, atol=step * scale)
        assert bool(mine[name][6].any())
        assert torch.equal(mine[name][6], mine[name][0])
        assert torch.equal(mine[name][7], mine[name][0])
    assert own_norms[0] == pytest.approx(norms[0], rel=2**-8)
    for backend in ("staged", "emulate", "reference"):
        if (backend, mode) in of_ranks[0]:
            for first, second in zip(*(of[backend, mode][2] for of in of_ranks), strict=True):
                assert first == second
            assert of_ranks[0][backend, mode][2][0] == pytest.approx(norms[0], rel=2**-8)


def test_main_grad_and_delays_give_the_same_bits(of_ranks):
    for name in NAMES:
        for one, other in (("plain", "delayed"), ("main_grad", "both")):
            first = joined(of_ranks, ("staged", one))[name]
            assert torch.equal(first, joined(of_ranks, ("staged", other))[name])


def test_moving_experts_changes_nothing(of_ranks):
    """Weights, gradients, main_grad and moments go with them, in the middle of training."""
    for still, moved in (("plain", "moved"), ("main_grad", "moved to main_grad")):
        first, second = joined(of_ranks, ("staged", still)), joined(of_ranks, ("staged", moved))
        for name in NAMES:
            for expert in range(6):
                step = 2**-6 * float(first[name].abs().max())  # other slots have other tokens
                torch.testing.assert_close(
                    second[name][OTHERS.index(expert)], first[name][expert], rtol=0, atol=step
                )
    same = [made("alone", list(range(6))) for _ in range(2)]
    trained(same[0])
    trained(same[1], moves=[3, 5, 4, 0, 2, 1])
    for name in NAMES:  # no replicas, so that every slot has the tokens of an expert
        held = getattr(same[1], name)[[3, 5, 4, 0, 2, 1].index(0)], getattr(same[0], name)[0]
        assert torch.equal(*held), name


def test_moments_of_all_optimizers_move_once():
    """Of those that are stated and of those that have stepped."""
    to = [3, 5, 4, 0, 2, 1]
    layer = made("alone", list(range(6)))
    sgd = torch.optim.SGD([layer.w13], lr=1e-3, momentum=0.9)
    adam = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    backward(layer, 0, 1, 0)
    moments = []
    for optimizer, key in ((sgd, "momentum_buffer"), (adam, "exp_avg")):
        optimizer.step()
        moments.append(optimizer.state[layer.w13][key])
    before = [t.clone() for t in moments]
    layer.move_experts(megamoe.ExpertPlacement(to), optimizers=sgd)
    for old, new in zip(before, moments, strict=True):
        assert torch.equal(new, old[to])
        assert not torch.equal(new, old)


class Around(nn.Module):
    num_delayed = 0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *call):
        return self.inner(*call)


def refusals(rank, folder):
    group, messages = dist.group.WORLD, {}

    def caught(name, kind, act):
        with pytest.raises(kind) as error:
            act()
        messages[name] = str(error.value)

    # a replica that no token takes has the gradient of its expert
    layer = made(group)
    x, ids = torch.ones(1, 32).bfloat16(), torch.tensor([[0, 1]])
    layer(x, ids, torch.ones(1, 2)).float().sum().backward()
    taken = layer.statistics().tokens_per_expert.tolist()
    grads = [torch.empty_like(layer.w2.grad.float()) for _ in range(2)]
    dist.all_gather(grads, layer.w2.grad.float())
    whole = torch.cat(grads)
    alike = all(torch.equal(whole[s], whole[0]) and bool(whole[s].any()) for s in (6, 7))

    # a checkpoint of slots
    other = made(group, init_seed=2)
    dcp.save({"model": layer.state_dict()}, checkpoint_id=folder)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    loaded = torch.equal(other.w13, layer.w13)
    moved = made(group, OTHERS)
    caught("other placement", ArgumentError, lambda: moved.load_state_dict(layer.state_dict()))
    plain = made(group, None)
    caught("no placement", ArgumentError, lambda: plain.load_state_dict(layer.state_dict()))
    caught("slots unknown", ArgumentError, lambda: layer.load_state_dict(plain.state_dict()))

    # what would come apart
    caught("optimizers", ArgumentError, lambda: moved.move_experts(layer.placement))
    slots = SLOTS if rank else [*SLOTS[:-1], 1]
    caught("ranks differ", RankMismatch, lambda: made(group, slots))
    frozen = made(group)
    frozen.w2.requires_grad_(rank == 0)
    caught("frozen", RankMismatch, lambda: backward(frozen, rank, 2, 0))
    differing = made(group)
    with torch.no_grad():
        differing.w13[-1] += rank
    caught("start", RankMismatch, lambda: differing.prepare())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    caught("distribute", ConfigError, lambda: layer.distribute(mesh))
    copies = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 1), mesh_dim_names=("e", "c")
    )
    for ignores in (False, True):
        net = Around(made(group, bias=False))
        ignored = set(net.inner.parameters()) if ignores else None
        fully_shard(net, mesh=copies["c"], ignored_params=ignored)
        if ignores:
            backward(net, rank, 2, 0)
        else:
            caught("around", ConfigError, lambda net=net: backward(net, rank, 2, 0))
    itself = made(group, bias=False)
    fully_shard(itself, mesh=copies["c"])
    caught("sharded", ConfigError, lambda: backward(itself, rank, 2, 0))
    late = made(group, delay_wgrad=True)
    late(x, ids, torch.ones(1, 2)).float().sum().backward()
    to = megamoe.ExpertPlacement(OTHERS)
    caught("waits", ArgumentError, lambda: late.move_experts(to, optimizers=()))
    late.backward_dw()
    odd = made(group)
    rows = torch.optim.SGD(odd.parameters(), lr=0.1)
    rows.state[odd.w13]["blocks"] = torch.zeros(7, 3)
    caught("moments", ArgumentError, lambda: odd.move_experts(to, optimizers=rows))
    return messages, taken, alike, loaded


def test_what_is_refused_on_all_ranks(tmp_path):
    expected = {
        "other placement": "slot_experts",
        "no placement": "expected no placement",
        "slots unknown": "slot_experts'\\] is None",
        "optimizers": "optimizers is None, expected those that train w13",
        "ranks differ": "placement is",
        "frozen": "gradients",
        "start": "hold expert 0, and different weights",
        "distribute": "placement is given, expected None",
        "around": "placement is given, expected None under fully_shard",
        "sharded": "placement is given, expected None under fully_shard",
        "waits": "backward_dw",
        "moments": r"SGD 0's blocks is \[7, 3\]",
    }
    for messages, taken, alike, loaded in launch(refusals, 2, str(tmp_path)):
        assert messages.keys() == expected.keys()
        for name, text in expected.items():
            assert re.search(text, messages[name]), (name, messages[name])
        assert alike
        assert loaded
        assert sum(taken) in (0, 2 * 2)


def moves_in_between(rank):
    """The last slot alone gets another expert: the rank of which nothing is written to raises, too."""
    layer, found = made(dist.group.WORLD), []
    x, ids = torch.ones(1, 32).bfloat16(), torch.tensor([[0, 1]])
    for to in ([*SLOTS[:4], 4, 5, 0, 1], SLOTS):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            copied = layer(x, ids, torch.ones(1, 2))
        kept = layer(x, ids, torch.ones(1, 2))
        layer.move_experts(megamoe.ExpertPlacement(to), optimizers=())
        found += [outcome(y.float().sum().backward) for y in (copied, kept)]
        found.append((None if layer.w13.grad is None else "gradient", ""))
    y = layer(x, ids, torch.ones(1, 2))
    layer.move_experts(megamoe.ExpertPlacement(SLOTS), optimizers=())  # to where they are
    found.append(outcome(y.float().sum().backward))
    return found


def test_a_move_between_a_call_and_its_backward_raises_on_all_ranks():
    """The rows of its gradients would be other experts': torch does not see it where hooks have copied the weights."""
    for found in launch(moves_in_between, 2, timeout_s=60):
        for copied, kept, grad in (found[:3], found[3:6]):
            assert copied[0] == "ArgumentError"
            assert "move_experts() is called between" in copied[1]
            assert kept[0] in ("ArgumentError", "RuntimeError", "RankMismatch")
            assert grad == (None, "")
        assert found[6:] == [(None, "")]


def test_compiled_and_copies():
    layer, eager = made("alone"), made("alone")
    layer.prepare()
    backward(torch.compile(layer, backend="aot_eager"), 0, 1, 0)
    backward(eager, 0, 1, 0)
    assert torch.equal(layer.w13.grad, eager.w13.grad)
    with pytest.raises(MegaMoEError, match="placement cannot be copied"):
        copy.deepcopy(layer)
