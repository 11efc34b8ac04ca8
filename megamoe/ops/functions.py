"""Define the functions of megamoe.ops: they validate their arguments and call the operators."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megamoe.core.config import Activation, activation_by_name
from megamoe.formats import quantization
from megamoe.ops import checks, gradients, operators
from megamoe.ops.operands import rows_by_block
from megamoe.ops.scales import by_block

Scales = tuple[Tensor, Tensor] | Literal["dynamic"]
gradients.register()


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scales: Scales | None = None,
) -> Tensor:
    """Multiply each row by the matrix of its expert; differentiable unless x and w are e4m3.

    Args:
        x: [M, K] bf16, rows sorted by expert; e4m3 with two scales. K is a multiple of 8 (e4m3: 16).
        w: [E, K, N] of x's dtype, contiguous in K (a transposed [E, N, K]) or in N; e4m3: in K. N is a multiple of 8
            (e4m3: 16).
        offs: [E] int32, the end of each expert's rows, ascending, as for torch's grouped_mm. The last may be less than
            M. Default: one expert has all rows.
        bias: [E, N] fp32 or bf16. Default: no bias.
        scales: None: bf16. "dynamic": quantize bf16 x and w to FP8 in this call (docs/ops.md). Two tensors: the scales
            of e4m3 x and w. Those of x are by block (quantize_rows(), scales_by_block()); those of w are [E,
            ceil(N/128), ceil(K/128)] fp32, or by channel [E, N, 1], and then x may have one scale per row, by block,
            [M] or [M, 1]. Default: None.

    Returns:
        [M, N] bf16. Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor has a wrong shape, dtype, stride, alignment or device.
    """
    checks.check_mode(x=x, w=w, bias=bias)
    checks.check_rows("x", x, dtype=checks.type_of(scales))
    checks.check_weights("w", w, x)
    if w.shape[1] != x.shape[1]:
        checks.refuse("w.shape", list(w.shape), f"[experts, {x.shape[1]}, N]")
    checks.check_quantizable("w", w, scales)
    return _product(x, w, offs, bias, scales)


def grouped_mm_swiglu(
    x: Tensor,
    w_up: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | Activation = "swiglu",
    save_pre_activation: bool = False,
    scales: Scales | None = None,
    quantize: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply each row by the gate and up projection of its expert and apply the activation; differentiable.

    Args:
        x: [M, H] bf16, rows sorted by expert; e4m3 with two scales. H is a multiple of 8 (e4m3: 16).
        w_up: [E, 2*I, H], gate rows and then up rows, or [E, 2, I, H] with any strides that TMA can read. Without the 2
            if the activation is not gated. I is a multiple of 8.
        offs: [E] int32, the end of each expert's rows, see grouped_mm(). Default: one expert has all rows.
        bias: [E, 2*I] or [E, 2, I], fp32 or bf16. Default: no bias.
        activation: A name or an Activation. Default: "swiglu".
        save_pre_activation: True: also return the pre-activations; not with scales or quantize. Default: False.
        scales: None, "dynamic", or the scales of e4m3 x and w_up, see grouped_mm(). Those of w_up are [E,
            2*ceil(I/128), ceil(H/128)], or by channel [E, 2*I, 1], and then x has one scale per row. Default: None.
        quantize: True: quantize h to e4m3 in groups of 128 columns, for grouped_mm_downproj(); not differentiable, and
            I is a multiple of 16. Default: False.

    Returns:
        h [M, I] bf16. With save_pre_activation: h and the pre-activations [M, 2, I] bf16, bias included. With quantize:
        h as e4m3 and its scales by block. Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor or option is invalid.
        ConfigError: The activation is unknown.
    """
    act = activation_by_name(activation)
    checks.check_mode(x=x, w_up=w_up, bias=bias)
    checks.check_rows("x", x, dtype=checks.type_of(scales))
    w = checks.check_planes("w_up", w_up, act.planes, x, x.shape[1])
    checks.check_offs(offs, w.shape[0], x)
    checks.check_bias("bias", bias, w.shape[0], act.planes * w.shape[2], x, act.planes)
    if save_pre_activation and (scales is not None or quantize):
        checks.refuse("save_pre_activation", True, "False with scales or quantize")
    if quantize and w.shape[2] % 16:
        checks.refuse("w_up.shape", list(w_up.shape), "I a multiple of 16, to quantize h")
    checks.check_quantizable("w_up", w, scales)
    of = checks.check_operands(scales, x, offs, w.shape[:3], grouped=False)
    saves = save_pre_activation or (scales is None and not quantize and _records(x, w, bias))
    call = x, w, offs, bias, act.kind, _numbers(act), saves
    found = operators.grouped_activation(*call, *of, quantize)
    return tuple(found) if quantize or save_pre_activation else found[0]


def grouped_mm_downproj(
    h: Tensor,
    w_down: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scales: Scales | None = None,
) -> Tensor:
    """Multiply each row by the down projection of its expert; differentiable unless h and w_down are e4m3.

    Args:
        h: [M, I] bf16, rows sorted by expert; e4m3 with two scales.
        w_down: [E, H, I] of h's dtype, the layer's w2, contiguous in I or in H. H is a multiple of 8.
        offs: [E] int32, the end of each expert's rows, see grouped_mm(). Default: one expert has all rows.
        bias: [E, H] fp32 or bf16. Default: no bias.
        scales: None, "dynamic", or the scales of e4m3 h, as grouped_mm_swiglu() returns them, and of w_down. Default:
            None.

    Returns:
        [M, H] bf16. Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor or option is invalid.
    """
    checks.check_mode(h=h, w_down=w_down, bias=bias)
    checks.check_rows("h", h, dtype=checks.type_of(scales))
    if w_down.dim() != 3 or w_down.shape[2] != h.shape[1] or w_down.shape[1] % 8:
        expected = f"[experts, H a multiple of 8, {h.shape[1]}]"
        checks.refuse("w_down.shape", list(w_down.shape), expected)
    checks.check_weights("w_down", w_down.transpose(1, 2), h)
    checks.check_quantizable("w_down", w_down, scales)
    return _product(h, w_down.transpose(1, 2), offs, bias, scales)


def grouped_mm_dswiglu(
    dy: Tensor,
    w_down: Tensor,
    pre_activation: Tensor,
    offs: Tensor | None = None,
    *,
    activation: str | Activation = "swiglu",
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of the pre-activations, and h again: the first step of an MLP's backward pass.

    Not differentiable.

    Args:
        dy: [M, H] bf16, the gradient of the MLP's output.
        w_down: [E, H, I] bf16, contiguous in I.
        pre_activation: [M, 2, I] bf16 (not gated: [M, 1, I]), as grouped_mm_swiglu() returns it.
        offs: [E] int32, the end of each expert's rows, see grouped_mm(). Default: one expert has all rows.
        activation: A name or an Activation. Default: "swiglu".

    Returns:
        The gradient [M, 2, I] bf16 and h [M, I] bf16. Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor is invalid.
        ConfigError: The activation is unknown.
    """
    act = activation_by_name(activation)
    checks.check_mode(dy=dy, w_down=w_down, pre_activation=pre_activation)
    checks.check_rows("dy", dy)
    if w_down.dim() != 3 or w_down.shape[1] != dy.shape[1]:
        checks.refuse("w_down.shape", list(w_down.shape), f"[experts, {dy.shape[1]}, I]")
    w = checks.check_planes("w_down", w_down.unsqueeze(1), 1, dy, w_down.shape[2])[:, 0]
    shape = [dy.shape[0], act.planes, w.shape[2]]
    if list(pre_activation.shape) != shape or not pre_activation.is_contiguous():
        checks.refuse("pre_activation.shape", list(pre_activation.shape), f"{shape}, contiguous")
    checks.check_rows("pre_activation", pre_activation.flatten(1), dy)
    checks.check_rows("pre_activation", pre_activation[:, 0], dy)
    checks.check_offs(offs, w.shape[0], dy)
    call = dy, w, pre_activation, offs, act.kind, _numbers(act)
    dgu, h = operators.grouped_activation_gradient(*call)
    return dgu, h


def grouped_mm_wgrad(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute weight gradients: for each expert the sum of a^T b over its rows.

    Not differentiable. Equal inputs give equal bits.

    Args:
        a: [M, N1] bf16, rows sorted by expert.
        b: [M, N2] bf16.
        offs: [E] int32, the end of each expert's rows, see grouped_mm(). Default: one expert has all rows.
        out: [E, N1, N2] bf16 or fp32, contiguous in N2, to add the result to; shares no memory with a and b. Default: a
            new tensor.
        dtype: bf16 or fp32, of a new result. Default: bf16.

    Returns:
        [E, N1, N2], zeros for an expert without rows; or `out`.

    Raises:
        ArgumentError: A tensor or dtype is invalid.
    """
    checks.check_mode(a=a, b=b, out=out)
    checks.check_rows("a", a)
    checks.check_rows("b", b, a)
    num = checks.num_ends(offs, a)
    if dtype not in (torch.bfloat16, torch.float32):
        checks.refuse("dtype", dtype, "bfloat16 or float32")
    if out is None:
        made: Tensor = operators.grouped_wgrad(a, b, offs, num, dtype == torch.float32, False)[0]
        return made
    checks.check_sums("out", out, (num, a.shape[1], b.shape[1]), a, (b, offs))
    operators.grouped_wgrad_add(a, b, offs, out)
    return out


def grouped_mlp(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    activation: str | Activation = "swiglu",
    scales: Literal["dynamic"] | None = None,
) -> Tensor:
    """Run each row through the MLP of its expert: grouped_mm_swiglu(), then grouped_mm_downproj(); differentiable.

    The backward pass uses one launch for the pre-activations' gradient and h, one for x's gradient and one for each
    weight. Pre-activations are saved, h is not. With "dynamic" only the arguments are saved; the first launch then
    becomes three, and torch's operations.

    Args:
        x: [M, H] bf16, rows sorted by expert.
        w13: [E, 2*I, H] or [E, 2, I, H], see grouped_mm_swiglu().
        w2: [E, H, I] bf16, contiguous in I.
        offs: [E] int32, the end of each expert's rows, see grouped_mm(). Default: one expert, a dense MLP.
        b13: [E, 2*I] or [E, 2, I], fp32 or bf16. Default: no bias.
        b2: [E, H] fp32 or bf16. Default: no bias.
        activation: A name or an Activation. Default: "swiglu".
        scales: "dynamic": multiply in FP8, see grouped_mm(); h is e4m3 between the products. Default: None, bf16.

    Returns:
        [M, H] bf16. Rows after offs[-1] are zeros.

    Raises:
        ArgumentError: A tensor or option is invalid.
        ConfigError: The activation is unknown.
    """
    act = activation_by_name(activation)
    checks.check_mode(x=x, w13=w13, w2=w2, b13=b13, b2=b2)
    checks.check_rows("x", x)
    w13 = checks.check_planes("w13", w13, act.planes, x, x.shape[1])
    num, planes, width = w13.shape[:3]
    if list(w2.shape) != [num, x.shape[1], width]:
        checks.refuse("w2.shape", list(w2.shape), f"[{num}, {x.shape[1]}, {width}]")
    checks.check_planes("w2", w2.unsqueeze(1), 1, x, width)
    checks.check_offs(offs, num, x)
    checks.check_bias("b13", b13, num, planes * width, x, planes)
    checks.check_bias("b2", b2, num, x.shape[1], x)
    dynamic = checks.is_dynamic(scales)
    if scales is not None and not dynamic:
        checks.refuse("scales", type(scales).__name__, "'dynamic' or None")
    checks.check_quantizable("w13", w13, scales)
    saves = not dynamic and _records(x, w13, w2, b13, b2)
    call = x, w13, w2, offs, b13, b2, act.kind, _numbers(act), saves, dynamic
    y: Tensor = operators.grouped_mlp(*call)[0]
    return y


def quantize_rows(
    x: Tensor, offs: Tensor | None = None, *, by_token: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize rows in groups of 128 columns, as the layer does (docs/numerics.md), for the argument `scales`.

    It uses torch's operations and does not wait for the device.

    Args:
        x: [M, K] bf16, fp16 or fp32. K is a multiple of 16.
        offs: [E] int32, the end of each expert's rows, see grouped_mm(). Default: one expert has all rows.
        by_token: True: one scale per row. Default: False.

    Returns:
        x as e4m3 [M, K], and its scales by block [ceil(K/128), P] fp32 (by_token: [1, P]), see scales_by_block(). They
        are valid for calls with the same offs.

    Raises:
        ArgumentError: A tensor is invalid.
    """
    checks.check_given(x=x)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        checks.refuse("x.dtype", x.dtype, "bfloat16, float16 or float32")
    if x.dim() != 2 or x.shape[1] == 0 or x.shape[1] % 16:
        checks.refuse("x.shape", list(x.shape), "[rows, a multiple of 16]")
    num = checks.num_ends(offs, x)
    return rows_by_block(x, offs, num, by_token)


def quantize_weights(
    w: Tensor, planes: int = 1, *, by_channel: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize weights in blocks of 128 x 128, as the layer does (docs/numerics.md), for the argument `scales`.

    Args:
        w: [E, N, K] bf16, fp16, fp32 or fp64.
        planes: 2 if w has gate rows and then up rows: blocks restart at the first up row. Default: 1.
        by_channel: True: one scale per row. Default: False.

    Returns:
        w as e4m3 [E, N, K], and its scales [E, planes * ceil(N / planes / 128), ceil(K/128)] fp32 (by_channel: [E, N,
        1]).

    Raises:
        ArgumentError: w or planes is invalid.
    """
    checks.check_given(w=w)
    if w.dim() != 3 or 0 in w.shape[1:] or not w.is_floating_point() or w.element_size() == 1:
        expected = "[experts, rows, columns] of bf16, fp16, fp32 or fp64"
        checks.refuse("w", f"{w.dtype} {list(w.shape)}", expected)
    if type(planes) is not int or planes not in (1, 2):
        checks.refuse("planes", planes, "1 or 2")
    if w.shape[1] % planes:
        checks.refuse("w.shape", list(w.shape), f"rows that are a multiple of planes = {planes}")
    quantize = quantization.quantize_channels if by_channel else quantization.quantize_blockwise
    return quantize(w.detach(), planes)


def scales_by_block(scale: Tensor, offs: Tensor | None = None) -> Tensor:
    """Move the scales of e4m3 rows to where the kernel reads them: each expert's scales begin at a multiple of 128.

    It uses torch's operations and does not wait for the device.

    Args:
        scale: [M, S] fp32: one scale per 128 columns of a row, or one per row.
        offs: [E] int32, the end of each expert's rows, see grouped_mm(). Default: one expert has all rows.

    Returns:
        [S, P] fp32, P = 128 * (M // 128 + E), valid for calls with the same offs.

    Raises:
        ArgumentError: A tensor is invalid.
    """
    checks.check_given(scale=scale)
    if scale.dim() != 2 or scale.dtype != torch.float32:
        checks.refuse("scale", f"{scale.dtype} {list(scale.shape)}", "[rows, groups of 128] fp32")
    num = checks.num_ends(offs, scale)
    return by_block(scale, offs, num)


def _product(
    x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None, scales: Scales | None
) -> Tensor:
    """x: [M, K], w: [E, K, N], both checked -> [M, N]."""
    num, _, width = w.shape
    checks.check_offs(offs, num, x)
    checks.check_bias("bias", bias, num, width, x)
    of = checks.check_operands(scales, x, offs, (num, 1, width))
    out: Tensor = operators.grouped_mm(x, w, offs, bias, *of)
    return out


def _numbers(act: Activation) -> list[float]:
    return [act.alpha, act.limit, act.up_offset]


def _records(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
