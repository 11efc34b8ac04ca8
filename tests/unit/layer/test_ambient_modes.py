"""What is switched on around a backward pass, or an operator, changes no bit of it."""

from __future__ import annotations

import pytest
import torch
from ambient import default_dtype

from megamoe import ExpertWeights, Layer, MegaMoE, Problem, SharedExperts, ops
from megamoe.adapters.library_activations import candidates, matching
from megamoe.formats import fp4
from megamoe.layer.main_grad import Joint
from megamoe.testing import make_inputs, make_weights

PROBLEM = Problem(48, 32, 5, 2, max_tokens=16)
OFFS = torch.tensor([4, 4, 11], dtype=torch.int32)
HALVES = [torch.bfloat16, torch.float16]


def same(found, expected):
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def of_layer(backend, precision):
    layer = MegaMoE(
        48, 32, 5, 2, backend=backend, precision=precision, bias=True, init_seed=3, max_tokens=16
    )
    i = make_inputs(PROBLEM, 10)
    x, scores = i.x.clone().requires_grad_(), i.topk_weights.clone().requires_grad_()
    y = layer(x, i.topk_ids, scores)
    return y, torch.autograd.grad(y.float().square().sum(), [x, scores, *layer.parameters()])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_backward_within_autocast(backend, precision):
    """Recomputed gradients were products of bf16 in place of fp32, or in fp16 torch's error."""
    y, expected = of_layer(backend, precision)
    for dtype in HALVES:
        with torch.autocast("cpu", dtype):
            same(of_layer(backend, precision)[1], expected)


def operands():
    torch.manual_seed(0)
    x, w13, w2 = (torch.randn(s).bfloat16() for s in ((13, 32), (3, 64, 32), (3, 32, 32)))
    b13 = torch.randn(3, 64, dtype=torch.float32)
    return [t.requires_grad_() for t in (x, w13, w2, b13)]


def of_operators(operands, recipe):
    x, w13, w2, b13 = operands
    given = {"offs": OFFS, "recipe": recipe}
    y = ops.grouped_mlp(x, w13.mT, w2.mT, b_up=b13, **given)
    h = ops.grouped_mm_act(x, w13.mT, bias=b13, **given)
    z = ops.grouped_mm(x, w13.mT, bias=b13, **given)
    loss = sum(t.float().square().sum() for t in (y, h, z))
    sums = ops.grouped_mm(x.detach().mT, x.detach(), offs=OFFS, out_dtype=torch.float32)
    return [y, h, z, sums, *torch.autograd.grad(loss, operands)]


@pytest.mark.parametrize("recipe", [None, "blockwise"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float64])
def test_operators_sum_in_fp32_whatever_the_default_is(dtype, recipe):
    """In fp16 their gradients were infinite, in bf16 rounded twice."""
    given = operands()
    expected = of_operators(given, recipe)
    with default_dtype(dtype):
        same(of_operators(given, recipe), expected)
    with torch.autocast("cpu", torch.bfloat16):
        same(of_operators(given, recipe), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_made_in_fp32_stays_so(dtype):
    """What a shared expert, or a host's activation, is made with; sums of joined weights; numbers of FP4."""
    shared = SharedExperts(Problem(48, 32, 5, 2, max_tokens=16, bias=True), 64)
    whole = make_weights(Problem(48, 64, 1, 1), quantize=False)
    given = type(whole)(whole.w13[0], whole.w2[0])
    ids, scores = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.float32)
    tried = candidates(True)
    with default_dtype(dtype):
        parts = shared.parts(given)
        assert shared.routes(ids, scores)[1].dtype == torch.float32
        assert matching(tried[0], tried, "a host") == tried[0]
        joint = Joint([torch.nn.Parameter(whole.w2)], lambda t: [t], lambda parts: None)
        joint.parameters[0].main_grad = torch.zeros(whole.w2.shape, dtype=torch.float32)
        assert joint.target(whole.w2, set()).dtype == torch.float32
        numbers = fp4.unpack(torch.zeros(1, 16, dtype=torch.uint8))
    assert parts.b13.dtype == parts.b2.dtype == numbers.dtype == torch.float32


def of_shared():
    shared, i = SharedExperts(PROBLEM, 64), make_inputs(PROBLEM, 10)
    given = shared.split(make_weights(shared.problem, quantize=False))
    leaves = [[t.clone().requires_grad_() for t in (half.w13, half.w2)] for half in given]
    weights = shared.join(*(ExpertWeights(*half) for half in leaves))  # copied
    call = i.x, *shared.routes(i.topk_ids, i.topk_weights), weights
    layer = Layer(shared.problem, backend="staged")
    y = layer(*call)
    return [y, *torch.autograd.grad(y.float().square().sum(), [*leaves[0], *leaves[1]])]


@pytest.mark.parametrize("dtype", HALVES)
def test_shared_experts_within_autocast(dtype):
    """torch joins no bf16 under autocast to fp16."""
    expected = of_shared()
    with torch.autocast("cpu", dtype):
        same(of_shared(), expected)
