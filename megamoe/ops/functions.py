"""Define the functions of megamoe.ops: they validate their arguments and call the operators.

Every weight is [E, in, out], as mat_b of torch's grouped_mm.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from megamoe.core.config import Activation, activation_by_name
from megamoe.core.transforms import records
from megamoe.formats import quantization
from megamoe.ops import checks, gradients, operators
from megamoe.ops.calls import repeats
from megamoe.ops.checks import Given
from megamoe.ops.groups import Groups
from megamoe.ops.operands import rows_by_group, transposed_rows
from megamoe.ops.scales import by_block

Glu = Literal["halves", "interleaved"]
Recipe = Literal["blockwise"]
# scale_a, scale_recipe_a, scale_b, scale_recipe_b, as for torch's scaled_grouped_mm
Scales = tuple[Tensor, ScalingType, Tensor, ScalingType]
gradients.register()


@repeats
def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, alignment: int = 1,
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    recipe: Recipe | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply each row by the matrix of its group, as torch.nn.functional.grouped_mm does.

    Args:
        mat_a: [M, K] bf16, rows sorted by group. With a 2-D mat_b: [N1, M], the transposed view of such rows. Other
            layouts are copied. K and N1 are multiples of 8.
        mat_b: [E, K, N] bf16, contiguous in K or in N; differentiable. Or [M, N2]: the result is mat_a @ mat_b over the
            rows of each group, a weight gradient without a derivative. N and N2 are multiples of 8.
        offs: [E] int32, the end of each group's rows, ascending. The last may be less than M. Default: one group has
            all rows.
        alignment: A group begins at this multiple, a power of two up to 256, after the end of the group before. Rows
            between groups are ignored, and zeros in the result. Default: 1.
        bias: [E, N] fp32 or bf16. Default: no bias.
        out_dtype: bf16; or e4m3, as of scaled_grouped_mm(); or fp32 with two 2-D operands. Default: bf16.
        recipe: "blockwise": quantize both operands to FP8 in this call (docs/ops.md). Default: None, bf16.

    Returns:
        [M, N], zeros in rows after offs[-1]; or [E, N1, N2], zeros for a group without rows.

    Raises:
        ArgumentError: A tensor has a wrong shape, dtype, stride, alignment or device.
    """
    checks.check_mode(mat_a=mat_a, mat_b=mat_b, bias=bias)
    types = (torch.float32,) if mat_b.dim() == 2 else (quantization.E4M3,)
    checks.check_choice("out_dtype", out_dtype, (None, torch.bfloat16, *types))
    if mat_b.dim() == 2:
        if bias is not None or recipe is not None:
            checks.refuse("mat_b.shape", list(mat_b.shape), "[experts, K, N] beside bias or recipe")
        a, b, num = checks.outer(mat_a, mat_b, Groups(offs, alignment))
        fp32 = out_dtype == torch.float32
        return operators.grouped_wgrad(a, b, offs, alignment, num, fp32, False)[0]
    return _product(Given(mat_a, mat_b, Groups(offs, alignment), bias), (), recipe, out_dtype)


@repeats
def scaled_grouped_mm(
    mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_recipe_a: ScalingType, scale_b: Tensor,
    scale_recipe_b: ScalingType, swizzle_a: SwizzleType | None = None,
    swizzle_b: SwizzleType | None = None, bias: Tensor | None = None, offs: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16, contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False, alignment: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply rows by the matrix of their group in FP8, as torch.nn.functional.scaled_grouped_mm does.

    Recipes: (BlockWise1x128, BlockWise128x128), (RowWise, RowWise), (BlockWise1x128, RowWise). Not differentiable.

    Args:
        mat_a: [M, K] e4m3, rows sorted by group. K is a multiple of 16.
        mat_b: [E, K, N] e4m3, contiguous in K. N is a multiple of 16.
        scale_a: fp32 [M, ceil(K/128)] (RowWise: [M]), which each call copies into the kernel's layout. Scales from
            quantize() with offs, or from grouped_mm_act(), have that layout already.
        scale_recipe_a: The ScalingType of scale_a.
        scale_b: fp32 [E, ceil(K/128), ceil(N/128)] (RowWise: [E, N]), copied unless its transpose is contiguous.
        scale_recipe_b: The ScalingType of scale_b.
        swizzle_a: None or NO_SWIZZLE.
        swizzle_b: None or NO_SWIZZLE.
        bias: [E, N] fp32 or bf16. Default: no bias.
        offs: [E] int32, see grouped_mm(). Default: one group has all rows.
        output_dtype: bf16, or e4m3: quantize the result in groups of 128 columns, as grouped_mm_act() does; N is then a
            multiple of 16. Default: bf16.
        contraction_dim: Empty.
        use_fast_accum: Changes nothing: the recipe alone decides how products are summed (docs/numerics.md).
        alignment: see grouped_mm(). Default: 1.

    Returns:
        [M, N] bf16; in e4m3 also its scales. Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor or recipe is invalid.
    """
    checks.check_mode(mat_a=mat_a, mat_b=mat_b, bias=bias)
    checks.check_choice("swizzle_a", swizzle_a, (None, SwizzleType.NO_SWIZZLE))
    checks.check_choice("swizzle_b", swizzle_b, (None, SwizzleType.NO_SWIZZLE))
    checks.check_choice("output_dtype", output_dtype, (None, torch.bfloat16, quantization.E4M3))
    checks.check_choice("contraction_dim", contraction_dim, ((), []))
    scales = scale_a, scale_recipe_a, scale_b, scale_recipe_b
    return _product(Given(mat_a, mat_b, Groups(offs, alignment), bias), scales, None, output_dtype)


@repeats
def grouped_mm_act(
    mat_a: Tensor, mat_b: Tensor, activation: str | Activation = "swiglu", *,
    offs: Tensor | None = None, alignment: int = 1, bias: Tensor | None = None,
    glu: Glu = "halves", return_pre: bool = False, scales: Scales | tuple[()] = (),
    output_dtype: torch.dtype = torch.bfloat16, recipe: Recipe | None = None,
    row_scale: Tensor | None = None, transposed: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Multiply each row by the gate and up projection of its group and apply the activation; differentiable.

    Args:
        mat_a: [M, H] bf16, rows sorted by group; e4m3 with scales. H is a multiple of 8 (e4m3: 16).
        mat_b: [E, H, 2*I] of mat_a's dtype, or [E, H, I] if the activation is not gated. I is a multiple of 8. bf16
            that is contiguous in 2*I is copied in each call if h is e4m3.
        activation: A name or an Activation. Default: "swiglu".
        offs: [E] int32, see grouped_mm(). Default: one group has all rows.
        alignment: see grouped_mm(). Default: 1.
        bias: [E, 2*I] fp32 or bf16, in the order of mat_b's columns. Default: no bias.
        glu: Where gate and up are in mat_b's columns. "halves": gate columns, then up columns. "interleaved": g0 u0 g1
            u1, as in GPT-OSS. Default: "halves".
        return_pre: True: also return the pre-activations. Default: False.
        scales: scale_a, scale_recipe_a, scale_b, scale_recipe_b of scaled_grouped_mm(), in the order of mat_b's
            columns. RowWise is possible for both operands or for none. With "halves", blocks restart at the first up
            column: [E, ceil(H/128), 2*ceil(I/128)]. Default: none, bf16.
        output_dtype: bf16, or e4m3: quantize h in groups of 128 columns for scaled_grouped_mm(); not differentiable,
            and I is a multiple of 16. Default: bf16.
        recipe: "blockwise": quantize both operands to FP8 in this call. Default: None.
        row_scale: [M] fp32, multiplies h before it is rounded, like probabilities before FC2. Default: none.
        transposed: True: also return bf16 h in the form of quantize(..., transposed=True) with BlockWise128x128, for
            grouped_mm_wgrad(). This needs operands by block and h in e4m3. Default: False.

    Returns:
        h [M, I] bf16, or e4m3 and its scales. Then, if requested, transposed h and its scales, and the pre-activations
        [M, 2*I] bf16, bias included, in the order of mat_b's columns. Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor or option is invalid.
        ConfigError: The activation is unknown.
    """
    act = activation_by_name(activation)
    checks.check_mode(mat_a=mat_a, mat_b=mat_b, bias=bias, row_scale=row_scale)
    interleaved, groups = checks.interleaved(glu, act), Groups(offs, alignment)
    checks.check_choice("output_dtype", output_dtype, (torch.bfloat16, quantization.E4M3))
    quantizes = output_dtype == quantization.E4M3
    columns = act.planes, interleaved, quantizes
    given = Given(mat_a, mat_b, groups, bias, row_scale, *columns, num_recipes=2)
    placed = given.check(scales, recipe)
    by_block = recipe is not None or (scales and scales[3] == ScalingType.BlockWise128x128)
    if transposed and not (quantizes and by_block):
        checks.refuse("transposed", True, "False unless h is e4m3 and operands are FP8 by block")
    plain = not scales and not quantizes
    saves = return_pre or (plain and records((mat_a, mat_b, bias, row_scale)))
    call = mat_a, mat_b, *groups, bias, *placed, quantizes + transposed, act.kind, _numbers(act)
    h, pre, scale, *of_h = operators.grouped_mm(*call, interleaved, saves, row_scale)
    found = h, *((scale,) if quantizes else ()), *(of_h if transposed else ())
    found += (pre,) if return_pre else ()
    return found if len(found) > 1 else h


@repeats
def grouped_mm_dact(
    grad: Tensor, mat_b: Tensor, pre: Tensor, activation: str | Activation = "swiglu", *,
    offs: Tensor | None = None, alignment: int = 1, glu: Glu = "halves",
    scales: Scales | tuple[()] = (), output_dtype: torch.dtype = torch.bfloat16,
    recipe: Recipe | None = None, row_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradient of h, grouped_mm(grad, mat_b), from it that of the pre-activations, and h again.

    This is the first step of an MLP's backward pass. The second is x's gradient, `grouped_mm` of the result and
    w_up.mT. Not differentiable.

    Args:
        grad: [M, H] bf16, the gradient of the MLP's output; e4m3 with scales.
        mat_b: [E, H, I] of grad's dtype, the down projection transposed: w_down.mT.
        pre: [M, 2*I] bf16, the pre-activations, as grouped_mm_act() returns them; [M, I] if the activation is not
            gated.
        activation: A name or an Activation. Default: "swiglu".
        offs: [E] int32, see grouped_mm(). Default: one group has all rows.
        alignment: see grouped_mm(). Default: 1.
        glu: The order of the columns of `pre`, see grouped_mm_act(). Default: "halves".
        scales: scale_a, BlockWise1x128, scale_b, BlockWise128x128 of grad and mat_b, as of scaled_grouped_mm().
            Default: none, bf16.
        output_dtype: bf16; or e4m3, for the other FP8 products of the backward pass. e4m3 needs FP8 operands, gate and
            up as halves, and I a multiple of 128 (not gated: of 16). Default: bf16.
        recipe: "blockwise": quantize both operands to FP8 in this call. Default: None.
        row_scale: [M] fp32, see grouped_mm_act(): multiplies both results. Default: none.

    Returns:
        The gradient [M, 2*I], in the order of `pre`, and h [M, I], both bf16. With row_scale also its gradient [M]
        fp32: sums of grouped_mm(grad, mat_b) times the unscaled h. In e4m3, six tensors replace the first two: the
        gradient and its scales, the transposed gradient and its scales, transposed h and its scales. Transposed tensors
        are made of the bf16 values. They are the first (gradient) and second (h) operand of grouped_mm_wgrad(), in the
        form of quantize(). Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor or option is invalid.
        ConfigError: The activation is unknown.
    """
    act = activation_by_name(activation)
    checks.check_mode(grad=grad, mat_b=mat_b, pre=pre, row_scale=row_scale)
    interleaved, groups = checks.interleaved(glu, act), Groups(offs, alignment)
    names = "grad", "mat_b", ""
    given = Given(grad, mat_b, groups, None, row_scale, names=names, num_recipes=1)
    placed = given.check(scales, recipe)
    checks.check_rows("pre", pre, grad)
    if pre.shape[1] != act.planes * mat_b.shape[2]:
        expected = f"[{grad.shape[0]}, {act.planes * mat_b.shape[2]}]"
        checks.refuse("pre.shape", list(pre.shape), expected)
    checks.check_choice("output_dtype", output_dtype, (torch.bfloat16, quantization.E4M3))
    quantizes = output_dtype == quantization.E4M3
    odd = interleaved or mat_b.shape[2] % (128 if act.gated else 16)
    if quantizes and (odd or not (scales or recipe)):
        expected = "bfloat16 unless operands are FP8, gate and up halves, and I a multiple of 128"
        checks.refuse("output_dtype", output_dtype, expected)
    call = grad, mat_b, pre, *groups, act.kind, _numbers(act), interleaved, *placed, row_scale
    d_pre, h, d_scale, *more = operators.grouped_activation_gradient(*call, quantizes)
    found = (d_pre, more[0], *more[2:], h, more[1]) if quantizes else (d_pre, h)
    return found if row_scale is None else (*found, d_scale)


def grouped_mm_wgrad(
    mat_a: Tensor, mat_b: Tensor, *, out: Tensor, offs: Tensor | None = None, alignment: int = 1,
    scales: Scales | tuple[()] = (),
) -> Tensor:  # fmt: skip
    """Add weight gradients: out += grouped_mm(mat_a, mat_b, offs=offs) of two 2-D operands.

    Not differentiable. Equal inputs give equal bits.

    Args:
        mat_a: [N1, M] bf16, the transposed view of the layer's input; other layouts are copied. With scales: transposed
            e4m3, as quantize() and grouped_mm_dact() return it.
        mat_b: [M, N2] bf16, the gradient of its output; or transposed e4m3.
        out: [E, N1, N2] bf16 or fp32, contiguous in N2; shares no memory with mat_a and mat_b.
        offs: [E] int32, see grouped_mm(). Default: one group has all rows.
        alignment: see grouped_mm(). Default: 1.
        scales: scale_a, BlockWise1x128, scale_b, BlockWise128x128 of transposed e4m3. Default: none, bf16.

    Returns:
        `out`.

    Raises:
        ArgumentError: A tensor is invalid.
    """
    checks.check_mode(mat_a=mat_a, mat_b=mat_b, out=out)
    groups, placed = Groups(offs, alignment), list[Tensor]()
    if scales:
        a, b, *placed = checks.outer_of_e4m3(mat_a, mat_b, scales, groups, out)
    else:
        a, b, num = checks.outer(mat_a, mat_b, groups)
        checks.check_sums(out, (num, a.shape[1], b.shape[1]), a, b, offs)
    operators.grouped_wgrad_add(a, b, *groups, out, *placed)
    return out


@repeats
def grouped_mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, activation: str | Activation = "swiglu", *,
    offs: Tensor | None = None, alignment: int = 1, b_up: Tensor | None = None,
    b_down: Tensor | None = None, glu: Glu = "halves", recipe: Recipe | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run each row through the MLP of its group: grouped_mm_act(), then grouped_mm(); differentiable.

    The backward pass uses one launch for the pre-activations' gradient and h, one for x's gradient and one for each
    weight. A recipe adds launches that quantize operands. Pre-activations are saved, h is recomputed.

    Args:
        x: [M, H] bf16, rows sorted by group.
        w_up: [E, H, 2*I] bf16, see grouped_mm_act(); [E, H, I] if the activation is not gated.
        w_down: [E, I, H] bf16.
        activation: A name or an Activation. Default: "swiglu".
        offs: [E] int32, see grouped_mm(). Default: one group, a dense MLP, whose weights may be 2-D, and biases 1-D.
        alignment: see grouped_mm(). Default: 1.
        b_up: [E, 2*I] fp32 or bf16, in the order of w_up's columns. Default: no bias.
        b_down: [E, H] fp32 or bf16. Default: no bias.
        glu: Where gate and up are in w_up's columns, see grouped_mm_act(). Default: "halves".
        recipe: "blockwise": multiply in FP8, see grouped_mm(); h is e4m3 between the products. Default: None, bf16.
        row_scale: [M] fp32, see grouped_mm_act(); differentiable. Default: none.

    Returns:
        [M, H] bf16. Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor or option is invalid.
        ConfigError: The activation is unknown.
    """
    act = activation_by_name(activation)
    checks.check_mode(x=x, w_up=w_up, w_down=w_down, b_up=b_up, b_down=b_down, row_scale=row_scale)
    if offs is None and w_up.dim() == w_down.dim() == 2:
        w_up, w_down = w_up[None], w_down[None]
        b_up, b_down = (b if b is None else b[None] for b in (b_up, b_down))
    interleaved, groups = checks.interleaved(glu, act), Groups(offs, alignment)
    given = Given(x, w_up, groups, b_up, row_scale, act.planes, names=("x", "w_up", "b_up"))
    *_, dynamic = given.check((), recipe)
    num, hidden, width = len(w_up), w_up.shape[1], w_up.shape[2] // act.planes
    if list(w_down.shape) != [num, width, hidden]:
        checks.refuse("w_down.shape", list(w_down.shape), f"[{num}, {width}, {hidden}]")
    checks.check_weights("w_down", w_down, x)
    if b_down is not None:
        checks.check_tensor("b_down", b_down, x, ((num, hidden),), *checks.BIASES)
    saves = records((x, w_up, w_down, b_up, b_down, row_scale))
    call = x, w_up, w_down, *groups, b_up, b_down, act.kind, _numbers(act), interleaved
    return operators.grouped_mlp(*call, saves, dynamic, row_scale)[0]


@repeats
def quantize(
    x: Tensor, recipe: ScalingType, *, offs: Tensor | None = None, alignment: int = 1,
    glu: Glu | None = None, transposed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize rows or weights to e4m3, as the layer does (docs/numerics.md), for scaled_grouped_mm().

    It does not wait for the device.

    Args:
        x: Rows [M, K] of bf16, fp16 or fp32, K a multiple of 16; or weights [E, K, N], also of fp64.
        recipe: Of rows BlockWise1x128 or RowWise, of weights BlockWise128x128 or RowWise: one scale per column of N. Of
            transposed rows BlockWise1x128 or BlockWise128x128, for the first or second operand of grouped_mm_wgrad().
        offs: [E] int32, the end of each group's rows: return the scales of rows in the kernel's layout, valid for calls
            with the same offs. Default: return them in torch's layout.
        alignment: see grouped_mm(). Default: 1.
        glu: "halves": 128 x 128 blocks restart at the first up column, for grouped_mm_act(). Default: None.
        transposed: True: return rows as grouped_mm_wgrad() takes them. Default: False.

    Returns:
        x as e4m3, weights contiguous in K, and its scales: [M, ceil(K/128)], RowWise [M]; with offs [ceil(K/128), P],
        RowWise [1, P], P = 128 * (M // 128 + E), where each group begins at a multiple of 128. Of weights [E,
        ceil(K/128), ceil(N/128)], with glu [E, ceil(K/128), 2*ceil(N/2/128)], RowWise [E, N]. Transposed rows are
        [B, K', 128]: B = P/128 blocks of 128 rows of one group, in an order of the kernel, and K' = K rounded up to
        128. Scales are powers of two [B + 1, K'], BlockWise128x128 [K'/128, B + 1]; the last block is of zeros.

    Raises:
        ArgumentError: A tensor or option is invalid.
    """
    checks.check_given(x=x)
    by_row = recipe == ScalingType.RowWise
    checks.check_quantized(x, recipe, offs, glu, transposed)
    if x.dim() == 2:
        groups = Groups(offs, alignment)
        if transposed:
            by_column = recipe == ScalingType.BlockWise1x128
            return transposed_rows(x, groups, checks.num_ends(groups, x), by_column)
        given = () if offs is None else (groups, checks.num_ends(groups, x))
        if not by_row:
            return rows_by_group(x, *given)
        q, scale = quantization.quantize_tokens(x)
        return q, by_block(scale, *given) if given else scale[:, 0]
    make = quantization.quantize_channels if by_row else quantization.quantize_blockwise
    q, scale = make(x.detach().mT, 1 if glu is None else 2)
    return q.mT, scale[..., 0] if by_row else scale.mT


def _product(
    given: Given, scales: tuple[Any, ...], recipe: Recipe | None, dtype: torch.dtype | None
) -> Any:
    given = given._replace(x=checks.by_row(given.x), quantizes=dtype == quantization.E4M3)
    call = given.x, given.w, *given.groups, given.bias, *given.check(scales, recipe)
    out, _, scale, *_ = operators.grouped_mm(*call, given.quantizes)
    return (out, scale) if given.quantizes else out


def _numbers(act: Activation) -> tuple[float, ...]:
    return act.alpha, act.limit, act.up_offset
