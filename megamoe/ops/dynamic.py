"""Products in FP8 of bf16 operands: quantized in each call, differentiable. `scales="dynamic"` of functions.py.

    megamoe::grouped_mm_dynamic(x, w, offs?, bias?) -> out
    megamoe::grouped_planes_dynamic(x, w, offs?, bias?) -> gu           the pre-activations
    megamoe::grouped_activation_dynamic(x, w, offs?, bias?, kind, numbers, quantizes) -> (h, h_scale)
    megamoe::grouped_mlp_dynamic(x, w13, w2, offs?, b13?, b2?, kind, numbers) -> y

Gradients are straight through: those of the products of quantized operands, as if quantizing were the identity. The
gradient of rows is such a product again, of quantized dy and the same e4m3 weights: blocks of 128 x 128 are those of
the transpose, too. Weight gradients are products of what was given, in BF16. Pre-activations are computed again. So a
call saves its arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.table import E4M3_BLOCKS
from megamoe.formats.cache import quantize_weights
from megamoe.formats.quantization import GROUP, num_groups, quantize_rows
from megamoe.ops.checks import E4M3
from megamoe.ops.gradients import (
    of_bias,
    of_mm,
    of_planes_weights,
    refuse_to_differentiate,
    rows_of,
    save_mm,
)
from megamoe.ops.operators import (
    grouped_activation_e4m3,
    grouped_mm_e4m3,
    grouped_wgrad,
)
from megamoe.ops.reference import activation_gradient
from megamoe.ops.scales import by_block, num_places

_op = torch.library.custom_op
Pair = tuple[Tensor, Tensor]


def _rows(x: Tensor, offs: Tensor | None, num_experts: int) -> Pair:
    """x: [M, K] -> e4m3, scales by block."""
    q, scale = quantize_rows(x)
    return q, by_block(scale, offs, num_experts)


def _planes(w: Tensor) -> Pair:
    """w: [E, P, N, K], contiguous in K -> [E, P, N, K] e4m3, [E, P*ceil(N/128), ceil(K/128)]."""
    (q, scale), _ = quantize_weights(w, w.shape[1], E4M3_BLOCKS, None, False, None)
    return q.view(w.shape), scale


def _matrices(w: Tensor) -> Pair:
    """w: [E, K, N], contiguous in either -> [E, K, N] e4m3, contiguous in K, [E, ceil(N/128), ceil(K/128)]."""
    if w.stride(2) != 1:
        q, scale = _planes(w.transpose(1, 2).unsqueeze(1))
        return q[:, 0].transpose(1, 2), scale
    _, turned = quantize_weights(w, 1, E4M3_BLOCKS, None, True, None)
    assert turned is not None
    return turned[0][:, 0].transpose(1, 2), turned[1]


@_op("megamoe::grouped_mm_dynamic", mutates_args=())
def grouped_mm_dynamic(x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    """x: [M, K], w: [E, K, N], either major, both bf16 -> [M, N] bf16."""
    (q, x_scale), (matrices, w_scale) = _rows(x, offs, w.shape[0]), _matrices(w)
    return grouped_mm_e4m3(q, matrices, offs, bias, x_scale, w_scale)


@_op("megamoe::grouped_planes_dynamic", mutates_args=())
def grouped_planes_dynamic(
    x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x: [M, H], w: [E, P, I, H], both bf16 -> [M, P, I] bf16: a launch for each plane, whose blocks are its own."""
    num, planes, width, _ = w.shape
    (q, x_scale), (matrices, w_scale) = _rows(x, offs, num), _planes(w)
    of_planes = w_scale.unflatten(1, (planes, num_groups(width)))
    biases = [None] * planes if bias is None else bias.reshape(num, planes, width).unbind(1)
    found = []
    for p in range(planes):
        of = matrices[:, p].transpose(1, 2), offs, biases[p], x_scale, of_planes[:, p].clone()
        found.append(grouped_mm_e4m3(q, *of))
    return torch.stack(found, 1)


@_op("megamoe::grouped_activation_dynamic", mutates_args=())
def grouped_activation_dynamic(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    kind: str,
    numbers: Sequence[float],
    quantizes: bool,
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w: [E, P, I, H], both bf16 -> h [M, I] bf16 or e4m3, its scales by block."""
    (q, x_scale), (planes, w_scale) = _rows(x, offs, w.shape[0]), _planes(w)
    of = kind, numbers, quantizes
    return grouped_activation_e4m3(q, planes, offs, bias, x_scale, w_scale, *of)


@_op("megamoe::grouped_mlp_dynamic", mutates_args=())
def grouped_mlp_dynamic(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    kind: str,
    numbers: Sequence[float],
) -> Tensor:
    """x: [M, H], w13: [E, P, I, H], w2: [E, H, I], all bf16 -> [M, H] bf16; h goes between them as e4m3."""
    h, h_scale = grouped_activation_dynamic(x, w13, offs, b13, kind, numbers, True)
    w, w_scale = _matrices(w2.transpose(1, 2))
    return grouped_mm_e4m3(h, w, offs, b2, h_scale, w_scale)


@grouped_mm_dynamic.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@grouped_planes_dynamic.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1], w.shape[2])


@grouped_activation_dynamic.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, (num, _, width, _) = x.shape[0], w.shape
    shape = (num_groups(width), num_places(rows, num)) if rest[-1] else (0,)
    h = x.new_empty(rows, width, dtype=E4M3 if rest[-1] else x.dtype)
    return h, x.new_empty(shape, dtype=torch.float32)


@grouped_mlp_dynamic.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], w2.shape[1])


# --- gradients ---


def _of_planes(dgu: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    """dgu: [M, P, I], w: [E, P, I, H] -> [M, H]: of each plane, where a group of 128 would hold two, else at once."""
    planes, width = w.shape[1:3]
    if planes == 1 or (width % GROUP == 0 and w.stride(1) == width * w.stride(2)):
        return grouped_mm_dynamic(dgu.flatten(1), w.flatten(1, 2), offs, None)
    first, second = (grouped_mm_dynamic(dgu[:, p], w[:, p], offs, None) for p in range(2))
    return first + second


def _save_activation(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.kind, ctx.numbers, ctx.quantizes = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _activation_backward(ctx: Any, dh: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, w, offs, bias = ctx.saved_tensors
    if dh is None:
        return (None,) * 7
    if ctx.quantizes:
        raise RuntimeError("a quantized h has no gradient: use ops.grouped_mlp")
    dgu, _ = _through(ctx, x, w, offs, bias, dh)
    dx, dw, db = _of_first(dgu, x, w, offs, bias, (ctx.needs_input_grad[i] for i in (0, 1, 3)))
    return dx, dw, None, db, None, None, None


def _through(
    ctx: Any, x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None, dh: Tensor
) -> Pair:
    """Return dgu [M, P, I] and h [M, I], both bf16, of pre-activations that are computed again."""
    gu = grouped_planes_dynamic(x, w, offs, bias)
    act = Activation(ctx.kind, *ctx.numbers)
    dgu, h = activation_gradient(act, gu.flatten(1).float(), dh.float())
    return dgu.to(gu.dtype).view(gu.shape), h.to(gu.dtype)


def _of_first(
    dgu: Tensor, x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None, needs: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, w [E, P, I, H] and its bias."""
    of_x, of_w, of_b = needs
    dx = _of_planes(dgu, w, offs) if of_x else None
    dw, db = of_planes_weights(dgu, x, offs, w, bias, (of_w, of_b))
    return dx, dw if of_w else None, db


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kind, ctx.numbers = inputs
    ctx.save_for_backward(*tensors)


def _mlp_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w13, w2, offs, b13, b2 = ctx.saved_tensors
    needs, dy = ctx.needs_input_grad, rows_of(dy)
    dx = dw13 = dw2 = db13 = db2 = None
    dh = grouped_mm_dynamic(dy, w2, offs, None)
    dgu, h = _through(ctx, x, w13, offs, b13, dh)
    dx, dw13, db13 = _of_first(dgu, x, w13, offs, b13, (needs[i] for i in (0, 1, 4)))
    if needs[2] or needs[5]:
        dw2, db2 = grouped_wgrad(dy, h, offs, w2.shape[0], False, needs[5])
        dw2, db2 = dw2 if needs[2] else None, of_bias(db2, b2, needs[5])
    return dx, dw13, dw2, None, db13, db2, None, None


def register() -> None:
    """Give the operators their gradients. Once."""
    refuse_to_differentiate("megamoe::grouped_planes_dynamic")
    grouped_mm_dynamic.register_autograd(of_mm(grouped_mm_dynamic), setup_context=save_mm)
    grouped_activation_dynamic.register_autograd(
        _activation_backward, setup_context=_save_activation
    )
    grouped_mlp_dynamic.register_autograd(_mlp_backward, setup_context=_save_mlp)
