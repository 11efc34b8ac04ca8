"""fp32 masters, made transposes and gathered e4m3 on GPUs: bits, streams, graphs."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import megamoe
from megamoe.testing import launch
from megamoe.testing.compare import same_bits

pytestmark = pytest.mark.gpu


def make(seed=0, **options):
    return megamoe.MegaMoE(
        *(512, 256, 8, 2), max_tokens=256, precision="fp8", backend="mega", device="cuda",
        init_seed=seed, **options,
    )  # fmt: skip


def batch():
    x = torch.randn(256, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    scores = torch.randn(256, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    weights, ids = scores.softmax(-1).topk(2)
    return x.bfloat16().requires_grad_(), ids, weights


def trained(layers, steps=3):
    optimizer = torch.optim.AdamW(
        [p for layer in layers for p in layer.parameters()], lr=1e-3, fused=True, capturable=True
    )
    for layer in layers:
        megamoe.after_step(optimizer, layer)
    x, ids, weights = batch()
    for _ in range(steps):
        x.grad = None
        optimizer.zero_grad()
        y = x
        for layer in layers:
            y = layer(y, ids, weights)
        y.float().square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    found = [y.detach(), x.grad]
    return found + [t for layer in layers for p in layer.parameters() for t in (p.grad, p.data)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_made_transposes_have_the_bits_of_kept_ones(dtype):
    runs = [
        trained([make(i, dtype=dtype, transposes=way) for i in range(2)])
        for way in ("kept", "made")
    ]
    assert all(map(same_bits, *runs))


def test_layers_on_two_streams_share_the_buffer():
    """Each waits until the other's launch has read it."""
    layers = [make(i, transposes="made") for i in range(2)]
    alone = [trained([make(i, transposes="kept")], steps=1) for i in range(2)]
    streams, outs = [torch.cuda.Stream() for _ in layers], []
    for layer, stream in zip(layers, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x, ids, weights = batch()
            outs.append((layer(x, ids, weights).float().square().mean(), x))
    for (loss, _), stream in zip(outs, streams, strict=True):
        with torch.cuda.stream(stream):
            loss.backward()
    torch.cuda.synchronize()
    for (_, x), (_, expected, *_) in zip(outs, alone, strict=True):
        assert same_bits(x.grad, expected)


@pytest.mark.parametrize("products", ["bf16", "e4m3"])
@pytest.mark.parametrize("way", ["kept", "made"])
def test_a_graph_of_a_step_follows_fp32_masters(way, products):
    options = {"dtype": torch.float32, "transposes": way, "weight_gradients": products}
    expected = trained([make(**options)], steps=6)
    graphed = make(**options)
    optimizer = torch.optim.AdamW(graphed.parameters(), lr=1e-3, fused=True, capturable=True)
    megamoe.after_step(optimizer, graphed)
    x, ids, weights = batch()

    def step():
        x.grad = None
        optimizer.zero_grad()
        graphed(x, ids, weights).float().square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert same_bits(graphed.w13.data, expected[3])
    assert same_bits(graphed.w2.data, expected[5])


def gathered(rank):
    """Return which results of gathering e4m3 have the bits of gathering masters, over NCCL."""
    runs = []
    for gathers in ("masters", "e4m3"):
        layer = make(dtype=torch.float32, gathers=gathers)
        fully_shard(layer)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
        x, ids, weights = batch()
        for _ in range(3):
            layer(x, ids, weights).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        layer.check()
        runs.append([x.grad, *(p.to_local() for p in layer.parameters())])
    return [same_bits(*pair) for pair in zip(*runs, strict=True)]


@pytest.mark.ep(2, share=False)
def test_gathered_e4m3_has_the_bits_of_gathered_masters():
    found = launch(gathered, 2, timeout_s=120, backend="cpu:gloo,cuda:nccl")
    assert found == [[True] * 3] * 2
