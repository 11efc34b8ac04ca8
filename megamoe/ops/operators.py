"""Register the operators with torch.library: what each runs, and its shapes for torch.compile. Gradients: gradients.py.

    megamoe::grouped_mm(x, w, offs?, alignment, bias?, x_scale?, w_scale?, dynamic) -> out
    megamoe::grouped_activation(x, w, offs?, alignment, bias?, kind, numbers, interleaved, saves, x_scale?, w_scale?,
        dynamic, quantizes, row_scale?) -> (h, gu, scales of h)
    megamoe::grouped_activation_gradient(dy, w, gu, offs?, alignment, kind, numbers, interleaved, dy_scale?, w_scale?,
        dynamic, row_scale?) -> (dgu, h, d_row_scale)
    megamoe::grouped_mlp(x, w_up, w_down, offs?, alignment, b_up?, b_down?, kind, numbers, interleaved, saves, dynamic,
        row_scale?) -> (y, gu)
    megamoe::grouped_wgrad(a, b, offs?, alignment, num_experts, fp32, sums) -> (out, sums)
    megamoe::grouped_wgrad_add(a, b, offs?, alignment, out!) -> ()

Rows and weights are bf16, or e4m3 with scales, or with `dynamic` bf16 that the operator quantizes. Weights are [E, K,
N]; gate and up are halves of N, or `interleaved`. functions.py has validated the arguments. A result that was not
requested is empty. If a kernel runs, no operator waits for the device or reads `offs` on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.planes import IN_MEMORY, STRIDE_BYTES
from megamoe.core.transforms import records
from megamoe.formats.quantization import E4M3, num_groups
from megamoe.jit.grouped import GroupedVariant
from megamoe.jit.recording import made
from megamoe.launch.panels import TILE_COLUMNS
from megamoe.ops import reference
from megamoe.ops.arguments import Gemm, Outer
from megamoe.ops.calls import is_observed, repeats
from megamoe.ops.groups import Groups
from megamoe.ops.machines import machine_of
from megamoe.ops.operands import (
    Operands,
    dequantized,
    quantized,
    readable,
    rows_by_group,
)
from megamoe.ops.scales import num_places
from megamoe.ops.tails import tails

recorded: dict[str, Any] = {}  # the autograd functions of eager calls, by operator: gradients.py
_variant = cache(GroupedVariant)
_WEIGHTS = _variant("weights")


class Fused(NamedTuple):
    """What an epilogue does to the product: nothing, or an activation of gate and up columns in this order."""

    act: Activation | None = None
    interleaved: bool = False
    columns: int = 1  # of w for one of h
    planes: int = 1  # that w has for the kernel

    def variant(self, stage: str, given: Operands, suffix: str) -> GroupedVariant:
        """Return the kernel of these operands."""
        name = stage + given.suffix + suffix + "-interleaved" * self.interleaved
        return _variant(name, self.act and self.act.kind)


_PLAIN = Fused()


@cache
def _fused(interleaved: bool, kind: str, *numbers: float) -> Fused:
    act = Activation(kind, *numbers) if kind else None
    columns = 1 if act is None else act.planes
    return Fused(act, interleaved, columns, 1 if interleaved else columns)


def _op(run: Callable[..., Any]) -> Any:
    """Register an operator. Eager calls go past the dispatcher, which takes longer than a small kernel."""
    name, defaults = run.__name__, run.__defaults__ or ()
    names = run.__code__.co_varnames[: run.__code__.co_argcount]
    written = [n for n in names if n == "out"]
    custom = torch.library.custom_op(f"megamoe::{name}", run, mutates_args=written)

    @wraps(run)
    def call(*args: Any) -> Any:
        tensors = [t for t in args if isinstance(t, Tensor)]
        if is_observed() or not frozenset(IN_MEMORY).issuperset(map(type, tensors)):
            return custom(*args)
        if name in recorded and records(tensors):
            return recorded[name].apply(*args, *defaults[len(args) - len(names) + len(defaults) :])
        if not written:
            return planned(*args)
        with torch.no_grad():
            torch.autograd.graph.increment_version(args[-1])
            return planned(*args)

    marked: Any = call
    marked.planned = planned = repeats(run, seen=True)
    return call


@_op
def grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor | None, alignment: int, bias: Tensor | None,
    x_scale: Tensor | None = None, w_scale: Tensor | None = None, dynamic: bool = False,
) -> Tensor:  # fmt: skip
    """x: [M, K], w: [E, K, N], contiguous in either, given e4m3 in K -> [M, N] bf16."""
    groups = Groups(offs, alignment)
    given = Operands(_aligned(x), readable(w), x_scale, w_scale)
    return _activated(quantized(given, groups) if dynamic else given, groups, bias)[0]


@_op
def grouped_activation(
    x: Tensor, w: Tensor, offs: Tensor | None, alignment: int, bias: Tensor | None, kind: str,
    numbers: Sequence[float], interleaved: bool, saves: bool, x_scale: Tensor | None = None,
    w_scale: Tensor | None = None, dynamic: bool = False, quantizes: bool = False,
    row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x: [M, H], w: [E, H, P*I] -> h [M, I] bf16 or e4m3; gu [M, P*I]; h's scales by block. kind: "" is none."""
    groups, fused = Groups(offs, alignment), _fused(interleaved, kind, *numbers)
    given = Operands(x, w, x_scale, w_scale, fused.planes)
    given = quantized(given, groups) if dynamic else given
    return _told(*_activated(given, groups, bias, fused, saves, quantizes, row_scale))


@_op
def grouped_activation_gradient(
    dy: Tensor, w: Tensor, gu: Tensor, offs: Tensor | None, alignment: int, kind: str,
    numbers: Sequence[float], interleaved: bool, dy_scale: Tensor | None = None,
    w_scale: Tensor | None = None, dynamic: bool = False, row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dy: [M, H], w: [E, H, I], contiguous in either, gu: [M, P*I] -> dgu [M, P*I], h [M, I], row_scale's [M]."""
    groups, fused = Groups(offs, alignment), _fused(interleaved, kind, *numbers)
    given = Operands(_aligned(dy), w, dy_scale, w_scale)
    given = quantized(given, groups) if dynamic else given
    variant = fused.variant("gradient", given, "-scales" * (row_scale is not None))
    machine = machine_of(dy.device, variant)
    if machine is None:
        assert fused.act is not None
        call = *dequantized(given, groups), gu, groups, fused.act, row_scale, interleaved
        made = reference.gradient(*call)
        return made[0].bfloat16(), made[1].bfloat16(), made[2]
    dgu, h, d_scale = _empty_gradients(gu, w, row_scale)
    gemm = Gemm(given, groups, dgu, None, fused.act, interleaved, gu=gu, h=h)
    if row_scale is not None:
        parts = d_scale.new_zeros(len(gu), -(-h.shape[1] // TILE_COLUMNS) + 1)
        gemm.row_scale, gemm.d_scale = row_scale, parts
    _run(machine, variant, gemm)
    return dgu, h, d_scale if row_scale is None else parts.sum(1)


@_op
def grouped_mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, offs: Tensor | None, alignment: int,
    b_up: Tensor | None, b_down: Tensor | None, kind: str, numbers: Sequence[float],
    interleaved: bool, saves: bool, dynamic: bool = False, row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x: [M, H], w_up: [E, H, P*I], w_down: [E, I, H] -> y [M, H], gu [M, P*I]. dynamic: h is e4m3."""
    groups, fused = Groups(offs, alignment), _fused(interleaved, kind, *numbers)
    first = Operands(x, w_up, planes=fused.planes)
    first = quantized(first, groups) if dynamic else first
    h, gu, scale = _activated(first, groups, b_up, fused, saves, dynamic, row_scale)
    second = Operands(h, w_down, scale if dynamic else None)
    y, *_ = _activated(quantized(second, groups) if dynamic else second, groups, b_down)
    return y, _empty(x, 0) if gu is None else gu


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
    given: Operands, groups: Groups, bias: Tensor | None, fused: Fused = _PLAIN,
    saves: bool = False, quantizes: bool = False, row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return h, or the product if there is no activation; gu if it is saved; the scales of h in e4m3."""
    if quantizes:
        given = given._replace(w=readable(given.w, columns=False))
    stage = "product" if fused.act is None else "saving" if saves else "activation"
    variant = fused.variant(stage, given, "-quantizes" * quantizes)
    machine = machine_of(given.x.device, variant)
    num, _, width = given.w.shape
    h, gu, scale = _empty_hidden(given.x, width, num, fused, saves, quantizes)
    if machine is None:
        call = *dequantized(given, groups), groups, bias, fused.act, row_scale, fused.interleaved
        wide, pre = reference.activation(*call)
        if quantizes:
            h, scale = rows_by_group(wide, groups, num)
        return h if quantizes else wide.bfloat16(), pre.bfloat16() if saves else None, scale
    gemm = Gemm(given, groups, h, _fp32(bias), *fused[:2], gu, None, scale, row_scale)
    _run(machine, variant, gemm)
    return h, gu, scale


def _run(machine: Any, variant: GroupedVariant, gemm: Gemm) -> None:
    if gemm.out.shape[0]:
        machine.run(variant, gemm)
    elif gemm.out_scale is not None:
        gemm.out_scale.zero_()


def _empty_hidden(
    x: Tensor, width: int, num: int, fused: Fused, saves: bool, quantizes: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """width: of w's columns, P*I."""
    rows, of_h = len(x), width // fused.columns
    h = _empty(x, rows, of_h, dtype=E4M3 if quantizes else torch.bfloat16)
    gu = _rows_like(x, width) if saves else None
    places = num_groups(of_h), num_places(rows, num)
    return h, gu, _empty(x, *places, dtype=torch.float32) if quantizes else None


def _told(h: Tensor, gu: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Make what was not requested empty, as the operator's schema has no optional results."""
    gu = _empty(h, 0) if gu is None else gu
    return h, gu, _empty(h, 0, dtype=torch.float32) if scale is None else scale


def _empty_gradients(
    gu: Tensor, w: Tensor, row_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _empty(gu, 0 if row_scale is None else len(gu), dtype=torch.float32)
    return _rows_like(gu, gu.shape[1]), _rows_like(gu, w.shape[2]), rows


def _empty_weights(
    a: Tensor, b: Tensor, num_experts: int, fp32: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    out = _empty(a, num_experts, a.shape[1], b.shape[1], dtype=torch.float32 if fp32 else a.dtype)
    return out, _empty(a, *((num_experts, a.shape[1]) if sums else (0,)), dtype=torch.float32)


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return made(like.new_empty(*shape, dtype=dtype))


def _rows_like(x: Tensor, width: int) -> Tensor:
    return _empty(x, x.shape[0], width)


def _aligned(rows: Tensor) -> Tensor:
    """Return rows where TMA reads them: a copy of those of a gradient that is a part of another."""
    return rows.clone() if rows.data_ptr() % STRIDE_BYTES else rows


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


# --- shapes ---

_shapes = torch.library.register_fake
_shapes("megamoe::grouped_mm")(lambda x, w, *_: _rows_like(x, w.shape[2]))
_shapes("megamoe::grouped_activation")(
    lambda x, w, offs, alignment, bias, kind, numbers, interleaved, saves, *rest: _told(
        *_empty_hidden(
            *(x, w.shape[2], len(w), _fused(interleaved, kind, *numbers), saves),
            len(rest) > 3 and rest[3],  # torch leaves defaults out
        )
    )
)
_shapes("megamoe::grouped_activation_gradient")(
    lambda dy, w, gu, *rest: _empty_gradients(gu, w, rest[8] if len(rest) == 9 else None)
)
_shapes("megamoe::grouped_mlp")(
    lambda x, w, w_down, *rest: (
        _rows_like(x, w_down.shape[2]),
        _rows_like(x, w.shape[2]) if rest[7] else x.new_empty(0),
    )
)
_shapes("megamoe::grouped_wgrad")(lambda a, b, offs, alignment, *rest: _empty_weights(a, b, *rest))
