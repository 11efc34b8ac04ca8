"""The staged backend on 1-3 gloo ranks against the oracle: forward, and gradients against autograd."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from megamoe import ConfigError, Layer, MegaMoE
from megamoe.backends import reference
from megamoe.backends.call import Call
from megamoe.backends.emulate.backend import EmulateBackend
from megamoe.backends.select import make_backend
from megamoe.backends.staged import StagedBackend
from megamoe.core.config import Problem
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import Group
from megamoe.launch.layout import window_regions
from megamoe.layer.autograd import apply
from megamoe.layer.inputs import Inputs
from megamoe.layer.runtime import Runtime
from megamoe.testing import assert_close, launch, make_inputs, make_weights


@dataclass(frozen=True)
class Case:
    problem: Problem
    tokens: tuple[int, ...]
    routing: str = "uniform"
    grad_x: bool = True

    def inputs(self, rank):
        return make_inputs(self.problem, self.tokens[rank], rank=rank, routing=self.routing)


def cases(ranks):
    base = Problem(48, 32, 7, 3, ep_size=ranks, max_tokens=64)
    tokens = (33, 5, 40)[:ranks]
    return {
        "plain": Case(base, tokens),
        "dropped": Case(replace(base, bias=True, activation="swiglu_oai"), tokens, "dropped"),
        "duplicates": Case(replace(base, activation="relu2"), tokens, "duplicates"),
        "one_rank": Case(replace(base, activation="geglu"), tokens, "one_rank"),
        "no_tokens_here": Case(base, (0, 17, 0)[:ranks]),
        "frozen_x": Case(replace(base, num_experts=2, bias=True), tokens, grad_x=False),
        "many_routes": Case(
            replace(base, num_experts=37, top_k=22, activation="geglu_tanh"), tokens, "dropped"
        ),
        "most_routes": Case(replace(base, top_k=32, activation="relu2"), tokens, "duplicates"),
        "nothing": Case(base, tokens, "all_dropped"),
        "fp8": Case(replace(base, hidden=144, intermediate=80, precision="fp8"), tokens, "dropped"),
    }


NAMES = ("x", "topk_weights", "w13", "w2", "b13", "b2")


def run_case(case, rank, group, device="cpu"):
    """Return y and the gradients by both ways: autograd through staged, and the operator's backward."""
    problem = replace(case.problem, rank=rank)
    inputs = case.inputs(rank).to(device)
    masters = make_weights(problem, quantize=False)
    dy = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(rank)).bfloat16()
    dy = dy.to(device)
    results = {}
    for way in ("operator", "staged"):
        if way == "staged" and problem.precision == "fp8":
            continue  # quantized weights have no gradient of their own
        leaves = {"x": inputs.x, "topk_weights": inputs.topk_weights, **masters.named()}
        leaves = {
            name: leaf.detach().to(device, copy=True).requires_grad_()
            for name, leaf in leaves.items()
        }
        leaves["x"].requires_grad_(case.grad_x)
        weights = ExpertWeights(**{n: t for n, t in leaves.items() if n[0] in "wb"})
        arguments = leaves["x"], inputs.topk_ids, leaves["topk_weights"], weights
        backend = StagedBackend(problem, group)
        if way == "operator":
            runtime = Runtime(problem, Group.of(group), backend)
            y = apply(Inputs.of(*arguments), runtime.handle)
        else:
            y, _ = backend.forward(Call(*arguments))
        y.backward(dy)
        results[way] = {"y": y.detach(), **{n: leaf.grad for n, leaf in leaves.items()}}
        results[way] = {n: t if t is None else t.cpu() for n, t in results[way].items()}
    results["dy"] = dy.cpu()
    return results


def run_all(rank, ranks):
    return {name: run_case(case, rank, dist.group.WORLD) for name, case in cases(ranks).items()}


def oracle(case, results, rounding):
    """Return y and the gradients of all ranks, by autograd through the reference in fp32."""
    problem = case.problem
    ranks = range(problem.ep_size)
    inputs = [case.inputs(r) for r in ranks]
    masters = [make_weights(replace(problem, rank=r), quantize=False) for r in ranks]
    if rounding == "kernel":
        weights = [make_weights(replace(problem, rank=r)) for r in ranks]
        columns = zip(*((i.x, i.topk_ids, i.topk_weights) for i in inputs), strict=True)
        return reference.forward(problem, *map(list, columns), weights)["y"]
    problem = replace(problem, precision="bf16")
    leaves = []
    for i, w in zip(inputs, masters, strict=True):
        named = {"x": i.x, "topk_weights": i.topk_weights, **w.named()}
        leaves.append({n: t.float().detach().requires_grad_() for n, t in named.items()})
    weights = [ExpertWeights(**{n: t for n, t in of.items() if n[0] in "wb"}) for of in leaves]
    y = reference.forward(
        problem,
        [of["x"] for of in leaves],
        [i.topk_ids for i in inputs],
        [of["topk_weights"] for of in leaves],
        weights,
        rounding="none",
    )["y"]
    flat = list(itertools.chain.from_iterable(of.values() for of in leaves))
    dys = [r["dy"].float() for r in results]
    grads = iter(torch.autograd.grad(y, flat, dys, allow_unused=True, materialize_grads=True))
    return [{name: next(grads) for name in of} for of in leaves]


def check(name, case, results, y_tolerance=5e-3, grad_tolerance=0.01):
    fp8 = case.problem.precision == "fp8"
    expected_y = oracle(case, results, "kernel")
    expected = oracle(case, results, "none")
    for rank, result in enumerate(results):
        for way in ("operator", "staged"):
            if way not in result:
                continue
            found, what = result[way], f"{name}, rank {rank}, {way}"
            assert_close(found["y"], expected_y[rank], relative=y_tolerance, name=f"{what}: y")
            for leaf, gradient in expected[rank].items():
                if leaf == "x" and not case.grad_x:
                    assert found["x"] is None
                    continue
                tolerance = 0.12 if fp8 else grad_tolerance
                assert_close(found[leaf], gradient, relative=tolerance, name=f"{what}: d_{leaf}")


def test_one_rank():
    for name, case in cases(1).items():
        check(name, case, [run_case(case, 0, None)])


@pytest.fixture(scope="module")
def three_ranks():
    return launch(run_all, 3, 3, timeout_s=100)


@pytest.mark.parametrize("name", list(cases(3)))
def test_three_ranks(three_ranks, name):
    check(name, cases(3)[name], [of_rank[name] for of_rank in three_ranks])


def test_gradients_are_not_trivial(three_ranks):
    found = three_ranks[0]["dropped"]["operator"]
    assert all(found[name].float().norm() > 1e-3 for name in NAMES)


@pytest.mark.gpu
def test_cuda():
    for name, case in cases(1).items():
        # The grouped matmul rounds gate_up, and its gradient, to bf16; FP8 values become bf16.
        results = [run_case(case, 0, None, "cuda")]
        y_tolerance = 0.03 if case.problem.precision == "fp8" else 0.015
        check(name, case, results, y_tolerance, grad_tolerance=0.03)


def assert_repeatable(case, device):
    first, *further = (run_case(case, 0, None, device)["operator"] for _ in range(6))
    for name in first:
        assert all(torch.equal(first[name], found[name]) for found in further), name


REPEATED = Problem(256, 128, 8, 4, max_tokens=256, bias=True, activation="swiglu_oai")


def test_calls_with_many_threads_give_equal_bits():
    threads = torch.get_num_threads()
    torch.set_num_threads(16)
    try:
        for precision in ("bf16", "fp8"):
            assert_repeatable(Case(replace(REPEATED, precision=precision), (256,)), "cpu")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
def test_calls_on_cuda_give_equal_bits():
    assert_repeatable(Case(REPEATED, (256,)), "cuda")


def test_num_tokens_device_and_out():
    problem = Problem(48, 32, 7, 3)
    inputs, weights = make_inputs(problem, 20), make_weights(problem)
    arguments = inputs.x, inputs.topk_ids, inputs.topk_weights, weights
    for name in ("staged", "reference"):
        backend = make_backend(name, problem, device="cpu")
        whole, _ = backend.forward(Call(*arguments))
        out = torch.full_like(inputs.x, 7)
        count = torch.tensor([13], dtype=torch.int32)
        y, _ = backend.forward(Call(*arguments, out=out, num_tokens_device=count))
        assert y is out
        assert torch.equal(y[:13], whole[:13])
        assert not y[13:].any()


def test_weights_of_dropped_routes_may_be_nan():
    problem = Problem(48, 32, 7, 3)
    inputs, weights = make_inputs(problem, 20, routing="dropped"), make_weights(problem)
    dropped = (inputs.topk_ids < 0) | (inputs.topk_ids >= 7)
    assert dropped.any()
    scores = inputs.topk_weights
    layer = Layer(problem, backend="staged")
    clean = layer(inputs.x, inputs.topk_ids, scores, weights)
    nan = scores.masked_fill(dropped, float("nan"))
    assert torch.equal(layer(inputs.x, inputs.topk_ids.int(), nan, weights), clean)


def train_many(rank, ranks):
    """One step of this rank's part of the tokens, or (ranks 1) of all of them; y before and after, gradients."""
    group = dist.group.WORLD if ranks > 1 else "alone"
    layer = MegaMoE(16, 16, 20, 2, bias=True, backend="staged", init_seed=3, group=group)
    i = make_inputs(Problem(16, 16, 20, 2), 48)
    part = slice(3 * rank, 3 * rank + 3) if ranks > 1 else slice(None)
    x, ids, scores = i.x[part].clone().requires_grad_(), i.topk_ids[part], i.topk_weights[part]
    y = layer(x, ids, scores)
    (y.float() ** 2).sum().backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    with torch.no_grad():
        after = layer(x, ids, scores)
    return {"y": y.detach(), "after": after, "x": x.grad, **grads}


def test_sixteen_ranks_train_as_one_does():
    """More than the kernel's window has room for: "mega" and "emulate" refuse them before memory is taken."""
    expected = train_many(0, 1)
    found = launch(train_many, 16, 16, timeout_s=100)
    assert not torch.equal(expected["y"], expected["after"])
    for name, value in expected.items():
        assert_close(torch.cat([of_rank[name] for of_rank in found]), value, relative=1e-2)
    large = Problem(16, 16, 20, 2, ep_size=16)
    reason = "ep_size is 16, expected 1..8 for the kernel's window"
    assert large.why_no_window() == reason
    for make in (EmulateBackend, window_regions):
        with pytest.raises(ConfigError, match=reason):
            make(large)
    with pytest.raises(ConfigError, match="max_tokens is 4194305, expected 1..4194304 for"):
        window_regions(Problem(16, 16, 20, 2, ep_size=8, max_tokens=(1 << 22) + 1))
