"""The operators as torch.library has them: what they run, and shapes for torch.compile. Gradients: gradients.py.

    megamoe::grouped_mm(x, w, offs?, bias?) -> out
    megamoe::grouped_mm_planes(x, w, offs?) -> out                     x and w in planes of K
    megamoe::grouped_activation(x, w, offs?, bias?, kind, numbers, saves) -> (h, gu)
    megamoe::grouped_activation_gradient(dy, w, gu, offs?, kind, numbers) -> (dgu, h)
    megamoe::grouped_wgrad(a, b, offs?, num_experts, fp32, sums) -> (out, sums)
    megamoe::grouped_wgrad_add(a, b, offs?, out!) -> ()
    megamoe::grouped_mm_e4m3(x, w, offs?, bias?, x_scale, w_scale) -> out
    megamoe::grouped_activation_e4m3(x, w, offs?, bias?, x_scale?, w_scale?, kind, numbers, quantizes) -> (h, h_scale)
    megamoe::grouped_mlp(x, w13, w2, offs?, b13?, b2?, kind, numbers, saves) -> (y, gu)

Arguments are those of functions.py, checked there. What is not asked for comes back empty. None of them waits, or
reads `offs` on the host, where a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.planes import STRIDE_BYTES
from megamoe.formats.quantization import num_groups
from megamoe.jit.grouped import GroupedVariant
from megamoe.ops import arguments, reference
from megamoe.ops.checks import E4M3
from megamoe.ops.machines import machine_of
from megamoe.ops.scales import num_places
from megamoe.ops.tails import tails

_op = torch.library.custom_op
Numbers = Sequence[float]  # alpha, limit, up_offset
_WEIGHTS = GroupedVariant("weights")


@_op("megamoe::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    """x: [M, K], w: [E, K, N] -> [M, N]."""
    variant = GroupedVariant("product" if w.stride(2) != 1 else "product-columns")
    x, machine = _aligned(x), machine_of(x.device, variant)
    if machine is None:
        return reference.product(x, w, offs, bias).to(x.dtype)
    out, bias = x.new_empty(x.shape[0], w.shape[2]), _fp32(bias)
    if x.shape[0]:
        machine.run(
            variant,
            lambda *to: arguments.fill_product(*to, x, w.unsqueeze(1), offs, out, bias),
        )
    return out


@_op("megamoe::grouped_mm_planes", mutates_args=())
def grouped_mm_planes(x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    """x: [M, 2, K], w: [E, 2, K, N], contiguous in N -> [M, N], the sum over both planes."""
    variant = GroupedVariant("product-planes")
    x, machine = _aligned(x), machine_of(x.device, variant)
    if machine is None:
        return reference.product(x.flatten(1), w.flatten(1, 2), offs, None).to(x.dtype)
    out = x.new_empty(x.shape[0], w.shape[3])
    if x.shape[0]:
        machine.run(
            variant,
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
    act, variant = (
        Activation(kind, *numbers),
        GroupedVariant("saving" if saves else "activation", kind),
    )
    machine = machine_of(x.device, variant)
    rows, planes, width = x.shape[0], w.shape[1], w.shape[2]
    if machine is None:
        h, gu = reference.activation(x, w, offs, bias, act)
        return h.to(x.dtype), gu.to(x.dtype) if saves else x.new_empty(0)
    h, bias = x.new_empty(rows, width), _fp32(bias)
    gu = x.new_empty(rows, planes, width) if saves else x.new_empty(0)
    if rows:
        saved = gu if saves else None
        machine.run(
            variant,
            lambda *to: arguments.fill_activation(*to, x, w, offs, h, saved, bias, act),
        )
    return h, gu


@_op("megamoe::grouped_activation_gradient", mutates_args=())
def grouped_activation_gradient(
    dy: Tensor, w: Tensor, gu: Tensor, offs: Tensor | None, kind: str, numbers: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """dy: [M, H], w: [E, H, I], contiguous in I, gu: [M, P, I] -> dgu [M, P, I], h [M, I]."""
    act, variant = Activation(kind, *numbers), GroupedVariant("gradient", kind)
    dy, machine = _aligned(dy), machine_of(dy.device, variant)
    if machine is None:
        dgu, h = reference.gradient(dy, w, gu, offs, act)
        return dgu.to(gu.dtype), h.to(gu.dtype)
    dgu, h = torch.empty_like(gu), gu.new_empty(gu.shape[0], gu.shape[2])
    if dy.shape[0]:
        machine.run(
            variant,
            lambda *to: arguments.fill_gradient(*to, dy, w, gu, offs, dgu, h, act),
        )
    return dgu, h


@_op("megamoe::grouped_wgrad", mutates_args=())
def grouped_wgrad(
    a: Tensor, b: Tensor, offs: Tensor | None, num_experts: int, fp32: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    """a: [M, N1], b: [M, N2] -> [E, N1, N2] bf16 or fp32, sums of a's columns [E, N1] fp32."""
    dtype = torch.float32 if fp32 else a.dtype
    a, b, machine = _aligned(a), _aligned(b), machine_of(a.device, _WEIGHTS)
    if machine is None:
        total = reference.column_sums(a, offs) if sums else a.new_empty(0, dtype=torch.float32)
        return reference.weights(a, b, offs, num_experts, dtype).to(dtype), total
    make = a.new_empty if a.shape[0] else a.new_zeros
    out = make(num_experts, a.shape[1], b.shape[1], dtype=dtype)
    total = make((num_experts, a.shape[1]) if sums else (0,), dtype=torch.float32)
    _add_products(machine, a, b, offs, out, total if sums else None, accumulate=False)
    return out, total


@_op("megamoe::grouped_wgrad_add", mutates_args=("out",))
def grouped_wgrad_add(a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor) -> None:
    """out: [E, N1, N2] bf16 or fp32, contiguous in N2, += a^T b of each expert's rows."""
    a, b, machine = _aligned(a), _aligned(b), machine_of(a.device, _WEIGHTS)
    if machine is None:
        out += reference.weights(a, b, offs, out.shape[0], out.dtype)
    else:
        _add_products(machine, a, b, offs, out, None, accumulate=True)


def _add_products(
    machine: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    out: Tensor,
    sums: Tensor | None,
    accumulate: bool,
) -> None:
    if a.shape[0] == 0:
        return
    ends = tails(a, b, offs)
    machine.run(
        _WEIGHTS,
        lambda *to: arguments.fill_weights(*to, a, b, ends, offs, out, sums, accumulate),
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


@_op("megamoe::grouped_mm_e4m3", mutates_args=())
def grouped_mm_e4m3(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor,
    w_scale: Tensor,
) -> Tensor:
    """x: [M, K], w: [E, K, N], contiguous in K, both e4m3 -> [M, N] bf16. x_scale: by block, see scales.py."""
    variant = GroupedVariant("product-e4m3")
    machine = machine_of(x.device, variant)
    if machine is None:
        numbers = reference.numbers_of(x, w.transpose(1, 2).unsqueeze(1), offs, x_scale, w_scale)
        wide, matrices = numbers[0], numbers[1][:, 0].transpose(1, 2)
        return reference.product(wide, matrices, offs, bias).bfloat16()
    out = x.new_empty(x.shape[0], w.shape[2], dtype=torch.bfloat16)
    bias, scales = _fp32(bias), (x_scale, w_scale)
    if x.shape[0]:
        machine.run(
            variant,
            lambda *to: arguments.fill_product(*to, x, w.unsqueeze(1), offs, out, bias, scales),
        )
    return out


@_op("megamoe::grouped_activation_e4m3", mutates_args=())
def grouped_activation_e4m3(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    kind: str,
    numbers: Sequence[float],
    quantizes: bool,
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w: [E, P, I, H], e4m3 where they have scales -> h [M, I] bf16 or e4m3, its scales by block."""
    product = "activation" + ("-e4m3" if x_scale is not None else "")
    variant = GroupedVariant(product + ("-quantizes" if quantizes else ""), kind)
    act, machine = Activation(kind, *numbers), machine_of(x.device, variant)
    h, h_scale = _empty_hidden(x, w, quantizes)
    if machine is None:
        if x_scale is not None and w_scale is not None:
            x, w = reference.numbers_of(x, w, offs, x_scale, w_scale)
        wide = reference.activation(x, w, offs, bias, act)[0]
        return reference.quantized(wide, offs, w.shape[0]) if quantizes else (wide.to(h), h_scale)
    bias, scales = _fp32(bias), (x_scale, w_scale)
    if x.shape[0]:
        of_h = h_scale if quantizes else None
        machine.run(
            variant,
            lambda *to: arguments.fill_activation(
                *to, x, w, offs, h, None, bias, act, scales, of_h
            ),
        )
    return h, h_scale


def _empty_hidden(x: Tensor, w: Tensor, quantizes: bool) -> tuple[Tensor, Tensor]:
    rows, (num, _, width, _) = x.shape[0], w.shape
    shape = (num_groups(width), num_places(rows, num)) if quantizes else (0,)
    h = x.new_empty(rows, width, dtype=E4M3 if quantizes else torch.bfloat16)
    return h, x.new_empty(shape, dtype=torch.float32)


def _aligned(rows: Tensor) -> Tensor:
    """Return rows where TMA reads them: a copy of those of a gradient that is a part of another."""
    return rows.clone() if rows.data_ptr() % STRIDE_BYTES else rows


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


@grouped_mm_e4m3.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2], dtype=torch.bfloat16)


@grouped_activation_e4m3.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_hidden(x, w, rest[-1])


@grouped_mlp.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], w13.shape[1], w13.shape[2]) if rest[-1] else (0,)
    return x.new_empty(x.shape[0], w2.shape[1]), x.new_empty(shape)
