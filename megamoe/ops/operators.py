"""Register the operators with torch.library: what each runs, and its shapes for torch.compile. Gradients: gradients.py.

    megamoe::grouped_mm(x, w, offs?, bias?, x_scale?, w_scale?, dynamic) -> out
    megamoe::grouped_mm_planes(x, w, offs?) -> out                     x and w in planes of K
    megamoe::grouped_pre_activation(x, w, offs?, bias?) -> gu          quantized here
    megamoe::grouped_activation(x, w, offs?, bias?, kind, numbers, saves, x_scale?, w_scale?, dynamic, quantizes)
        -> (h, gu or scales of h)
    megamoe::grouped_activation_gradient(dy, w, gu, offs?, kind, numbers) -> (dgu, h)
    megamoe::grouped_mlp(x, w13, w2, offs?, b13?, b2?, kind, numbers, saves, dynamic) -> (y, gu)
    megamoe::grouped_wgrad(a, b, offs?, num_experts, fp32, sums) -> (out, sums)
    megamoe::grouped_wgrad_add(a, b, offs?, out!) -> ()

Rows and weights are bf16, or e4m3 with scales, or with `dynamic` bf16 that the operator quantizes. functions.py has
validated the arguments. A result that was not requested is empty. If a kernel runs, no operator waits for the device or
reads `offs` on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.planes import STRIDE_BYTES
from megamoe.formats.quantization import E4M3, num_groups
from megamoe.jit.grouped import GroupedVariant
from megamoe.ops import reference
from megamoe.ops.arguments import Gemm, Outer
from megamoe.ops.machines import machine_of
from megamoe.ops.operands import Operands, by_k, dequantized, quantized, rows_by_block
from megamoe.ops.scales import num_places
from megamoe.ops.tails import tails

_op = torch.library.custom_op
_variant = cache(GroupedVariant)
_WEIGHTS = _variant("weights")


@_op("megamoe::grouped_mm", mutates_args=())
def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    dynamic: bool = False,
) -> Tensor:
    """x: [M, K], w: [E, K, N], contiguous in either, given e4m3 in K -> [M, N] bf16."""
    given = Operands(_aligned(x), w.transpose(1, 2).unsqueeze(1), x_scale, w_scale)
    return _product(quantized(given, offs) if dynamic else given, offs, bias)


@_op("megamoe::grouped_mm_planes", mutates_args=())
def grouped_mm_planes(x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    """x: [M, 2, K], w: [E, 2, K, N], contiguous in N -> [M, N], the sum over both planes."""
    return _product(Operands(_aligned(x), w.transpose(2, 3)), offs, None)


@_op("megamoe::grouped_pre_activation", mutates_args=())
def grouped_pre_activation(
    x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x: [M, H], w: [E, P, I, H], both bf16 -> [M, P, I] bf16: a launch for each plane, whose blocks are its own."""
    num, planes, width, _ = w.shape
    q, matrices, x_scale, w_scale = quantized(Operands(x, w), offs)
    assert w_scale is not None
    of_planes = w_scale.unflatten(1, (planes, num_groups(width)))
    biases = [None] * planes if bias is None else bias.reshape(num, planes, width).unbind(1)
    found = []
    for p in range(planes):
        # a copy, which begins at a multiple of 16 bytes
        given = Operands(q, matrices[:, p : p + 1], x_scale, of_planes[:, p].clone())
        found.append(_product(given, offs, biases[p]))
    return torch.stack(found, 1)


@_op("megamoe::grouped_activation", mutates_args=())
def grouped_activation(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    kind: str,
    numbers: Sequence[float],
    saves: bool,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    dynamic: bool = False,
    quantizes: bool = False,
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w: [E, P, I, H] -> h [M, I] bf16 or e4m3; gu [M, P, I] or h's scales by block."""
    given, act = Operands(x, w, x_scale, w_scale), Activation(kind, *numbers)
    return _activated(
        quantized(given, offs) if dynamic else given, offs, bias, act, saves, quantizes
    )


@_op("megamoe::grouped_activation_gradient", mutates_args=())
def grouped_activation_gradient(
    dy: Tensor, w: Tensor, gu: Tensor, offs: Tensor | None, kind: str, numbers: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """dy: [M, H], w: [E, H, I], contiguous in I, gu: [M, P, I] -> dgu [M, P, I], h [M, I]."""
    act, variant = Activation(kind, *numbers), _variant("gradient", kind)
    machine = machine_of(dy.device, variant)
    if machine is None:
        dgu, h = reference.gradient(dy, w, gu, offs, act)
        return dgu.bfloat16(), h.bfloat16()
    dgu, h = torch.empty_like(gu), gu.new_empty(gu.shape[0], gu.shape[2])
    given = Operands(_aligned(dy), w.transpose(1, 2).unsqueeze(1))
    _run(machine, variant, Gemm(given, offs, dgu, activation=act, gu=gu, h=h))
    return dgu, h


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
    dynamic: bool = False,
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w13: [E, P, I, H], w2: [E, H, I] -> y [M, H], gu [M, P, I]. dynamic: h is e4m3, it does not save."""
    first, act = Operands(x, w13), Activation(kind, *numbers)
    if not dynamic:
        h, gu = _activated(first, offs, b13, act, saves, False)
        return _product(Operands(h, w2.unsqueeze(1)), offs, b2), gu
    h, h_scale = _activated(quantized(first, offs), offs, b13, act, False, True)
    second = quantized(Operands(h, w2.unsqueeze(1), h_scale), offs)
    return _product(second, offs, b2), x.new_empty(0)


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
    if a.shape[0]:
        outer = Outer(a, b, tails(a, b, offs), offs, out, total if sums else None, False)
        machine.run(_WEIGHTS, outer.fill)
    return out, total


@_op("megamoe::grouped_wgrad_add", mutates_args=("out",))
def grouped_wgrad_add(a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor) -> None:
    """out: [E, N1, N2] bf16 or fp32, contiguous in N2, += a^T b of each expert's rows."""
    a, b, machine = _aligned(a), _aligned(b), machine_of(a.device, _WEIGHTS)
    if machine is None:
        out += reference.weights(a, b, offs, out.shape[0], out.dtype)
    elif a.shape[0]:
        outer = Outer(a, b, tails(a, b, offs), offs, out, None, True)
        machine.run(_WEIGHTS, outer.fill)


def _product(given: Operands, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x w^T + bias [M, N] bf16, of planes the sum."""
    x, w = given.x, given.w
    major = "" if by_k(w) else "-columns" if x.dim() == 2 else "-planes"
    variant = _variant("product" + given.suffix + major)
    machine = machine_of(x.device, variant)
    if machine is None:
        x, w = dequantized(given, offs)
        matrices = w.transpose(2, 3).flatten(1, 2)
        return reference.product(x.flatten(1), matrices, offs, bias).bfloat16()
    out = x.new_empty(x.shape[0], w.shape[2], dtype=torch.bfloat16)
    _run(machine, variant, Gemm(given, offs, out, _fp32(bias)))
    return out


def _activated(
    given: Operands,
    offs: Tensor | None,
    bias: Tensor | None,
    act: Activation,
    saves: bool,
    quantizes: bool,
) -> tuple[Tensor, Tensor]:
    """Return h, and what stands beside it."""
    stage = "saving" if saves else "activation"
    stage += given.suffix + ("-quantizes" if quantizes else "")
    variant = _variant(stage, act.kind)
    machine = machine_of(given.x.device, variant)
    if machine is None:
        call = *dequantized(given, offs), offs, bias, act
        if quantizes:
            return rows_by_block(reference.activation(*call)[0], offs, given.w.shape[0])
        h, gu = reference.activation(*call)
        return h.bfloat16(), gu.bfloat16() if saves else given.x.new_empty(0, dtype=torch.bfloat16)
    h, beside = _empty_hidden(given.x, given.w, saves, quantizes)
    scale = beside if quantizes else None
    gemm = Gemm(given, offs, h, _fp32(bias), act, beside if saves else None, out_scale=scale)
    _run(machine, variant, gemm)
    return h, beside


def _run(machine: Any, variant: GroupedVariant, gemm: Gemm) -> None:
    if gemm.out.shape[0]:
        machine.run(variant, gemm.fill)


def _empty_hidden(x: Tensor, w: Tensor, saves: bool, quantizes: bool) -> tuple[Tensor, Tensor]:
    rows, (num, planes, width, _) = x.shape[0], w.shape
    h = x.new_empty(rows, width, dtype=E4M3 if quantizes else torch.bfloat16)
    if quantizes:
        return h, x.new_empty(num_groups(width), num_places(rows, num), dtype=torch.float32)
    shape = (rows, planes, width) if saves else (0,)
    return h, x.new_empty(shape, dtype=torch.bfloat16)


def _aligned(rows: Tensor) -> Tensor:
    """Return rows where TMA reads them: a copy of those of a gradient that is a part of another."""
    return rows.clone() if rows.data_ptr() % STRIDE_BYTES else rows


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


# --- shapes ---


@grouped_mm.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2], dtype=torch.bfloat16)


@grouped_mm_planes.register_fake
def _(x: Tensor, w: Tensor, offs: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[3])


@grouped_pre_activation.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1], w.shape[2])


@grouped_activation.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    quantizes = len(rest) == 9 and rest[8]  # torch leaves defaults out
    return _empty_hidden(x, w, rest[4], quantizes)


@grouped_activation_gradient.register_fake
def _(dy: Tensor, w: Tensor, gu: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gu), gu.new_empty(gu.shape[0], gu.shape[2])


@grouped_mlp.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], w2.shape[1]), _empty_hidden(x, w13, rest[5], False)[1]


@grouped_wgrad.register_fake
def _(
    a: Tensor, b: Tensor, offs: Any, num_experts: int, fp32: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    out = a.new_empty(num_experts, a.shape[1], b.shape[1], dtype=torch.float32 if fp32 else a.dtype)
    total = (num_experts, a.shape[1]) if sums else (0,)
    return out, a.new_empty(total, dtype=torch.float32)
