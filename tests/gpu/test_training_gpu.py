"""Training through the kernel: ways to the backward pass that must not move a bit, and a whole iteration in one graph.

The iteration is the program of docs/training.md. Gradients against the oracle are in tools/rank_check.py and
tests/gpu/test_layer.py, many steps in tools/soak.py.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pages
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megamoe
from megamoe.core.errors import WorkspaceTooSmall
from megamoe.testing import compare, launch, make_inputs, same_bits

BACKEND, DEVICE, PROCESS_GROUP = "mega", "cuda", "cpu:gloo,cuda:nccl"
SHAPE = {"hidden": 512, "intermediate": 384, "num_experts": 5, "top_k": 3, "max_tokens": 300}
PRECISIONS = ("bf16", "fp8")
WEIGHTS = ("w13", "w2", "b13", "b2")
pytestmark = pytest.mark.gpu


@pytest.fixture
def make():
    layers = []

    def made(**options: Any) -> megamoe.MegaMoE:
        options = {"init_seed": 1, "bias": True, **options}
        layers.append(megamoe.MegaMoE(**SHAPE, backend=BACKEND, device=DEVICE, **options))
        return layers[-1]

    yield made
    for layer in layers:
        layer.check()
        layer.close()


def leaves(layer, seed=0, routing="dropped"):
    i = make_inputs(layer.problem, 300, seed=seed, routing=routing, device=DEVICE)
    return i.x.clone().requires_grad_(), i.topk_ids, i.topk_weights.clone().requires_grad_()


def loss_of(layer, call):
    return layer(*call).float().square().sum()


def gradients(layer, call):
    found = {"x": call[0].grad, "topk_weights": call[2].grad}
    return found | {name: p.grad for name, p in layer.named_parameters()}


def trained(layer, seed=0, way: Callable[..., Any] = loss_of):
    layer.zero_grad()
    call = leaves(layer, seed)
    way(layer, call).backward()
    return gradients(layer, call)


def assert_same(found, expected):
    for name, value in expected.items():
        assert value.isfinite().all(), name
        assert value.abs().max() > 0, name
        assert same_bits(found[name], value), name


def offloaded(layer, call):
    with torch.autograd.graph.save_on_cpu():
        return loss_of(layer, call)


WAYS = {
    "again": loss_of,
    "checkpoint": lambda f, a: checkpoint(loss_of, f, a, use_reentrant=False),
    "checkpoint, reentrant": lambda f, a: (
        checkpoint(f, *a, use_reentrant=True).float().square().sum()
    ),
    "offloaded": offloaded,
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", WAYS)
def test_ways(make, precision, way):
    layer = make(precision=precision)
    assert_same(trained(layer, way=WAYS[way]), trained(layer))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_and_microbatches_in_flight(make, precision):
    layers = [make(precision=precision, init_seed=seed) for seed in (1, 2)]
    alone = [trained(layers[n % 2], seed=n) for n in range(4)]
    calls = [leaves(layers[n % 2], seed=n) for n in range(4)]
    losses = [loss_of(layers[n % 2], call) for n, call in enumerate(calls)]
    for n in (3, 0, 1, 2):
        layers[n % 2].zero_grad()
        losses[n].backward(retain_graph=n == 0)
        assert_same(gradients(layers[n % 2], calls[n]), alone[n])
    layers[0].zero_grad()
    calls[0][0].grad = calls[0][2].grad = None
    losses[0].backward()  # its graph was retained
    assert_same(gradients(layers[0], calls[0]), alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad(make, dtype):
    layer, plain = make(accumulate_into_main_grad=True), make()
    for p in (layer.w13, layer.w2):
        p.main_grad, p.grad_added_to_main_grad = torch.ones_like(p, dtype=dtype), False
    parts = [trained(plain, seed) for seed in range(2)]
    for seed in range(2):
        assert_same({"x": trained(layer, seed)["x"]}, {"x": parts[seed]["x"]})
    for name in ("w13", "w2"):
        p = getattr(layer, name)
        assert p.grad_added_to_main_grad
        expected = 1 + parts[0][name].float() + parts[1][name].float()
        # the parts are rounded to bf16 where they are returned, sums where main_grad is bf16
        assert compare(p.main_grad, expected).relative <= 6e-3, name


def test_frozen(make):
    layer = make()
    expected = trained(layer)
    for name in WEIGHTS:
        getattr(layer, name).requires_grad_(False)
    found = trained(layer)
    assert_same({"x": found["x"]}, {"x": expected["x"]})
    assert found["w13"] is None
    assert found["b2"] is None


def programs() -> tuple[str, str, str]:
    """Return three parts of docs/training.md: the model, the iteration, and its capture."""
    start, model, *_ = pages.programs("docs/training.md")
    (graph,) = pages.programs("docs/training.md", "gpu")
    assert "dist.init_process_group()\n" in start
    model = start.replace("dist.init_process_group()\n", "") + model  # launch() made the group
    iteration, mark, capture = graph.partition("side = ")
    assert mark
    return model, iteration, mark + capture


# FP8 also with weight gradients in e4m3 and masters that are quantized behind each step.
ITERATIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8", "weight_gradients": "bf16"},
    "fp8-e4m3": {"precision": "fp8", "weight_gradients": "e4m3"},
}


def captured(rank: int, case: str) -> dict[str, Any]:
    """Replay the captured iteration with several routings and counts; do the same without a graph."""
    made = megamoe.MegaMoE
    forced = {"backend": BACKEND, "max_tokens": 32, "init_seed": 1, **ITERATIONS[case]}
    model, iteration, capture = programs()
    names: list[dict[str, Any]] = [{}, {}]
    with (
        mock.patch.object(megamoe, "MegaMoE", lambda *a, **o: made(*a, **{**o, **forced})),
        mock.patch(
            "torch.cuda.set_device"
        ),  # launch() did, where ranks share a GPU to one of a lower number
    ):
        for of in names:
            torch.manual_seed(0)
            exec(model + iteration, of)
            if forced.get("weight_gradients") == "e4m3":
                megamoe.after_step(of["fused"], of["graphed"])
    graphed, eager = names
    start = {n: p.detach().clone() for n, p in eager["graphed"].named_parameters()}
    exec(capture, graphed)  # three iterations, and one replay
    for _ in range(4):
        eager["iteration"]()
        eager["fused"].zero_grad()
    losses, wrong = [], []
    generator = torch.Generator(DEVICE).manual_seed(rank)
    for step in range(20):
        x = torch.randn(32, 64, generator=generator, device=DEVICE).bfloat16()
        for of in names:
            of["x"].copy_(x)
            of["count"].fill_((32, 0, 7, 31)[(step + rank) % 4])
        graphed["graph"].replay()
        if step == 10:
            torch.cuda.set_sync_debug_mode("error")  # no operation may wait for the device
        loss = eager["iteration"]()
        torch.cuda.set_sync_debug_mode("default")
        eager["fused"].zero_grad()
        losses.append((float(graphed["graphed_loss"]), float(loss)))
    for of in names:
        of["graphed"].moe.check()
    equal = True
    for (name, p), q in zip(
        graphed["graphed"].named_parameters(), eager["graphed"].parameters(), strict=True
    ):
        moved, expected = p.detach() - start[name], q.detach() - start[name]
        equal &= same_bits(p.detach(), q.detach())
        error = compare(moved, expected).relative
        if not error <= 1e-2 or not expected.any():
            wrong.append(f"{name}: moved otherwise, relative {error:.2e}")
    del graphed["graph"]
    for of in names:
        of["graphed"].moe.close()
    return {"losses": losses, "wrong": wrong, "bits are equal": equal}


@pytest.mark.parametrize("case", ITERATIONS)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ep(n)) for n in (1, 2)])
def test_an_iteration_in_one_graph(ranks, case):
    for found in launch(captured, ranks, case, timeout_s=200, backend=PROCESS_GROUP):
        assert not found["wrong"]
        for replayed, expected in found["losses"]:
            assert replayed == pytest.approx(expected, rel=1e-3)
        # other tokens, routes and counts arrived; five calls had no token
        losses = [replayed for replayed, _ in found["losses"]]
        assert losses.count(0.0) == 5
        assert len(set(losses)) == len(losses) - 4
        print("bits are equal:", found["bits are equal"])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_delayed_weight_gradients(make, precision):
    """Two passes wait; the oldest's come first, with the bits of a pass that did not wait, and are added up."""
    plain = make(precision=precision)
    expected = [trained(plain, seed) for seed in range(2)]
    layer = make(precision=precision, delay_wgrad=True)
    calls = [leaves(layer, seed) for seed in range(2)]
    for seed, call in enumerate(calls):
        loss_of(layer, call).backward()
        found = gradients(layer, call)
        assert_same({"x": found["x"]}, {"x": expected[seed]["x"]})
        assert all(found[name] is None for name in WEIGHTS)
    for seed, call in enumerate(calls):
        assert layer.num_delayed == 2 - seed
        layer.backward_dw()
        found = gradients(layer, call)
        sums = {name: sum(e[name] for e in expected[: seed + 1]) for name in WEIGHTS}
        assert_same({name: found[name] for name in WEIGHTS}, sums)
    assert layer.num_delayed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delayed_main_grad(make, dtype):
    """The weights' launch adds to main_grad what the whole launch would have added."""
    found = {}
    for delays in (False, True):
        layer = make(accumulate_into_main_grad=True, delay_wgrad=delays)
        for p in (layer.w13, layer.w2):
            p.main_grad, p.grad_added_to_main_grad = torch.ones_like(p, dtype=dtype), False
        for seed in range(2):
            loss_of(layer, leaves(layer, seed)).backward()
        for _ in range(layer.num_delayed):
            layer.backward_dw()
        found[delays] = {name: getattr(layer, name).main_grad for name in ("w13", "w2")}
        assert layer.w13.grad_added_to_main_grad
    assert_same(found[True], found[False])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_kept_weight_gradients(make, precision):
    """A pass alone has the bits of one that did not wait; three are their sum, to bf16's rounding, in equal bits."""
    plain = make(precision=precision)
    expected = [trained(plain, seed) for seed in range(3)]
    layer, found = make(precision=precision, delay_wgrad="keep"), []
    for passes in (1, 3, 3):
        layer.zero_grad()
        for seed in range(passes):
            call = leaves(layer, seed)
            loss_of(layer, call).backward()
            assert_same({"x": call[0].grad}, {"x": expected[seed]["x"]})
            assert layer.w13.grad is None
        layer.backward_dw(passes)
        assert layer.num_delayed == 0
        found.append({name: getattr(layer, name).grad for name in WEIGHTS})
    assert_same(found[0], {name: expected[0][name] for name in WEIGHTS})
    assert_same(found[2], found[1])
    for name in WEIGHTS:
        total = sum(e[name].float() for e in expected)
        assert compare(found[1][name], total).relative <= 6e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_main_grad(make, dtype):
    """Sums of two passes are added to main_grad at once; the planted fault is a pass that is left out."""
    layer = make(accumulate_into_main_grad=True, delay_wgrad="keep")
    parts = [trained(make(), seed) for seed in range(2)]
    for p in (layer.w13, layer.w2):
        p.main_grad, p.grad_added_to_main_grad = torch.ones_like(p, dtype=dtype), False
    for seed in range(2):
        loss_of(layer, leaves(layer, seed)).backward()
    layer.backward_dw(passes=2)
    for name in ("w13", "w2"):
        p = getattr(layer, name)
        assert p.grad_added_to_main_grad
        one, both = (1 + sum(e[name].float() for e in parts[:n]) for n in (1, 2))
        assert compare(p.main_grad, both).relative <= 6e-3, name
        assert compare(p.main_grad, one).relative > 6e-2, name


def test_a_kept_pass_that_filled_its_pool_twice(make):
    """Its rows are not all there: an error by name, and NaN where gradients would be."""
    least = megamoe.launch.layout.min_pool_rows(make().problem)
    layer = megamoe.MegaMoE(
        **SHAPE, backend=BACKEND, device=DEVICE, bias=True, delay_wgrad="keep", pool_rows=least
    )
    loss_of(layer, leaves(layer, routing="uniform")).backward()
    assert int(layer.statistics().passes) > 1
    layer.backward_dw()
    assert layer.w13.grad.isnan().any()
    with pytest.raises(WorkspaceTooSmall, match="not all rows of pass 0"):
        layer.check()
    layer.reset()
    layer.close()


def delayed_beside_plain(rank: int, precision: str, late: bool | str) -> list[str]:
    """Steps of two layers with equal weights over the ranks, one of which delays; return whose bits differ."""
    group = torch.distributed.group.WORLD
    layers = [
        megamoe.MegaMoE(
            **SHAPE, group=group, backend=BACKEND, device=DEVICE, init_seed=1, bias=True,
            precision=precision, delay_wgrad=delays,
        )
        for delays in (False, late)
    ]  # fmt: skip
    wrong = []
    for seed in range(3):
        calls = [leaves(layer, 10 * seed + rank) for layer in layers]
        for layer, call in zip(layers, calls, strict=True):
            layer.zero_grad()
            loss_of(layer, call).backward()
        layers[1].backward_dw()
        plain, late = (gradients(f, call) for f, call in zip(layers, calls, strict=True))
        wrong += [f"{seed}: {name}" for name in plain if not same_bits(late[name], plain[name])]
        wrong += [f"{seed}: {n} is zero" for n, g in plain.items() if not g.abs().max() > 0]
    for layer in layers:
        layer.check()
        layer.close()
    return wrong


@pytest.mark.ep(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("late", [True, "keep"])
def test_delayed_over_ranks(precision, late):
    given = 2, precision, late
    found = launch(delayed_beside_plain, *given, timeout_s=120, backend=PROCESS_GROUP)
    assert found == [[], []]
