"""Register the operators with torch.library: what each runs, and its shapes for torch.compile. Gradients: gradients.py.

    megamoe::grouped_mm(x, w, offs?, alignment, bias?, x_scale?, w_scale?, dynamic) -> out
    megamoe::grouped_activation(x, w, offs?, alignment, bias?, kind, numbers, saves, x_scale?, w_scale?, dynamic,
        quantizes, row_scale?) -> (h, gu or scales of h)
    megamoe::grouped_activation_gradient(dy, w, gu, offs?, alignment, kind, numbers, row_scale?)
        -> (dgu, h, d_row_scale)
    megamoe::grouped_mlp(x, w13, w2, offs?, alignment, b13?, b2?, kind, numbers, saves, dynamic,
        row_scale?) -> (y, gu)
    megamoe::grouped_wgrad(a, b, offs?, alignment, num_experts, fp32, sums) -> (out, sums)
    megamoe::grouped_wgrad_add(a, b, offs?, alignment, out!) -> ()

Rows and weights are bf16, or e4m3 with scales, or with `dynamic` bf16 that the operator quantizes. functions.py has
validated the arguments. A result that was not requested is empty. If a kernel runs, no operator waits for the device or
reads `offs` on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.planes import IN_MEMORY, STRIDE_BYTES
from megamoe.core.transforms import records, watched
from megamoe.formats.quantization import E4M3, num_groups
from megamoe.jit.grouped import GroupedVariant
from megamoe.launch.panels import TILE_COLUMNS
from megamoe.ops import reference
from megamoe.ops.arguments import Gemm, Outer
from megamoe.ops.groups import Groups
from megamoe.ops.machines import machine_of
from megamoe.ops.operands import Operands, by_k, dequantized, quantized, readable, rows_by_group
from megamoe.ops.scales import num_places
from megamoe.ops.tails import tails

recorded: dict[str, Any] = {}  # the autograd functions of eager calls, by operator: gradients.py
_variant, _activation = cache(GroupedVariant), cache(Activation)
_WEIGHTS = _variant("weights")


def _op(run: Callable[..., Any]) -> Any:
    """Register an operator. Eager calls go past the dispatcher, which takes longer than a small kernel."""
    name, defaults = run.__name__, run.__defaults__ or ()
    names = run.__code__.co_varnames[: run.__code__.co_argcount]
    written = [n for n in names if n == "out"]
    custom = torch.library.custom_op(f"megamoe::{name}", run, mutates_args=written)

    @wraps(run)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or watched() or torch._C._get_tracing_state():
            return custom(*args)
        tensors = [t for t in args if isinstance(t, Tensor)]
        if not all(type(t) in IN_MEMORY for t in tensors):
            return custom(*args)
        if name in recorded and records(tensors):
            return recorded[name].apply(*args, *defaults[len(args) - len(names) + len(defaults) :])
        if not written:
            return run(*args)
        with torch.no_grad():
            torch.autograd.graph.increment_version(args[-1])
            return run(*args)

    return call


@_op
def grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor | None, alignment: int, bias: Tensor | None,
    x_scale: Tensor | None = None, w_scale: Tensor | None = None, dynamic: bool = False,
) -> Tensor:  # fmt: skip
    """x: [M, K], w: [E, K, N], contiguous in either, given e4m3 in K -> [M, N] bf16."""
    w = w.transpose(1, 2).unsqueeze(1)
    given, groups = Operands(_aligned(x), readable(w), x_scale, w_scale), Groups(offs, alignment)
    return _activated(quantized(given, groups) if dynamic else given, groups, bias)[0]


@_op
def grouped_activation(
    x: Tensor, w: Tensor, offs: Tensor | None, alignment: int, bias: Tensor | None, kind: str,
    numbers: Sequence[float], saves: bool, x_scale: Tensor | None = None,
    w_scale: Tensor | None = None, dynamic: bool = False, quantizes: bool = False,
    row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x: [M, H], w: [E, P, I, H] -> h [M, I] bf16 or e4m3; gu [M, P, I] or h's scales by block. kind: "" is none."""
    given = Operands(x, readable(w, not quantizes), x_scale, w_scale)
    groups, act = Groups(offs, alignment), _activation(kind, *numbers) if kind else None
    given = quantized(given, groups) if dynamic else given
    return _activated(given, groups, bias, act, saves, quantizes, row_scale)


@_op
def grouped_activation_gradient(
    dy: Tensor, w: Tensor, gu: Tensor, offs: Tensor | None, alignment: int, kind: str,
    numbers: Sequence[float], row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dy: [M, H], w: [E, H, I], contiguous in either, gu: [M, P, I] -> dgu [M, P, I], h [M, I], row_scale's [M]."""
    groups, act = Groups(offs, alignment), _activation(kind, *numbers)
    w = w.transpose(1, 2).unsqueeze(1)
    variant = _variant("gradient" + _major(w) + "-scales" * (row_scale is not None), kind)
    machine = machine_of(dy.device, variant)
    if machine is None:
        made = reference.gradient(dy, w[:, 0].transpose(1, 2), gu, groups, act, row_scale)
        return made[0].bfloat16(), made[1].bfloat16(), made[2]
    dgu, h, d_scale = _empty_gradients(gu, row_scale)
    gemm = Gemm(Operands(_aligned(dy), w), groups, dgu, activation=act, gu=gu, h=h)
    if row_scale is not None:
        parts = d_scale.new_zeros(len(gu), -(-gu.shape[2] // TILE_COLUMNS) + 1)
        gemm.row_scale, gemm.d_scale = row_scale, parts
    _run(machine, variant, gemm)
    return dgu, h, d_scale if row_scale is None else parts.sum(1)


@_op
def grouped_mlp(
    x: Tensor, w13: Tensor, w2: Tensor, offs: Tensor | None, alignment: int, b13: Tensor | None,
    b2: Tensor | None, kind: str, numbers: Sequence[float], saves: bool, dynamic: bool = False,
    row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x: [M, H], w13: [E, P, I, H], w2: [E, H, I] -> y [M, H], gu [M, P, I]. dynamic: h is e4m3, it does not save."""
    groups, act = Groups(offs, alignment), _activation(kind, *numbers)
    first = Operands(x, readable(w13))
    if not dynamic:
        h, gu = _activated(first, groups, b13, act, saves, False, row_scale)
        return _activated(Operands(h, w2.unsqueeze(1)), groups, b2)[0], gu
    h, h_scale = _activated(quantized(first, groups), groups, b13, act, False, True, row_scale)
    second = quantized(Operands(h, w2.unsqueeze(1), h_scale), groups)
    return _activated(second, groups, b2)[0], x.new_empty(0)


@_op
def grouped_wgrad(
    a: Tensor, b: Tensor, offs: Tensor | None, alignment: int, num_experts: int, fp32: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """a: [M, N1], b: [M, N2] -> [E, N1, N2] bf16 or fp32, sums of a's columns [E, N1] fp32."""
    dtype = torch.float32 if fp32 else a.dtype
    a, b, machine = _aligned(a), _aligned(b), machine_of(a.device, _WEIGHTS)
    groups = Groups(offs, alignment)
    if machine is None:
        total = reference.column_sums(a, groups) if sums else a.new_empty(0, dtype=torch.float32)
        return reference.weights(a, b, groups, num_experts, dtype).to(dtype), total
    out, total = _empty_weights(a, b, num_experts, fp32, sums)
    if not a.shape[0]:
        return out.zero_(), total.zero_()
    outer = Outer(a, b, tails(a, b, groups), groups, out, total if sums else None, False)
    machine.run(_WEIGHTS, outer)
    return out, total


@_op
def grouped_wgrad_add(
    a: Tensor, b: Tensor, offs: Tensor | None, alignment: int, out: Tensor
) -> None:
    """out: [E, N1, N2] bf16 or fp32, contiguous in N2, += a^T b of each expert's rows."""
    a, b, machine = _aligned(a), _aligned(b), machine_of(a.device, _WEIGHTS)
    groups = Groups(offs, alignment)
    if machine is None:
        out += reference.weights(a, b, groups, out.shape[0], out.dtype)
    elif a.shape[0]:
        outer = Outer(a, b, tails(a, b, groups), groups, out, None, True)
        machine.run(_WEIGHTS, outer)


def _activated(
    given: Operands, groups: Groups, bias: Tensor | None, act: Activation | None = None,
    saves: bool = False, quantizes: bool = False, row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return h, or the product if there is no activation; and gu, or the scales of h."""
    stage = "product" if act is None else "saving" if saves else "activation"
    stage += given.suffix + _major(given.w) + ("-quantizes" if quantizes else "")
    variant = _variant(stage, act and act.kind)
    machine = machine_of(given.x.device, variant)
    if machine is None:
        call = *dequantized(given, groups), groups, bias, act, row_scale
        if quantizes:
            return rows_by_group(reference.activation(*call)[0], groups, given.w.shape[0])
        h, gu = reference.activation(*call)
        return h.bfloat16(), gu.bfloat16() if saves else given.x.new_empty(0, dtype=torch.bfloat16)
    h, beside = _empty_hidden(given.x, given.w, saves, quantizes)
    scale = beside if quantizes else None
    gemm = Gemm(
        given, groups, h, _fp32(bias), act, beside if saves else None, None, scale, row_scale
    )
    _run(machine, variant, gemm)
    return h, beside


def _major(w: Tensor) -> str:
    return "" if by_k(w) else "-columns"


def _run(machine: Any, variant: GroupedVariant, gemm: Gemm) -> None:
    if gemm.out.shape[0]:
        machine.run(variant, gemm)


def _empty_hidden(x: Tensor, w: Tensor, saves: bool, quantizes: bool) -> tuple[Tensor, Tensor]:
    rows, (num, planes, width, _) = x.shape[0], w.shape
    h = x.new_empty(rows, width, dtype=E4M3 if quantizes else torch.bfloat16)
    if quantizes:
        return h, x.new_empty(num_groups(width), num_places(rows, num), dtype=torch.float32)
    shape = (rows, planes, width) if saves else (0,)
    return h, x.new_empty(shape, dtype=torch.bfloat16)


def _empty_gradients(gu: Tensor, row_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows = gu.new_empty(0 if row_scale is None else len(gu), dtype=torch.float32)
    return torch.empty_like(gu), _rows_like(gu, gu.shape[2]), rows


def _empty_weights(
    a: Tensor, b: Tensor, num_experts: int, fp32: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    out = a.new_empty(num_experts, a.shape[1], b.shape[1], dtype=torch.float32 if fp32 else a.dtype)
    return out, a.new_empty((num_experts, a.shape[1]) if sums else (0,), dtype=torch.float32)


def _rows_like(x: Tensor, width: int) -> Tensor:
    return x.new_empty(x.shape[0], width, dtype=torch.bfloat16)


def _aligned(rows: Tensor) -> Tensor:
    """Return rows where TMA reads them: a copy of those of a gradient that is a part of another."""
    return rows.clone() if rows.data_ptr() % STRIDE_BYTES else rows


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


# --- shapes ---

_shapes = torch.library.register_fake
_shapes("megamoe::grouped_mm")(lambda x, w, *_: _rows_like(x, w.shape[2]))
_shapes("megamoe::grouped_activation")(  # torch leaves defaults out
    lambda x, w, *rest: _empty_hidden(x, w, rest[5], len(rest) > 9 and rest[9])
)
_shapes("megamoe::grouped_activation_gradient")(
    lambda dy, w, gu, *rest: _empty_gradients(gu, rest[4] if len(rest) == 5 else None)
)
_shapes("megamoe::grouped_mlp")(
    lambda x, w, w2, *rest: (_rows_like(x, w2.shape[1]), _empty_hidden(x, w, rest[6], False)[1])
)
_shapes("megamoe::grouped_wgrad")(lambda a, b, offs, alignment, *rest: _empty_weights(a, b, *rest))
