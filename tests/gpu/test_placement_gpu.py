"""Redundant experts behind the kernel: replicas on one rank and on two stay equal, and learn what one expert would."""

import pytest
import torch
import torch.distributed as dist

import megamoe
from megamoe.testing import launch
from megamoe.testing.launch import gpu_of

pytestmark = pytest.mark.gpu
SLOTS, OTHERS = [0, 1, 2, 3, 4, 5, 0, 0], [3, 0, 5, 4, 0, 3, 2, 1]
TOKENS = 96


def made(group, placement, device, **options):
    sizes = 256, 128, 6, 2
    given = {"max_tokens": TOKENS, "init_seed": 1, "bias": True, "backend": "mega"} | options
    return megamoe.MegaMoE(*sizes, group=group, placement=placement, device=device, **given)


def trained(layer, rank, ranks, moves=None):
    """Three steps of AdamW; returns the norms, the first gradients and the parameters on the CPU."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    adds, delays = layer.accumulate_into_main_grad, layer._delays
    for p in (layer.w13, layer.w2) if adds else ():
        p.main_grad = torch.zeros(p.shape, device=p.device)
    norms, first = [], {}
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, TOKENS // 2, 256, generator=generator).bfloat16()
        ids = torch.rand(2, TOKENS // 2, 6, generator=generator).topk(2, -1).indices
        own = slice(rank, rank + 1) if ranks == 2 else slice(None)
        device = layer.w13.device
        scores = torch.full(ids[own].shape, 0.5, device=device)
        layer(x[own].to(device), ids[own].to(device), scores).float().square().sum().backward()
        if delays:
            layer.backward_dw()
        for p in (layer.w13, layer.w2) if adds else ():
            p.grad = p.main_grad.to(p.dtype)
            p.main_grad.zero_()
        if not adds:
            norms.append(float(megamoe.grad_norm(layer)))
        first = first or {n: p.grad.cpu().clone() for n, p in layer.named_parameters()}
        if moves and step == 1:
            layer.move_experts(moves)
        optimizer.step()
        optimizer.zero_grad()
    layer.check()
    return norms, first, {n: p.detach().cpu() for n, p in layer.named_parameters()}


def train(rank, precision, options, others):
    ranks = dist.get_world_size()
    group, device = (dist.group.WORLD if ranks > 1 else "alone"), gpu_of(rank)
    torch.cuda.set_device(device)
    placement = megamoe.ExpertPlacement(SLOTS)
    moves = megamoe.ExpertPlacement(OTHERS) if others else None
    layer = made(group, placement, device, precision=precision, **options)
    found = trained(layer, rank, ranks, moves)
    layer.close()
    alone = made("alone", None, device, precision=precision)
    expected = trained(alone, 0, 1)
    alone.close()
    return found, expected


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ep(n)) for n in (1, 2)])
@pytest.mark.parametrize(
    ("precision", "options", "others"),
    [
        ("bf16", {}, False),
        ("fp8", {}, True),
        ("bf16", {"accumulate_into_main_grad": True, "delay_wgrad": True}, True),
    ],
)
def test_replicas_stay_equal(ranks, precision, options, others):
    results = launch(
        train, ranks, precision, options, others, timeout_s=200, backend="cpu:gloo,cuda:nccl"
    )
    slots = OTHERS if others else SLOTS
    expected_norms, expected, _ = results[0][1]
    for name in ("w13", "w2", "b13", "b2"):
        first = torch.cat([found[1][name] for found, _ in results])
        last = torch.cat([found[2][name] for found, _ in results])
        for slot, expert in enumerate(slots):
            assert torch.equal(last[slot], last[slots.index(expert)]), (name, slot)
        error = (first[:6].float() - expected[name].float()).norm() / expected[name].float().norm()
        assert float(error) <= 2**-7, name  # a rounding to bf16 of each slot and of the sum
        assert torch.equal(first[6], first[0])
    for found, _ in results:
        if found[0]:
            assert found[0][0] == pytest.approx(expected_norms[0], rel=2**-7)
