"""Transposed e4m3 results of the grouped kernels, and the weight gradients that multiply them, on fibers."""

from __future__ import annotations

import pytest
import torch
from flaws import SEEN, names, plant
from torch import Tensor
from torch.nn.functional import ScalingType as Recipe

from megamoe import ops
from megamoe.core.config import ACTIVATIONS
from megamoe.core.errors import ArgumentError
from megamoe.formats.quantization import rows_of_blocks
from megamoe.ops import machines, scales
from megamoe.ops.groups import Groups
from megamoe.testing.compare import compare

QUICK = "swiglu"
LENGTHS = [0, 1, 63, 64, 65, 0, 127, 128, 129, 0]
E4M3, GROUPS, BLOCKS = torch.float8_e4m3fn, Recipe.BlockWise1x128, Recipe.BlockWise128x128


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("MEGAMOE_BACKEND", "emulate")
    torch.manual_seed(0)


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def case(lengths: list[int] = LENGTHS, alignment: int = 1) -> tuple[Groups, int, int]:
    """Return the groups, how many they are, and rows; three rows are behind the last group, which have values."""
    ends, end = [], 0
    for length in lengths:
        end = -(-end // alignment) * alignment + length
        ends.append(end)
    return Groups(torch.tensor(ends).int(), alignment), len(ends), end + 3


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Bit by bit."""
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        assert torch.equal(f.contiguous().view(torch.uint8), e.contiguous().view(torch.uint8))


def values(
    pair: tuple[Tensor, Tensor], by_column: bool, groups: Groups, width: int, num_rows: int
) -> Tensor:
    """Transposed blocks as rows [M, N]; what stands elsewhere is zeros."""
    q, scale = pair
    of_blocks = scale if by_column else scale.T.repeat_interleave(128, 1)
    assert not of_blocks[-1].any()
    wide = rows_of_blocks(q, of_blocks[:-1])
    at, inside = scales.places(groups, torch.zeros(num_rows, 1), len(groups.offs))
    out = torch.zeros(num_rows, width)
    out[inside] = wide[at[inside], :width]
    assert out.count_nonzero() == wide.count_nonzero()
    return out


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("recipe", [GROUPS, BLOCKS])
def test_rows_are_quantized_transposed(recipe, alignment):
    """Scales are the least powers of two that suffice."""
    groups, num, rows = case(alignment=alignment)
    at, inside = scales.places(groups, torch.zeros(rows, 1), num)
    x = rand(rows, 256) * torch.logspace(-3, 3, 256, 2.0).bfloat16()
    x[:, 7] = 0
    pair = ops.quantize(x, recipe, **groups._asdict(), transposed=True)
    wide = values(pair, recipe == GROUPS, groups, 256, rows)
    x[~inside] = 0
    amax = torch.zeros(len(pair[0]), 256).index_reduce_(0, at // 128, x.abs().float(), "amax")
    if recipe == BLOCKS:
        amax = amax.unflatten(1, (2, 128)).amax(2).T
    scale = pair[1][:-1] if recipe == GROUPS else pair[1][:, :-1]
    has_rows = amax.amax(0 if recipe == BLOCKS else 1) > 0
    assert 0 < has_rows.sum() < len(has_rows)
    amax, scale = (t.movedim(int(recipe == BLOCKS), 0) for t in (amax, scale))
    assert not scale[~has_rows].any()
    amax, scale = amax[has_rows].clamp(min=1e-10), scale[has_rows]
    assert (torch.frexp(scale)[0] == 0.5).all()
    assert (scale * 448 >= amax).all()
    assert (scale * 224 < amax).all()
    assert ((wide - x.float()).abs() <= x.float().abs() * 2.0**-4 + scale.max() * 2.0**-9).all()


def operands(of: str, x: Tensor, w: Tensor, groups: Groups, planes: int) -> tuple:
    """Return rows, weights, and what a call says of them."""
    if of == "recipe":
        return x, w, {"recipe": "blockwise"}
    q, x_scale = ops.quantize(x, GROUPS, **groups._asdict())
    wq, w_scale = ops.quantize(w, BLOCKS, glu="halves" if planes == 2 else None)
    return q, wq, {"scales": (x_scale, GROUPS, w_scale, BLOCKS)}


def act_and_gradient(of: str, name: str, glu: str, alignment: int, width: int) -> None:
    """Equal bits with what other launches leave in bf16, quantized afterwards."""
    act, hidden = ACTIVATIONS[name], 272
    groups, num, rows = case(alignment=alignment)
    alternate = glu == "interleaved" and act.gated
    given = {**groups._asdict(), "activation": name, "glu": glu}
    w = rand(num, hidden, act.planes * width, scale=0.1)
    x, w, call = operands(of, rand(rows, hidden), w, groups, 1 if alternate else act.planes)
    call |= {**given, "bias": torch.randn(num, act.planes * width), "row_scale": torch.rand(rows)}
    h, pre = ops.grouped_mm_act(x, w, return_pre=True, **call)
    expected = ops.grouped_mm_act(x, w, output_dtype=E4M3, **call)
    expected += ops.quantize(h, BLOCKS, **groups._asdict(), transposed=True)
    call |= {"output_dtype": E4M3, "transposed": True}
    same(ops.grouped_mm_act(x, w, **call), expected)
    same(ops.grouped_mm_act(x, w, return_pre=True, **call), (*expected, pre))
    values(expected[2:], False, groups, width, rows)
    if alternate:
        return
    dy, w, call = operands(of, rand(rows, hidden), rand(num, hidden, width, scale=0.1), groups, 1)
    # A factor for each row does not depend on the activation.
    for scaled in ({}, {"row_scale": torch.rand(rows) + 0.1})[0 if act.gated else 1 :]:
        d_pre, h, *d_scale = ops.grouped_mm_dact(dy, w, pre, **call, **given, **scaled)
        by_row = ops.quantize(d_pre, GROUPS, **groups._asdict())
        columns = ops.quantize(d_pre, GROUPS, **groups._asdict(), transposed=True)
        of_h = ops.quantize(h, BLOCKS, **groups._asdict(), transposed=True)
        found = ops.grouped_mm_dact(dy, w, pre, output_dtype=E4M3, **call, **given, **scaled)
        same(found, (*by_row, *columns, *of_h, *d_scale))


CASES = [("by block", "halves", 1, 256), ("recipe", "interleaved", 128, 144)]


@pytest.mark.parametrize(("how", "seed"), [("emulate", 0), ("emulate", 7), ("auto", 0)])
@pytest.mark.parametrize(("of", "glu", "alignment", "width"), CASES)
def test_activation_and_its_gradient(of, glu, alignment, width, seed, how, monkeypatch):
    monkeypatch.setenv("MEGAMOE_BACKEND", how)
    monkeypatch.setattr(machines.fibers, "seed", seed)
    act_and_gradient(of, QUICK, glu, alignment, width)


@pytest.mark.parametrize("name", [pytest.param("geglu", marks=pytest.mark.slow), "relu2"])
def test_other_activations(name):
    """Ungated, a tile has two halves of h, of which the second may not exist."""
    act_and_gradient("by block", name, "halves", 1, 384)


@pytest.mark.parametrize("how", ["emulate", "auto"])
@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_gradient(dtype, alignment, how, monkeypatch):
    monkeypatch.setenv("MEGAMOE_BACKEND", how)
    weight_gradient(dtype, alignment)


def weight_gradient(dtype: torch.dtype, alignment: int) -> None:
    groups, num, rows = case(alignment=alignment)
    a, b = rand(rows, 144), rand(rows, 272)
    b *= torch.logspace(-2, 2, rows, 2.0).bfloat16()[:, None]  # blocks have other scales
    a[groups.offs[-1] :] = float("nan")
    a, b = (
        ops.quantize(t, recipe, **groups._asdict(), transposed=True)
        for t, recipe in ((a, GROUPS), (b, BLOCKS))
    )
    wide = (
        values(a, True, groups, 144, rows).double(),
        values(b, False, groups, 272, rows).double(),
    )
    before = torch.randn(num, 144, 272).to(dtype)
    expected = before.double()
    for e, r in groups.slices(wide[0]):
        expected[e] += wide[0][r].T @ wide[1][r]
    out = before.clone()
    of = a[1], GROUPS, b[1], BLOCKS
    assert ops.grouped_mm_wgrad(a[0], b[0], out=out, scales=of, **groups._asdict()) is out
    assert compare(out, expected).relative < (2.5e-3 if dtype == torch.bfloat16 else 1e-5)
    none = torch.tensor(LENGTHS) == 0
    assert torch.equal(out[none], before[none])


def test_one_group_and_no_rows():
    x = rand(256, 128)
    q, scale = ops.quantize(x, GROUPS, transposed=True)
    assert q.shape == (3, 128, 128)
    assert not scale[2:].any()
    b, of_b = ops.quantize(x, BLOCKS, transposed=True)
    out = torch.zeros(1, 128, 128)
    ops.grouped_mm_wgrad(q, b, out=out, scales=(scale, GROUPS, of_b, BLOCKS))
    assert compare(out[0], x.double().T @ x.double()).relative < 5e-2
    offs = torch.zeros(3, dtype=torch.int32)
    (a, of_a), (b, of_b) = (
        ops.quantize(x[:0], r, offs=offs, transposed=True) for r in (GROUPS, BLOCKS)
    )
    out = torch.ones(3, 128, 128)
    ops.grouped_mm_wgrad(a, b, out=out, offs=offs, scales=(of_a, GROUPS, of_b, BLOCKS))
    assert (out == 1).all()


def test_bad_operands_are_refused():
    groups, num, rows = case()
    x = rand(rows, 128)
    with pytest.raises(ArgumentError, match="transposed is True, expected False with weights"):
        ops.quantize(rand(num, 128, 256), BLOCKS, transposed=True)
    with pytest.raises(ArgumentError, match="recipe is RowWise, expected BlockWise1x128 or"):
        ops.quantize(x, Recipe.RowWise, offs=groups.offs, transposed=True)
    (a, of_a), (b, of_b) = (
        ops.quantize(x, r, offs=groups.offs, transposed=True) for r in (GROUPS, BLOCKS)
    )
    given, out = (of_a, GROUPS, of_b, BLOCKS), torch.zeros(num, 128, 128)
    for wrong, message in (
        (
            {"scales": (of_a, GROUPS, of_b, GROUPS)},
            r"expected \(BlockWise1x128, BlockWise128x128\)",
        ),
        ({"scales": (of_b, GROUPS, of_b, BLOCKS)}, "scale_a.shape is"),
        ({"scales": (of_a, GROUPS, of_a, BLOCKS)}, "scale_b.shape is"),
        ({"mat_a": a[1:]}, "mat_b.shape is"),
        ({"mat_b": x}, "mat_b.dtype is"),
        ({"out": out[:2]}, "out.shape is"),
        ({"out": torch.zeros(num, 256, 128)}, "mat_a.shape is"),
    ):
        of = {"mat_a": a, "mat_b": b, "out": out, "scales": given, "offs": groups.offs} | wrong
        with pytest.raises(ArgumentError, match=message):
            ops.grouped_mm_wgrad(**of)


FLAWS = {
    "blocks are rows": (
        *(
            "cta/blocks.cuh",
            "experts.first_block[tile.expert()] * T::",
            "experts.first_row(tile.expert()) / 128 * T::",
        ),
    ),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_of_weight_gradients_is_seen(flaw, monkeypatch, tmp_path):
    plant(FLAWS[flaw], monkeypatch, tmp_path)
    with pytest.raises(SEEN):
        weight_gradient(torch.float32, 1)


def test_no_rows_leave_zeros():
    offs, x = torch.zeros(3, dtype=torch.int32), rand(0, 128)
    w = rand(3, 128, 256, scale=0.1)
    call = {"offs": offs, "recipe": "blockwise", "output_dtype": E4M3}
    found = ops.grouped_mm_act(x, w, transposed=True, **call)
    for t in (*found, *ops.grouped_mm_dact(x, w[:, :, :128], rand(0, 256), **call)):
        assert not t.float().any()


def test_what_has_no_kernel_is_refused():
    groups, num, rows = case()
    x, w = rand(rows, 128), rand(num, 128, 256)
    call = {"offs": groups.offs, "recipe": "blockwise"}
    with pytest.raises(ArgumentError, match="transposed is True, expected False unless h is e4m3"):
        ops.grouped_mm_act(x, w, transposed=True, **call)
    with pytest.raises(ArgumentError, match="operands are FP8 by block"):
        ops.grouped_mm_act(x, w, offs=groups.offs, output_dtype=E4M3, transposed=True)
    pre, call["output_dtype"] = rand(rows, 512), E4M3
    with pytest.raises(ArgumentError, match="gate and up halves"):
        ops.grouped_mm_dact(x, w, pre, glu="interleaved", **call)
    with pytest.raises(ArgumentError, match="unless operands are FP8"):
        ops.grouped_mm_dact(x, w, pre, offs=groups.offs, output_dtype=E4M3)
    with pytest.raises(ArgumentError, match="I a multiple of 128"):
        ops.grouped_mm_dact(x, w[:, :, :144], pre[:, :288], **call)


TRANSPOSED = "epilogue/transposed.cuh"
OF_RESULTS = {
    "rows of the next expert": (TRANSPOSED, "8 * i < rows ? pair : 0", "pair"),
    "largest of one warp": (TRANSPOSED, "of_warps[math_warp()] = own;", "of_warps[0] = own;"),
    "scales of another block": (TRANSPOSED, "transposed_blocks(ctx.args) + block;", "1 + block;"),
    "blocks of no expert are left": (
        "rows/sorted.cuh",
        "i < end; i += stride",
        "i < 0; i += stride",
    ),
    "by row, as many as the tile": (
        *("cta/blocks.cuh", "rows_used<T>(tile) - row);", "tile.rows() - row);"),
    ),
    "rows behind an expert's last differentiated": (
        *(
            "epilogue/transposed_gradient.cuh",
            "Weights s = {-0.0f, -0.0f};",
            "Weights s = {0.0f, 0.0f};",
        ),
    ),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(OF_RESULTS))
def test_a_flaw_of_results_is_seen(flaw, monkeypatch, tmp_path):
    plant(OF_RESULTS[flaw], monkeypatch, tmp_path)
    with pytest.raises(SEEN):
        act_and_gradient("by block", QUICK, "halves", 1, 256)
