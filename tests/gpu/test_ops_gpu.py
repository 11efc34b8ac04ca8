"""megamoe.ops on a GPU: against fp32 and torch's grouped matmul, in graphs, compiled; nothing behind is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType as Recipe

from megamoe import ops
from megamoe.core.config import ACTIVATIONS
from megamoe.core.full_fp32 import full_fp32
from megamoe.formats.quantization import (
    dequantize_blockwise,
    dequantize_rows,
    quantize_rows,
)
from megamoe.jit.__main__ import main as jit
from megamoe.jit.grouped import GroupedVariant
from megamoe.ops import arguments, calls, operators, reference
from megamoe.ops.groups import Groups
from megamoe.ops.machines import Gpu, machine_of
from megamoe.ops.operands import Operands, rows_of_transposed
from megamoe.ops.scales import by_row
from megamoe.testing.compare import compare

pytestmark = pytest.mark.gpu
ROUNDED = 2.5e-3  # relative Frobenius error of one rounding to bf16, and of sums in another order
SUMMED = 1e-4  # of fp32 sums in tensor cores, whose additions truncate
FP8_SUMMED = 2e-3  # of 128 e4m3 products, which tensor cores add with fewer bits
# of all K in one accumulator (docs/numerics.md, "FP8 by channel"), which relu2 squares
FP8_SUMMED_IN_PLACE = 2 * 2.5e-3
EDGES = [0, 1, 63, 64, 65, 0, 127, 128, 129, 0, 300, 2500]
SIZES = [(264, 136), (2880, 2880)]  # K or H, and N or I
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def case(lengths=EDGES, behind=70):
    offs = torch.tensor(lengths, device=DEVICE).cumsum(0).int()
    return offs, len(lengths), sum(lengths) + behind


def near(found: Tensor, expected: Tensor, limit: float = ROUNDED) -> None:
    difference = compare(found, expected)
    assert difference.relative < limit, difference


def exact(x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times w [E, K, N] in fp32."""
    return reference.product(x.float(), w.float(), Groups(offs), bias)


def test_the_kernel_is_what_runs():
    assert isinstance(machine_of(DEVICE, GroupedVariant("product")), Gpu)


def test_sms_are_left_to_others():
    offs, groups, rows = case()
    x, w = rand(rows, 264), rand(groups, 264, 136)
    expected = ops.grouped_mm(x, w, offs=offs)
    for margin in (1, 32, 1000):
        with ops.sm_margin(margin):
            assert torch.equal(ops.grouped_mm(x, w, offs=offs), expected)
    plans = [plan for plan in calls._plans.values() if plan is not None]
    grids = {block.launcher.grid for plan in plans for block, _ in plan._launches}
    assert 2 in grids
    assert len(grids) >= 3


def test_a_new_thread_has_a_context():
    """As the first product of an autograd thread, whose maps are encoded before anything of torch ran there."""
    offs, groups, rows = case()
    x, w = rand(rows, 264), rand(groups, 264, 136, scale=264**-0.5)
    ops.grouped_mm(x, w, offs=offs)
    moved = x.clone()  # at another address: no map of it is there yet
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(ops.grouped_mm(moved, w, offs=offs)))
    thread.start()
    thread.join()
    assert len(found) == 1
    near(found[0][: offs[-1]], exact(x, w, offs)[: offs[-1]])


@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize("major", ["k", "n"])
def test_product(major, k, n):
    offs, num, rows = case()
    x, bias = rand(rows, k), torch.randn(num, n, device=DEVICE)
    w = rand(num, n, k).transpose(1, 2) if major == "k" else rand(num, k, n)
    out = ops.grouped_mm(x, w, offs=offs, bias=bias)
    near(out, exact(x, w, offs, bias))
    assert not out[offs[-1] :].any()
    call = {"mat_a": x, "mat_b": w, "offs": offs, "out_dtype": torch.bfloat16}
    theirs, end = torch.nn.functional.grouped_mm(**call), int(offs[-1])
    near(ops.grouped_mm(**call)[:end], theirs[:end], 1e-3)


@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activation_and_its_gradient(name, hidden, width):
    offs, num, rows = case()
    act = ACTIVATIONS[name]
    x, bias = rand(rows, hidden), torch.randn(num, act.planes * width, device=DEVICE)
    w = rand(num, act.planes, width, hidden, scale=hidden**-0.5)
    options = {"offs": offs, "bias": bias}
    h, gu = ops.grouped_mm_act(x, w.flatten(1, 2).mT, name, return_pre=True, **options)
    for lay in (lambda t: t, lambda t: t.contiguous()):
        assert torch.equal(ops.grouped_mm_act(x, lay(w.flatten(1, 2).mT), name, **options), h)
    dy, w2 = rand(rows, hidden), rand(num, hidden, width, scale=hidden**-0.5)
    dgu, again = ops.grouped_mm_dact(dy, w2, gu, name, offs=offs)
    if act.gated:  # the same columns in another order
        mixed = w.transpose(1, 2).flatten(1, 2).mT
        options["bias"] = neighbours(bias)
        options |= {"glu": "interleaved", "return_pre": True}
        for lay in (lambda t: t, lambda t: t.contiguous()):
            of_mixed, pre = ops.grouped_mm_act(x, lay(mixed), name, **options)
            assert torch.equal(of_mixed, h)
            assert torch.equal(pre, neighbours(gu))
            d_pre, h2 = ops.grouped_mm_dact(dy, lay(w2), pre, name, offs=offs, glu="interleaved")
            assert torch.equal(d_pre, neighbours(dgu))
            assert torch.equal(h2, again)
    with full_fp32(DEVICE):
        w = w.flatten(1, 2).mT
        expected, pre = reference.activation(x.float(), w.float(), Groups(offs), bias, act, None)
        near(gu, pre)
        near(h, expected)
        scale = torch.rand(rows, device=DEVICE) + 0.1
        given = dy.float(), w2.float(), gu, Groups(offs), act
        scaled = ops.grouped_mm_dact(dy, w2, gu, name, offs=offs, row_scale=scale)
        for found, wanted in zip(scaled, reference.gradient(*given, scale), strict=True):
            near(found, wanted)
        expected, h2, _ = reference.gradient(*given, None)
    near(dgu, expected)
    by_k = ops.grouped_mm_dact(dy, w2.mT.contiguous().mT, gu, name, offs=offs)
    assert all(torch.equal(f, e) for f, e in zip(by_k, (dgu, again), strict=True))
    near(again, h2)
    for found in (h, gu, dgu, again):
        assert not found[offs[-1] :].any()


def neighbours(halves: Tensor) -> Tensor:
    return halves.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)


@pytest.mark.parametrize(("hidden", "width"), [(272, 144), (2880, 2880)])
@pytest.mark.parametrize("glu", ["halves", "interleaved"])
@pytest.mark.parametrize("recipe", [None, Recipe.BlockWise1x128, Recipe.RowWise])
def test_fp8_gradient_of_the_activation(recipe, glu, hidden, width):
    """Of pre-activations that a launch has left beside h in e4m3. None: quantized in the call."""
    offs, num, rows = case()
    act, end = ACTIVATIONS["swiglu_oai"], int(offs[-1])
    x, dy, scale = rand(rows, hidden), rand(rows, hidden), torch.rand(rows, device=DEVICE) + 0.1
    w = rand(num, 2 * width, hidden, scale=hidden**-0.5).mT
    mat_b = rand(num, width, hidden, scale=hidden**-0.5).mT
    by_channel = recipe == Recipe.RowWise
    of_weights = recipe if by_channel else Recipe.BlockWise128x128
    planes = 2 if glu == "halves" else 1
    options, calls, wide = {"offs": offs, "glu": glu}, [], []
    for a, b, p in (x, w, planes), (dy, mat_b, 1):
        q, of_q = ops.quantize(a, recipe or Recipe.BlockWise1x128, offs=offs)
        blocks = {"glu": "halves"} if p == 2 and not by_channel else {}
        wq, of_w = ops.quantize(b, of_weights, **blocks)
        of_rows = by_row(of_q, Groups(offs), q, num)
        numbers_of_q = q.float() * of_rows if by_channel else dequantize_rows(q, of_rows)
        wide.append((numbers_of_q, numbers(wq, of_w, by_channel, p)))
        scales = {"scales": (of_q, recipe, of_w, of_weights)} if recipe else {"recipe": "blockwise"}
        calls.append(((q, wq) if recipe else (a, b), scales))
    e4m3 = {"output_dtype": torch.float8_e4m3fn, "return_pre": True}
    h, _, pre = ops.grouped_mm_act(*calls[0][0], act, **calls[0][1], **e4m3, **options)
    expected = exact(*wide[0], offs)
    near(pre[:end], expected[:end], 4e-3)
    if by_channel:  # of pre-activations alone
        calls[1], wide[1] = ((dy, mat_b), {}), (dy, mat_b.float())
    found = ops.grouped_mm_dact(*calls[1][0], pre, act, row_scale=scale, **calls[1][1], **options)
    given = wide[1][0].float(), wide[1][1], pre, Groups(offs), act, scale, glu == "interleaved"
    for f, e in zip(found, reference.gradient(*given), strict=True):
        near(f[:end], e[:end], 5e-3)
    for t in (h.float(), pre, *found):
        assert not t[end:].any()


@pytest.mark.parametrize(("hidden", "width"), [(272, 144), (2880, 2880)])
@pytest.mark.parametrize("name", ["swiglu_oai", "relu2"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_fp8(by_channel, name, hidden, width):
    """By channel also of rows and columns of very different sizes, each of which has to be right."""
    offs, num, rows = case()
    act, end = ACTIVATIONS[name], int(offs[-1])
    x = rand(rows, hidden)
    w13 = rand(num, act.planes * width, hidden, scale=hidden**-0.5)
    w2 = rand(num, hidden, width, scale=width**-0.5)
    if by_channel:
        x *= spread(rows)[:, None]
        w2 *= spread(num * hidden).view(num, hidden, 1)
    recipes = Recipe.BlockWise1x128, Recipe.BlockWise128x128
    if by_channel:
        recipes = Recipe.RowWise, Recipe.RowWise
    x, x_scale = ops.quantize(x, recipes[0], offs=offs)
    glu = {"glu": "halves"} if act.gated and not by_channel else {}
    w13, s13 = ops.quantize(w13.mT, recipes[1], **glu)
    w2, s2 = ops.quantize(w2.mT, recipes[1])
    scales = x_scale, recipes[0], s13, recipes[1]
    options = {"scales": scales, "activation": name, "offs": offs}
    groups = Groups(offs)
    of_rows = by_row(x_scale, groups, x, num)
    wide = x.float() * of_rows if by_channel else dequantize_rows(x, of_rows)
    wide[end:] = 0
    matrices = numbers(w13, s13, by_channel, act.planes)
    expected = act(exact(wide, matrices, offs))
    near(ops.grouped_mm_act(x, w13, **options)[:end], expected[:end], 4e-3)
    h, h_scale = ops.grouped_mm_act(x, w13, output_dtype=torch.float8_e4m3fn, **options)
    by_rows = by_row(h_scale, groups, h, num)[:end]
    q, q_scale = quantize_rows(expected[:end])
    near(by_rows, q_scale, FP8_SUMMED_IN_PLACE if by_channel else FP8_SUMMED)
    assert (h[:end].float() != q.float()).float().mean() < 5e-2
    assert not h[end:].float().any()
    h_wide = torch.zeros(rows, width, device=DEVICE)
    h_wide[:end] = dequantize_rows(h[:end], by_rows)
    given = h_scale, Recipe.BlockWise1x128, s2, recipes[1]
    y = ops.scaled_grouped_mm(h, w2, *given, offs=offs)
    expected = exact(h_wide, numbers(w2, s2, by_channel), offs)
    near(y, expected, 4e-3)
    if by_channel:
        off = (y.float() - expected).norm(dim=0) / expected.norm(dim=0)
        assert off.max() < 8e-3
        q, q_scale = ops.quantize(h_wide, Recipe.RowWise, offs=offs)
        y = ops.scaled_grouped_mm(q, w2, q_scale, recipes[0], s2, recipes[1], offs=offs)
        plain = by_row(q_scale, groups, q, num)[:, 0].contiguous()
        h_wide = q.float() * plain[:, None]
        near(y, exact(h_wide, numbers(w2, s2, True), offs), 4e-3)
        call = q, w2, plain, recipes[0], s2, recipes[1]
        assert torch.equal(ops.scaled_grouped_mm(*call, offs=offs), y)
        theirs = torch.nn.functional.scaled_grouped_mm(*call, offs=offs)
        near(y[:end], theirs[:end], 8e-3)  # each is so near to the exact one


@pytest.mark.parametrize("glu", ["halves", "interleaved"])
@pytest.mark.parametrize("name", ["swiglu_oai", "geglu", "relu2"])
@pytest.mark.parametrize(("hidden", "width"), [(272, 256), (2880, 2944)])
def test_transposed_results(hidden, width, name, glu):
    """Equal bits with bf16 results of other launches that are quantized afterwards; and what multiplies them."""
    offs, num, rows = case()
    act, of = ACTIVATIONS[name], {"offs": offs}
    alternate = glu == "interleaved" and act.gated
    call = {"recipe": "blockwise", "activation": name, "glu": glu, **of}
    scale = torch.rand(rows, device=DEVICE) + 0.1
    x, dy = rand(rows, hidden), rand(rows, hidden)
    w = rand(num, hidden, act.planes * width, scale=hidden**-0.5).mT.contiguous().mT
    mat_b = rand(num, width, hidden, scale=hidden**-0.5).mT

    def turned(t: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
        return ops.quantize(t, recipe, transposed=True, **of)

    def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        for f, e in zip(found, expected, strict=True):
            assert torch.equal(f.contiguous().view(torch.uint8), e.contiguous().view(torch.uint8))

    e4m3 = {"output_dtype": torch.float8_e4m3fn}
    h, pre = ops.grouped_mm_act(x, w, return_pre=True, row_scale=scale, **call)
    found = ops.grouped_mm_act(x, w, row_scale=scale, transposed=True, **e4m3, **call)
    by_row = ops.grouped_mm_act(x, w, row_scale=scale, **e4m3, **call)
    same(found, (*by_row, *turned(h, Recipe.BlockWise128x128)))
    if alternate:
        return
    for scaled in ({}, {"row_scale": scale}):
        d_pre, h, *d_scale = ops.grouped_mm_dact(dy, mat_b, pre, **call, **scaled)
        columns, of_h = turned(d_pre, Recipe.BlockWise1x128), turned(h, Recipe.BlockWise128x128)
        by_row = ops.quantize(d_pre, Recipe.BlockWise1x128, **of)
        found = ops.grouped_mm_dact(dy, mat_b, pre, **call, **e4m3, **scaled)
        same(found, (*by_row, *columns, *of_h, *d_scale))
    b = turned(x, Recipe.BlockWise128x128)
    given = columns[1], Recipe.BlockWise1x128, b[1], Recipe.BlockWise128x128
    out = torch.randn(num, act.planes * width, hidden, device=DEVICE)
    a_rows, b_rows, groups = rows_of_transposed(columns, b, Groups(offs))
    wide = a_rows[:, : out.shape[1]], b_rows[:, :hidden]
    expected = reference.weights(*wide, groups, num, torch.float32) + out
    ops.grouped_mm_wgrad(columns[0], b[0], out=out, scales=given, **of)
    near(out, expected, FP8_SUMMED)


def spread(num: int) -> Tensor:
    """From 1/16 to 16, in any order."""
    return torch.logspace(-4, 4, num, 2.0, device=DEVICE).bfloat16()[torch.randperm(num)]


def numbers(q: Tensor, scale: Tensor, by_channel: bool, planes: int = 1) -> Tensor:
    if by_channel:
        return q.float() * scale[:, None]
    return dequantize_blockwise(q.mT, scale.mT, planes).mT


@pytest.mark.parametrize(("n1", "n2"), SIZES)
def test_weight_gradient(n1, n2):
    offs, num, rows = case()
    a, b = rand(rows, n1), rand(rows, n2)
    a[offs[-1] :] = b[offs[-1] :] = float("nan")
    expected = reference.weights(a.float(), b.float(), Groups(offs), num, torch.float32)
    column_sums = reference.column_sums(a, Groups(offs))
    near(column_sums[-1], a[offs[-2] : offs[-1]].double().sum(0), 1e-6)
    near(ops.grouped_mm(a.mT, b, offs=offs), expected)
    fp32, sums = operators.grouped_wgrad(a, b, offs, 1, num, True, True)
    near(fp32, expected, SUMMED)
    near(sums, column_sums, 1e-5)
    assert not fp32[torch.tensor(EDGES) == 0].any()
    before = torch.randn_like(fp32)
    near(ops.grouped_mm_wgrad(a.mT, b, offs=offs, out=before.clone()), before + expected, SUMMED)
    assert torch.equal(ops.grouped_mm(a.mT, b, offs=offs, out_dtype=torch.float32), fp32)


def test_the_next_expert_may_be_nan():
    offs, num, rows = case([5, 70, 9], behind=0)
    a, b, w = rand(rows, 264), rand(rows, 72), rand(num, 264, 72)
    a[5:75] = b[5:75] = float("nan")
    out, dw = ops.grouped_mm(a, w, offs=offs), ops.grouped_mm(a.mT, b, offs=offs)
    assert out[5:75].isnan().all()
    assert out[:5].isfinite().all()
    assert out[75:].isfinite().all()
    assert dw[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    "ends", [[-5, 40, 30, 90], [200, 10, 300, 20], [0, 0, 0, 0], [7, 7, 100, 100]]
)
def test_nothing_behind_the_output_is_written(ends):
    rows, num = 100, 4
    x, w = rand(rows, 64), rand(num, 64, 72)
    whole = torch.full((64 + rows + 64, 72), 7.0, device=DEVICE).bfloat16()
    out, offs = whole[64:-64], torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    variant = GroupedVariant("product-columns")
    machine_of(DEVICE, variant).run(
        variant,
        arguments.Gemm(Operands(x, w), Groups(offs), out),
    )
    assert (whole[:64] == 7).all()
    assert (whole[-64:] == 7).all()
    near(out, exact(x, w, offs.clamp(0, rows).cummax(0)[0].int()))


def mlp_operands(num: int, rows: int, hidden: int = 512, width: int = 264) -> list[Tensor]:
    made = (
        rand(rows, hidden),
        rand(num, 2 * width, hidden, scale=hidden**-0.5),
        rand(num, hidden, width, scale=width**-0.5),
        torch.randn(num, 2 * width, device=DEVICE),
        torch.randn(num, hidden, device=DEVICE),
    )
    return [t.requires_grad_() for t in made]


def mlp(x, w13, w2, b13=None, b2=None, *, activation="swiglu", **options):
    """By the layer's layout of weights."""
    options |= {"b_up": b13, "b_down": b2}
    return ops.grouped_mlp(x, w13.mT, w2.mT, activation, **options)


def step(function, tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    y = function(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def expected_mlp(act, tensors: list[Tensor], offs: Tensor, dy: Tensor) -> list[Tensor]:
    """Value and gradients of the MLP, in fp32."""

    def plain(x, w13, w2, b13, b2):
        parts = []
        for e, r in Groups(offs).slices(x):
            h = act(x[r] @ w13[e].T + b13[e])
            parts.append(h @ w2[e].T + b2[e])
        return torch.cat([*parts, x.new_zeros(len(x) - int(offs[-1]), 512)])

    with full_fp32(DEVICE):
        return step(plain, [t.detach().float().requires_grad_() for t in tensors], dy.float())


def test_mlp_and_its_gradients():
    offs, num, rows = case()
    tensors, act = mlp_operands(num, rows), ACTIVATIONS["swiglu_oai"]
    dy = rand(rows, 512)

    def ours(x, w13, w2, b13, b2):
        return mlp(x, w13, w2, b13, b2, offs=offs, activation="swiglu_oai")

    found, expected = step(ours, tensors, dy), expected_mlp(act, tensors, offs, dy)
    for f, e in zip(found, expected, strict=True):
        near(f, e, 8e-3)  # dy, dgu, h and pre-activations are rounded
    for f, again in zip(found, step(ours, tensors, dy), strict=True):
        assert torch.equal(f, again)  # the same bits


@pytest.mark.parametrize("alignment", [1, 128])
def test_a_captured_step_follows_the_offsets(alignment):
    """With 128, rows are padded per expert as DeepEP hands them over."""
    offs, num, rows = case([100, 0, 300, 28], behind=300)
    tensors, dy = mlp_operands(num, rows), rand(rows, 512)

    def run():
        return step(lambda *t: mlp(*t, offs=offs, alignment=alignment), tensors, dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for counts in ([100, 0, 300, 28], [0, 64, 1, 129], [128, 127, 0, 440], [0, 0, 0, 0]):
        ends, end = [], 0  # psum_num_recv_tokens_per_expert
        for count in counts:
            end = -(-end // alignment) * alignment + count
            ends.append(end)
        offs.copy_(torch.tensor(ends))
        graph.replay()
        for f, e in zip(captured, run(), strict=True):
            assert torch.equal(f, e)
        of_none = ~Groups(offs, alignment).of_rows(dy)[1]
        assert not captured[0][of_none].any()


def test_compiled_without_a_break():
    offs, num, rows = case([100, 0, 300, 28])
    tensors, dy = mlp_operands(num, rows), rand(rows, 512)

    def model(x, w13, w2, b13, b2):
        return mlp(x, w13, w2, b13, b2, offs=offs)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for f, e in zip(step(compiled, tensors, dy), step(model, tensors, dy), strict=True):
        assert torch.equal(f, e)


def test_a_dense_mlp_is_one_expert():
    x, w13, w2, *_ = mlp_operands(1, 1000)
    y = mlp(x, w13, w2)
    h = torch.nn.functional.silu(x @ w13[0, :264].T) * (x @ w13[0, 264:].T)
    near(y, h @ w2[0].T, 8e-3)


# A process that has kernels but no compiler: what runs, and whether it is right.
FRESH = """
import json, logging, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("cuda.bindings.nvrtc", "cutlass")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import torch
from megamoe.core.errors import CompileError
from megamoe.jit import paths
def hidden():
    raise CompileError("the CUTLASS headers are missing")
paths.cutlass_include = hidden
from megamoe import ops
from megamoe.ops.machines import Gpu
folder = sys.argv[1]
launched, warned = [], []
run = Gpu.run
Gpu.run = lambda self, variant, fill: (launched.append(str(variant)), run(self, variant, fill))[1]
logger = logging.getLogger("megamoe")
logger.addHandler(logging.Handler())
logger.handlers[0].emit = lambda record: warned.append(record.getMessage())
case = torch.load(f"{folder}/case.pt")
tensors = [t.requires_grad_() for t in case["tensors"]]
x, w13, w2, b13, b2 = tensors
offs = case["offs"]
y = ops.grouped_mlp(x, w13.mT, w2.mT, offs=offs, b_up=b13, b_down=b2)
found = [y.detach(), *torch.autograd.grad(y, tensors, case["dy"])]
a, b = x.detach(), case["dy"]
found.append(ops.grouped_mm(a.mT, b, offs=offs, out_dtype=torch.float32))
found.append(ops.grouped_mm(a, w2.detach(), offs=offs, recipe="blockwise"))
torch.save(found, f"{folder}/found.pt")
print(json.dumps([launched, warned]))
"""


@pytest.mark.parametrize("prebuilt", [True, False])
def test_a_process_without_cutlass(prebuilt, tmp_path):
    """By the kernels of another machine; without them by torch's grouped_mm, said once for each reason."""
    offs, num, rows = case()
    tensors, dy = mlp_operands(num, rows, width=512), rand(rows, 512)
    stages = ["saving-swiglu", "product", "product-columns", "gradient-columns-swiglu", "weights"]
    names = [f"grouped-{stage}" for stage in [*stages, "product-e4m3"]]
    variables = {**os.environ, "MEGAMOE_CACHE_DIR": str(tmp_path / "cache")}
    variables.pop("MEGAMOE_PREBUILT", None)
    if prebuilt:
        assert jit(["--export", str(tmp_path / "made"), "--only", *names, "quantize-weights"]) == 0
        variables["MEGAMOE_PREBUILT"] = str(tmp_path / "made")
    saved = {"tensors": [t.detach() for t in tensors], "offs": offs, "dy": dy}
    torch.save(saved, tmp_path / "case.pt")
    command = [sys.executable, "-c", FRESH, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    launched, warned = json.loads(done.stdout.splitlines()[-1])
    *of_mlp, dw, quantized = torch.load(tmp_path / "found.pt")
    if prebuilt:
        assert set(launched) == set(names)
        assert warned == []
    else:
        assert launched == []
        assert sum("torch's grouped_mm, at 1.1 to 1.7 times" in line for line in warned) == 1
    for found, expected in zip(
        of_mlp, expected_mlp(ACTIVATIONS["swiglu"], tensors, offs, dy), strict=True
    ):
        near(
            found, expected, 1e-2
        )  # without kernels pre-activations are rounded before the bias, too
    x, w2 = tensors[0].detach(), tensors[2].detach()
    near(dw, reference.weights(x.float(), dy.float(), Groups(offs), num, torch.float32), SUMMED)
    near(quantized, exact(x, w2, offs), 6e-2)  # FP8 of both operands
    assert not (tmp_path / "cache").exists()
