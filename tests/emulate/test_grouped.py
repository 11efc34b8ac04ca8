"""The grouped kernel's source on fibers against fp64: offsets, strides, activations, what lies behind the rows."""

from __future__ import annotations

import pytest
import torch
from flaws import SEEN, names, plant
from torch import Tensor
from torch.nn.functional import ScalingType as Recipe

from megamoe import ops
from megamoe.backends.emulate.emulation import EmulationError
from megamoe.backends.reference.backward import activation_gradient
from megamoe.core.config import ACTIVATIONS, KINDS, Activation
from megamoe.core.errors import ArgumentError
from megamoe.formats.quantization import (
    dequantize_blockwise,
    dequantize_rows,
    quantize_rows,
)
from megamoe.jit.grouped import GroupedVariant, grouped_variants
from megamoe.ops import arguments, machines, operators, reference, scales
from megamoe.ops.groups import Groups
from megamoe.ops.operands import Operands
from megamoe.testing.compare import compare

ROUNDED = 2.5e-3  # relative Frobenius error of one rounding to bf16, and fp32 sums
LENGTHS = [0, 1, 63, 64, 65, 0, 127, 128, 129, 0]
QUICK = "swiglu"  # each kernel takes g++ a second: SLOW=1 has the other activations
NAMES = [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ACTIVATIONS]
H, I = 136, 72  # noqa: E741


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("MEGAMOE_BACKEND", "emulate")
    torch.manual_seed(0)


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def case(lengths: list[int] = LENGTHS, behind: int = 3) -> tuple[Tensor, int, int]:
    """Return offs, the number of experts, and of rows; `behind` of them are of no expert."""
    offs = torch.tensor(lengths).cumsum(0).int()
    return offs, len(lengths), int(offs[-1]) + behind


def exact(x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times w [E, K, N] in fp64."""
    out, start = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float64), 0
    for e, end in enumerate(offs.tolist()):
        out[start:end] = x[start:end].double() @ w[e].double()
        if bias is not None:
            out[start:end] += bias[e].flatten().double()
        start = end
    return out


def exact_weights(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    pairs = zip([0, *offs.tolist()], offs.tolist(), strict=False)
    return torch.stack([a[s:e].double().T @ b[s:e].double() for s, e in pairs])


def near(found: Tensor, expected: Tensor, limit: float = ROUNDED) -> None:
    difference = compare(found, expected)
    assert difference.relative < limit, difference


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("major", ["k", "n"])
def test_product(major, seed, monkeypatch):
    monkeypatch.setattr(machines.fibers, "seed", seed)
    offs, num, rows = case()
    x, bias = rand(rows, H), torch.randn(num, 264)
    w = rand(num, 264, H).transpose(1, 2) if major == "k" else rand(num, H, 264)
    out = ops.grouped_mm(x, w, offs=offs, bias=bias)
    near(out, exact(x, w, offs, bias))
    assert not out[offs[-1] :].any()


def test_more_experts_than_a_warp_has_lanes_for():
    """In three rounds, each of which begins where the last one ended."""
    offs, num, rows = case([e % 5 * 35 for e in range(70)])
    x, w = rand(rows, 16), rand(num, 16, 24)
    out = ops.grouped_mm(x, w, offs=offs)
    near(out, exact(x, w, offs))
    assert not out[offs[-1] :].any()
    near(ops.grouped_mm(x.mT, out, offs=offs), exact_weights(x, out, offs))


def test_rows_and_weights_stay_where_they_are():
    offs, num, rows = case([70, 0, 3])
    x, w = rand(rows, 2 * H)[:, H:], rand(num, 64, 3 * H)[:, :, 16 : H + 16]
    near(ops.grouped_mm(x, w.mT, offs=offs), exact(x, w.mT, offs))
    assert ops.grouped_mm(x[:0], w.mT, offs=offs * 0).shape == (0, 64)


def test_sms_are_left_to_others(monkeypatch):
    """Launches inside `with`, the backward pass's too, have fewer CTAs: the same bits; a pair is the least."""
    grids: list[int] = []
    run = machines.run_alone
    monkeypatch.setattr(
        machines, "run_alone", lambda v, a, grid, seed: (grids.append(grid), run(v, a, grid, seed))
    )
    offs, num, rows = case([70, 0, 200])
    x, w = rand(rows, 64).requires_grad_(), rand(num, 64, 264)
    expected = ops.grouped_mm(x, w, offs=offs)
    with ops.sm_margin(2):
        out = ops.grouped_mm(x, w, offs=offs)
        out.sum().backward()
        with ops.sm_margin(400):
            assert torch.equal(ops.grouped_mm(x, w, offs=offs), expected)
        with ops.sm_margin(1):
            ops.grouped_mm(x, w, offs=offs)
    assert torch.equal(out, expected)
    monkeypatch.setenv("MEGAMOE_RESERVE_SMS", "2")
    monkeypatch.setattr(machines, "_reserved", machines.env.reserve_sms)  # as a new process does
    ops.grouped_mm(x, w, offs=offs)
    assert grids == [4, 2, 2, 2, 2, 2]
    for wrong in (-1, 1.0, None, True):
        with (
            pytest.raises(ArgumentError, match="num_sms is .*, expected an int"),
            ops.sm_margin(wrong),
        ):
            pass


def padded(lengths: list[int], alignment: int) -> tuple[Tensor, Tensor, int]:
    """Return ends of experts that begin at multiples of `alignment`, the rows that they have, and all rows."""
    ends, rows, end = [], [], 0
    for length in lengths:
        begin = -(-end // alignment) * alignment
        end = begin + length
        ends.append(end)
        rows += range(begin, end)
    return torch.tensor(ends).int(), torch.tensor(rows), end + 5


@pytest.mark.parametrize(
    ("alignment", "how"), [(16, "emulate"), (128, "emulate"), (128, "torch"), (8, "")]
)
def test_rows_may_be_padded_per_expert(alignment, how, monkeypatch):
    """The same bits as of rows that follow each other; rows of padding are not read, and zeros."""
    monkeypatch.setenv("MEGAMOE_BACKEND", "emulate" if how == "emulate" else "auto")
    if how == "torch":  # as on GPUs without a kernel
        monkeypatch.setattr(reference, "_grouped", lambda x: x.dtype == torch.bfloat16)
    counts = LENGTHS[:-1] + [5, 0]
    dense, num, _ = case(counts, behind=0)
    offs, rows, total = padded(counts, alignment)
    w13, w2 = rand(num, 2 * 128, 128, scale=0.1), rand(num, 128, 128, scale=0.1)
    b13, values = rand(num, 2 * 128), rand(len(rows), 128)

    def spread(t: Tensor) -> Tensor:
        out = torch.full((total, *t.shape[1:]), float("nan"), dtype=torch.bfloat16)
        out[rows] = t
        return out

    def run(x: Tensor, **of: Tensor | int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {"product": ops.grouped_mm(x, w13.mT, bias=b13, **of)}
        found["h"], found["pre"] = ops.grouped_mm_act(x, w13.mT, bias=b13, return_pre=True, **of)
        found["d_pre"], found["h again"] = ops.grouped_mm_dact(x, w2, found["pre"], **of)
        found["dw"] = ops.grouped_mm(x.mT, found["d_pre"], **of)
        out = torch.ones(num, 128, 128, dtype=torch.bfloat16)
        found["dw +="] = ops.grouped_mm_wgrad(x.mT, x, out=out, **of)
        q, scale = ops.quantize(x, Recipe.BlockWise1x128, **of)
        weights = ops.quantize(w2.mT, Recipe.BlockWise128x128)
        given = scale, Recipe.BlockWise1x128, weights[1], Recipe.BlockWise128x128
        found["e4m3"] = ops.scaled_grouped_mm(q, weights[0], *given, **of)
        out = ops.scaled_grouped_mm(q, weights[0], *given, output_dtype=q.dtype, **of)
        by_row_alone(out[1], Groups(of["offs"], of.get("alignment", 1)), q, num)
        for recipe in (None, "blockwise"):
            leaves = [t.clone().requires_grad_() for t in (x, w13, w2, b13)]
            y = ops.grouped_mlp(
                leaves[0], leaves[1].mT, leaves[2].mT, b_up=leaves[3], recipe=recipe, **of
            )
            y.backward(x)
            found |= {f"{recipe} {i}": t for i, t in enumerate((y, *(t.grad for t in leaves)))}
        return found

    expected = run(values, offs=dense)
    for name, t in run(spread(values), offs=offs, alignment=alignment).items():
        if t.shape[0] == total:
            t, rest = t[rows], t.clone()
            rest[rows] = 0
            assert not rest.any(), name
        assert how == "torch" or torch.equal(t, expected[name]), name
        near(t, expected[name], 4e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["emulate", "auto"])
def test_row_scale(how, name, monkeypatch):
    """Of h, with its gradient; those of rows of no expert are not read."""
    monkeypatch.setenv("MEGAMOE_BACKEND", how)
    act, width, (offs, num, rows) = ACTIVATIONS[name], 272, case()
    end = int(offs[-1])
    x, dy, bias = rand(rows, 64), rand(rows, 64), rand(num, act.planes * width, scale=0.2)
    w13 = rand(num, act.planes * width, 64, scale=0.2)
    w2 = rand(num, 64, width, scale=0.1)  # [E, H, I]: what dh is multiplied by
    scale = torch.rand(rows) + 0.1
    scale[end:] = float("nan")
    options = {"activation": name, "offs": offs, "row_scale": scale}
    h, pre = ops.grouped_mm_act(x, w13.mT, bias=bias, return_pre=True, **options)
    plain = ops.grouped_mm_act(x, w13.mT, bias=bias, **options)
    exact_pre = exact(x, w13.mT, offs, bias)
    s, wide = scale.double().nan_to_num()[:, None], pre.double().requires_grad_()
    near(h, act(exact_pre) * s)
    near(pre, exact_pre)
    assert torch.equal(plain, h)
    q, q_scale = ops.grouped_mm_act(
        x, w13.mT, bias=bias, output_dtype=torch.float8_e4m3fn, **options
    )
    by_row = scales.by_row(q_scale, Groups(offs), q, num)
    near(dequantize_rows(q, by_row)[:end], (act(exact_pre) * s)[:end], 4e-2)

    factor = s.flatten().requires_grad_()
    expected = factor[:, None] * act(wide)
    dh = exact(dy, w2, offs)
    expected.backward(dh)
    d_pre, again, d_scale = ops.grouped_mm_dact(dy, w2, pre, **options)
    near(d_pre, wide.grad, 4e-3)
    near(again, expected.detach(), 4e-3)
    near(d_scale, factor.grad, 4e-3)
    assert d_scale.dtype == torch.float32
    for t in (h, q.float(), d_pre, again, d_scale):
        assert not t[end:].any()

    leaves = [t.clone().requires_grad_() for t in (x, w13, w2, scale)]
    twins = [t.detach().double().nan_to_num().requires_grad_() for t in leaves]
    for recipe, limit in (None, 6e-3), ("blockwise", 8e-2):
        y = ops.grouped_mlp(
            leaves[0],
            leaves[1].mT,
            leaves[2].mT,
            name,
            offs=offs,
            row_scale=leaves[3],
            recipe=recipe,
        )
        found = torch.autograd.grad(y, leaves, dy)
        parts = []
        for e, r in Groups(offs).slices(x):
            of_h = act(twins[0][r] @ twins[1][e].T) * twins[3][r, None]
            parts.append(of_h @ twins[2][e].T)
        near(y[:end], torch.cat(parts).detach(), limit)
        for a, b in zip(
            found, torch.autograd.grad(torch.cat(parts), twins, dy[:end].double()), strict=True
        ):
            near(a, b, limit)


def test_one_expert_without_offs():
    x, w = rand(130, 64), rand(1, 64, 72)
    near(ops.grouped_mm(x, w), x.double() @ w[0].double())


def halves(gu: Tensor, alternate: bool) -> Tensor:
    return torch.cat((gu[..., ::2], gu[..., 1::2]), -1) if alternate else gu


@pytest.mark.parametrize("glu", ["halves", "interleaved"])
@pytest.mark.parametrize("name", NAMES)
def test_activation_and_its_gradient(name, glu):
    offs, num, rows = case()
    act = ACTIVATIONS[name]
    x, bias = rand(rows, H), torch.randn(num, act.planes * I)
    w = rand(num, act.planes * I, H, scale=0.2).mT
    options = {"activation": name, "offs": offs, "glu": glu}
    h, gu = ops.grouped_mm_act(x, w, bias=bias, return_pre=True, **options)
    pre = exact(x, w, offs, bias)
    near(gu, pre)
    alternate = glu == "interleaved" and act.gated
    near(h, act(halves(pre, alternate)))
    assert not h[offs[-1] :].any()
    assert not gu[offs[-1] :].any()

    dy, w2 = rand(rows, H), rand(num, H, I, scale=0.2)
    dgu, again = ops.grouped_mm_dact(dy, w2, gu, **options)
    pre = halves(gu, alternate).double()
    expected, h2 = activation_gradient(act, pre, exact(dy, w2, offs))
    near(halves(dgu, alternate), expected)
    near(again[: offs[-1]], h2[: offs[-1]])
    assert not dgu[offs[-1] :].any()
    assert not again[offs[-1] :].any()


@pytest.mark.parametrize("glu", ["halves", "interleaved"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_read_as_they_lie(name, glu, monkeypatch):
    """Contiguous in K or in N, gate and up halves or neighbours, by a kernel of each: the same bits, in their order."""
    ran: list[str] = []
    run = machines.Fibers.run
    monkeypatch.setattr(
        machines.Fibers, "run", lambda self, v, fill: (ran.append(str(v)), run(self, v, fill))[1]
    )
    offs, num, rows = case([70, 0, 130])
    act = ACTIVATIONS[name]
    x, bias = rand(rows, H), torch.randn(num, act.planes * I)
    w_up, mat_b = rand(num, H, act.planes * I, scale=0.2), rand(num, H, I, scale=0.2)
    alternate = glu == "interleaved" and act.gated
    of_halves = {"offs": offs, "bias": halves(bias, alternate), "return_pre": True}
    *expected, pre = (
        *ops.grouped_mm_act(x, halves(w_up, alternate), name, **of_halves),
        rand(rows, act.planes * I),
    )
    of_dact = ops.grouped_mm_dact(x, mat_b, halves(pre, alternate), name, offs=offs)
    ran.clear()
    # Where columns alternate, what saves is what does not, and more.
    for saves in (True,) if alternate else (False, True):
        options = {"offs": offs, "bias": bias, "return_pre": saves, "glu": glu}
        for w in of_either_major(w_up):
            found = ops.grouped_mm_act(x, w, name, **options)
            h, *gu = found if saves else (found,)
            assert torch.equal(h, expected[0])
            assert all(torch.equal(halves(t, alternate), expected[1]) for t in gu)
    for w in of_either_major(mat_b):
        d_pre, h = ops.grouped_mm_dact(x, w, pre, name, offs=offs, glu=glu)
        assert torch.equal(halves(d_pre, alternate), of_dact[0])
        assert torch.equal(h, of_dact[1])
    order = "-interleaved" * alternate
    stages = ("saving", "gradient") if alternate else ("activation", "saving", "gradient")
    assert ran == [
        f"grouped-{s}{major}{order}-{act.kind}" for s in stages for major in ("-columns", "")
    ]


def of_either_major(w: Tensor) -> tuple[Tensor, Tensor]:
    """w: [E, K, N], contiguous -> it, and a copy that is contiguous in K."""
    by_k = torch.empty(w.shape[0], w.shape[2], w.shape[1], dtype=w.dtype)
    return w, by_k.copy_(w.mT).mT


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_saving_changes_no_bit(name):
    offs, num, rows = case([40, 100])
    act = ACTIVATIONS[name]
    x, w = rand(rows, H), rand(num, act.planes * I, H).mT
    h, _ = ops.grouped_mm_act(x, w, name, offs=offs, return_pre=True)
    assert torch.equal(ops.grouped_mm_act(x, w, name, offs=offs), h)


@pytest.mark.parametrize("seed", [0, 7])
def test_weight_gradient(seed, monkeypatch):
    monkeypatch.setattr(machines.fibers, "seed", seed)
    offs, num, rows = case()
    a, b = rand(rows, H), rand(rows, 264)
    a[offs[-1] :] = b[offs[-1] :] = float("nan")  # rows of no expert count nowhere
    expected = exact_weights(a, b, offs)
    near(ops.grouped_mm(a.mT, b, offs=offs), expected)
    fp32 = ops.grouped_mm(a.mT, b, offs=offs, out_dtype=torch.float32)
    near(fp32, expected, 1e-6)
    empty = torch.tensor(LENGTHS) == 0
    assert not fp32[empty].any()
    before = torch.randn(num, H, 264)
    added = ops.grouped_mm_wgrad(a.mT, b, offs=offs, out=before.clone())
    near(added, before + expected, 1e-6)
    assert torch.equal(added[empty], before[empty])
    _, sums = operators.grouped_wgrad(a, b, offs, 1, num, True, True)
    near(sums, exact_weights(a, torch.ones_like(b[:, :1]), offs)[..., 0], 1e-6)


OTHER_SHAPES = {
    "tiles of both kinds of units, and none for a CTA": ([70, 0, 200], 264, 520),
    "an odd number of blocks, shared rows": ([64, 5], 392, 24),
    "one row an expert": ([1, 0, 1, 1], 8, 272),
    "no rows at all": ([0, 0, 0], 136, 264),
    "more experts than a warp has lanes": ([e % 3 * 40 for e in range(40)], 16, 24),
}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_weight_gradients_of_other_shapes(name):
    """Made in either type, and added to either."""
    lengths, n1, n2 = OTHER_SHAPES[name]
    offs, num, rows = case(lengths)
    a, b = rand(rows, n1), rand(rows, n2)
    made, _ = operators.grouped_wgrad(a, b, offs, 1, num, True, True)
    near(made, exact_weights(a, b, offs), 1e-6)
    assert torch.equal(ops.grouped_mm(a.mT, b, offs=offs), made.bfloat16())
    out = torch.randn(num, n1, n2)
    expected = out + made
    ops.grouped_mm_wgrad(a.mT, b, offs=offs, out=out)
    assert torch.equal(out, expected)


def said(operation: str) -> tuple[str, str, str]:
    """Let the kernel say which CTA does it, and where: a flaw, but for the result."""
    told = "arch::block_idx(), tile.expert(), row, to.column"
    call = f"arch::tma_{operation}_4d(to.map, "
    say = f'fprintf(stderr, "{operation} %d %d %d %d\\n", {told});'
    return "epilogue/weight_gradient.cuh", call, f"{say} {call}"


def test_what_is_added_to_was_asked_for(monkeypatch, tmp_path, capfd):
    """Once, by who adds, and one slot of a tile ahead: hints are in no result."""
    for operation in ("prefetch", "reduce_add"):
        plant(said(operation), monkeypatch, tmp_path / operation)
    offs, num, rows = case([70, 0, 9])
    a, b, out = rand(rows, 200), rand(rows, 424), torch.zeros(num, 200, 424)
    ops.grouped_mm_wgrad(a.mT, b, offs=offs, out=out)
    near(out, exact_weights(a, b, offs), 1e-6)
    asked: dict[tuple[int, ...], int] = {}
    added = []
    for line in capfd.readouterr().err.splitlines():
        operation, *numbers = line.split()
        cta, *place = map(int, numbers)
        expert, row, column = place
        if operation == "prefetch":
            assert (expert, row, column) not in asked
            asked[expert, row, column] = cta
            continue
        first = column // 256 * 256
        tile = range(first, min(first + 256, 424), 32)  # eight slots
        found = [c for c in tile if asked.get((expert, row, c)) == cta]
        assert found == [c for c in tile if c <= column + 32]
        added.append((expert, row, column))
    wanted = [(e, r, c) for e in (0, 2) for r in range(0, 200, 64) for c in range(0, 424, 32)]
    assert sorted(added) == sorted(asked) == wanted


def test_loads_through_a_ragged_map_are_seen(monkeypatch):
    """On a GPU they touch memory outside of the tensor."""
    offs, _, rows = case([70, 3])
    monkeypatch.setattr(arguments, "_matrices", lambda w: arguments._ragged(w[0, 0])[0])
    with pytest.raises(EmulationError, match="dimensions 1 and 2 have one distance"):
        ops.grouped_mm(rand(rows, 72).mT, rand(rows, 64), offs=offs)


def test_the_next_expert_may_be_nan():
    """Rows of the neighbour are loaded with a tile's; no result shows it, and a last slot's zeros hold."""
    offs, num, rows = case([5, 70, 9], behind=0)
    a, b, w = rand(rows, H), rand(rows, 72), rand(num, H, 72)
    a[5:75] = b[5:75] = float("nan")
    out, dw = ops.grouped_mm(a, w, offs=offs), ops.grouped_mm(a.mT, b, offs=offs)
    assert out[5:75].isnan().all()
    near(out[:5], exact(a, w, offs)[:5])
    near(out[75:], exact(a, w, offs)[75:])
    near(dw[[0, 2]], exact_weights(a, b, offs)[[0, 2]])


BAD_ENDS = [[-5, 40, 30, 90], [200, 10, 300, 20], [0, 0, 0, 0], [10, 5, 70, 2**31 - 1]]


@pytest.mark.parametrize("ends", BAD_ENDS)
def test_bad_ends_write_nothing_else(ends):
    """Memory behind the output is left alone, every row in it is written, and the launch ends."""
    rows, num = 100, 4
    x, w = rand(rows, 64), rand(num, 64, 72)
    whole = torch.full((64 + rows + 64, 72), 7.0).bfloat16()
    out, offs = whole[64:-64], torch.tensor(ends, dtype=torch.int32)
    machines.fibers.run(
        GroupedVariant("product-columns"),
        arguments.Gemm(Operands(x, w), Groups(offs), out),
    )
    assert (whole[:64] == 7).all()
    assert (whole[-64:] == 7).all()
    taken = offs.clamp(0, rows).cummax(0)[0]
    near(out[: taken[-1]], exact(x, w, taken)[: taken[-1]])
    assert not out[taken[-1] :].any()


def recipe_of(name: str, by_channel: bool) -> Recipe:
    return Recipe.RowWise if by_channel else getattr(Recipe, name)


def quantized(w: Tensor, planes: int, by_channel: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """w: [E, K, P*I] -> e4m3, scales, and the numbers that they are."""
    glu = {"glu": "halves"} if planes == 2 and not by_channel else {}
    q, scale = ops.quantize(w, recipe_of("BlockWise128x128", by_channel), **glu)
    if by_channel:
        return q, scale, q.float() * scale[:, None]
    return q, scale, dequantize_blockwise(q.mT, scale.mT, planes).mT


def scaled(
    rows: tuple[Tensor, Tensor], weights: tuple[Tensor, ...], by_channel: bool = False, **options
) -> Tensor:
    """rows, weights: each with its scales; rows by token where these are [1, P]."""
    of_rows = recipe_of("BlockWise1x128", len(rows[1]) == 1)
    of_weights = recipe_of("BlockWise128x128", by_channel)
    given = rows[1], of_rows, weights[1], of_weights
    return ops.scaled_grouped_mm(rows[0], weights[0], *given, **options)


def scaled_act(
    rows: tuple[Tensor, Tensor], weights: tuple[Tensor, ...], by_channel: bool = False, **options
) -> Tensor | tuple[Tensor, Tensor]:
    names = "BlockWise1x128", "BlockWise128x128"
    of_rows, of_weights = (recipe_of(name, by_channel) for name in names)
    given = rows[1], of_rows, weights[1], of_weights
    return ops.grouped_mm_act(rows[0], weights[0], scales=given, **options)


def quantized_rows(
    x: Tensor, offs: Tensor, by_token: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = ops.quantize(x, recipe_of("BlockWise1x128", by_token), offs=offs)
    of_rows = scales.by_row(scale, Groups(offs), x, offs.numel())
    return q, scale, q.float() * of_rows if by_token else dequantize_rows(q, of_rows)


@pytest.mark.parametrize("ends", BAD_ENDS)
def test_bad_ends_of_e4m3_rows_are_those_that_the_kernel_takes(ends):
    offs, rows = torch.tensor(ends, dtype=torch.int32), 100
    taken = offs.clamp(0, rows).cummax(0)[0].int()
    x, weights = rand(rows, 144), quantized(rand(len(ends), 144, 80), 1)
    q, scale, _ = quantized_rows(x, offs)
    expected, scale_taken, _ = quantized_rows(x, taken)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, scale_taken)
    found = scaled((q, scale), weights, offs=offs)
    assert torch.equal(found, scaled((q, scale), weights, offs=taken))
    end = int(taken[-1])
    near(dequantize_rows(q, scales.by_row(scale, Groups(offs), x, len(ends)))[:end], x[:end], 4e-2)


def mlp_of_e4m3(name: str, by_channel: bool) -> None:
    """x, h and both weights in e4m3: h's scales go from one kernel to the next as they are."""
    act, (hidden, width) = ACTIVATIONS[name], (272, 144)
    offs, num, rows = case()
    x, w13 = rand(rows, hidden), rand(num, act.planes * width, hidden, scale=0.1)
    w2, bias = rand(num, hidden, width), torch.randn(num, act.planes * width)
    by = {"by_channel": by_channel}
    if by_channel:  # of very different sizes, so that another one's scale is seen
        x *= torch.logspace(-1, 1, rows).bfloat16()[torch.randperm(rows), None]
        for w in (w13, w2):
            w *= torch.logspace(-1, 1, num * w.shape[1]).bfloat16().view(num, -1, 1)
    *x, x_wide = quantized_rows(x, offs, by_channel)
    *w13, w13_wide = quantized(w13.mT, act.planes, by_channel)
    *w2, w2_wide = quantized(w2.mT, 1, by_channel)
    options = {"activation": name, "offs": offs, "bias": bias}
    h, h_scale = scaled_act(x, w13, output_dtype=torch.float8_e4m3fn, **by, **options)
    expected = act(exact(x_wide, w13_wide, offs, bias))
    q, q_scale = quantize_rows(expected)
    by_row = by_row_alone(h_scale, Groups(offs), h, num)
    end = int(offs[-1])
    near(by_row[:end], q_scale[:end], 1e-5)
    steps = h[:end].float() != q[:end].float()  # where a sum's last bits decide
    assert steps.float().mean() < 2e-3
    assert not h[end:].float().any()
    y = scaled((h, h_scale), w2, **by, offs=offs)
    h_wide = torch.zeros(rows, width)
    h_wide[:end] = dequantize_rows(h[:end], by_row[:end])
    near_by_row(y, exact(h_wide, w2_wide, offs))
    assert not y[end:].any()
    if by_channel:
        near_by_row(scaled_act(x, w13, **by, **options), expected, end)
        y = scaled(x, w13, **by, offs=offs, bias=bias)
        near_by_row(y, exact(x_wide, w13_wide, offs, bias))


@pytest.mark.parametrize("how", ["emulate", "auto"])
@pytest.mark.parametrize("of", ["bf16", "blockwise", "by block", "by token", "by channel"])
def test_a_product_quantizes(of, how, monkeypatch):
    """Its sums in fp32, as quantize_rows() does; its result is what the next product takes."""
    monkeypatch.setenv("MEGAMOE_BACKEND", how)
    offs, num, rows = case()
    end, x, bias = int(offs[-1]), rand(rows, 144), torch.randn(num, 272)
    w = rand(num, 272, 144, scale=0.1).mT
    *q, x_wide = quantized_rows(x, offs, of == "by token")
    *wq, w_wide = quantized(w, 1, of in ("by token", "by channel"))
    options = {"offs": offs, "bias": bias}
    if of in ("bf16", "blockwise"):
        recipe = None if of == "bf16" else of
        out, scale = ops.grouped_mm(x, w, out_dtype=torch.float8_e4m3fn, recipe=recipe, **options)
        x_wide, w_wide = (x, w) if of == "bf16" else (x_wide, w_wide)
    else:
        by = of != "by block"
        out, scale = scaled(q, wq, by, output_dtype=torch.float8_e4m3fn, **options)
    expected, expected_scale = quantize_rows(exact(x_wide, w_wide, offs, bias))
    by_row = by_row_alone(scale, Groups(offs), out, num)
    near(by_row[:end], expected_scale[:end], 1e-5)
    steps = out[:end].float() != expected[:end].float()  # where a sum's last bits decide
    assert steps.float().mean() < 3e-3
    assert not out[end:].float().any()
    wide = torch.zeros(rows, 272)
    wide[:end] = dequantize_rows(out[:end], by_row[:end])
    *second, second_wide = quantized(rand(num, 272, 80), 1)
    near(scaled((out, scale), second, offs=offs), exact(wide, second_wide, offs))


def by_row_alone(scale: Tensor, groups: Groups, like: Tensor, num: int) -> Tensor:
    """Scales by row; those that stand elsewhere are zeros."""
    found = scales.by_row(scale, groups, like, num)
    assert torch.equal(scale, scales.by_block(found, groups, num))
    return found


def near_by_row(found: Tensor, expected: Tensor, end: int | None = None) -> None:
    """Also of the smallest rows and columns: large ones hide them in a sum over all."""
    pairs = [(found[:end], expected[:end]), (found[:end].T, expected[:end].T)]
    for f, e in pairs:
        off = (f.double() - e.double()).norm(dim=1) / e.double().norm(dim=1).clamp(min=1e-9)
        assert off.max() < 2 * ROUNDED, off.argmax()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_e4m3(name):
    mlp_of_e4m3(name, by_channel=False)


@pytest.mark.parametrize("name", NAMES)
def test_e4m3_by_channel(name):
    mlp_of_e4m3(name, by_channel=True)


def act_and_gradient(of: str, glu: str, name: str = QUICK) -> None:
    """Of e4m3 operands: h in bf16, or in e4m3 beside the pre-activations, and the gradient of these."""
    act, (hidden, width) = ACTIVATIONS[name], (272, 144)
    offs, num, rows = case()
    by_channel, end = of == "by channel", int(offs[-1])
    alternate = glu == "interleaved" and act.gated
    x, w = rand(rows, hidden), rand(num, hidden, act.planes * width, scale=0.1)
    dy, mat_b = rand(rows, hidden), rand(num, hidden, width, scale=0.1)
    bias, scale = torch.randn(num, act.planes * width), torch.rand(rows) + 0.1
    given: list[dict] = []
    wide = []
    for a, b, planes in (x, w, 1 if alternate else act.planes), (dy, mat_b, 1):
        *q, q_wide = quantized_rows(a, offs, by_channel)
        *wq, w_wide = quantized(b, planes, by_channel)
        of_rows = recipe_of("BlockWise1x128", by_channel)
        scales_of = q[1], of_rows, wq[1], recipe_of("BlockWise128x128", by_channel)
        given.append({"scales": scales_of} if of != "recipe" else {"recipe": "blockwise"})
        wide.append((q_wide, w_wide))
        if of == "recipe":
            q, wq = (a,), (b,)
        given[-1] |= {"operands": (q[0], wq[0])}
    options = {"activation": name, "offs": offs, "glu": glu}
    call = {**options, "scales": given[0].get("scales", ()), "recipe": given[0].get("recipe")}
    pair = given[0]["operands"]
    h, pre = ops.grouped_mm_act(*pair, bias=bias, return_pre=True, **call)
    expected = exact(*wide[0], offs, bias)
    near(pre, expected)
    near(h, act(halves(expected, alternate)))
    assert torch.equal(ops.grouped_mm_act(*pair, bias=bias, **call), h)
    q, q_scale, again = ops.grouped_mm_act(
        *pair, bias=bias, return_pre=True, output_dtype=torch.float8_e4m3fn, **call
    )
    assert torch.equal(again, pre)
    plain = ops.grouped_mm_act(*pair, bias=bias, output_dtype=torch.float8_e4m3fn, **call)
    assert torch.equal(plain[0].view(torch.uint8), q.view(torch.uint8))
    by_row = by_row_alone(q_scale, Groups(offs), q, num)
    near(by_row[:end], quantize_rows(act(halves(expected, alternate)))[1][:end], 1e-5)
    near(dequantize_rows(q, by_row)[:end], h[:end], 4e-2)

    call |= {"scales": given[1].get("scales", ())}
    operands = given[1]["operands"]
    if by_channel:
        with pytest.raises(ArgumentError, match=r"expected \(BlockWise1x128, BlockWise128x128\)$"):
            ops.grouped_mm_dact(*operands, pre, **call)
        call["scales"], operands, wide[1] = (), (dy, mat_b), (dy, mat_b)
    d_pre, h, d_scale = ops.grouped_mm_dact(*operands, pre, row_scale=scale, **call)
    leaf, factor = pre.double().requires_grad_(), scale.double().requires_grad_()
    again = factor[:, None] * act(halves(leaf, alternate))
    again.backward(exact(*wide[1], offs))
    near(d_pre, leaf.grad, 4e-3)
    near(h[:end], again[:end].detach())
    near(d_scale, factor.grad, 4e-3)
    for t in (pre, q.float(), d_pre, h, d_scale):
        assert not t[end:].any()


ACTS = [("by block", "halves"), ("by channel", "interleaved"), ("recipe", "interleaved")]
SLOW_ACTS = [(of, glu, name) for of, glu in ACTS for name in ACTIVATIONS if name != QUICK]


@pytest.mark.parametrize("how", ["emulate", "auto"])
@pytest.mark.parametrize(("of", "glu"), ACTS)
def test_activation_of_e4m3_and_its_gradient(of, glu, how, monkeypatch):
    monkeypatch.setenv("MEGAMOE_BACKEND", how)
    act_and_gradient(of, glu)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "glu", "name"), SLOW_ACTS)
def test_other_activations_of_e4m3(of, glu, name):
    act_and_gradient(of, glu, name)


COLUMNS = "epilogue/column_scales.cuh"
OF_RESULTS = {
    "h of another lane": (
        *("epilogue/activation.cuh", "quad == 1 || quad == 2 ? 3 - quad : quad", "quad"),
    ),
    "h has scales of pre-activations": (
        "epilogue/elementwise.cuh",
        "interleaved) group /= 2;",
        "interleaved) {}",
    ),
    "scales of rows of the next expert": ("formats/fragment.cuh", "row < num", "row < num + 1"),
    "scales of no row are left": (
        "rows/sorted.cuh",
        "e <= num; ++e) {\n        int begin",
        "e < num; ++e) {\n        int begin",
    ),
    "gradients of gate and up change places": (
        *(
            "epilogue/activation_gradient.cuh",
            "s * dgate[j], s * dup[j]",
            "s * dup[j], s * dgate[j]",
        ),
    ),
    "pre-activations of the first half again": (
        "epilogue/activation_gradient.cuh",
        "2 * column + plane * slot_columns",
        "2 * column",
    ),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(OF_RESULTS))
def test_a_flaw_of_results_is_seen(flaw, monkeypatch, tmp_path):
    plant(OF_RESULTS[flaw], monkeypatch, tmp_path)
    with pytest.raises(SEEN):
        act_and_gradient("by channel", "interleaved")


FLAWS = {
    "up has gate's scales": (COLUMNS, "halves.plane(half)", "halves.plane(0)"),
    "another expert's scales": (COLUMNS, "tile.expert()", "0"),
    "scales are not awaited": (COLUMNS, "arch::copies_wait();", ""),
    "the other warpgroup's scales": (
        COLUMNS,
        "experts.column_scales[math_warpgroup()]",
        "experts.column_scales[0]",
    ),
    "scales lie where the table is": (
        COLUMNS,
        "reinterpret_cast<ColumnScales&>(scales)",
        "reinterpret_cast<ColumnScales*>(ctx.smem.experts.first_block)[math_warpgroup()]",
    ),
    "slots have scales of their own": ("gemm/gemm.cuh", "A::whole_rows ? 0 : args", "args"),
}


@pytest.mark.flaws
@pytest.mark.parametrize("flaw", names(FLAWS))
def test_a_flaw_of_column_scales_is_seen(flaw, monkeypatch, tmp_path):
    plant(FLAWS[flaw], monkeypatch, tmp_path)

    def run() -> None:
        for seed in range(3):
            monkeypatch.setattr(machines.fibers, "seed", seed)
            mlp_of_e4m3(QUICK, by_channel=True)

    with pytest.raises(SEEN):
        run()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_either_side_of_the_activation_may_be_bf16(name):
    act, (hidden, width) = ACTIVATIONS[name], (272, 144)
    offs, num, rows = case([5, 0, 200])
    x, w = rand(rows, hidden), rand(num, act.planes * width, hidden, scale=0.1)
    *q, q_wide = quantized_rows(x, offs)
    *wq, w_wide = quantized(w.mT, act.planes)
    options = {"activation": name, "offs": offs}
    near(scaled_act(q, wq, **options), act(exact(q_wide, w_wide, offs)))
    h, h_scale = ops.grouped_mm_act(x, w.mT, output_dtype=torch.float8_e4m3fn, **options)
    end, by_row = int(offs[-1]), scales.by_row(h_scale, Groups(offs), h, num)
    plain = ops.grouped_mm_act(x, w.mT, **options)
    near(dequantize_rows(h[:end], by_row[:end]), plain[:end], 4e-2)


def gradients(function, *tensors: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    y.backward(rand_like(y))
    return [y.detach(), *(t.grad for t in leaves)]


def rand_like(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)


@pytest.mark.parametrize("major", ["in", "out"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_the_mlp(interleaved, major):
    offs, num, rows = case([5, 0, 70], behind=2)
    x, w2 = rand(rows, H), rand(num, H, I, scale=0.2)
    w13, b13, b2 = rand(num, 2 * I, H, scale=0.2), torch.randn(num, 2 * I), torch.randn(num, H)
    if major == "out":
        w13, w2 = (w.mT.contiguous().mT for w in (w13, w2))

    def ours(x, w13, w2, b13, b2):
        given = {"b_up": b13, "b_down": b2, "glu": "interleaved" if interleaved else "halves"}
        return ops.grouped_mlp(x, w13.mT, w2.mT, offs=offs, **given)

    def plain(x, w13, w2, b13, b2):
        gu = differentiable(x, w13.transpose(1, 2), offs, b13)
        gate, up = halves(gu, interleaved).chunk(2, 1)
        h = torch.nn.functional.silu(gate) * up
        return differentiable(h, w2.transpose(1, 2), offs, b2)

    tensors = x, w13, w2, b13, b2
    found = gradients(ours, *tensors)
    expected = gradients(plain, *(t.double() for t in tensors))
    for f, e in zip(found, expected, strict=True):
        near(f, e, 8e-3)  # dy, dgu, h and the pre-activations are rounded, too


def test_a_gradient_may_lie_anywhere():
    """dy is a part of another tensor's gradient, 8 bytes behind a multiple of 16."""
    offs, num, rows = case([5, 0, 70], behind=2)
    x, w13, w2 = rand(rows, H), rand(num, 2 * I, H, scale=0.2), rand(num, H, I, scale=0.2)
    beside = torch.zeros(rows, 4).bfloat16()

    def last(x, w13, w2):
        return ops.grouped_mlp(x, w13.mT, w2.mT, offs=offs)

    def saved(x, w13, w2):
        gu = ops.grouped_mm_act(x, w13.mT, offs=offs, return_pre=True)[1]
        return ops.grouped_mm(gu[:, :I].contiguous(), w2.mT, offs=offs)

    def pre(x, w13):
        return ops.grouped_mm_act(x, w13.mT, offs=offs, return_pre=True)[1].flatten()

    for function, tensors in (last, (x, w13, w2)), (saved, (x, w13, w2)), (pre, (x, w13)):
        leaves, others = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
        y, again = function(*leaves), function(*others)
        before = beside if y.dim() == 2 else beside[0]
        part = torch.cat((before, y, before), -1)
        dy = torch.randn(part.shape).bfloat16()
        part.backward(dy)
        again.backward(dy[..., 4:-4].contiguous())
        for found, expected in zip(leaves, others, strict=True):
            assert torch.equal(found.grad, expected.grad)


def test_rows_of_a_gradient_may_be_one_in_memory():
    """As behind a sum over rows: no map has rows without a distance."""
    offs, num, rows = case([5, 0, 70], behind=2)
    tensors, row = (rand(rows, H), rand(num, H, I, scale=0.2)), torch.randn(I).bfloat16()
    leaves, others = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    ops.grouped_mm(*leaves, offs=offs).sum(0).backward(row)
    ops.grouped_mm(*others, offs=offs).backward(row.repeat(rows, 1))
    for found, expected in zip(leaves, others, strict=True):
        assert torch.equal(found.grad, expected.grad)


def differentiable(x, w, offs, bias):
    parts, start = [], 0
    for e, end in enumerate(offs.tolist()):
        parts.append(x[start:end] @ w[e] + bias[e])
        start = end
    return torch.cat([*parts, x.new_zeros(x.shape[0] - start, w.shape[2])])


def test_kinds_are_the_kernels():
    """Each kind of the layer has its kernels here."""
    for kind in KINDS:
        for stage in ("activation", "activation-e4m3-quantizes", "saving", "gradient"):
            assert GroupedVariant(stage, Activation(kind).kind) in grouped_variants()
