"""Gradients of the operators in BF16, by the operators; of FP8 products: dynamic.py. e4m3 operands have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.errors import MegaMoEError
from megamoe.ops.operators import (
    grouped_activation,
    grouped_activation_gradient,
    grouped_mlp,
    grouped_mm,
    grouped_mm_planes,
    grouped_wgrad,
)
from megamoe.ops.reference import activation_gradient


def rows_of(t: Tensor) -> Tensor:
    """Return a gradient as kernels take it."""
    legal = t.stride(-1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[-1]
    return t if legal and t.dtype == torch.bfloat16 else t.to(torch.bfloat16).contiguous()


def of_bias(sums: Tensor, bias: Tensor | None, needed: bool) -> Tensor | None:
    """Return sums of columns as the gradient of the bias that was given."""
    return None if bias is None or not needed else sums.view_as(bias).to(bias)


def of_product(
    x: Tensor,
    dy: Tensor,
    offs: Tensor | None,
    w: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of w [E, K, N], in its major, and of its bias."""
    if not any(needs):
        return None, None
    num = w.shape[0]
    if w.stride(2) == 1 and not needs[1]:
        return grouped_wgrad(x, dy, offs, num, False, False)[0], None
    dw, db = grouped_wgrad(dy, x, offs, num, False, needs[1])
    return dw.transpose(1, 2), of_bias(db, bias, needs[1])


def save_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what of_mm() needs."""
    ctx.save_for_backward(*inputs)


def of_mm(product: Callable[..., Tensor]) -> Callable[..., tuple[Any, ...]]:
    """Return the backward pass of a product (x, w, offs, bias), whose gradient of x is such a product again."""

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w, offs, bias = ctx.saved_tensors
        needs, dy = ctx.needs_input_grad, rows_of(dy)
        dx = product(dy, w.transpose(1, 2), offs, None) if needs[0] else None
        dw, db = of_product(x, dy, offs, w, bias, (needs[1], needs[3]))
        return dx, dw if needs[1] else None, None, db

    return backward


def of_planes(dgu: Tensor, w13: Tensor, offs: Tensor | None) -> Tensor:
    """dgu: [M, P, I], w13: [E, P, I, H] -> [M, H]: the gradient of x. Planes that lie behind each other are one."""
    planes, width = w13.shape[1:3]
    if planes == 1 or w13.stride(1) == width * w13.stride(2):
        # A view here, a copy in a compiled graph that lays w13 out anew: as_strided would read past it.
        return grouped_mm(dgu.flatten(1), w13.flatten(1, 2), offs, None)
    return grouped_mm_planes(dgu, w13, offs)


def of_planes_weights(
    dgu: Tensor,
    x: Tensor,
    offs: Tensor | None,
    w13: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of w13 [E, P, I, H] and of its bias."""
    if not any(needs):
        return None, None
    dw, db = grouped_wgrad(dgu.flatten(1), x, offs, w13.shape[0], False, needs[1])
    return dw.view(w13.shape), of_bias(db, bias, needs[1])


def _save_activation(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, offs, bias, ctx.kind, ctx.numbers, saves = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, offs, bias, output[1] if saves else None)


def _activation_backward(ctx: Any, dh: Tensor | None, d_gu: Tensor | None) -> tuple[Any, ...]:
    x, w, offs, bias, gu = ctx.saved_tensors
    needs, dgu = ctx.needs_input_grad, d_gu
    if dh is not None:
        act = Activation(ctx.kind, *ctx.numbers)
        dgu = activation_gradient(act, gu.flatten(1).float(), dh.float())[0].view(gu.shape)
        dgu = (dgu if d_gu is None else dgu + d_gu).to(gu.dtype)
    if dgu is None:
        return (None,) * 7
    dgu = dgu.contiguous()
    dx = of_planes(dgu, w, offs) if needs[0] else None
    dw, db = of_planes_weights(dgu, x, offs, w, bias, (needs[1], needs[3]))
    return dx, dw if needs[1] else None, None, db, None, None, None


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.kind, ctx.numbers, saves = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1] if saves else None)


def _mlp_backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, w13, w2, offs, b13, b2, gu = ctx.saved_tensors
    if dy is None:
        return (None,) * 9
    needs, dy = ctx.needs_input_grad, rows_of(dy)
    dgu, h = grouped_activation_gradient(dy, w2, gu, offs, ctx.kind, ctx.numbers)
    dx = of_planes(dgu, w13, offs) if needs[0] else None
    dw13, db13 = of_planes_weights(dgu, x, offs, w13, b13, (needs[1], needs[4]))
    dw2 = db2 = None
    if needs[2] or needs[5]:
        dw2, db2 = grouped_wgrad(dy, h, offs, w2.shape[0], False, needs[5])
        db2 = of_bias(db2, b2, needs[5])
    return (
        dx,
        dw13 if needs[1] else None,
        dw2 if needs[2] else None,
        None,
        db13,
        db2,
        None,
        None,
        None,
    )


def refuse_to_differentiate(name: str) -> None:
    """Make a backward pass that comes to the operator of this name raise MegaMoEError."""

    def backward(ctx: Any, *_: Any) -> Any:
        raise MegaMoEError(
            f"a result of {name} was differentiated, expected first derivatives in bf16 operands only: this operator, "
            "a part of backward passes or for e4m3, has none"
        )

    torch.library.register_autograd(name, backward)


def register() -> None:
    """Give the operators their gradients. Once."""
    for name in (
        "grouped_mm_planes",
        "grouped_wgrad",
        "grouped_activation_gradient",
        "grouped_mm_e4m3",
        "grouped_activation_e4m3",
    ):
        refuse_to_differentiate(f"megamoe::{name}")
    grouped_mm.register_autograd(of_mm(grouped_mm), setup_context=save_mm)
    grouped_activation.register_autograd(_activation_backward, setup_context=_save_activation)
    grouped_mlp.register_autograd(_mlp_backward, setup_context=_save_mlp)
