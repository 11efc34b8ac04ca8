"""megamoe.ops by torch's operations: values, gradients, torch.compile, and what is refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from megamoe import ops
from megamoe.backends.reference import activation_gradient as oracle
from megamoe.core.config import ACTIVATIONS
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.formats.quantization import (
    dequantize_blockwise,
    dequantize_rows,
    quantize_blockwise,
    quantize_tokens,
)
from megamoe.ops import operators, reference
from megamoe.ops.scales import by_row
from megamoe.ops.tails import tails
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
        monkeypatch.setattr(reference, "experts_of", None)
        monkeypatch.setattr(torch, "_grouped_mm", undefined_without_rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_mlp(name, bias, stand_in):
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


@pytest.mark.parametrize("ends", [[-5, 7, 3, 9], [200, 1, 300, 2], [0, 0, 0, 0], [7, 7, 11, 11]])
def test_any_ends(ends, stand_in):
    """Rows of no expert are zeros whatever they hold, no ends are another expert's, NaN stays where it is."""
    x, dy, w, offs = rand(M, H), rand(M, I), rand(4, H, I), torch.tensor(ends, dtype=torch.int32)
    kept = offs.clamp(0, M).cummax(0)[0].tolist()
    x[kept[-1] :] = dy[kept[-1] :] = float("nan")
    y, dw = ops.grouped_mm(x, w, offs), ops.grouped_mm_wgrad(x, dy, offs)
    of_rows, of_none = y[: kept[-1]], y[kept[-1] :]
    assert not of_none.any()
    start = 0
    for e, end in enumerate(kept):
        near(of_rows[start:end], x[start:end].float() @ w[e].float())
        near(dw[e], x[start:end].float().T @ dy[start:end].float())
        start = end
    sums = operators.grouped_wgrad(x, dy, offs, 4, False, True)[1]
    near(sums[0], x[: kept[0]].float().sum(0), 1e-6)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_the_derivative_is_the_oracles(name):
    """At the clamps' limits and behind them, far out, and of NaN too."""
    act, p = ACTIVATIONS[name], ACTIVATIONS[name].planes
    edges = torch.tensor([-30.0, -7.25, -7, -0.5, 0, 0.5, 7, 7.25, 30, float("nan")])
    gu = torch.cartesian_prod(edges, edges)[:, :p].bfloat16()  # [100, P], of one column
    dy, w = torch.ones(100, 8).bfloat16(), torch.full((1, 8, 8), 0.125).bfloat16()
    gu = gu[..., None].expand(-1, -1, 8).contiguous()
    dgu, h = ops.grouped_mm_dswiglu(dy, w, gu, activation=act)
    expected = oracle(act, gu.flatten(1).double(), torch.ones(100, 8).double())
    for found, of_oracle in zip((dgu.flatten(1), h), expected, strict=True):
        assert torch.allclose(found.double(), of_oracle, rtol=4e-3, atol=1e-6, equal_nan=True)


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


def fp8_operands(act):
    rows, hidden, width = 200, 144, 272
    offs = torch.tensor([130, 130, 190], dtype=torch.int32)
    x, x_scale = ops.quantize_rows(rand(rows, hidden), offs)
    w13, s13 = quantize_blockwise(rand(3, act.planes * width, hidden) * 0.1, act.planes)
    w2, s2 = quantize_blockwise(rand(3, hidden, width))
    return offs, x, w13, w2, (x_scale, s13), s2


@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_fp8(name):
    act = ACTIVATIONS[name]
    offs, x, w13, w2, of_first, s2 = fp8_operands(act)
    options = {"activation": name, "scales": of_first}
    h, h_scale = ops.grouped_mm_swiglu(x, w13, offs, quantize=True, **options)
    plain = ops.grouped_mm_swiglu(x, w13, offs, **options)
    wide = dequantize_rows(x, by_row(of_first[0], offs, 200, 3))
    matrices = dequantize_blockwise(w13, of_first[1], act.planes).transpose(1, 2)
    ranges = [(0, 130), (130, 130), (130, 190)]
    expected = act(torch.cat([wide[s:e] @ matrices[i] for i, (s, e) in enumerate(ranges)]))
    near(plain[:190], expected)
    assert not plain[190:].any()
    h_wide = dequantize_rows(h, by_row(h_scale, offs, 200, 3))[:190]
    near(h_wide, expected, 4e-2)
    y = ops.grouped_mm_downproj(h, w2, offs, scales=(h_scale, s2))
    matrices = dequantize_blockwise(w2, s2).transpose(1, 2)
    near(y[:190], torch.cat([h_wide[s:e] @ matrices[i] for i, (s, e) in enumerate(ranges)]))


def channel_operands(act, rows=200, hidden=144, width=272):
    offs = torch.tensor([130, 130, 190], dtype=torch.int32)
    x, x_scale = quantize_tokens(rand(rows, hidden) * torch.logspace(-2, 2, rows)[:, None])
    w13 = rand(3, act.planes * width, hidden) * torch.logspace(-2, 0, act.planes * width)[:, None]
    w2 = rand(3, hidden, width) * torch.logspace(0, 2, hidden)[:, None]
    first, second = (ops.quantize_weights(w, by_channel=True) for w in (w13, w2))
    return offs, (x, x_scale), first, second


@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_fp8_by_channel(name):
    """As layers of fp8_channel: x by token, both weights by channel, h in groups of 128."""
    act = ACTIVATIONS[name]
    offs, (x, x_scale), (w13, s13), (w2, s2) = channel_operands(act)
    assert s13.shape == (3, act.planes * 272, 1)
    options = {"activation": name, "quantize": True}
    h, h_scale = ops.grouped_mm_swiglu(x, w13, offs, scales=(x_scale, s13), **options)
    by_block = ops.scales_by_block(x_scale, offs)
    for other in (x_scale[:, 0], by_block):  # the same scales in other places
        again, again_scale = ops.grouped_mm_swiglu(x, w13, offs, scales=(other, s13), **options)
        assert torch.equal(again.view(torch.uint8), h.view(torch.uint8))
        assert torch.equal(again_scale, h_scale)
    wide, ranges = x.float() * x_scale, [(0, 130), (130, 130), (130, 190)]
    matrices = (w13.float() * s13).transpose(1, 2)
    expected = act(torch.cat([wide[s:e] @ matrices[i] for i, (s, e) in enumerate(ranges)]))
    h_wide = dequantize_rows(h, by_row(h_scale, offs, 200, 3))[:190]
    assert h_scale.shape[0] == 3
    near(h_wide, expected, 4e-2)
    plain = ops.grouped_mm_swiglu(x, w13, offs, activation=name, scales=(x_scale, s13))
    near(plain[:190], expected)
    y = ops.grouped_mm_downproj(h, w2, offs, scales=(h_scale, s2))
    matrices = (w2.float() * s2).transpose(1, 2)
    near(y[:190], torch.cat([h_wide[s:e] @ matrices[i] for i, (s, e) in enumerate(ranges)]))
    wide = dequantize_rows(h, by_row(h_scale, offs, 200, 3))
    q, q_scale = ops.quantize_rows(wide, offs, by_token=True)
    assert q_scale.shape == by_block.shape
    y = ops.grouped_mm(q, w2.transpose(1, 2), offs, scales=(q_scale, s2))
    near(y[:190], torch.cat([h_wide[s:e] @ matrices[i] for i, (s, e) in enumerate(ranges)]), 4e-2)


def test_scales_stand_by_block():
    """Experts begin at multiples of 128, also behind one that fills its blocks; rows of no expert are nowhere."""
    offs = torch.tensor([1, 1, 257, 258], dtype=torch.int32)
    scale = torch.arange(1.0, 261.0)[:, None]
    found = ops.scales_by_block(scale, offs)
    assert found.shape == (1, 128 * (260 // 128 + 4))
    assert found[0, 0] == 1
    assert found[0, 128:384].tolist() == scale[1:257, 0].tolist()
    assert found[0, 384] == 258
    assert torch.equal(by_row(found, offs, 260, 4)[:258], scale[:258])
    assert torch.equal(ops.scales_by_block(scale)[0, :260], scale[:, 0])


def test_what_has_no_gradient_says_so():
    offs, x, w13, w2, of_first, s2 = fp8_operands(ACTIVATIONS["swiglu"])
    bias, b2 = (torch.zeros(3, width, requires_grad=True) for width in (2 * 272, 144))
    h, h_scale = ops.grouped_mm_swiglu(x, w13, offs, scales=of_first, quantize=True)
    a = rand(M, H).requires_grad_()
    results = [
        ("mm", ops.grouped_mm_downproj(h, w2, offs, b2, scales=(h_scale, s2))),
        ("activation", ops.grouped_mm_swiglu(x, w13, offs, bias, scales=of_first)),
        ("activation", ops.grouped_mm_swiglu(a, rand(3, 2 * I, H), OFFS, quantize=True)[0]),
        ("wgrad", ops.grouped_mm_wgrad(a, a, OFFS)),
        ("activation_gradient", ops.grouped_mm_dswiglu(a, rand(3, H, I), rand(M, 2, I), OFFS)[0]),
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
    assert dict(re.findall(r"(megamoe::\w+)\((.*?)\)", operators.__doc__)) == found


def test_opcheck():
    x, w13, w2, b13, b2 = operands(ACTIVATIONS["swiglu"])
    w13, numbers, ours = w13.unflatten(1, (2, I)), [1.0, 1e9, 0.0], torch.ops.megamoe
    wanted = (x.requires_grad_(), w13.requires_grad_(), w2.requires_grad_())
    act = "clamped_swiglu", numbers
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for op, arguments in (
        (ours.grouped_mlp, (*wanted, OFFS, b13, b2, *act, True)),
        (ours.grouped_mm, (x, w13.flatten(1, 2).transpose(1, 2), OFFS, b13)),
        (ours.grouped_activation, (x, w13, OFFS, b13, *act, True)),
        (ours.grouped_wgrad_add, (rand(M, I), rand(M, H), OFFS, torch.zeros(3, I, H))),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=checks)


def fp8(w_scale=None, x_scale=None, **options):
    offs, x, w13, _, of_first, _ = fp8_operands(ACTIVATIONS["swiglu"])
    scales = (
        of_first[0] if x_scale is None else x_scale,
        of_first[1] if w_scale is None else w_scale,
    )
    return ops.grouped_mm_swiglu(x, w13, offs, scales=scales, **options)


def channel(rows=(200, 1), weights=(3, 544, 1), function=ops.grouped_mm_swiglu):
    offs, (x, _), (w, _), _ = channel_operands(ACTIVATIONS["swiglu"])
    w = w if function is ops.grouped_mm_swiglu else w.transpose(1, 2)
    return function(x, w, offs, scales=(torch.ones(rows), torch.ones(weights)))


X, W, W2 = rand(M, H), rand(3, 2 * I, H), rand(3, H, I)
GU, E4M3 = rand(M, 2, I), rand(16, 16).to(torch.float8_e4m3fn)
SUMS = rand(3, H, H)
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
    "offs.stride() is (2,), expected 1": lambda: ops.grouped_mm(
        X, W2, OFFS.repeat_interleave(2)[::2]
    ),
    "offs is [4, 4, 11], expected a tensor": lambda: ops.grouped_mm(X, W2, OFFS.tolist()),
    "experts of offs is 0": lambda: ops.quantize_rows(W[0, :, :16], OFFS[:0]),
    "x.dtype is torch.int32": lambda: ops.quantize_rows(X.int(), OFFS),
    "x.shape is [13, 24], expected [rows, a multiple of 16]": lambda: ops.quantize_rows(X, OFFS),
    "offs.device is meta": lambda: ops.grouped_mm(X, W2, OFFS.to("meta")),
    "bias.shape is [3, 8], expected [3, 16]": lambda: ops.grouped_mm(X, W2, OFFS, rand(3, 8)),
    "bias.shape is [3, 16, 2], expected [3, 32] or [3, 2, 16]": lambda: ops.grouped_mm_swiglu(
        X, W, OFFS, rand(3, I, 2)
    ),
    "bias.dtype is torch.float64": lambda: ops.grouped_mm(X, W2, OFFS, rand(3, I).double()),
    "w_up.shape is [3, 32, 24], expected [experts, 2 * I, 16]": lambda: ops.grouped_mm_swiglu(
        X[:, :16], W, OFFS
    ),
    "activation is 'gelu'": lambda: ops.grouped_mm_swiglu(X, W, OFFS, activation="gelu"),
    "w_down.shape is [3, 20, 24], expected [experts, H a mult": lambda: ops.grouped_mm_downproj(
        X, W[:, :20], OFFS
    ),
    "w_down.shape is [24], expected [experts, 24, I]": lambda: ops.grouped_mm_dswiglu(
        X, W2[0, :, 0], GU, OFFS
    ),
    "w_down.shape is [3, 32, 24]": lambda: ops.grouped_mm_downproj(rand(M, 8), W, OFFS),
    "pre_activation.shape is [13, 32]": lambda: ops.grouped_mm_dswiglu(X, W2, GU.flatten(1), OFFS),
    "pre_activation.dtype": lambda: ops.grouped_mm_dswiglu(X, W2, GU.float(), OFFS),
    "x.dtype is torch.bfloat16, expected float8_e4m3fn": lambda: ops.grouped_mm(
        X, W2, OFFS, scales=(X, X)
    ),
    "scales[0].shape is [200, 2], expected [2, 512]": lambda: fp8(x_scale=torch.ones(200, 2)),
    "scales[1].shape is [3, 5, 2], expected [3, 6, 2]": lambda: fp8(w_scale=torch.ones(3, 5, 2)),
    "scales[0].shape is [2, 512], expected [1, 512] or [200, 1] or [200]": lambda: channel(
        (2, 512)
    ),
    "scales[0].shape is [200, 2], expected [1, 512] or [200, 1] or [200] or [2, 512]": lambda: (
        channel((200, 2), function=ops.grouped_mm)
    ),
    "scales[0].shape is [200, 1], expected [2, 512]": lambda: fp8(x_scale=torch.ones(200, 1)),
    "scales[0].stride() is (1, 2), expected those of a contiguous tensor": lambda: fp8(
        x_scale=torch.ones(512, 2).T
    ),
    "scales[0].layout is torch.sparse_coo": lambda: fp8(x_scale=torch.ones(2, 512).to_sparse()),
    "scales[1].shape is [3, 544], expected [3, 6, 2] or [3, 544, 1]": lambda: channel(
        weights=(3, 544)
    ),
    "scales is Tensor, expected two tensors": lambda: ops.grouped_mm(
        E4M3, E4M3[None].transpose(1, 2), scales=X
    ),
    "scales[1].dtype": lambda: fp8(w_scale=torch.ones(3, 6, 2).bfloat16()),
    "save_pre_activation is True": lambda: fp8(save_pre_activation=True),
    "b.shape is [12, 24], expected 13 rows": lambda: ops.grouped_mm_wgrad(X, X[:12], OFFS),
    "out.shape is [3, 24, 16]": lambda: ops.grouped_mm_wgrad(X, X, OFFS, out=torch.zeros(3, H, I)),
    "out.stride() is (64, 24, 1), expected places of their own": lambda: ops.grouped_mm_wgrad(
        X, X, OFFS, out=torch.zeros(800).as_strided((3, H, H), (64, H, 1))
    ),
    "out is in a storage that the call reads": lambda: ops.grouped_mm_wgrad(
        X, SUMS[0, -M:], OFFS, out=SUMS
    ),
    "out is a negative view": lambda: ops.grouped_mm_wgrad(X, X, OFFS, out=torch._neg_view(SUMS)),
    "out.dtype": lambda: ops.grouped_mm_wgrad(X, X, OFFS, out=torch.zeros(3, H, H).double()),
    "dtype is torch.float16": lambda: ops.grouped_mm_wgrad(X, X, OFFS, dtype=torch.float16),
    "x is list, expected a tensor": lambda: ops.grouped_mm(X.tolist(), W2, OFFS),
    "w13 is NoneType, expected a tensor": lambda: ops.grouped_mlp(X, None, W2, OFFS),
    "b is NoneType, expected a tensor": lambda: ops.grouped_mm_wgrad(X, None, OFFS),
    "bias is int, expected a tensor": lambda: ops.grouped_mm(X, W2, OFFS, 1, scales="dynamic"),
    "x is ndarray, expected a tensor": lambda: ops.quantize_rows(X.float().numpy(), OFFS),
    "scale is float, expected a tensor": lambda: ops.scales_by_block(1.0, OFFS),
    "scales[1] is 1.0, expected scales [3, 6, 2]": lambda: fp8(w_scale=1.0),
    "w2.shape is [3, 16, 24], expected [3, 24, 16]": lambda: ops.grouped_mlp(
        X, W, W2.transpose(1, 2), OFFS
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_by_name(said):
    with pytest.raises((ArgumentError, ConfigError)) as caught:
        REFUSED[said]()
    assert said in str(caught.value)


DIFFERENTIATED = {
    "mm": lambda x: ops.grouped_mm(x, W2, OFFS),
    "mm, bias": lambda x: ops.grouped_mm(X, W2, OFFS, x[:2, :].reshape(3, I)),
    "swiglu": lambda x: ops.grouped_mm_swiglu(x, W, OFFS),
    "downproj": lambda x: ops.grouped_mm_downproj(x, W[:, :8], OFFS),
    "dswiglu": lambda x: ops.grouped_mm_dswiglu(x, W2, GU, OFFS)[0],
    "wgrad": lambda x: ops.grouped_mm_wgrad(x, X, OFFS),
    "wgrad, out": lambda x: ops.grouped_mm_wgrad(X, x, OFFS, out=torch.zeros(3, H, H)),
    "mlp": lambda x: ops.grouped_mlp(x, W, W2, OFFS),
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
    compiled = torch.compile(lambda x: ops.grouped_mm(x, W2, OFFS), backend="eager")
    y, dual = compiled(X), torch.autograd.forward_ad
    with dual.dual_level(), pytest.raises(ArgumentError, match="a forward-mode tangent is given"):
        compiled(dual.make_dual(X, X))
    with pytest.raises(ArgumentError, match="a forward-mode tangent is given"):
        torch.compile(lambda x: torch.func.jvp(compiled, (x,), (x,)), backend="eager")(X)
    assert torch.equal(compiled(X), y)


def test_weights_are_quantized_as_a_layer_has_them():
    w = rand(2, 2 * 48, 160).requires_grad_()
    q, scale = ops.quantize_weights(w, planes=2)
    halves = [quantize_blockwise(half.detach()) for half in w.unflatten(1, (2, 48)).unbind(1)]
    assert torch.equal(q.float(), torch.cat([h[0].float() for h in halves], 1))
    assert torch.equal(scale, torch.cat([h[1] for h in halves], 1))
    for wrong, planes, message in (
        (w[0], 1, "w is torch.bfloat16 \\[96, 160\\], expected"),
        (w.detach().int(), 1, "w is torch.int32"),
        (w, 3, "planes is 3, expected 1 or 2"),
        (w, True, "planes is True, expected 1 or 2"),
        (w[:, :95], 2, "w.shape is \\[2, 95, 160\\], expected rows that are a multiple"),
        (w[:, :0], 1, "w is torch.bfloat16 \\[2, 0, 160\\], expected"),
        (w[:, :, :0], 1, "w is torch.bfloat16 \\[2, 96, 0\\], expected"),
        (q, 1, "w is torch.float8_e4m3fn .*, expected"),  # its scales would be forgotten
    ):
        for by_channel in (False, True):
            with pytest.raises(ArgumentError, match=message):
                ops.quantize_weights(wrong, planes, by_channel=by_channel)


@pytest.mark.parametrize("by_token", [False, True])
def test_quantized_rows_are_contiguous(by_token):
    x = rand(48, 200).float().T
    q, scale = ops.quantize_rows(x, by_token=by_token)
    expected, of_expected = ops.quantize_rows(x.contiguous(), by_token=by_token)
    assert q.is_contiguous()
    assert torch.equal(q.float(), expected.float())
    assert torch.equal(scale, of_expected)


@pytest.mark.parametrize("place", ["by block", "by row"])
def test_e4m3_compiles_for_any_number_of_rows(place):
    _, (x, x_scale), _, (w, w_scale) = channel_operands(ACTIVATIONS["swiglu"], 200, 272)

    def model(x, w, offs, x_scale, w_scale):
        return ops.grouped_mm(x, w.transpose(1, 2), offs, scales=(x_scale, w_scale))

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (200, 137, 64):
        offs = torch.tensor([60, 60, rows], dtype=torch.int32)
        scale = x_scale[:rows]
        scale = ops.scales_by_block(scale, offs) if place == "by block" else scale
        call = x[:rows], w, offs, scale, w_scale
        assert torch.equal(compiled(*call), model(*call))


def test_sums_may_lie_between_others():
    """Experts beside each other in the rows of one tensor: nothing is shared."""
    a, b = rand(M, H), rand(M, I)
    out = torch.zeros(H, 3, I).transpose(0, 1)
    ops.grouped_mm_wgrad(a, b, OFFS, out=out)
    assert torch.equal(out, ops.grouped_mm_wgrad(a, b, OFFS, dtype=torch.float32))


@pytest.mark.parametrize("which", range(2))
def test_sums_among_rows_that_are_read_are_refused(which):
    """A kernel would write them while it reads rows: these are far apart, so their numbers fill less than they span."""
    memory = torch.randn(20 * M * H).bfloat16()
    wide, rows = memory.view(M, 20 * H)[:, :H], rand(M, H)
    out = memory[10 * M * H :][: 3 * H * H].view(3, H, H)
    operands = (wide, rows) if which == 0 else (rows, wide)
    with pytest.raises(ArgumentError, match="out is in a storage that the call reads"):
        ops.grouped_mm_wgrad(*operands, OFFS, out=out)


def test_tails_are_what_is_left_of_whole_slots():
    offs = torch.tensor([0, 64, 135, 136], dtype=torch.int32)
    rows = torch.arange(1.0, 141.0)[:, None].expand(-1, 8).bfloat16().contiguous()
    rows[136:] = float("nan")
    found = tails(rows, rows, offs)[0][:, 0].unflatten(0, (4, 64))
    assert not found[:2].any()  # no rows, and whole slots alone
    assert found[2, :7].tolist() == rows[128:135, 0].tolist()
    assert not found[2, 7:].any()
    assert found[3, 0] == rows[135, 0]
    assert not found[3, 1:].any()
    assert tails(rows[:64], rows[:64], None)[1].shape == (64, 8)


@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_without_a_gradient_here_is_refused(gated):
    """A new one must not be given another's."""
    new = SimpleNamespace(kind="new", gated=gated)
    with pytest.raises(NotImplementedError, match="'new'"):
        reference.activation_gradient(new, rand(M, 2 * I).float(), rand(M, I).float())
