"""Gradients of megamoe.ops differentiated again: right, or refused by the operator's name, never zero."""

import pytest
import torch

from megamoe import ops
from megamoe.core.config import ACTIVATIONS
from megamoe.core.errors import MegaMoEError
from megamoe.testing.compare import compare

OFFS = torch.tensor([4, 4, 11], dtype=torch.int32)
M, H, I = 13, 128, 32  # noqa: E741

FUNCTIONS = {
    "mm": lambda x, w13, w2, b13, b2, **options: ops.grouped_mm(
        x, w13.mT, offs=OFFS, bias=b13, **options
    ),
    "act": lambda x, w13, w2, b13, b2, **options: ops.grouped_mm_act(
        x, w13.mT, offs=OFFS, bias=b13, **options
    ),
    "interleaved": lambda x, w13, w2, b13, b2, **options: ops.grouped_mm_act(
        x, w13.mT, offs=OFFS, bias=b13, glu="interleaved", **options
    ),
    "downproj": lambda x, w13, w2, b13, b2, **options: ops.grouped_mm(
        x[:, :I], w2.mT, offs=OFFS, bias=b2, **options
    ),
    "mlp": lambda x, w13, w2, b13, b2, **options: ops.grouped_mlp(
        x, w13.mT, w2.mT, offs=OFFS, b_up=b13, b_down=b2, **options
    ),
}
WITHOUT = {  # name, recipe, which leaf's gradient is differentiated again
    ("mlp", None, 0): "grouped_activation_gradient",
}


@pytest.fixture
def leaves():
    torch.manual_seed(0)
    shapes = (M, H), (3, 2 * I, H), (3, H, I)
    rows_and_weights = [(torch.randn(s) * 0.3).bfloat16() for s in shapes]
    return [
        t.requires_grad_() for t in (*rows_and_weights, torch.randn(3, 2 * I), torch.randn(3, H))
    ]


def first(y, leaf):
    (found,) = torch.autograd.grad(y.float().square().sum(), leaf, create_graph=True)
    return found


@pytest.mark.parametrize("recipe", [None, "blockwise"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_refused_by_name(leaves, name, recipe):
    of_parameters = (2, 4) if name == "downproj" else (1, 3)
    for of in (0, *of_parameters):
        operator = WITHOUT.get((name, recipe, of), "grouped_wgrad" if of else None)
        if operator is None:
            continue  # these are right, see below
        found = first(FUNCTIONS[name](*leaves, recipe=recipe), leaves[of])
        with pytest.raises(MegaMoEError, match=f"a result of megamoe::{operator} was differenti"):
            found.float().square().sum().backward()


def by_hand(x, w13, bias, activation):
    """The functions above for x, w13 and b13 in fp32, by autograd of matmuls."""
    parts = [x[s:e] @ w13[i].T + bias[i] for i, (s, e) in enumerate([(0, 4), (4, 4), (4, 11)])]
    gu = torch.cat([*parts, x.new_zeros(2, w13.shape[1])])
    return gu if activation is None else activation(gu)


@pytest.mark.parametrize("glu", ["halves", "interleaved"])
@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
def test_those_of_the_gradient_of_x_are_right(name, glu):
    """name: of grouped_mm_act's activation; None: grouped_mm."""
    torch.manual_seed(0)
    act = None if name is None else ACTIVATIONS[name]
    width = I if act is None else act.planes * I
    given = [torch.randn(M, H) * 0.3, torch.randn(3, width, H) * 0.3, torch.randn(3, width)]
    given[:2] = [t.bfloat16() for t in given[:2]]

    def ours(x, w, bias):
        if act is None:
            return ops.grouped_mm(x, w.mT, offs=OFFS, bias=bias)
        if glu == "interleaved":  # the same columns in another order
            order = torch.arange(width).view(act.planes, I).t().flatten()
            w, bias = w[:, order], bias[:, order]
        return ops.grouped_mm_act(x, w.mT, name, offs=OFFS, bias=bias, glu=glu)

    found = []
    for function, dtype in ((ours, None), (lambda *t: by_hand(*t, act), torch.float32)):
        leaves = [t.to(dtype or t.dtype).requires_grad_() for t in given]
        penalty = first(function(*leaves), leaves[0]).float().square().sum()
        found.append(torch.autograd.grad(penalty, leaves))
    for mine, expected in zip(*found, strict=True):
        assert compare(mine, expected).relative < 1e-2  # of bf16 roundings on the way: 3e-3 to 8e-3


@pytest.mark.parametrize("name", ["mm", "act", "interleaved"])
def test_those_in_fp8_are_near_those_in_bf16(leaves, name):
    """Quantization counts as the identity there, too."""
    found = []
    for recipe in (None, "blockwise"):
        penalty = first(FUNCTIONS[name](*leaves, recipe=recipe), leaves[0]).float().square().sum()
        found.append(torch.autograd.grad(penalty, [leaves[n] for n in (0, 1, 3)]))
    for in_bf16, in_fp8 in zip(*found, strict=True):
        assert compare(in_fp8, in_bf16).relative < 0.15  # of two or three quantized operands
