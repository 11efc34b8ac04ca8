"""Redundant experts behind the kernel: a graph captured right behind prepare() follows experts that move."""

import pytest
import torch
import torch.distributed as dist

import megamoe
from megamoe.testing import launch
from megamoe.testing.launch import gpu_of

pytestmark = pytest.mark.gpu
SLOTS, OTHERS = [0, 1, 2, 3, 4, 5, 0, 0], [3, 0, 5, 4, 0, 3, 2, 1]
TOKENS = 96


def made(group, placement, device, precision):
    sizes = 256, 128, 6, 2
    given = {"max_tokens": TOKENS, "init_seed": 1, "bias": True, "backend": "mega"}
    return megamoe.MegaMoE(
        *sizes, group=group, placement=placement, device=device, precision=precision, **given
    )


def serve(rank, precision):
    """Return y of a layer without a placement, of a captured one, and of the same graph behind a move of experts."""
    ranks = dist.get_world_size()
    group, device = (dist.group.WORLD if ranks > 1 else "alone"), gpu_of(rank)
    torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, 256, generator=generator).bfloat16().to(device)
    scores, ids = (t.to(device) for t in torch.rand(TOKENS, 6, generator=generator).topk(2))
    plain = made(group, None, device, precision)
    layer = made(group, megamoe.ExpertPlacement(SLOTS), device, precision)
    with torch.no_grad():
        found = [plain(x, ids, scores).cpu()]
        layer.prepare()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = layer(x, ids, scores)
        for to in (None, OTHERS):
            if to is not None:
                layer.move_experts(megamoe.ExpertPlacement(to))
                layer.prepare()  # FP8 copies, before the next replay
            graph.replay()
            torch.cuda.synchronize()
            found.append(y.cpu())
        assert torch.equal(found[-1], layer(x, ids, scores).cpu())
    for each in (plain, layer):
        each.check()
        each.close()
    return found


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ep(n)) for n in (1, 2)])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_captured_layer_follows_a_move_of_experts(ranks, precision):
    results = launch(serve, ranks, precision, timeout_s=200, backend="cpu:gloo,cuda:nccl")
    for expected, *found in results:
        for y in found:
            # y is summed in another order where its experts lie on other ranks
            error = (y.float() - expected.float()).norm() / expected.float().norm()
            assert float(error) <= 2**-7
        assert bool(expected.any())
