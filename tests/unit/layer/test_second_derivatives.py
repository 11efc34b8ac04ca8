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
        x, w13.transpose(1, 2), OFFS, b13, **options
    ),
    "swiglu": lambda x, w13, w2, b13, b2, **options: ops.grouped_mm_swiglu(
        x, w13, OFFS, b13, **options
    ),
    "interleaved": lambda x, w13, w2, b13, b2, **options: ops.grouped_mm_swiglu(
        x, w13.unflatten(1, (I, 2)).transpose(1, 2), OFFS, b13, **options
    ),
    "downproj": lambda x, w13, w2, b13, b2, **options: ops.grouped_mm_downproj(
        x[:, :I], w2, OFFS, b2, **options
    ),
    "mlp": lambda x, w13, w2, b13, b2, **options: ops.grouped_mlp(
        x, w13, w2, OFFS, b13, b2, **options
    ),
}
WITHOUT = {  # name, scales, which leaf's gradient is differentiated again
    ("interleaved", None, 0): "grouped_mm_planes",
    ("mlp", None, 0): "grouped_activation_gradient",
    ("swiglu", "dynamic", 0): "grouped_pre_activation",
    ("interleaved", "dynamic", 0): "grouped_pre_activation",
    ("mlp", "dynamic", 0): "grouped_pre_activation",
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


@pytest.mark.parametrize("scales", [None, "dynamic"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_refused_by_name(leaves, name, scales):
    of_parameters = (2, 4) if name == "downproj" else (1, 3)
    for of in (0, *of_parameters):
        operator = WITHOUT.get((name, scales, of), "grouped_wgrad" if of else None)
        if operator is None:
            continue  # these are right, see below
        found = first(FUNCTIONS[name](*leaves, scales=scales), leaves[of])
        with pytest.raises(MegaMoEError, match=f"a result of megamoe::{operator} was differenti"):
            found.float().square().sum().backward()


def by_hand(x, w13, bias, activation):
    """The functions above for x, w13 and b13 in fp32, by autograd of matmuls."""
    parts = [x[s:e] @ w13[i].T + bias[i] for i, (s, e) in enumerate([(0, 4), (4, 4), (4, 11)])]
    gu = torch.cat([*parts, x.new_zeros(2, w13.shape[1])])
    return gu if activation is None else activation(gu)


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
def test_those_of_the_gradient_of_x_are_right(name):
    """name: of grouped_mm_swiglu's activation; None: grouped_mm."""
    torch.manual_seed(0)
    act = None if name is None else ACTIVATIONS[name]
    width = I if act is None else act.planes * I
    given = [torch.randn(M, H) * 0.3, torch.randn(3, width, H) * 0.3, torch.randn(3, width)]
    given[:2] = [t.bfloat16() for t in given[:2]]

    def ours(x, w, bias):
        if act is None:
            return ops.grouped_mm(x, w.transpose(1, 2), OFFS, bias)
        return ops.grouped_mm_swiglu(x, w, OFFS, bias, activation=name)

    found = []
    for function, dtype in ((ours, None), (lambda *t: by_hand(*t, act), torch.float32)):
        leaves = [t.to(dtype or t.dtype).requires_grad_() for t in given]
        penalty = first(function(*leaves), leaves[0]).float().square().sum()
        found.append(torch.autograd.grad(penalty, leaves))
    for mine, expected in zip(*found, strict=True):
        assert compare(mine, expected).relative < 1e-2  # of bf16 roundings on the way: 3e-3 to 8e-3
