"""The kernel inside each of several hosts: on one GPU beside a wire that spins, on two GPUs that are two hosts."""

import os

import pytest
import torch
import torch.distributed as dist

import megamoe
from bench.hosts.model import Fabric
from bench.hosts.spin import Spinning, over_hosts
from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.core.config import Problem
from megamoe.testing import assert_close, launch, make_inputs, make_weights
from megamoe.testing.launch import gpu_of

pytestmark = pytest.mark.gpu
TOKENS, HOSTS = 512, 2
PROBLEM = Problem(512, 384, 8, 3, ep_size=HOSTS, max_tokens=TOKENS)
ROUNDED_ONCE_MORE = 6e-3


@pytest.fixture
def spun():
    """Return a backend, its weights and a call of it, by exchange, in one process."""
    made = []

    def make(exchange):
        device = torch.device("cuda", torch.cuda.current_device())
        engine = Spinning(Fabric(gb_s=50, latency_us=20).wire_us, device, PROBLEM, exchange)
        options = {"chunks": 2, "exchange": exchange, "reserve_sms": 8}
        backend = over_hosts(PROBLEM, HOSTS, "mega", device, engine, **options)
        made.append(backend)
        weights = make_weights(PROBLEM, device=device)
        drawn = make_inputs(PROBLEM, TOKENS, device=device, ids_dtype=torch.int32)
        backend.prepare(weights)
        return backend, Call(drawn.x, drawn.topk_ids, drawn.topk_weights, weights)

    yield make
    for backend in made:
        backend.close()


def test_static_waits_for_nothing_and_exact_once(spun):
    for exchange, waits in (("static", 0), ("exact", 1)):
        backend, call = spun(exchange)
        for _ in range(2):
            expected = backend.forward(call)[0]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if not waits else "warn")
        try:
            y = backend.forward(call)[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(y, expected)
        backend.check()


def test_exact_and_static_have_equal_bits(spun):
    ys = []
    for exchange in ("exact", "static"):
        backend, call = spun(exchange)
        ys.append(backend.forward(call)[0])
        backend.check()
    assert torch.equal(*ys)


def test_a_step_is_captured(spun):
    backend, call = spun("static")
    dy, wanted = torch.randn_like(call.x), GradRequest(Needs(b13=False, b2=False))

    def step():
        y, state = backend.forward(call, keep=True)
        return y, backend.backward(call, dy, state, wanted)

    expected_y, expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, found = step()
    for _ in range(1000):
        graph.replay()
    backend.check()
    assert torch.equal(y, expected_y)
    for name in ("x", "topk_weights", "w13", "w2"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_exact_is_not_captured(spun):
    backend, call = spun("exact")
    backend.forward(call)
    with pytest.raises(megamoe.MegaMoEError, match='make the layer with "static"'):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            backend.forward(call)


# --- two hosts of one GPU ---


def trained(rank, group, precision, **options):
    """Return y and gradients of a step; of one rank those of all tokens.

    dy is drawn: one made of y would have its roundings, which differ between hosts, and flip those of dy to e4m3.
    """
    device = gpu_of(rank)
    ranks = 1 if group == "alone" else 2
    sizes = {"hidden": 512, "intermediate": 384, "num_experts": 9, "top_k": 3, "bias": True}
    layer = megamoe.MegaMoE(
        **sizes, group=group, max_tokens=2 * TOKENS // ranks, init_seed=1, precision=precision,
        device=device, backend="mega", **options,
    )  # fmt: skip
    draws = [make_inputs(layer.problem, TOKENS, rank=r, device=device) for r in range(2)]
    mine = draws if ranks == 1 else [draws[rank]]
    x = torch.cat([d.x for d in mine]).requires_grad_()
    ids = torch.cat([d.topk_ids for d in mine])
    scores = torch.cat([d.topk_weights for d in mine]).requires_grad_()
    dice = torch.Generator().manual_seed(2)
    drawn = torch.randn(2 * TOKENS, layer.problem.hidden, generator=dice).bfloat16().split(TOKENS)
    y = layer(x, ids, scores)
    y.backward(torch.cat(drawn if ranks == 1 else drawn[rank : rank + 1]).to(device))
    layer._layer.check()
    found = {"y": y.detach(), "x": x.grad, "topk_weights": scores.grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    problem = layer.problem
    held = slice(problem.expert_begin(), problem.expert_begin() + problem.num_local_experts())
    layer.close()
    return found, held


def two_hosts(rank):
    """Return what is wrong with two hosts of one GPU, beside one GPU."""
    os.environ["MEGAMOE_HOST"] = f"host-{rank}"
    torch.cuda.set_device(gpu_of(rank))
    wrong = []
    for precision in ("bf16", "fp8"):
        expected, _ = trained(rank, "alone", precision)
        for options in ({"chunks": 2}, {"exchange": "static", "chunks": 2}):
            found, held = trained(rank, dist.group.WORLD, precision, **options)
            for name, t in found.items():
                tokens = slice(rank * TOKENS, (rank + 1) * TOKENS)
                of = tokens if name in ("y", "x", "topk_weights") else held
                try:
                    assert_close(t, expected[name][of], relative=ROUNDED_ONCE_MORE)
                except AssertionError as error:
                    wrong.append(f"{precision} {options} {name}: {error}")
    return wrong


@pytest.mark.ep(2, share=False)
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_two_hosts_of_one_gpu_train_as_one_does(backend):
    assert launch(two_hosts, 2, backend=backend, timeout_s=120) == [[], []]


def transposed(rank, exchange):
    """Return the errors of backward passes of different calls: of the pass itself, and of what follows; then whether a
    reset makes the layer right."""
    os.environ["MEGAMOE_HOST"] = f"host-{rank}"
    torch.cuda.set_device(gpu_of(rank))
    sizes = {"hidden": 512, "intermediate": 384, "num_experts": 8, "top_k": 3, "max_tokens": TOKENS}
    options = {"exchange": exchange, "backend": "mega", "device": gpu_of(rank), "init_seed": 1}
    layer = megamoe.MegaMoE(**sizes, group=dist.group.WORLD, **options)
    draws = [
        make_inputs(layer.problem, TOKENS, rank=rank, seed=n, device=gpu_of(rank)) for n in range(2)
    ]

    def gradient(of):
        leaves = [d.x.clone().requires_grad_() for d in draws]
        ys = [layer(x, d.topk_ids, d.topk_weights) for x, d in zip(leaves, draws, strict=True)]
        ys[of].backward(torch.ones_like(ys[of]))
        layer._layer.check()
        return leaves[of].grad

    expected, said = gradient(0), []
    for attempt in (lambda: gradient(rank), lambda: gradient(0)):
        try:
            attempt()
            said.append("nothing")
        except megamoe.MegaMoEError as error:
            said.append(f"{type(error).__name__}: {error}")
    layer._layer.reset()
    right = torch.equal(gradient(0), expected)
    layer.close()
    return said, right


@pytest.mark.ep(2, share=False)
@pytest.mark.parametrize("exchange", ["exact", "static"])
def test_backward_passes_of_different_calls_are_named(exchange):
    """static: what a device saw, check() says, or a later call."""
    for (first, then), right in launch(transposed, 2, exchange, backend="nccl", timeout_s=120):
        assert first.startswith("RankMismatch: rank ")
        assert "comes for backward of call " in first
        assert then.startswith(("WindowBroken", "RankMismatch"))
        assert right
