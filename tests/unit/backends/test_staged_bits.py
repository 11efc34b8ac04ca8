"""`staged`, which judges the other backends, rounds where docs/numerics.md says: equal bits, not close ones.

With the numbers here every sum is exact in fp32, in whatever order: small integers, powers of two, one-hot matrices.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megamoe import ExpertWeights, Layer, Problem
from megamoe.backends import reference
from megamoe.core.config import ACTIVATIONS
from megamoe.testing import launch

BASE = Problem(144, 144, 5, 2, max_tokens=48, bias=True)
TOKENS = 16
NAMES = ("w13", "w2", "b13", "b2")


def integers(*shape, most=7, share=1.0):
    """Return bf16 integers in -most..most, but for a share of them zeros."""
    kept = torch.rand(shape) < share
    return (torch.randint(-most, most + 1, shape) * kept).bfloat16()


def one_hot(*shape, value=7.0):
    """Return matrices with one element in each row."""
    w = torch.zeros(shape)
    return w.scatter(-1, torch.randint(shape[-1], (*shape[:-1], 1)), value).bfloat16()


def exact_layer(problem):
    """Return weights of all experts. A 7 in each block makes its scale a power of two."""
    torch.manual_seed(5)
    experts, planes = problem.num_experts, problem.activation.planes
    width, hidden = problem.intermediate, problem.hidden
    w13 = integers(experts, planes * width, hidden, share=0.1) / 16
    w13[:, ::16, ::16] = 7 / 16
    b13, b2 = (integers(experts, n).float() for n in (planes * width, hidden))
    return ExpertWeights(w13, one_hot(experts, hidden, width), b13, b2)


def exact_call(problem, rank=0):
    """Return x, ids and weights whose products have bits that bf16 has not."""
    torch.manual_seed(rank)
    x = integers(TOKENS, problem.hidden, share=0.2)
    x[:, ::16] = 7
    ids = torch.rand(TOKENS, problem.num_experts).topk(problem.top_k)[1]
    return x, ids, (2 * torch.randint(512, ids.shape) + 1) / 1024


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_is_the_oracles(name, precision):
    problem = replace(BASE, activation=name, precision=precision)
    masters, call = exact_layer(problem), exact_call(problem)
    y = Layer(problem, backend="staged")(*call, masters)
    weights = masters.quantized(problem) if precision == "fp8" else masters
    (expected,) = reference.forward(problem, *([t] for t in call), [weights])["y"]
    assert len(expected.unique()) > 500
    assert torch.equal(y, expected)


SQUARES = Problem(48, 32, 5, 4, max_tokens=4 * TOKENS, bias=True, activation="relu2")


def small_layer():
    torch.manual_seed(5)
    shapes = (5, 32, 48), (5, 48, 32)
    matrices = [integers(*shape, most=3, share=0.2) for shape in shapes]
    return ExpertWeights(*matrices, *(integers(5, n, most=3).float() for n in (32, 48)))


def small_call(rank):
    torch.manual_seed(rank)
    ids = torch.rand(TOKENS, 5).topk(4)[1]
    dy = integers(TOKENS, 48, most=3, share=0.3)
    return integers(TOKENS, 48, most=3, share=0.4), ids, torch.randint(1, 512, ids.shape) / 512, dy


def gradients(layer, weights, x, ids, scores, dy):
    """Return y and all gradients."""
    leaves = {"x": x, "scores": scores, **weights.named()}
    leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
    given = ExpertWeights(*(leaves[n] for n in NAMES))
    y = layer(leaves["x"], ids, leaves["scores"], given)
    y.backward(dy)
    return {"y": y.detach(), **{n: t.grad for n, t in leaves.items()}}


def rounded(t):
    return t.bfloat16().double()


def by_formulas(weights, x, ids, scores, dy):
    """The same, token by token in fp64 with the roundings of docs/numerics.md; relu(g)^2 has no exponentials."""
    w13, w2, b13, b2, x, s, dy = (t.double() for t in (*weights.named().values(), x, scores, dy))
    ys, found = torch.zeros_like(x), {n: torch.zeros_like(t) for n, t in weights.named().items()}
    found = {n: t.double() for n, t in found.items()} | {"x": ys.clone(), "scores": 0 * s}
    for t, k in [(t, k) for t in range(len(ids)) for k in range(ids.shape[1])]:
        e = int(ids[t, k])
        g = (w13[e] @ x[t] + b13[e]).clamp(min=0)
        h = rounded(g**2)
        row = rounded(w2[e] @ h + b2[e])
        ys[t] += s[t, k] * row
        found["scores"][t, k] = row @ dy[t]
        d_row = rounded(s[t, k] * dy[t])
        dg = rounded(w2[e].T @ d_row) * 2 * g
        found["x"][t] += rounded(w13[e].T @ dg)
        for name, d in (("w2", d_row[:, None] * h), ("b2", d_row)):
            found[name][e] += d
        for name, d in (("w13", dg[:, None] * x[t]), ("b13", dg)):
            found[name][e] += d
    types = {"x": torch.bfloat16, "w13": torch.bfloat16, "w2": torch.bfloat16}
    found = {n: d.to(types.get(n, torch.float32)) for n, d in found.items()}
    return {"y": ys.bfloat16(), **found}


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [n for n, t in expected.items() if not (t.any() and torch.equal(found[n], t))]


@pytest.fixture(scope="module")
def expected():
    """Of three ranks' tokens, on one."""
    columns = zip(*(small_call(rank) for rank in range(3)), strict=True)
    return by_formulas(small_layer(), *map(torch.cat, columns))


def test_gradients_are_those_of_the_formulas(expected):
    call = map(torch.cat, zip(*(small_call(rank) for rank in range(3)), strict=True))
    found = gradients(Layer(SQUARES, backend="staged"), small_layer(), *call)
    assert not differing(found, expected)


def on_three_ranks(rank):
    group = dist.group.WORLD
    problem = replace(SQUARES, ep_size=3, rank=rank)
    layer = Layer(problem, group=group, backend="staged")
    begin = problem.expert_begin()
    held = slice(begin, begin + problem.num_local_experts())
    mine = ExpertWeights(*(t[held] for t in small_layer().named().values()))
    return gradients(layer, mine, *small_call(rank)), held


def test_three_ranks_give_the_bits_of_one(expected):
    for rank, (found, held) in enumerate(launch(on_three_ranks, 3, timeout_s=100)):
        tokens = slice(rank * TOKENS, (rank + 1) * TOKENS)
        mine = {n: t[held if n in NAMES else tokens] for n, t in expected.items()}
        assert not differing(found, mine)
