"""megamoe.ops in FP8 of bf16 operands: values and gradients against fp64, by torch's operations and by the kernel."""

import pytest
import torch
from formulas import activate
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import ScalingType as Recipe

from megamoe import ops
from megamoe.core.config import ACTIVATIONS
from megamoe.core.errors import ArgumentError
from megamoe.formats.quantization import (
    dequantize_blockwise,
    dequantize_rows,
    quantize_blockwise,
    quantize_rows,
)
from megamoe.testing import same_bits
from megamoe.testing.compare import compare

ROUNDED = 2.5e-3  # relative Frobenius error of one rounding to bf16, and fp32 sums
FP8 = 0.08  # of two products of quantized operands, 4e-2 each, beside those of the operands themselves
ENDS = [70, 70, 203]
OFFS = torch.tensor(ENDS, dtype=torch.int32)
M, H, I = 208, 144, 80  # noqa: E741


@pytest.fixture(params=["torch", "emulate"])
def machine(request, monkeypatch):
    if request.param == "emulate":
        monkeypatch.setenv("MEGAMOE_BACKEND", "emulate")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def near(found: Tensor, expected: Tensor, limit: float = ROUNDED) -> None:
    difference = compare(found, expected)
    assert difference.relative < limit, difference


def rows8(x: Tensor) -> Tensor:
    """What e4m3 makes of rows, in fp64."""
    return dequantize_rows(*quantize_rows(x)).double()


def weights8(w: Tensor, planes: int = 1) -> Tensor:
    """What e4m3 makes of [E, P*N, K], in fp64."""
    return dequantize_blockwise(*quantize_blockwise(w, planes), planes).double()


def by_expert(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] times w [E, K, N]; zeros behind."""
    parts = [x[s:e] @ w[i] for i, (s, e) in enumerate(zip([0, *ENDS], ENDS, strict=False))]
    return torch.cat([*parts, x.new_zeros(len(x) - ENDS[-1], w.shape[2])])


def outer(a: Tensor, b: Tensor) -> Tensor:
    pairs = zip([0, *ENDS], ENDS, strict=False)
    return torch.stack([a[s:e].double().T @ b[s:e].double() for s, e in pairs])


def sums(a: Tensor) -> Tensor:
    return outer(a, torch.ones(len(a), 1))[..., 0]


def gradients(function, tensors, dy=None):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)) if dy is None else dy
    dy = dy.to(y.dtype)
    y.backward(dy)
    return [y.detach(), *(None if t is None else t.grad for t in leaves)], dy


@pytest.mark.parametrize("major", ["K", "N"])
@pytest.mark.parametrize("bias", [False, True])
def test_product(machine, major, bias):
    n = 272
    stored = rand(3, n, H) if major == "K" else rand(3, H, n).transpose(1, 2)  # [E, N, K]
    x, b = rand(M, H), torch.randn(3, n) if bias else None
    x[ENDS[-1] :] = float("nan")  # of no expert

    def ours(x, w, b):
        return ops.grouped_mm(x, w.mT, offs=OFFS, bias=b, recipe="blockwise")

    (y, dx, dw, db), dy = gradients(ours, (x, stored, b))
    w8 = weights8(stored)
    expected = by_expert(rows8(x), w8.transpose(1, 2))
    for e, (start, end) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
        expected[start:end] += b[e] if bias else 0
    near(y, expected)
    near(dx, by_expert(rows8(dy), w8))
    near(dw, outer(dy, x))
    if bias:
        near(db, sums(dy))
    wide = [t if t is None else t.double() for t in (x.nan_to_num(), stored, b)]
    plain, _ = gradients(lambda x, w, b: by_expert(x, w.transpose(1, 2)), wide, dy.double())
    near(dx, plain[1], FP8)
    assert compare(dx, plain[1]).relative > 10 * ROUNDED  # it is FP8


def exact_rows(*shape: int) -> Tensor:
    """Numbers that e4m3 has, 448 among each 128: quantizing changes nothing, in rows and in blocks."""
    x = torch.randint(-8, 9, shape).float()
    x[..., ::128] = 448.0
    return x.bfloat16()


@pytest.mark.parametrize("major", ["K", "N"])
def test_where_quantizing_is_exact_gradients_are_those_in_bf16(machine, major):
    """No tolerance: the same numbers go into the same sums, whose products and results fp32 holds."""
    x, w, dy = exact_rows(M, H), exact_rows(3, H, 256), exact_rows(M, 256)
    stored = w.transpose(1, 2).contiguous().transpose(1, 2) if major == "K" else w
    options = {"offs": OFFS, "recipe": "blockwise"}
    found, _ = gradients(lambda *t: ops.grouped_mm(*t, **options), (x, stored), dy)
    expected, _ = gradients(lambda *t: ops.grouped_mm(*t, offs=OFFS), (x, stored), dy)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)


def formula(act, x, w13, b13, dh):
    """h unrounded, and of dh the gradient in pre-activations as they are rounded, and h of these; fp64."""
    flat = w13.flatten(1, -2)
    gu = by_expert(rows8(x), weights8(flat, act.planes).transpose(1, 2))
    for e, (start, end) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
        gu[start:end] += 0 if b13 is None else b13[e].flatten()
    stored = gu.bfloat16().double().requires_grad_()
    again = activate(act, stored)
    (dgu,) = torch.autograd.grad(again, stored, dh)
    return act(gu), dgu.bfloat16(), again.bfloat16()


def of_first(act, dgu, x, w13):
    """Gradients of x, w13 and b13."""
    w8 = weights8(w13.flatten(1, -2), act.planes).unflatten(1, (act.planes, -1))
    planes = dgu.unflatten(1, (act.planes, -1))
    dx = sum(by_expert(rows8(planes[:, p]), w8[:, p]) for p in range(act.planes))
    return dx, outer(dgu, x), sums(dgu)


CASES = [("swiglu", 80), ("swiglu", 128), ("swiglu_oai", 80), ("relu2", 80)]
SLOW = [pytest.param(name, 80, marks=pytest.mark.slow) for name in ACTIVATIONS]


@pytest.mark.parametrize(("name", "width"), [*CASES, *SLOW])
def test_activation(name, width):
    act = ACTIVATIONS[name]
    x, w13 = rand(M, H), rand(3, act.planes * width, H, scale=0.2)
    b13 = torch.randn(3, act.planes * width)

    def ours(x, w13, b13):
        return ops.grouped_mm_act(x, w13.mT, name, offs=OFFS, bias=b13, recipe="blockwise")

    (h, dx, dw, db), dh = gradients(ours, (x, w13, b13))
    expected, dgu, _ = formula(act, x, w13, b13, dh.double())
    near(h, expected)
    for found, e in zip((dx, dw, db), of_first(act, dgu, x, w13), strict=True):
        near(found, e, 2 * ROUNDED)  # roundings of dgu at ties, and of each plane's dx
    plain = ops.grouped_mm_act(x, w13.mT, name, offs=OFFS, bias=b13)
    near(h, plain, FP8)


MLPS = [("emulate", "swiglu", 80), ("emulate", "swiglu", 128), *[("torch", *c) for c in CASES]]
SLOW_MLPS = [pytest.param("torch", name, 80, marks=pytest.mark.slow) for name in ACTIVATIONS]


@pytest.mark.parametrize(("machine", "name", "width"), [*MLPS, *SLOW_MLPS], indirect=["machine"])
def test_mlp(machine, name, width):
    act = ACTIVATIONS[name]
    p = act.planes
    tensors = [rand(M, H), rand(3, p * width, H, scale=0.2), rand(3, H, width, scale=0.2)]
    tensors += [torch.randn(3, p * width), torch.randn(3, H)]

    def ours(x, w13, w2, b13, b2):
        options = {"b_up": b13, "b_down": b2, "recipe": "blockwise"}
        return ops.grouped_mlp(x, w13.mT, w2.mT, name, offs=OFFS, **options)

    (y, dx, dw13, dw2, db13, db2), dy = gradients(ours, tensors)
    x, w13, w2, b13, b2 = tensors
    dh = by_expert(rows8(dy), weights8(w2))
    h, dgu, again = formula(act, x, w13, b13, dh)
    expected = by_expert(rows8(h), weights8(w2).transpose(1, 2))
    for e, (start, end) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
        expected[start:end] += b2[e]
    near(y, expected, 2 * ROUNDED)  # h is quantized: sums in fp32 fall on the other side of a tie
    for found, e in zip((dx, dw13, db13), of_first(act, dgu, x, w13), strict=True):
        near(found, e, 3 * ROUNDED)  # dgu is quantized: another sum may round dh to its neighbour
    near(dw2, outer(dy, again), 2 * ROUNDED)
    near(db2, sums(dy))

    def plain(x, w13, w2, b13, b2):
        return ops.grouped_mlp(x, w13.mT, w2.mT, name, offs=OFFS, b_up=b13, b_down=b2)

    for f, e in zip((y, dx, dw13, dw2), gradients(plain, tensors)[0], strict=False):
        near(f, e, 2 * FP8)


@pytest.mark.parametrize("major", ["in", "out"])
def test_frozen_parts_and_strided_weights(machine, major):
    """Gate and up interleaved; x alone wants a gradient; the weights alone do."""
    x, w13, w2 = rand(M, H), rand(3, H, 2 * I, scale=0.2), rand(3, I, H, scale=0.2)
    if major == "in":
        w13, w2 = (w.mT.contiguous().mT for w in (w13, w2))
    both = {}
    for wanted in ("all", "x", "weights"):
        leaves = [t.clone(memory_format=torch.preserve_format) for t in (x, w13, w2)]
        for i, t in enumerate(leaves):
            t.requires_grad_(wanted == "all" or (i == 0) == (wanted == "x"))
        y = ops.grouped_mlp(*leaves, offs=OFFS, glu="interleaved", recipe="blockwise")
        y.float().square().sum().backward()
        both[wanted] = [t.grad for t in leaves]
    assert all(g is None for g in (*both["x"][1:], both["weights"][0]))
    assert same_bits(both["x"][0], both["all"][0])
    for alone, of_all in zip(both["weights"][1:], both["all"][1:], strict=True):
        assert same_bits(alone, of_all)


def test_written_arguments_are_seen():
    x, w = rand(M, H).requires_grad_(), rand(3, H, 64).requires_grad_()
    y = ops.grouped_mm(x, w, offs=OFFS, recipe="blockwise")
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_quantized_h_is_that_of_quantized_operands():
    x, w13 = rand(M, H), rand(3, 2 * I, H, scale=0.2)
    options = {"offs": OFFS, "output_dtype": torch.float8_e4m3fn}
    found = ops.grouped_mm_act(x, w13.mT, recipe="blockwise", **options)
    q, x_scale = ops.quantize(x, Recipe.BlockWise1x128, offs=OFFS)
    w8, w_scale = ops.quantize(w13.mT, Recipe.BlockWise128x128, glu="halves")
    scales = x_scale, Recipe.BlockWise1x128, w_scale, Recipe.BlockWise128x128
    for f, e in zip(found, ops.grouped_mm_act(q, w8, scales=scales, **options), strict=True):
        assert torch.equal(f.view(torch.uint8), e.view(torch.uint8))
    h, _ = ops.grouped_mm_act(x.requires_grad_(), w13.mT, recipe="blockwise", **options)
    with pytest.raises(RuntimeError, match="a quantized h has no gradient"):
        h.float().sum().backward()


def test_compiled():
    tensors = (
        rand(M, H),
        rand(3, 2 * I, H, scale=0.2),
        rand(3, H, I, scale=0.2),
        torch.randn(3, 2 * I),
    )
    graphs = []

    def record(graph, example):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph)

    def model(x, w13, w2, b13):
        options = {"offs": OFFS, "recipe": "blockwise"}
        y = ops.grouped_mlp(x * 1.5, w13.mT, w2.mT, b_up=b13, **options)
        h = ops.grouped_mm_act(y, w13.mT, bias=b13, **options)
        return ops.grouped_mm(h, w2.mT, **options)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for found, expected in zip(
        gradients(compiled, tensors)[0], gradients(model, tensors)[0], strict=True
    ):
        near(found, expected, 1e-2)
    ours = torch.ops.megamoe
    assert {ours.grouped_mlp.default, ours.grouped_mm.default} <= graphs[0]
    assert {ours.grouped_wgrad.default, ours.grouped_mm.default} <= graphs[1]


def test_opcheck():
    x, w13 = rand(M, H).requires_grad_(), rand(3, H, 2 * I).requires_grad_()
    w2, mine = rand(3, I, H).requires_grad_(), torch.ops.megamoe
    dynamic, act = (None, None, True), ("clamped_swiglu", [1.0, 1e9, 0.0], True)
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for op, arguments in (
        (mine.grouped_mm, (x, w13, OFFS, 1, None, *dynamic)),
        (mine.grouped_mm, (x, w13, OFFS, 1, None, *dynamic, False, *act, False)),
        (mine.grouped_mm, (x, w13, OFFS, 1, None, *dynamic, True, *act, True)),
        (mine.grouped_mlp, (x, w13, w2, OFFS, 1, None, None, *act, False, True)),
        (mine.grouped_mlp, (x, w13, w2, OFFS, 1, None, None, *act, True, True)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=checks)


X, W2, FP8_CALL = rand(M, H), rand(3, H, 24), {"offs": OFFS, "recipe": "blockwise"}
REFUSED = {
    "recipe is 'static', expected 'blockwise'": lambda: ops.grouped_mm(
        X, W2, offs=OFFS, recipe="static"
    ),
    "RowWise: 1>, expected 'blockwise' or None": lambda: ops.grouped_mlp(
        X, rand(3, H, 2 * I), rand(3, I, H), offs=OFFS, recipe=Recipe.RowWise
    ),
    "mat_b.shape is [3, 144, 24], expected widths that are multiples of 16": lambda: (
        ops.grouped_mm(X, W2, **FP8_CALL)
    ),
    "mat_b.shape is [3, 24, 144], expected widths": lambda: ops.grouped_mm(
        rand(M, 24), W2.mT, **FP8_CALL
    ),
    "mat_b.shape is [3, 144, 48], expected widths": lambda: ops.grouped_mm_act(
        X, rand(3, H, 48), **FP8_CALL
    ),
    "w_up.shape is [3, 144, 48], expected widths": lambda: ops.grouped_mlp(
        X, rand(3, H, 48), W2.mT, **FP8_CALL
    ),
    "mat_a.dtype is torch.float8_e4m3fn, expected bfloat16": lambda: ops.grouped_mm(
        X.to(torch.float8_e4m3fn), W2, **FP8_CALL
    ),
    "mat_b.shape is [208, 144], expected [experts, K, N] beside": lambda: ops.grouped_mm(
        X.mT, X, **FP8_CALL
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_by_name(said):
    with pytest.raises(ArgumentError) as caught:
        REFUSED[said]()
    assert said in str(caught.value)
