"""megamoe.ops by torch's operations: values, gradients, torch.compile, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from megamoe import ops
from megamoe.config import ACTIVATIONS
from megamoe.errors import ArgumentError, ConfigError
from megamoe.testing.compare import compare

OFFS = torch.tensor([4, 4, 11], dtype=torch.int32)
M, H, I = 13, 24, 16  # noqa: E741


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def near(found: Tensor, expected: Tensor, limit: float = 4e-3) -> None:
    difference = compare(found, expected)
    assert difference.relative < limit, difference


def loop(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times w [E, K, N] by hand."""
    parts = [x[s:e] @ w[i] for i, (s, e) in enumerate([(0, 4), (4, 4), (4, 11)])]
    if bias is not None:
        parts = [p + b.flatten() for p, b in zip(parts, bias, strict=True)]
    return torch.cat([*parts, x.new_zeros(2, w.shape[2])])


def mlp(act, x, w13, w2, b13, b2):
    h = act(loop(x, w13.flatten(1, -2).transpose(1, 2), b13))
    return loop(h.to(x.dtype), w2.transpose(1, 2), b2)


def operands(act, bias=True):
    p = act.planes
    w = rand(M, H), rand(3, p * I, H), rand(3, H, I)
    return *w, *((torch.randn(3, p * I), torch.randn(3, H)) if bias else (None, None))


def gradients(function, tensors):
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(t.grad for t in leaves if t is not None)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_mlp(name, bias):
    act = ACTIVATIONS[name]
    tensors = operands(act, bias)
    found = gradients(
        lambda x, w13, w2, b13, b2: ops.grouped_mlp(x, w13, w2, OFFS, b13, b2, activation=name),
        tensors,
    )
    wide = [None if t is None else t.float() for t in tensors]
    for f, e in zip(found, gradients(lambda *t: mlp(act, *t), wide), strict=True):
        assert f.shape == e.shape
        near(f, e, 1.2e-2)  # dy, pre-activations, h and dgu are rounded


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_product_has_gradients_in_the_layout_of_its_weights(columns, bias):
    w = rand(3, H, I) if columns else rand(3, I, H).transpose(1, 2)
    tensors = [rand(M, H), w, torch.randn(3, I) if bias else None]
    found = gradients(lambda x, w, b: ops.grouped_mm(x, w, OFFS, b), tensors)
    wide = [None if t is None else t.float() for t in tensors]
    for f, e in zip(found, gradients(loop, wide), strict=True):
        near(f, e)
    h, w2 = rand(M, I), rand(3, H, I)
    near(ops.grouped_mm_downproj(h, w2, OFFS), loop(h.float(), w2.transpose(1, 2).float()))


def test_activation_alone_and_its_saved_values_have_gradients():
    act = ACTIVATIONS["swiglu"]
    x, w13, _, b13, _ = operands(act)

    def ours(x, w13, b13):
        h, gu = ops.grouped_mm_swiglu(x, w13, OFFS, b13, save_pre_activation=True)
        return torch.cat((h, gu.flatten(1)), 1)

    def plain(x, w13, b13):
        gu = loop(x, w13.transpose(1, 2), b13)
        return torch.cat((act(gu), gu), 1)

    found = gradients(ours, (x, w13, b13))
    expected = gradients(plain, (x.float(), w13.float(), b13))
    for f, e in zip(found, expected, strict=True):
        near(f[:11] if f.shape[0] == M else f, e[:11] if e.shape[0] == M else e, 6e-3)
    h = ops.grouped_mm_swiglu(x, w13.unflatten(1, (2, I)), OFFS, b13.unflatten(1, (2, I)))
    assert torch.equal(h, found[0][:, :I])


def test_a_dense_mlp_is_one_expert():
    act = ACTIVATIONS["swiglu"]
    x, w13, w2 = rand(M, H), rand(1, 2 * I, H), rand(1, H, I)
    found = gradients(lambda *t: ops.grouped_mlp(*t), (x, w13, w2))

    def plain(x, w13, w2):
        return act(x @ w13[0].T) @ w2[0].T

    for f, e in zip(found, gradients(plain, [t.float() for t in (x, w13, w2)]), strict=True):
        near(f, e, 1.2e-2)


def test_weight_gradients_are_added():
    a, b = rand(M, I), rand(M, H)
    dw = ops.grouped_mm_wgrad(a, b, OFFS, dtype=torch.float32)
    into = torch.randn(3, 2 * I, H)[:, I:]  # a part of a larger tensor
    before = into.clone()
    assert ops.grouped_mm_wgrad(a, b, OFFS, out=into) is into
    near(into, before + dw, 1e-6)
    near(dw[2], a[4:11].float().T @ b[4:11].float(), 1e-6)
    assert not dw[1].any()


def test_fullgraph_forward_and_backward():
    tensors = operands(ACTIVATIONS["swiglu_oai"])
    graphs = []

    def record(graph, example):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph)

    def model(x, w13, w2, b13, b2):
        y = ops.grouped_mlp(x * 1.5, w13, w2, OFFS, b13, b2, activation="swiglu_oai")
        return ops.grouped_mm(y, w13.transpose(1, 2), OFFS)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model, fullgraph=True, backend=backend), tensors)
    for found, expected in zip(compiled, gradients(model, tensors), strict=True):
        near(found, expected)
    ours = torch.ops.megamoe
    assert len(graphs) == 2
    assert {ours.grouped_mlp.default, ours.grouped_mm.default} <= graphs[0]
    assert {ours.grouped_activation_gradient.default, ours.grouped_wgrad.default} <= graphs[1]


def test_opcheck():
    x, w13, w2, b13, b2 = operands(ACTIVATIONS["swiglu"])
    w13, numbers, ours = w13.unflatten(1, (2, I)), [1.0, 1e9, 0.0], torch.ops.megamoe
    wanted = (x.requires_grad_(), w13.requires_grad_(), w2.requires_grad_())
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for op, arguments in (
        (ours.grouped_mlp, (*wanted, OFFS, b13, b2, "clamped_swiglu", numbers, True)),
        (ours.grouped_mm, (x, w13.flatten(1, 2).transpose(1, 2), OFFS, b13)),
        (ours.grouped_activation, (x, w13, OFFS, b13, "clamped_swiglu", numbers, True)),
        (ours.grouped_wgrad_add, (rand(M, I), rand(M, H), OFFS, torch.zeros(3, I, H))),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=checks)


X, W, W2 = rand(M, H), rand(3, 2 * I, H), rand(3, H, I)
GU = rand(M, 2, I)
REFUSED = {
    "x.dtype is torch.float32": lambda: ops.grouped_mm(X.float(), W.transpose(1, 2), OFFS),
    "x.shape is [1, 13, 24]": lambda: ops.grouped_mm(X[None], W.transpose(1, 2), OFFS),
    "widths that are multiples of 8": lambda: ops.grouped_mm(X[:, :12], W2[:, :12], OFFS),
    "x.stride() is (1, 13)": lambda: ops.grouped_mm(rand(H, M).T, W.transpose(1, 2), OFFS),
    "x.stride() is (25, 1)": lambda: ops.grouped_mm(rand(M, 25)[:, :24], W.transpose(1, 2), OFFS),
    "x.data_ptr()": lambda: ops.grouped_mm(rand(M, 32)[:, 1:25], W.transpose(1, 2), OFFS),
    "w.shape is [3, 32, 24], expected [experts, 24, N]": lambda: ops.grouped_mm(X, W, OFFS),
    "w.shape is [24, 16], expected [experts, K, N]": lambda: ops.grouped_mm(X, W2[0], OFFS),
    "w.stride()": lambda: ops.grouped_mm(X, rand(3, H, 2 * I)[..., ::2], OFFS),
    "w.device is meta": lambda: ops.grouped_mm(X, W2.to("meta"), OFFS),
    "offs is None, expected the ends of 3 experts": lambda: ops.grouped_mm(X, W2),
    "offs.dtype is torch.int64": lambda: ops.grouped_mm(X, W2, OFFS.long()),
    "offs.shape is [2], expected [3]": lambda: ops.grouped_mm(X, W2, OFFS[:2]),
    "offs.device is meta": lambda: ops.grouped_mm(X, W2, OFFS.to("meta")),
    "bias.shape is [3, 8], expected [3, 16]": lambda: ops.grouped_mm(X, W2, OFFS, rand(3, 8)),
    "bias.dtype is torch.float64": lambda: ops.grouped_mm(X, W2, OFFS, rand(3, I).double()),
    "w_up.shape is [3, 32, 24], expected [experts, 2 * I, 16]": lambda: ops.grouped_mm_swiglu(
        X[:, :16], W, OFFS
    ),
    "activation is 'gelu'": lambda: ops.grouped_mm_swiglu(X, W, OFFS, activation="gelu"),
    "w_down.shape is [3, 32, 24]": lambda: ops.grouped_mm_downproj(rand(M, 8), W, OFFS),
    "pre_activation.shape is [13, 32]": lambda: ops.grouped_mm_dswiglu(X, W2, GU.flatten(1), OFFS),
    "pre_activation.dtype": lambda: ops.grouped_mm_dswiglu(X, W2, GU.float(), OFFS),
    "b.shape is [12, 24], expected 13 rows": lambda: ops.grouped_mm_wgrad(X, X[:12], OFFS),
    "out.shape is [3, 24, 16]": lambda: ops.grouped_mm_wgrad(X, X, OFFS, out=torch.zeros(3, H, I)),
    "out.dtype": lambda: ops.grouped_mm_wgrad(X, X, OFFS, out=torch.zeros(3, H, H).double()),
    "dtype is torch.float16": lambda: ops.grouped_mm_wgrad(X, X, OFFS, dtype=torch.float16),
    "w2.shape is [3, 16, 24], expected [3, 24, 16]": lambda: ops.grouped_mlp(
        X, W, W2.transpose(1, 2), OFFS
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_by_name(said):
    with pytest.raises((ArgumentError, ConfigError)) as caught:
        REFUSED[said]()
    assert said in str(caught.value)
