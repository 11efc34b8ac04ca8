"""gathers="e4m3": FSDP2 gathers quantized experts; the bits of a layer whose masters are gathered."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import megamoe
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.launch import cache
from megamoe.launch.gathered import Gathered
from megamoe.testing import launch

SHAPE = {"hidden": 64, "intermediate": 32, "num_experts": 4, "top_k": 2, "max_tokens": 32}
STEPS, MICRO_BATCHES = 3, 2


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        options = {"backend": "reference", "precision": "fp8", "init_seed": 3} | options
        self.moe = megamoe.MegaMoE(**SHAPE, **options)

    def forward(self, seed):
        x, ids, weights = batch(seed)
        return self.moe(x.requires_grad_(), ids, weights)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, SHAPE["hidden"], generator=generator).bfloat16()
    weights, ids = torch.randn(12, 4, generator=generator).softmax(-1).topk(2)
    return x, ids, weights


@contextmanager
def counted():
    """Yield a list to which each quantization adds its number of experts."""
    made, quantize = [], cache.quantize_weights

    def quantized(w, *rest):
        made.append(len(w))
        return quantize(w, *rest)

    cache.quantize_weights = quantized
    yield made
    cache.quantize_weights = quantize


def trained(*args, **options):
    with counted() as made:
        return *_trained(*args, **options), made


def _trained(rank, gathers, reshard=True, policy=None, kind="fused", **options):
    net = Net(gathers=gathers, **options)
    fully_shard(net.moe, reshard_after_forward=reshard, mp_policy=policy or MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **{kind: True})
    found = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            y = net(100 * step + 10 * micro + rank)
            y.float().square().sum().backward()
            found.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    state = {n: t.clone() + 0.25 for n, t in net.state_dict().items()}
    net.load_state_dict(state)
    with torch.no_grad():
        found.append(net(rank))
        net.moe._apply(torch.clone)  # moves the shards
        found.append(net(rank))
    net.moe.reshard()
    found += [p.to_local().detach().clone() for p in net.parameters()]
    copies = net.moe._layer._runtime.cache
    return found, len(copies._entries), net


CASES = {
    "bf16": {"dtype": torch.bfloat16},
    "fp32": {"dtype": torch.float32},
    "foreach, kept": {"dtype": torch.float32, "kind": "foreach", "reshard": False},
    "staged, biases": {"dtype": torch.float32, "backend": "staged", "bias": True},
    "emulate": {"dtype": torch.float32, "backend": "emulate"},
}
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)


def on_two_ranks(rank):
    found = {}
    for name, options in CASES.items():
        (masters, *_), (e4m3, kept, _, made) = (
            trained(rank, gathers, **options) for gathers in ("masters", "e4m3")
        )
        equal = [torch.equal(a, b) for a, b in zip(masters, e4m3, strict=True)]
        found[name] = equal, made, kept
    # gradients in bf16, and still quantized from fp32
    _, _, net, _ = trained(rank, "e4m3", policy=NARROW, dtype=torch.float32)
    net.moe.unshard()
    found["types"] = net.moe.w13.dtype
    net = Net(gathers="e4m3", dtype=torch.float32)
    fully_shard(net.moe)
    net.moe.unshard()
    found["seen"] = type(net.moe.w13) is Gathered, net.moe.w13.dtype, tuple(net.moe.w13.shape)
    net.moe.prepare()
    with pytest.raises(ArgumentError, match=r"gathered parameter.*reshard\(\) before it is read"):
        net.moe.w13.sum()
    net.moe.reshard()
    found["shard"] = bool(net.moe.w13.to_local().isfinite().all())
    return found


def test_bits_and_counts_over_two_ranks():
    for found in launch(on_two_ranks, 2, timeout_s=200):
        for name in CASES:
            equal, made, kept = found[name]
            assert all(equal), (name, equal)
            # w13 and w2 of two of four experts: at first, behind each step, load_state_dict() and _apply()
            assert made == [2, 2] * (1 + STEPS + 1), name
            assert kept == 0  # no copies of all experts
        assert found["types"] == torch.bfloat16
        assert found["seen"] == (True, torch.float32, (4, 64, 64))
        assert found["shard"]


def over_experts(rank):
    """Two ranks with different experts, and two copies of each, as plain parameters and as DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    found = {}
    for distributed in (False, True):
        bits = []
        for gathers in ("masters", "e4m3"):
            net = Net(gathers=gathers, group=mesh["experts"], dtype=torch.float32)
            if distributed:
                net.moe.distribute(mesh["experts"])
            fully_shard(net.moe, mesh=mesh["copies"])
            megamoe.average_expert_gradients(net, 4)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for step in range(2):
                net(10 * step + rank).float().square().sum().backward()
                norm = megamoe.clip_grad_norm_(net, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            bits.append([norm, *(p.to_local().detach() for p in net.parameters())])
        found[distributed] = [torch.equal(a, b) for a, b in zip(*bits, strict=True)]
    return found


def test_ranks_of_different_experts():
    for found in launch(over_experts, 4, timeout_s=200):
        assert all(map(all, found.values())), found


def uneven(rank):
    net = megamoe.MegaMoE(**SHAPE | {"num_experts": 3}, precision="fp8", gathers="e4m3")
    with pytest.raises(ArgumentError, match=r"gathers is 'e4m3' with .* do not divide"):
        fully_shard(net)
    net = Net(gathers="e4m3")
    with pytest.raises(ArgumentError, match=r"gathers is 'e4m3' with fully_shard\(\) of a module"):
        fully_shard(net)


def test_ranks_have_to_divide_the_experts():
    launch(uneven, 2, timeout_s=60)


def test_other_values_are_refused():
    with pytest.raises(ConfigError, match="gathers is 'bf16', expected 'masters', or 'e4m3' with"):
        Net(gathers="bf16")
    with pytest.raises(ConfigError, match="gathers is 'e4m3', expected 'masters', or 'e4m3' with"):
        Net(gathers="e4m3", precision="bf16")


def test_without_fsdp_nothing_changes():
    found = []
    for gathers in ("masters", "e4m3"):
        net = Net(gathers=gathers, dtype=torch.float32)
        y = net(0)
        y.float().sum().backward()
        found.append((y.detach(), net.moe.w13.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
