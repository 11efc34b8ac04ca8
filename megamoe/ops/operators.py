"""The operators as torch.library has them: forward, shapes for torch.compile, gradients.

    megamoe::grouped_mm(x, w, offs?, bias?) -> out
    megamoe::grouped_mm_planes(x, w, offs?) -> out                     x and w in planes of K
    megamoe::grouped_activation(x, w, offs?, bias?, kind, numbers, saves) -> (h, gu)
    megamoe::grouped_activation_gradient(dy, w, gu, offs?, kind, numbers) -> (dgu, h)
    megamoe::grouped_wgrad(a, b, offs?, num_experts, fp32, sums) -> (out, sums)
    megamoe::grouped_wgrad_add(a, b, offs?, out!) -> ()
    megamoe::grouped_mlp(x, w13, w2, offs?, b13?, b2?, kind, numbers, saves) -> (y, gu)

Arguments are those of functions.py, checked there. What is not asked for comes back empty. None of them waits, or
reads `offs` on the host, where a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.reference.backward import activation_gradient
from megamoe.config import Activation
from megamoe.jit.grouped import GroupedVariant
from megamoe.ops import arguments, reference
from megamoe.ops.machines import machine_of

_op = torch.library.custom_op
Numbers = Sequence[float]  # alpha, limit, up_offset


@_op("megamoe::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    """x: [M, K], w: [E, K, N] -> [M, N]."""
    machine = machine_of(x.device)
    if machine is None:
        return reference.product(x, w, offs, bias)
    out, bias = x.new_empty(x.shape[0], w.shape[2]), _fp32(bias)
    if x.shape[0]:
        stage = "product" if w.stride(2) != 1 else "product-columns"
        machine.run(
            GroupedVariant(stage),
            lambda *to: arguments.fill_product(*to, x, w.unsqueeze(1), offs, out, bias),
        )
    return out


@_op("megamoe::grouped_mm_planes", mutates_args=())
def grouped_mm_planes(x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    """x: [M, 2, K], w: [E, 2, K, N], contiguous in N -> [M, N], the sum over both planes."""
    machine = machine_of(x.device)
    if machine is None:
        return reference.product(x.flatten(1), w.flatten(1, 2), offs, None)
    out = x.new_empty(x.shape[0], w.shape[3])
    if x.shape[0]:
        machine.run(
            GroupedVariant("product-planes"),
            lambda *to: arguments.fill_product(*to, x, w, offs, out, None),
        )
    return out


@_op("megamoe::grouped_activation", mutates_args=())
def grouped_activation(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    kind: str,
    numbers: Sequence[float],
    saves: bool,
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w: [E, P, I, H] -> h [M, I], gu [M, P, I]."""
    act, machine = Activation(kind, *numbers), machine_of(x.device)
    rows, planes, width = x.shape[0], w.shape[1], w.shape[2]
    if machine is None:
        h, gu = reference.activation(x, w, offs, bias, act)
        return h, gu if saves else x.new_empty(0)
    h, bias = x.new_empty(rows, width), _fp32(bias)
    gu = x.new_empty(rows, planes, width) if saves else x.new_empty(0)
    if rows:
        saved = gu if saves else None
        machine.run(
            GroupedVariant("saving" if saves else "activation", kind),
            lambda *to: arguments.fill_activation(*to, x, w, offs, h, saved, bias, act),
        )
    return h, gu


@_op("megamoe::grouped_activation_gradient", mutates_args=())
def grouped_activation_gradient(
    dy: Tensor, w: Tensor, gu: Tensor, offs: Tensor | None, kind: str, numbers: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """dy: [M, H], w: [E, H, I], contiguous in I, gu: [M, P, I] -> dgu [M, P, I], h [M, I]."""
    act, machine = Activation(kind, *numbers), machine_of(dy.device)
    if machine is None:
        return reference.gradient(dy, w, gu, offs, act)
    dgu, h = torch.empty_like(gu), gu.new_empty(gu.shape[0], gu.shape[2])
    if dy.shape[0]:
        machine.run(
            GroupedVariant("gradient", kind),
            lambda *to: arguments.fill_gradient(*to, dy, w, gu, offs, dgu, h, act),
        )
    return dgu, h


@_op("megamoe::grouped_wgrad", mutates_args=())
def grouped_wgrad(
    a: Tensor, b: Tensor, offs: Tensor | None, num_experts: int, fp32: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    """a: [M, N1], b: [M, N2] -> [E, N1, N2] bf16 or fp32, sums of a's columns [E, N1] fp32."""
    dtype = torch.float32 if fp32 else a.dtype
    machine = machine_of(a.device)
    if machine is None:
        out, total = reference.weights(a, b, offs, num_experts)
        return out.to(dtype), total if sums else a.new_empty(0, dtype=torch.float32)
    make = a.new_empty if a.shape[0] else a.new_zeros
    out = make(num_experts, a.shape[1], b.shape[1], dtype=dtype)
    total = make((num_experts, a.shape[1]) if sums else (0,), dtype=torch.float32)
    _add_products(machine, a, b, offs, out, total if sums else None, accumulate=False)
    return out, total


@_op("megamoe::grouped_wgrad_add", mutates_args=("out",))
def grouped_wgrad_add(a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor) -> None:
    """out: [E, N1, N2] bf16 or fp32, contiguous in N2, += a^T b of each expert's rows."""
    machine = machine_of(a.device)
    if machine is None:
        out += reference.weights(a, b, offs, out.shape[0])[0]
    else:
        _add_products(machine, a, b, offs, out, None, accumulate=True)


def _add_products(machine: Any, a: Tensor, b: Tensor, *rest: Any, accumulate: bool) -> None:
    if a.shape[0]:
        machine.run(
            GroupedVariant("weights"),
            lambda *to: arguments.fill_weights(*to, a, b, *rest, accumulate),
        )


@_op("megamoe::grouped_mlp", mutates_args=())
def grouped_mlp(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    kind: str,
    numbers: Sequence[float],
    saves: bool,
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w13: [E, P, I, H], w2: [E, H, I] -> y [M, H], gu [M, P, I]."""
    h, gu = grouped_activation(x, w13, offs, b13, kind, numbers, saves)
    return grouped_mm(h, w2.transpose(1, 2), offs, b2), gu


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


# --- shapes ---


@grouped_mm.register_fake
def _(x: Tensor, w: Tensor, offs: Any, bias: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@grouped_mm_planes.register_fake
def _(x: Tensor, w: Tensor, offs: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[3])


@grouped_activation.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], w.shape[1], w.shape[2]) if rest[-1] else (0,)
    return x.new_empty(x.shape[0], w.shape[2]), x.new_empty(shape)


@grouped_activation_gradient.register_fake
def _(dy: Tensor, w: Tensor, gu: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gu), gu.new_empty(gu.shape[0], gu.shape[2])


@grouped_wgrad.register_fake
def _(
    a: Tensor, b: Tensor, offs: Any, num_experts: int, fp32: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    out = a.new_empty(num_experts, a.shape[1], b.shape[1], dtype=torch.float32 if fp32 else a.dtype)
    total = (num_experts, a.shape[1]) if sums else (0,)
    return out, a.new_empty(total, dtype=torch.float32)


@grouped_mlp.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], w13.shape[1], w13.shape[2]) if rest[-1] else (0,)
    return x.new_empty(x.shape[0], w2.shape[1]), x.new_empty(shape)


# --- gradients ---


def _rows(t: Tensor) -> Tensor:
    """Return a gradient as kernels take it."""
    legal = t.stride(-1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[-1]
    return t if legal and t.dtype == torch.bfloat16 else t.to(torch.bfloat16).contiguous()


def _of_product(
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
    return dw.transpose(1, 2), None if bias is None or not needs[1] else db.view_as(bias).to(bias)


def _save_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _mm_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w, offs, bias = ctx.saved_tensors
    needs, dy, dx = ctx.needs_input_grad, _rows(dy), None
    if needs[0]:
        dx = grouped_mm(dy, w.transpose(1, 2), offs, None)
    dw, db = _of_product(x, dy, offs, w, bias, (needs[1], needs[3]))
    return dx, dw if needs[1] else None, None, db


def of_planes(dgu: Tensor, w13: Tensor, offs: Tensor | None) -> Tensor:
    """dgu: [M, P, I], w13: [E, P, I, H] -> [M, H]: the gradient of x. Planes that lie behind each other are one."""
    planes, width = w13.shape[1:3]
    if planes == 1 or w13.stride(1) == width * w13.stride(2):
        joined = w13.shape[0], planes * width, w13.shape[3]
        strides = w13.stride(0), w13.stride(2), w13.stride(3)
        return grouped_mm(dgu.flatten(1), w13.as_strided(joined, strides), offs, None)
    return grouped_mm_planes(dgu, w13, offs)


def _of_planes_weights(
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
    return dw.view(w13.shape), None if bias is None or not needs[1] else db.view_as(bias).to(bias)


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
    dw, db = _of_planes_weights(dgu, x, offs, w, bias, (needs[1], needs[3]))
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
    needs, dy = ctx.needs_input_grad, _rows(dy)
    dgu, h = grouped_activation_gradient(dy, w2, gu, offs, ctx.kind, ctx.numbers)
    dx = of_planes(dgu, w13, offs) if needs[0] else None
    dw13, db13 = _of_planes_weights(dgu, x, offs, w13, b13, (needs[1], needs[4]))
    dw2 = db2 = None
    if needs[2] or needs[5]:
        dw2, db2 = grouped_wgrad(dy, h, offs, w2.shape[0], False, needs[5])
        db2 = db2.view_as(b2).to(b2) if needs[5] else None
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


grouped_mm.register_autograd(_mm_backward, setup_context=_save_mm)
grouped_activation.register_autograd(_activation_backward, setup_context=_save_activation)
grouped_mlp.register_autograd(_mlp_backward, setup_context=_save_mlp)
