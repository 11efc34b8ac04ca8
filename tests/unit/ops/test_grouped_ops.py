"""megamoe.ops by torch's operations: values, gradients, torch.compile, and what is refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import ScalingType as Recipe

from megamoe import ops
from megamoe.backends.reference import activation_gradient as oracle
from megamoe.core.config import ACTIVATIONS
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.formats.quantization import (
    dequantize_blockwise,
    dequantize_rows,
    num_groups,
    quantize_blockwise,
)
from megamoe.ops import operators, reference
from megamoe.ops.groups import Groups, tails
from megamoe.ops.scales import by_block, by_row
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


def undefined_without_rows(a, b, offs, plain=torch._grouped_mm):
    out = plain(a, b, offs=offs)
    if b.dim() == 2:  # weight gradients
        out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
    return out


@pytest.fixture(params=["by expert", "by torch's grouped_mm"])
def stand_in(request, monkeypatch):
    """What does without a kernel on CPUs, and on GPUs."""
    if request.param != "by expert":
        monkeypatch.setattr(reference, "_grouped", lambda x: x.dtype == torch.bfloat16)
        monkeypatch.setattr(Groups, "slices", None)
        monkeypatch.setattr(torch, "_grouped_mm", undefined_without_rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_mlp(name, bias, stand_in):
    act = ACTIVATIONS[name]
    tensors = operands(act, bias)
    found = gradients(
        lambda x, w13, w2, b13, b2: ops.grouped_mlp(
            x, w13.mT, w2.mT, name, offs=OFFS, b_up=b13, b_down=b2
        ),
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
    found = gradients(lambda x, w, b: ops.grouped_mm(x, w, offs=OFFS, bias=b), tensors)
    wide = [None if t is None else t.float() for t in tensors]
    for f, e in zip(found, gradients(loop, wide), strict=True):
        near(f, e)
    leaves = [t.requires_grad_() for t in tensors[1:] if t is not None]
    y = ops.grouped_mm(tensors[0], w, offs=OFFS, bias=tensors[2])
    (dw, *_) = torch.autograd.grad(y.sum(), leaves)
    assert dw.stride() == w.stride()  # autograd would copy another


@pytest.mark.parametrize("ends", [[-5, 7, 3, 9], [200, 1, 300, 2], [0, 0, 0, 0], [7, 7, 11, 11]])
def test_any_ends(ends, stand_in):
    """Rows of no expert are zeros whatever they hold, no ends are another expert's, NaN stays where it is."""
    x, dy, w, offs = rand(M, H), rand(M, I), rand(4, H, I), torch.tensor(ends, dtype=torch.int32)
    kept = offs.clamp(0, M).cummax(0)[0].tolist()
    x[kept[-1] :] = dy[kept[-1] :] = float("nan")
    y, dw = ops.grouped_mm(x, w, offs=offs), ops.grouped_mm(x.mT, dy, offs=offs)
    of_rows, of_none = y[: kept[-1]], y[kept[-1] :]
    assert not of_none.any()
    start = 0
    for e, end in enumerate(kept):
        near(of_rows[start:end], x[start:end].float() @ w[e].float())
        near(dw[e], x[start:end].float().T @ dy[start:end].float())
        start = end
    sums = operators.grouped_wgrad(x, dy, offs, 1, 4, False, True)[1]
    near(sums[0], x[: kept[0]].float().sum(0), 1e-6)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_the_derivative_is_the_oracles(name):
    """At the clamps' limits and behind them, far out, and of NaN too."""
    act, p = ACTIVATIONS[name], ACTIVATIONS[name].planes
    edges = torch.tensor([-30.0, -7.25, -7, -0.5, 0, 0.5, 7, 7.25, 30, float("nan")])
    gu = torch.cartesian_prod(edges, edges)[:, :p].bfloat16()  # [100, P], of one column
    dy, w = torch.ones(100, 8).bfloat16(), torch.full((1, 8, 8), 0.125).bfloat16()
    gu = gu[..., None].expand(-1, -1, 8).flatten(1).contiguous()
    expected = oracle(act, gu.double(), torch.ones(100, 8).double())
    for found, of_oracle in zip(ops.grouped_mm_dact(dy, w, gu, act), expected, strict=True):
        assert torch.allclose(found.double(), of_oracle, rtol=4e-3, atol=1e-6, equal_nan=True)


def test_activation_alone_and_its_saved_values_have_gradients():
    act = ACTIVATIONS["swiglu"]
    x, w13, _, b13, _ = operands(act)

    def ours(x, w13, b13):
        return torch.cat(ops.grouped_mm_act(x, w13.mT, offs=OFFS, bias=b13, return_pre=True), 1)

    def plain(x, w13, b13):
        gu = loop(x, w13.transpose(1, 2), b13)
        return torch.cat((act(gu), gu), 1)

    found = gradients(ours, (x, w13, b13))
    expected = gradients(plain, (x.float(), w13.float(), b13))
    for f, e in zip(found, expected, strict=True):
        near(f[:11] if f.shape[0] == M else f, e[:11] if e.shape[0] == M else e, 6e-3)


def test_a_dense_mlp_is_one_expert():
    act = ACTIVATIONS["swiglu"]
    x, w13, w2 = rand(M, H), rand(1, 2 * I, H), rand(1, H, I)
    found = gradients(lambda x, w, v: ops.grouped_mlp(x, w.mT, v.mT), (x, w13, w2))
    flat = gradients(lambda x, w, v: ops.grouped_mlp(x, w.mT, v.mT), (x, w13[0], w2[0]))
    assert all(torch.equal(f, e.view_as(f)) for f, e in zip(flat, found, strict=True))

    def plain(x, w13, w2):
        return act(x @ w13[0].T) @ w2[0].T

    for f, e in zip(found, gradients(plain, [t.float() for t in (x, w13, w2)]), strict=True):
        near(f, e, 1.2e-2)


def test_weight_gradients_are_added():
    a, b = rand(M, I), rand(M, H)
    dw = ops.grouped_mm(a.mT, b, offs=OFFS, out_dtype=torch.float32)
    into = torch.randn(3, 2 * I, H)[:, I:]  # a part of a larger tensor
    before = into.clone()
    assert ops.grouped_mm_wgrad(a.mT, b, offs=OFFS, out=into) is into
    near(into, before + dw, 1e-6)
    near(dw[2], a[4:11].float().T @ b[4:11].float(), 1e-6)
    assert not dw[1].any()


BY_GROUP = (Recipe.BlockWise1x128, Recipe.BlockWise128x128)
RANGES = [(0, 130), (130, 130), (130, 190)]
OFFS8 = torch.tensor([130, 130, 190], dtype=torch.int32)


def fp8_operands(act, recipes=BY_GROUP, rows=200, hidden=144, width=272):
    """Rows, both weights and their scales; RowWise: of very different sizes."""
    x = rand(rows, hidden)
    w_up, w_down = rand(3, hidden, act.planes * width) * 0.1, rand(3, width, hidden)
    if recipes[0] == Recipe.RowWise:
        x *= torch.logspace(-2, 2, rows)[:, None]
        w_up *= torch.logspace(-1, 1, act.planes * width)
        w_down *= torch.logspace(0, 2, hidden)
    glu = {"glu": "halves"} if recipes == BY_GROUP and act.gated else {}
    first = (
        *ops.quantize(x.bfloat16(), recipes[0], offs=OFFS8),
        *ops.quantize(w_up.bfloat16(), recipes[1], **glu),
    )
    return first, ops.quantize(w_down.bfloat16(), recipes[1])


def scaled(a, a_scale, b, b_scale, recipes, **options):
    """The order of torch's arguments."""
    return ops.scaled_grouped_mm(a, b, a_scale, recipes[0], b_scale, recipes[1], **options)


def scaled_act(a, a_scale, b, b_scale, recipes=BY_GROUP, **options):
    scales = a_scale, recipes[0], b_scale, recipes[1]
    return ops.grouped_mm_act(a, b, scales=scales, **options)


def numbers(q, scale, recipe, planes=1):
    """Weights as they are in e4m3, fp32."""
    if recipe == Recipe.RowWise:
        return q.float() * scale[:, None]
    return dequantize_blockwise(q.mT.contiguous(), scale.mT, planes).mT


def numbers_of_rows(q, scale, recipe, offs=OFFS8):
    of_rows = by_row(scale, Groups(offs), q, len(offs)) if scale.shape[-1] > len(q) else scale
    by_token = recipe == Recipe.RowWise
    return q.float() * of_rows.reshape(-1, 1) if by_token else dequantize_rows(q, of_rows)


def by_range(x, w):
    return torch.cat([x[s:e] @ w[i] for i, (s, e) in enumerate(RANGES)])


@pytest.mark.parametrize("hidden", [144, 272])
@pytest.mark.parametrize("recipes", [BY_GROUP, (Recipe.RowWise, Recipe.RowWise)])
@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_fp8(name, recipes, hidden):
    """In groups and blocks, two and three; and by row and column; h is in groups of 128 columns."""
    act = ACTIVATIONS[name]
    first, (w2, s2) = fp8_operands(act, recipes, hidden=hidden)
    options = {"activation": name, "offs": OFFS8}
    h, h_scale = scaled_act(*first, recipes, output_dtype=torch.float8_e4m3fn, **options)
    plain = scaled_act(*first, recipes, **options)
    wide, matrices = (
        numbers_of_rows(*first[:2], recipes[0]),
        numbers(*first[2:], recipes[1], act.planes),
    )
    expected = act(by_range(wide, matrices))
    near(plain[:190], expected)
    assert not plain[190:].any()
    assert h_scale.shape == (num_groups(272), 128 * (200 // 128 + 3))
    h_wide = numbers_of_rows(h, h_scale, BY_GROUP[0])
    near(h_wide[:190], expected, 4e-2)
    y = scaled(h, h_scale, w2, s2, (BY_GROUP[0], recipes[1]), offs=OFFS8)
    near(y[:190], by_range(h_wide, numbers(w2, s2, recipes[1])))
    assert not y[190:].any()
    q, q_scale = ops.quantize(h_wide, recipes[0], offs=OFFS8)
    y = scaled(q, q_scale, w2, s2, recipes, offs=OFFS8)
    again = numbers_of_rows(q, q_scale, recipes[0])
    near(y[:190], by_range(again, numbers(w2, s2, recipes[1])))


@pytest.mark.parametrize("recipes", [BY_GROUP, (Recipe.RowWise, Recipe.RowWise)])
def test_scales_may_be_as_torch_has_them(recipes):
    """Of rows not by block, of weights in any strides: the same bits."""
    act, options = ACTIVATIONS["swiglu"], {"offs": OFFS8}
    (x, x_scale, w, w_scale), _ = fp8_operands(act, recipes)
    plain = by_row(x_scale, Groups(OFFS8), torch.empty(200, 1), 3).contiguous()
    plain[190:] = 0
    plain = plain[:, 0] if recipes[0] == Recipe.RowWise else plain.t().contiguous().t()
    expected = scaled_act(x, x_scale, w, w_scale, recipes, **options)
    assert torch.equal(scaled_act(x, plain, w, w_scale.contiguous(), recipes, **options), expected)
    moved = torch.cat((plain.flatten()[:1], plain.flatten()))[1:].view(
        plain.shape
    )  # 4 bytes behind
    assert torch.equal(scaled_act(x, moved, w, w_scale, recipes, **options), expected)


def test_fp8_of_columns_that_alternate():
    """RowWise scales alternate like the columns; blocks would mix gate and up."""
    recipes = (Recipe.RowWise, Recipe.RowWise)
    (x, x_scale, w, w_scale), _ = fp8_operands(ACTIVATIONS["swiglu"], recipes)
    expected = scaled_act(x, x_scale, w, w_scale, recipes, offs=OFFS8)
    order = torch.arange(2 * 272).view(2, 272).t().flatten()
    mixed, options = w.mT[:, order].contiguous().mT, {"offs": OFFS8, "glu": "interleaved"}
    found = scaled_act(x, x_scale, mixed, w_scale[:, order], recipes, **options)
    assert torch.equal(found, expected)


def test_scales_stand_by_block():
    """Experts begin at multiples of 128, also behind one that fills its blocks; rows of no expert are nowhere."""
    offs = torch.tensor([1, 1, 257, 258], dtype=torch.int32)
    scale = torch.arange(1.0, 261.0)[:, None]
    found = by_block(scale, Groups(offs), 4)
    assert found.shape == (1, 128 * (260 // 128 + 4))
    assert found[0, 0] == 1
    assert found[0, 128:384].tolist() == scale[1:257, 0].tolist()
    assert found[0, 384] == 258
    assert torch.equal(by_row(found, Groups(offs), scale, 4)[:258], scale[:258])
    assert torch.equal(by_block(scale, Groups(None), 1)[0, :260], scale[:, 0])


def test_what_has_no_gradient_says_so():
    first, (w2, s2) = fp8_operands(ACTIVATIONS["swiglu"])
    bias, b2 = (torch.zeros(3, width, requires_grad=True) for width in (2 * 272, 144))
    e4m3 = {"output_dtype": torch.float8_e4m3fn}
    h, h_scale = scaled_act(*first, offs=OFFS8, **e4m3)
    a = rand(M, H).requires_grad_()
    results = [
        ("mm", scaled(h, h_scale, w2, s2, BY_GROUP, offs=OFFS8, bias=b2)),
        ("mm", scaled_act(*first, offs=OFFS8, bias=bias)),
        ("mm", ops.grouped_mm_act(a, rand(3, H, 2 * I), offs=OFFS, **e4m3)[0]),
        ("wgrad", ops.grouped_mm(a.mT, a, offs=OFFS)),
        ("activation_gradient", ops.grouped_mm_dact(a, rand(3, H, I), GU, offs=OFFS)[0]),
    ]
    for name, result in results:
        said = f"a result of megamoe::grouped_{name} was differentiated"
        with pytest.raises(MegaMoEError, match=said):
            result.float().sum().backward()


def test_fullgraph_forward_and_backward():
    tensors = operands(ACTIVATIONS["swiglu_oai"])
    graphs = []

    def record(graph, example):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph)

    def model(x, w13, w2, b13, b2):
        given = {"offs": OFFS, "b_up": b13, "b_down": b2}
        y = ops.grouped_mlp(x * 1.5, w13.mT, w2.mT, "swiglu_oai", **given)
        return ops.grouped_mm(y, w13.mT, offs=OFFS)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model, fullgraph=True, backend=backend), tensors)
    for found, expected in zip(compiled, gradients(model, tensors), strict=True):
        near(found, expected)
    ours = torch.ops.megamoe
    assert len(graphs) == 2
    assert {ours.grouped_mlp.default, ours.grouped_mm.default} <= graphs[0]
    assert {ours.grouped_activation_gradient.default, ours.grouped_wgrad.default} <= graphs[1]
    strided = torch.ops.aten.as_strided.default  # wrong where inductor lays weights out anew
    assert strided not in graphs[0] | graphs[1]


def marked(argument) -> str:
    written = argument.alias_info is not None and argument.alias_info.is_write
    return argument.name + "?" * (str(argument.type) == "Optional[Tensor]") + "!" * written


def test_the_operators_are_those_that_their_file_lists():
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("megamoe::grouped"):
            schema = getattr(torch.ops.megamoe, name.removeprefix("megamoe::")).default._schema
            found[name] = ", ".join(map(marked, schema.arguments))
    listed = " ".join(operators.__doc__.split())
    assert dict(re.findall(r"(megamoe::\w+)\((.*?)\)", listed)) == found


def test_opcheck():
    x, w13, w2, b13, b2 = operands(ACTIVATIONS["swiglu"])
    w13, w2, ours = w13.mT, w2.mT, torch.ops.megamoe
    wanted = (x.requires_grad_(), w13.requires_grad_(), w2.requires_grad_())
    act = "clamped_swiglu", [1.0, 1e9, 0.0], False
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for op, arguments in (
        (ours.grouped_mlp, (*wanted, OFFS, 1, b13, b2, *act, True)),
        (ours.grouped_mm, (x, w13, OFFS, 1, b13)),
        (ours.grouped_mm, (x, w13, OFFS, 1, b13, None, None, False, False, *act, True)),
        (ours.grouped_wgrad_add, (rand(M, I), rand(M, H), OFFS, 1, torch.zeros(3, I, H))),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=checks)


def fp8(recipes=BY_GROUP, function=scaled_act, **changed):
    """A call of 200 rows, [3, 144, 544], in which some arguments have changed."""
    (x, x_scale, w, w_scale), _ = fp8_operands(ACTIVATIONS["swiglu"])
    if recipes[1] == Recipe.RowWise:
        x_scale, w_scale = torch.ones(200), torch.ones(3, 544)
    x_scale, w_scale = changed.pop("scale_a", x_scale), changed.pop("scale_b", w_scale)
    return function(x, x_scale, w, w_scale, recipes, offs=OFFS8, **changed)


def fp8_mm(**changed):
    return fp8((Recipe.RowWise, Recipe.RowWise), scaled, **changed)


W_ROWS, W2_ROWS = rand(3, 2 * I, H), rand(3, I, H)
X, W, W2 = rand(M, H), W_ROWS.mT, rand(3, H, I)  # W2 and GU are of an MLP from I to H
GU, E4M3 = rand(M, 2 * I), rand(16, 16).to(torch.float8_e4m3fn)
SUMS = rand(3, H, H)
MXFP8 = (Recipe.BlockWise1x32, Recipe.BlockWise1x32)
REFUSED = {
    "mat_a.dtype is torch.float32": lambda: ops.grouped_mm(X.float(), W, offs=OFFS),
    "mat_a.shape is [1, 13, 24]": lambda: ops.grouped_mm(X[None], W, offs=OFFS),
    "widths that are multiples of 8": lambda: ops.grouped_mm(X[:, :12], W2[:, :12], offs=OFFS),
    "mat_a.stride() is (25, 1)": lambda: ops.grouped_mm(rand(M, 25)[:, :24], W, offs=OFFS),
    "mat_a.data_ptr()": lambda: ops.grouped_mm(rand(M, 32)[:, 1:25], W, offs=OFFS),
    "mat_b.shape is [3, 32, 24], expected [experts, 24, N]": lambda: ops.grouped_mm(
        X, W.mT, offs=OFFS
    ),
    "mat_b.shape is [24], expected [experts, K, N]": lambda: ops.grouped_mm(
        X, W2[0, :, 0], offs=OFFS
    ),
    "mat_a.mT.shape is [13], expected [rows, columns]": lambda: ops.grouped_mm(
        X[:, 0], X, offs=OFFS
    ),
    "mat_b.shape is [13, 24], expected [experts, K, N] beside bias": lambda: ops.grouped_mm(
        X.mT, X, offs=OFFS, bias=rand(3, H)
    ),
    "out_dtype is torch.float32, expected None or torch.bfloat16": lambda: ops.grouped_mm(
        X, W2, offs=OFFS, out_dtype=torch.float32
    ),
    "out_dtype is torch.float16, expected None or torch.bfloat16 or torch.float32": lambda: (
        ops.grouped_mm(X.mT, X, offs=OFFS, out_dtype=torch.float16)
    ),
    "mat_b.stride()": lambda: ops.grouped_mm(X, rand(3, H, 2 * I)[..., ::2], offs=OFFS),
    "mat_b.device is meta": lambda: ops.grouped_mm(X, W2.to("meta"), offs=OFFS),
    "offs is None, expected the ends of 3 experts": lambda: ops.grouped_mm(X, W2),
    "mat_b.shape is [3, 24, 8], expected N a multiple of 16": lambda: ops.grouped_mm(
        X, W2[..., :8], offs=OFFS, out_dtype=torch.float8_e4m3fn
    ),
    "row_scale.shape is [3], expected [13]": lambda: ops.grouped_mlp(
        X, W, rand(3, I, H), offs=OFFS, row_scale=torch.ones(3)
    ),
    "alignment is 96, expected a power of two": lambda: ops.grouped_mm(
        X, W2, offs=OFFS, alignment=96
    ),
    "offs.dtype is torch.int64": lambda: ops.grouped_mm(X, W2, offs=OFFS.long()),
    "offs.shape is [2], expected [3]": lambda: ops.grouped_mm(X, W2, offs=OFFS[:2]),
    "offs.stride() is (2,), expected 1": lambda: ops.grouped_mm(
        X, W2, offs=OFFS.repeat_interleave(2)[::2]
    ),
    "offs is [4, 4, 11], expected a tensor": lambda: ops.grouped_mm(X, W2, offs=OFFS.tolist()),
    "experts of offs is 0": lambda: ops.quantize(X[:, :16], BY_GROUP[0], offs=OFFS[:0]),
    "offs.device is meta": lambda: ops.grouped_mm(X, W2, offs=OFFS.to("meta")),
    "bias.shape is [3, 8], expected [3, 16]": lambda: ops.grouped_mm(
        X, W2, offs=OFFS, bias=rand(3, 8)
    ),
    "bias.shape is [3, 2, 16], expected [3, 32]": lambda: ops.grouped_mm_act(
        X, W, offs=OFFS, bias=rand(3, 2, I)
    ),
    "bias.dtype is torch.float64": lambda: ops.grouped_mm(
        X, W2, offs=OFFS, bias=rand(3, I).double()
    ),
    "mat_b.shape is [3, 24, 32], expected [experts, 16, N]": lambda: ops.grouped_mm_act(
        X[:, :16], W, offs=OFFS
    ),
    "mat_b.shape is [3, 24, 24], expected [experts, H, a multiple of 16]": lambda: (
        ops.grouped_mm_act(X, SUMS, offs=OFFS)
    ),
    "mat_b.shape is [3, 2, 16, 24], expected [experts, K, N]": lambda: ops.grouped_mm_act(
        X, W_ROWS.unflatten(1, (2, I)), offs=OFFS
    ),
    "activation is 'gelu'": lambda: ops.grouped_mm_act(X, W, "gelu", offs=OFFS),
    "glu is 32, expected 'halves' or 'interleaved'": lambda: ops.grouped_mm_act(
        X, W, offs=OFFS, glu=32
    ),
    "glu is None, expected 'halves' or 'interleaved'": lambda: ops.grouped_mlp(
        X, W, W2_ROWS, offs=OFFS, glu=None
    ),
    "output_dtype is torch.float16": lambda: ops.grouped_mm_act(
        X, W, offs=OFFS, output_dtype=torch.float16
    ),
    "mat_b.shape is [3, 16, 24], expected [experts, 24, N]": lambda: ops.grouped_mm_dact(
        X, W2_ROWS, GU, offs=OFFS
    ),
    "pre.shape is [13, 2, 16]": lambda: ops.grouped_mm_dact(
        X, W2, GU.unflatten(1, (2, I)), offs=OFFS
    ),
    "pre.shape is [13, 24], expected [13, 32]": lambda: ops.grouped_mm_dact(X, W2, X, offs=OFFS),
    "pre.dtype": lambda: ops.grouped_mm_dact(X, W2, GU.float(), offs=OFFS),
    "mat_a.dtype is torch.bfloat16, expected float8_e4m3fn": lambda: scaled(
        X, X, W2, X, BY_GROUP, offs=OFFS
    ),
    "scale_a.shape is [200, 3], expected [200, 2] or [2, 512]": lambda: fp8(
        scale_a=torch.ones(200, 3)
    ),
    "scale_b.shape is [3, 2, 5], expected [3, 2, 6]": lambda: fp8(scale_b=torch.ones(3, 2, 5)),
    "scale_a.shape is [2, 512], expected [200] or [1, 512]": lambda: fp8_mm(
        scale_a=torch.ones(2, 512)
    ),
    "scale_a.shape is [200, 1], expected [200, 2] or [2, 512]": lambda: fp8(
        scale_a=torch.ones(200, 1)
    ),
    "scale_a.layout is torch.sparse_coo": lambda: fp8(scale_a=torch.ones(2, 512).to_sparse()),
    "scale_b.shape is [3, 544, 1], expected [3, 544]": lambda: fp8_mm(
        scale_b=torch.ones(3, 544, 1)
    ),
    "scale_a is 1.0, expected scales [200, 2] or": lambda: fp8(scale_a=1.0),
    "scale_b is None, expected scales [3, 2, 6]": lambda: fp8(scale_b=None),
    "scale_b.dtype": lambda: fp8(scale_b=torch.ones(3, 2, 6).bfloat16()),
    "(scale_recipe_a, scale_recipe_b) is (BlockWise1x128, RowWise), expected (BlockWise1x128, Bl": lambda: (
        fp8((Recipe.BlockWise1x128, Recipe.RowWise))
    ),
    "MXFP8's scales have no meaning on Hopper": lambda: fp8(MXFP8),
    "(scale_recipe_a, scale_recipe_b) is (None, None), expected (": lambda: fp8((None, None)),
    "(scale_recipe_a, scale_recipe_b) is (RowWise, BlockWise128x128), expected (BlockWise1x128, B": lambda: (
        fp8((Recipe.RowWise, Recipe.BlockWise128x128))
    ),
    "swizzle_b is SWIZZLE_32_4_4, expected None or NO_SWIZZLE": lambda: fp8_mm(
        swizzle_b=torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
    ),
    "output_dtype is torch.float32, expected None or torch.bfloat16": lambda: fp8_mm(
        output_dtype=torch.float32
    ),
    "contraction_dim is [1], expected () or []": lambda: fp8_mm(contraction_dim=[1]),
    "recipe is 'blockwise', expected": lambda: fp8(recipe="blockwise"),
    "mat_b.shape is [12, 24], expected 13 rows": lambda: ops.grouped_mm(X.mT, X[:12], offs=OFFS),
    "out.shape is [3, 24, 16]": lambda: ops.grouped_mm_wgrad(
        X.mT, X, offs=OFFS, out=torch.zeros(3, H, I)
    ),
    "out.stride() is (64, 24, 1), expected places of their own": lambda: ops.grouped_mm_wgrad(
        X.mT, X, offs=OFFS, out=torch.zeros(800).as_strided((3, H, H), (64, H, 1))
    ),
    "out is in a storage that the call reads": lambda: ops.grouped_mm_wgrad(
        X.mT, SUMS[0, -M:], offs=OFFS, out=SUMS
    ),
    "out is a negative view": lambda: ops.grouped_mm_wgrad(
        X.mT, X, offs=OFFS, out=torch._neg_view(SUMS)
    ),
    "out.dtype": lambda: ops.grouped_mm_wgrad(
        X.mT, X, offs=OFFS, out=torch.zeros(3, H, H).double()
    ),
    "out is NoneType, expected a tensor": lambda: ops.grouped_mm_wgrad(
        X.mT, X, offs=OFFS, out=None
    ),
    "mat_a is list, expected a tensor": lambda: ops.grouped_mm(X.tolist(), W2, offs=OFFS),
    "w_up is NoneType, expected a tensor": lambda: ops.grouped_mlp(X, None, W2, offs=OFFS),
    "mat_b is NoneType, expected a tensor": lambda: ops.grouped_mm(X.mT, None, offs=OFFS),
    "bias is int, expected a tensor": lambda: ops.grouped_mm(X, W2, offs=OFFS, bias=1),
    "w_down.shape is [3, 24, 16], expected [3, 16, 24]": lambda: ops.grouped_mlp(
        X, W, W2, offs=OFFS
    ),
    "x is ndarray, expected a tensor": lambda: ops.quantize(X.float().numpy(), BY_GROUP[0]),
    "x.dtype is torch.int32": lambda: ops.quantize(X[:, :16].int(), BY_GROUP[0]),
    "x.dtype is torch.float64": lambda: ops.quantize(X[:, :16].double(), BY_GROUP[0]),
    "x.dtype is torch.float8_e4m3fn": lambda: ops.quantize(
        E4M3[None], BY_GROUP[1]
    ),  # its scales are lost
    "x.shape is [13, 24], expected rows [M, a multiple of 16]": lambda: ops.quantize(
        X, BY_GROUP[0]
    ),
    "x.shape is [3, 0, 24], expected": lambda: ops.quantize(SUMS[:, :0], BY_GROUP[1]),
    "x.shape is [13], expected": lambda: ops.quantize(X[:, 0], BY_GROUP[0]),
    "recipe is BlockWise1x128, expected BlockWise128x128 or RowWise": lambda: ops.quantize(
        SUMS, BY_GROUP[0]
    ),
    "recipe is BlockWise1x16, expected BlockWise1x128 or RowWise: NVFP4's and MXFP8's scales have": (
        lambda: ops.quantize(X[:, :16], Recipe.BlockWise1x16)
    ),
    "recipe is blockwise, expected BlockWise128x128": lambda: ops.quantize(SUMS, "blockwise"),
    "offs is given, expected None with weights": lambda: ops.quantize(SUMS, BY_GROUP[1], offs=OFFS),
    "glu is 'halves', expected None, or": lambda: ops.quantize(SUMS, Recipe.RowWise, glu="halves"),
    "glu is 'interleaved', expected None, or": lambda: ops.quantize(
        SUMS, BY_GROUP[1], glu="interleaved"
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_by_name(said):
    with pytest.raises((ArgumentError, ConfigError)) as caught:
        REFUSED[said]()
    assert said in str(caught.value)


def test_a_call_like_an_earlier_one_is_still_checked():
    """What its tensors' places are, and options that only equal the earlier ones."""
    whole = rand(M * H + 8)
    x, at = whole[: M * H].view(M, H), whole[1 : M * H + 1].view(M, H)
    ops.grouped_mm(x, W2, offs=OFFS)
    with pytest.raises(ArgumentError, match=r"mat_a.data_ptr\(\)"):
        ops.grouped_mm(at, W2, offs=OFFS)
    with pytest.raises(ArgumentError, match="alignment is True"):
        ops.grouped_mm(x, W2, offs=OFFS, alignment=True)
    whole.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="it was freed"):
        ops.grouped_mm(x, W2, offs=OFFS)


DIFFERENTIATED = {
    "mm": lambda x: ops.grouped_mm(x, W2, offs=OFFS),
    "mm, bias": lambda x: ops.grouped_mm(X, W2, offs=OFFS, bias=x[:2, :].reshape(3, I)),
    "act": lambda x: ops.grouped_mm_act(x, W, offs=OFFS),
    "dact": lambda x: ops.grouped_mm_dact(x, W2, GU, offs=OFFS)[0],
    "wgrad": lambda x: ops.grouped_mm(x.mT, X, offs=OFFS),
    "wgrad, out": lambda x: ops.grouped_mm_wgrad(X.mT, x, offs=OFFS, out=torch.zeros(3, H, H)),
    "mlp": lambda x: ops.grouped_mlp(x, W, W2_ROWS, offs=OFFS),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_other_modes_than_reverse_are_refused(name):
    """Custom operators drop tangents: jvp would be zero, and no error."""
    function, dual = DIFFERENTIATED[name], torch.autograd.forward_ad
    with dual.dual_level():
        function(X)  # no tangent, nothing to refuse
        with pytest.raises(ArgumentError, match="a forward-mode tangent is given, expected rev"):
            function(dual.make_dual(X, torch.ones_like(X)))
    for transform in (
        lambda: torch.func.jvp(function, (X,), (X,)),
        lambda: torch.func.grad(lambda x: function(x).float().sum())(X),
        lambda: torch.vmap(function)(X[None]),
    ):
        with pytest.raises(ArgumentError, match="a transform of torch.func is active, expected to"):
            transform()


def test_forward_mode_is_refused_in_compiled_functions_too():
    compiled = torch.compile(lambda x: ops.grouped_mm(x, W2, offs=OFFS), backend="eager")
    y, dual = compiled(X), torch.autograd.forward_ad
    with dual.dual_level(), pytest.raises(ArgumentError, match="a forward-mode tangent is given"):
        compiled(dual.make_dual(X, X))
    with pytest.raises(ArgumentError, match="a forward-mode tangent is given"):
        torch.compile(lambda x: torch.func.jvp(compiled, (x,), (x,)), backend="eager")(X)
    assert torch.equal(compiled(X), y)


def test_weights_are_quantized_as_a_layer_has_them():
    w = rand(2, 2 * 48, 160).requires_grad_()
    q, scale = ops.quantize(w.mT, BY_GROUP[1], glu="halves")
    halves = [quantize_blockwise(half.detach()) for half in w.unflatten(1, (2, 48)).unbind(1)]
    assert torch.equal(q.mT.float(), torch.cat([h[0].float() for h in halves], 1))
    assert torch.equal(scale.mT, torch.cat([h[1] for h in halves], 1))
    assert ops.quantize(w.mT, BY_GROUP[1])[1].shape == (2, 2, 1)
    q, scale = ops.quantize(w.mT, Recipe.RowWise)
    assert scale.shape == (2, 96)
    near(q.float() * scale[:, None], w.mT, 4e-2)


@pytest.mark.parametrize("recipe", [BY_GROUP[0], Recipe.RowWise])
def test_quantized_rows_are_contiguous(recipe):
    x = rand(48, 208).float().T
    q, scale = ops.quantize(x, recipe)
    expected, of_expected = ops.quantize(x.contiguous(), recipe)
    assert q.is_contiguous()
    assert torch.equal(q.float(), expected.float())
    assert torch.equal(scale, of_expected)
    assert scale.shape == ((208, 1) if recipe == BY_GROUP[0] else (208,))


@pytest.mark.parametrize("place", ["by block", "by row"])
def test_e4m3_compiles_for_any_number_of_rows(place):
    recipes = (Recipe.RowWise, Recipe.RowWise)
    x, (w, w_scale) = rand(200, 272), ops.quantize(rand(3, 272, 144), Recipe.RowWise)

    def model(x, w, offs, x_scale, w_scale):
        return scaled(x, x_scale, w, w_scale, recipes, offs=offs)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (200, 137, 64):
        offs = torch.tensor([60, 60, rows], dtype=torch.int32)
        given = {"offs": offs} if place == "by block" else {}
        q, scale = ops.quantize(x[:rows], Recipe.RowWise, **given)
        call = q, w, offs, scale, w_scale
        assert torch.equal(compiled(*call), model(*call))


LAYOUTS = [(major, glu) for major in ("in", "out") for glu in ("halves", "interleaved")]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("major", "glu"), LAYOUTS)
def test_strides_are_free_and_glu_says_where_gate_and_up_lie(major, glu, bias):
    """With H = 2 I, so that no shape tells one meaning from another; gradients lie as their weights."""
    width = H // 2 + 4  # 16
    hidden = 2 * width
    lay = (lambda w: w) if major == "out" else (lambda w: w.mT.contiguous().mT)
    w_up, w_down = lay(rand(3, hidden, 2 * width)), lay(rand(3, width, hidden))
    b_up, b_down = (torch.randn(3, hidden), torch.randn(3, hidden)) if bias else (None, None)

    def ours(x, w_up, w_down, b_up, b_down):
        given = {"b_up": b_up, "b_down": b_down, "glu": glu, "offs": OFFS}
        return ops.grouped_mlp(x, w_up, w_down, **given)

    def in_steps(x, w_up, w_down, b_up, b_down):
        h, pre = ops.grouped_mm_act(x, w_up, offs=OFFS, bias=b_up, glu=glu, return_pre=True)
        return torch.cat((ops.grouped_mm(h, w_down, offs=OFFS, bias=b_down), pre), 1)

    def plain(x, w_up, w_down, b_up, b_down):
        pre = loop(x, w_up, b_up)
        gate, up = pre.chunk(2, 1) if glu == "halves" else (pre[:, ::2], pre[:, 1::2])
        return torch.cat((loop(torch.nn.functional.silu(gate) * up, w_down, b_down), pre), 1)

    given = rand(M, hidden), w_up, w_down, b_up, b_down
    wide = [None if t is None else t.double() for t in given]
    expected = gradients(lambda *t: plain(*t)[:, :hidden], wide)
    for f, e in zip(gradients(ours, given), expected, strict=True):
        near(f, e, 1.2e-2)
    for f, e in zip(gradients(in_steps, given), gradients(plain, wide), strict=True):
        near(f, e, 1.2e-2)
    dy = rand(M, hidden)
    pre = plain(*wide)[:, hidden:].bfloat16().requires_grad_()
    d_pre, again = ops.grouped_mm_dact(dy, w_down.mT, pre.detach(), offs=OFFS, glu=glu)
    gate, up = pre.chunk(2, 1) if glu == "halves" else (pre[:, ::2], pre[:, 1::2])
    h = torch.nn.functional.silu(gate.double()) * up.double()
    (expected,) = torch.autograd.grad(loop(h, w_down.double()), pre, dy.double())
    near(d_pre, expected)
    near(again[:11], h[:11])


def test_drop_in_for_torch():
    """torch's own function beside ours, by the names of its arguments."""
    theirs = torch.nn.functional.grouped_mm
    x, w, dy, offs = rand(16, H), rand(3, H, I), rand(16, I), OFFS + OFFS // 11 * 5
    for given in ((x, w), (x, w.mT.contiguous().mT), (x.T, dy), (x.T.contiguous(), dy)):
        call = {"mat_a": given[0], "mat_b": given[1], "offs": offs, "out_dtype": torch.bfloat16}
        found, expected = ops.grouped_mm(**call), theirs(**call)
        keep = slice(None) if given[1].dim() == 3 else [0, 2]  # of no rows theirs is undefined
        assert found.shape == expected.shape
        near(found[keep], expected[keep], 1e-6)
    near(ops.grouped_mm(x.T.contiguous().T, w, offs=offs), theirs(x, w, offs=offs), 1e-6)


def test_sums_may_lie_between_others():
    """Experts beside each other in the rows of one tensor: nothing is shared."""
    a, b = rand(M, H), rand(M, I)
    out = torch.zeros(H, 3, I).transpose(0, 1)
    ops.grouped_mm_wgrad(a.mT, b, offs=OFFS, out=out)
    assert torch.equal(out, ops.grouped_mm(a.mT, b, offs=OFFS, out_dtype=torch.float32))


@pytest.mark.parametrize("which", range(2))
def test_sums_among_rows_that_are_read_are_refused(which):
    """A kernel would write them while it reads rows: these are far apart, so their numbers fill less than they span."""
    memory = torch.randn(20 * M * H).bfloat16()
    wide, rows = memory.view(M, 20 * H)[:, :H], rand(M, H)
    out = memory[10 * M * H :][: 3 * H * H].view(3, H, H)
    operands = (wide, rows) if which == 0 else (rows, wide)
    with pytest.raises(ArgumentError, match="out is in a storage that the call reads"):
        ops.grouped_mm_wgrad(operands[0].mT, operands[1], offs=OFFS, out=out)


def test_tails_are_what_is_left_of_whole_slots():
    offs = torch.tensor([0, 64, 135, 136], dtype=torch.int32)
    rows = torch.arange(1.0, 141.0)[:, None].expand(-1, 8).bfloat16().contiguous()
    rows[136:] = float("nan")
    found = tails(rows, rows, Groups(offs))[0][:, 0].unflatten(0, (4, 64))
    assert not found[:2].any()  # no rows, and whole slots alone
    assert found[2, :7].tolist() == rows[128:135, 0].tolist()
    assert not found[2, 7:].any()
    assert found[3, 0] == rows[135, 0]
    assert not found[3, 1:].any()
    assert tails(rows[:64], rows[:64], Groups(None))[1].shape == (64, 8)


@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_without_a_gradient_here_is_refused(gated):
    """A new one must not be given another's."""
    new = SimpleNamespace(kind="new", gated=gated)
    with pytest.raises(NotImplementedError, match="'new'"):
        reference.activation_gradient(new, rand(M, 2 * I).float(), rand(M, I).float())
