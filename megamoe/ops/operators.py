"""Register the operators with torch.library: what each runs, and its shapes for torch.compile. Gradients: gradients.py.

    megamoe::grouped_mm(x, w, offs?, alignment, bias?, x_scale?, w_scale?, dynamic, quantizes, kind, numbers,
        interleaved, saves, row_scale?) -> (out, gu, scales of out, out transposed, its scales)
    megamoe::grouped_activation_gradient(dy, w, gu, offs?, alignment, kind, numbers, interleaved, dy_scale?, w_scale?,
        dynamic, row_scale?, quantizes) -> (dgu, h, d_row_scale, scales of dgu and h, dgu transposed, its scales)
    megamoe::grouped_mlp(x, w_up, w_down, offs?, alignment, b_up?, b_down?, kind, numbers, interleaved, saves, dynamic,
        row_scale?) -> (y, gu)
    megamoe::grouped_wgrad(a, b, offs?, alignment, num_experts, fp32, sums) -> (out, sums)
    megamoe::grouped_wgrad_add(a, b, offs?, alignment, out!, a_scale?, b_scale?) -> ()

Rows and weights are bf16, or e4m3 with scales, or with `dynamic` bf16 that the operator quantizes. Weights are [E, K,
N]; gate and up are halves of N, or `interleaved`. functions.py has validated the arguments. A result that was not
requested is empty. If a kernel runs, no operator waits for the device or reads `offs` on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.planes import IN_MEMORY, STRIDE_BYTES
from megamoe.core.transforms import records
from megamoe.formats.quantization import E4M3, GROUP, num_groups
from megamoe.jit.grouped import GroupedVariant
from megamoe.jit.recording import made
from megamoe.launch.panels import TILE_COLUMNS
from megamoe.launch.passes import Pair
from megamoe.ops import reference
from megamoe.ops.arguments import Gemm, Outer
from megamoe.ops.calls import F, is_observed, repeats
from megamoe.ops.groups import Groups, tails
from megamoe.ops.machines import machine_of
from megamoe.ops.operands import (
    Operands,
    dequantized,
    quantized,
    readable,
    rows_by_group,
    rows_of_transposed,
    transposed_rows,
)
from megamoe.ops.scales import num_places

recorded: dict[str, Any] = {}  # the autograd functions of eager calls, by operator: gradients.py
_variant = cache(GroupedVariant)


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


def _fused(kind: str, numbers: Sequence[float] | None, interleaved: bool) -> Fused:
    act = Activation(kind, *(numbers or ())) if kind else None
    columns = 1 if act is None else act.planes
    return Fused(act, interleaved, columns, 1 if interleaved else columns)


def _op(shapes: Callable[..., Any]) -> Callable[[F], F]:
    """Register an operator. shapes: of its results, by arguments of the same names. Eager calls skip the dispatcher."""
    read = shapes.__code__.co_varnames[: shapes.__code__.co_argcount]

    def register(run: F) -> F:
        name, defaults = run.__name__, run.__defaults__ or ()
        names = run.__code__.co_varnames[: run.__code__.co_argcount]
        written = [n for n in names if n == "out"]
        custom = torch.library.custom_op(f"megamoe::{name}", run, mutates_args=written)

        def whole(args: tuple[Any, ...]) -> tuple[Any, ...]:
            return *args, *defaults[len(args) - len(names) + len(defaults) :]

        custom.register_fake(lambda *args: shapes(*(whole(args)[names.index(n)] for n in read)))

        @wraps(run)
        def call(*args: Any) -> Any:
            tensors = [t for t in args if isinstance(t, Tensor)]
            if is_observed() or not frozenset(IN_MEMORY).issuperset(map(type, tensors)):
                return custom(*args)
            if name in recorded and records(tensors):
                return recorded[name].apply(*whole(args))
            if not written:
                return planned(*args)
            with torch.no_grad():
                torch.autograd.graph.increment_version(args[names.index("out")])
                return planned(*args)

        marked: Any = call
        marked.planned = planned = repeats(run, seen=True)
        return cast(F, call)

    return register


@_op(
    lambda x, w, quantizes, kind, numbers, interleaved, saves: _empty_hidden(
        x, w, _fused(kind, numbers, interleaved), saves, quantizes
    )
)
def grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor | None, alignment: int, bias: Tensor | None,
    x_scale: Tensor | None = None, w_scale: Tensor | None = None, dynamic: bool = False,
    quantizes: int = 0, kind: str = "", numbers: Sequence[float] | None = None,
    interleaved: bool = False, saves: bool = False, row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x: [M, K], w: [E, K, P*N] -> h or, of kind "", the product [M, N] bf16 or e4m3; gu [M, P*N]; scales by block.

    quantizes: 1: to e4m3; 2: h also transposed, as operands.transposed_rows().
    """
    groups, fused = Groups(offs, alignment), _fused(kind, numbers, interleaved)
    given = Operands(_aligned(x), readable(w), x_scale, w_scale, fused.planes)
    given = quantized(given, groups) if dynamic else given
    return _activated(given, groups, bias, fused, saves, quantizes, row_scale)


@_op(lambda gu, w, row_scale, quantizes: _empty_gradients(gu, w, row_scale, quantizes))
def grouped_activation_gradient(
    dy: Tensor, w: Tensor, gu: Tensor, offs: Tensor | None, alignment: int, kind: str,
    numbers: Sequence[float], interleaved: bool, dy_scale: Tensor | None = None,
    w_scale: Tensor | None = None, dynamic: bool = False, row_scale: Tensor | None = None,
    quantizes: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dy: [M, H], w: [E, H, I], contiguous in either, gu: [M, P*I] -> dgu [M, P*I], h [M, I], row_scale's [M].

    quantizes: dgu is e4m3, by row and transposed, and h is transposed alone.
    """
    groups, fused = Groups(offs, alignment), _fused(kind, numbers, interleaved)
    given = Operands(_aligned(dy), w, dy_scale, w_scale)
    given = quantized(given, groups) if dynamic else given
    suffix = "-quantizes" * quantizes + "-scales" * (row_scale is not None)
    variant = fused.variant("gradient", given, suffix)
    machine = machine_of(dy.device, variant)
    dgu, h, d_scale, *more = _empty_gradients(gu, w, row_scale, quantizes)
    if machine is None:
        assert fused.act is not None
        call = *dequantized(given, groups), gu, groups, fused.act, row_scale, interleaved
        dgu, h, d_scale = reference.gradient(*call)
        dgu, h = dgu.bfloat16(), h.bfloat16()
        if not quantizes:
            return dgu, h, d_scale, *more
        (q, scale), of_h = rows_by_group(dgu, groups, len(w)), transposed_rows(h, groups, len(w))
        return q, of_h[0], d_scale, scale, of_h[1], *transposed_rows(dgu, groups, len(w), True)
    gemm = Gemm(given, groups, dgu, None, fused.act, interleaved, gu=gu, h=h, reads=True)
    if quantizes:
        gemm.h, gemm.out_scale, gemm.transposed = None, more[0], (h, *more[1:])
    if row_scale is not None:
        parts = d_scale.new_zeros(len(gu), -(-h.shape[1] // TILE_COLUMNS) + 1)
        gemm.row_scale, gemm.d_scale = row_scale, parts
    _run(machine, variant, gemm, (dgu, h, d_scale, *more))
    return dgu, h, d_scale if row_scale is None else parts.sum(1), *more


@_op(
    lambda x, w_up, w_down, saves: (
        _empty(x, len(x), w_down.shape[2]),
        _empty(x, len(x), w_up.shape[2], wanted=saves),
    )
)
def grouped_mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, offs: Tensor | None, alignment: int,
    b_up: Tensor | None, b_down: Tensor | None, kind: str, numbers: Sequence[float],
    interleaved: bool, saves: bool, dynamic: bool = False, row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x: [M, H], w_up: [E, H, P*I], w_down: [E, I, H] -> y [M, H], gu [M, P*I]. dynamic: h is e4m3."""
    groups, fused = Groups(offs, alignment), _fused(kind, numbers, interleaved)
    first = Operands(x, w_up, planes=fused.planes)
    first = quantized(first, groups) if dynamic else first
    h, gu, scale, *_ = _activated(first, groups, b_up, fused, saves, dynamic, row_scale)
    second = Operands(h, w_down, scale if dynamic else None)
    y, *_ = _activated(quantized(second, groups) if dynamic else second, groups, b_down, Fused())
    return y, gu


@_op(lambda a, b, num_experts, fp32, sums: _empty_weights(a, b, num_experts, fp32, sums))
def grouped_wgrad(
    a: Tensor, b: Tensor, offs: Tensor | None, alignment: int, num_experts: int, fp32: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """a: [M, N1], b: [M, N2] -> [E, N1, N2] bf16 or fp32, sums of a's columns [E, N1] fp32."""
    out, total = _empty_weights(a, b, num_experts, fp32, sums)
    _sum_outer(a, b, Groups(offs, alignment), out, total if sums else None, False)
    return out, total


@_op(lambda: None)
def grouped_wgrad_add(
    a: Tensor, b: Tensor, offs: Tensor | None, alignment: int, out: Tensor,
    a_scale: Tensor | None = None, b_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """out: [E, N1, N2] bf16 or fp32, contiguous in N2, += a^T b of each expert's rows; with scales, of transposed."""
    scales = () if a_scale is None or b_scale is None else (a_scale, b_scale)
    _sum_outer(a, b, Groups(offs, alignment), out, None, True, scales)


def _sum_outer(
    a: Tensor, b: Tensor, groups: Groups, out: Tensor, sums: Tensor | None, adds: bool,
    scales: tuple[Any, ...] = (),
) -> None:  # fmt: skip
    variant = _variant("weights-e4m3" if scales else "weights")
    a, b, machine = _aligned(a), _aligned(b), machine_of(a.device, variant)
    if machine is not None and len(a):
        rest = scales or tails(a, b, groups)
        machine.run(variant, Outer(a, b, rest, groups, out, sums, adds))
        return
    if scales:
        a, b, groups = rows_of_transposed((a, scales[0]), (b, scales[1]), groups)
        a, b = a[:, : out.shape[1]], b[:, : out.shape[2]]
    made = reference.weights(a, b, groups, len(out), out.dtype)
    out.add_(made) if adds else out.copy_(made)
    if sums is not None:
        sums.copy_(reference.column_sums(a, groups))


def _activated(
    given: Operands, groups: Groups, bias: Tensor | None, fused: Fused,
    saves: bool = False, quantizes: int = 0, row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return h, or the product if there is no activation; gu if it is saved; the scales of h in e4m3; h transposed."""
    if quantizes:
        given = given._replace(w=readable(given.w, columns=False))
    stage = "product" if fused.act is None else "saving" if saves else "activation"
    variant = fused.variant(stage, given, ("", "-quantizes", "-quantizes-transposes")[quantizes])
    machine = machine_of(given.x.device, variant)
    h, gu, scale, *_ = empty = _empty_hidden(given.x, given.w, fused, saves, quantizes)
    if machine is None:
        call = *dequantized(given, groups), groups, bias, fused.act, row_scale, fused.interleaved
        wide, pre = reference.activation(*call)
        if quantizes:
            h, scale = rows_by_group(wide, groups, len(given.w))
        more = empty[3:]
        if quantizes > 1:
            more = transposed_rows(wide.bfloat16(), groups, len(given.w))
        return h if quantizes else wide.bfloat16(), pre.bfloat16() if saves else gu, scale, *more
    left, of_h = gu if saves else None, scale if quantizes else None
    bias = None if bias is None else bias.float().contiguous()
    gemm = Gemm(given, groups, h, bias, *fused[:2], left, None, of_h, row_scale)
    gemm.transposed = empty[3:] if quantizes > 1 else ()
    _run(machine, variant, gemm, empty)
    return empty


def _run(machine: Any, variant: GroupedVariant, gemm: Gemm, results: Sequence[Tensor]) -> None:
    if len(gemm.out):
        machine.run(variant, gemm)
    else:
        for t in results:
            t.zero_()


def _empty_hidden(
    x: Tensor, w: Tensor, fused: Fused, saves: bool, quantizes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_h = w.shape[2] // fused.columns
    h, scale = _empty_rows(x, of_h, len(w), quantizes > 0)
    gu = _empty(x, len(x), w.shape[2], wanted=saves)
    return h, gu, scale, *_empty_transposed(x, of_h, len(w), quantizes > 1)


def _empty_gradients(gu: Tensor, w: Tensor, row_scale: Tensor | None, quantizes: bool) -> Any:
    num, width = len(w), gu.shape[1]
    dgu, scale = _empty_rows(gu, width, num, quantizes)
    h, of_h = _empty_transposed(gu, w.shape[2], num, quantizes)
    h = h if quantizes else _empty(gu, len(gu), w.shape[2])
    columns = _empty_transposed(gu, width, num, quantizes, True)
    d_scale = _empty(gu, len(gu), dtype=torch.float32, wanted=row_scale is not None)
    return dgu, h, d_scale, scale, of_h, *columns


def _empty_rows(like: Tensor, width: int, num: int, e4m3: bool) -> Pair:
    rows = _empty(like, len(like), width, dtype=E4M3 if e4m3 else torch.bfloat16)
    places = num_groups(width), num_places(len(like), num)
    return rows, _empty(like, *places, dtype=torch.float32, wanted=e4m3)


def _empty_transposed(
    like: Tensor, width: int, num: int, wanted: bool, by_column: bool = False
) -> Pair:
    groups, blocks = num_groups(width), num_places(len(like), num) // GROUP
    of = (blocks + 1, groups * GROUP) if by_column else (groups, blocks + 1)
    q = _empty(like, blocks, groups * GROUP, GROUP, dtype=E4M3, wanted=wanted)
    return q, _empty(like, *of, dtype=torch.float32, wanted=wanted)


def _empty_weights(a: Tensor, b: Tensor, num_experts: int, fp32: bool, sums: bool) -> Pair:
    out = _empty(a, num_experts, a.shape[1], b.shape[1], dtype=torch.float32 if fp32 else a.dtype)
    return out, _empty(a, num_experts, a.shape[1], dtype=torch.float32, wanted=sums)


def _empty(
    like: Tensor, *shape: int, dtype: torch.dtype = torch.bfloat16, wanted: bool = True
) -> Tensor:
    """Allocate a result. One that is not wanted is empty: schemas have no optional results."""
    return made(like.new_empty(shape if wanted else (0,), dtype=dtype))


def _aligned(rows: Tensor) -> Tensor:
    """Return rows where TMA reads them: a copy of those of a gradient that is a part of another."""
    return rows.clone() if rows.data_ptr() % STRIDE_BYTES else rows
