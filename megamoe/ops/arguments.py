"""Describe a grouped launch and fill its argument block: csrc/megamoe/kernels/grouped.cuh.

The tensors are already validated. The tensor maps of outputs are ragged: their dimensions are (columns, 64, rows + 1,
1), both middle dimensions have the distance between rows as stride, and the base is 64 rows before the tensor. A box
that begins at (64 - n, row + n) covers the rows row .. row + n - 1 (csrc/megamoe/cta/blocks.cuh). Use such a map only
for stores: a load would touch the memory before the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import STRIDE_BYTES, map_strides
from megamoe.launch.table import (
    HALF,
    ROWS,
    Encoder,
    Map,
    Row,
    address_of,
    box,
    set_map,
    set_maps,
    write,
)
from megamoe.ops.groups import Groups
from megamoe.ops.operands import Operands, by_k


@dataclass(slots=True)
class Gemm:
    """Rows times their experts' matrices, and what its epilogue reads and leaves.

    out: [M, N]. bias: [E, P*N] fp32. gu: [M, P*N], pre-activations that are left; where `h` is, too, those that a
    gradient reads: then out is the gradient of them, and h [M, N] is made again. interleaved: their gate and up columns
    alternate. out_scale: by block, of e4m3. row_scale: [M] fp32, factors of h; d_scale: parts of their gradients [M,
    ceil(I/256) + 1], zeros.
    """

    operands: Operands
    groups: Groups
    out: Tensor
    bias: Tensor | None = None
    activation: Activation | None = None
    interleaved: bool = False
    gu: Tensor | None = None
    h: Tensor | None = None
    out_scale: Tensor | None = None
    row_scale: Tensor | None = None
    d_scale: Tensor | None = None

    def key(self) -> tuple[Any, ...]:
        """Return all that fill() reads."""
        of = self.out, self.bias, self.gu, self.h, self.out_scale, self.row_scale, self.d_scale
        offs, alignment = self.groups
        return _facts(*self.operands, offs, *of), alignment, self.activation, self.interleaved

    def fill(self, args: Any, encode: Encoder) -> None:
        """Fill a zeroed `abi.LAUNCHES["grouped"]`."""
        (x, w, x_scale, w_scale), act, own = self.operands, self.activation, args.own
        args.num_local_experts = w.shape[0]
        own.ends, own.num_rows = address_of(self.groups.offs), self.out.shape[0]
        own.row_alignment = self.groups.alignment
        written = (t for t in (self.out, self.gu if self.h is None else self.h) if t is not None)
        for i, t in enumerate(written):
            own.cleared[i] = t.data_ptr()
            own.cleared_row_bytes[i] = t[0].numel() * t.element_size()
        own.row_weight, own.d_s = address_of(self.row_scale), address_of(self.d_scale)
        if act is not None:
            args.act_alpha, args.act_limit, args.act_up_offset = act.alpha, act.limit, act.up_offset
        planes = 1 if act is None or self.interleaved else act.planes
        if self.gu is not None:
            of_gu = _ragged if self.h is None else _rows
            set_maps(args.gu, [of_gu(t) for t in self.gu.chunk(planes, 1)], encode)
        if self.h is not None:
            set_map(args.hs, encode(*_ragged(self.h)))
        for scale in (x_scale, self.out_scale):
            if scale is not None:
                args.pool_rows = scale.shape[1]
        row = Row(
            "gemm1",
            a=[_rows(x)],
            b=_matrices(w, HALF) if by_k(w) else _matrices(w.transpose(2, 3)),
            out=[_ragged(t) for t in self.out.chunk(1 if self.h is None else planes, 1)],
            a_scale=address_of(x_scale),
            b_scale=address_of(w_scale),
            out_scale=address_of(self.out_scale),
            bias=address_of(self.bias),
            n=w.shape[2],
            k=w.shape[3],
        )
        write(args, [row], encode)


@dataclass(slots=True)
class Outer:
    """Sums of the outer products of each expert's rows.

    a: [M, N1], b: [M, N2]; tails: of both, see tails.py. out: [E, N1, N2] bf16 or fp32. sums: of a's columns [E, N1]
    fp32.
    """

    a: Tensor
    b: Tensor
    tails: tuple[Tensor, Tensor]
    groups: Groups
    out: Tensor
    sums: Tensor | None
    accumulate: bool

    def key(self) -> tuple[Any, ...]:
        """Return all that fill() reads."""
        of = self.a, self.b, *self.tails, self.groups.offs, self.out, self.sums
        return _facts(*of), self.groups.alignment, self.accumulate

    def fill(self, args: Any, encode: Encoder) -> None:
        """Fill a zeroed `abi.LAUNCHES["grouped_weights"]`."""
        own, out, size = args.own, self.out, self.out.element_size()
        args.num_local_experts = out.shape[0]
        own.ends, own.num_rows = address_of(self.groups.offs), self.a.shape[0]
        own.row_alignment = self.groups.alignment
        own.dw_bytes, own.accumulate = size, self.accumulate
        set_map(own.tails_b, encode(*_matrices(self.tails[1][None, None])))
        row = Row(
            "dw13",
            a=[_rows(self.a), _rows(self.tails[0])],
            b=_matrices(self.b[None, None]),
            out=[_matrices(out.unsqueeze(1))],
            bias=address_of(self.sums),
            m=out.shape[1],
            n=out.shape[2],
        )
        write(args, [row], encode)


def _facts(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(
        [t if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
    )


def _row_bytes(t: Tensor) -> int:
    """Bytes between rows; of a single row, any that a map takes."""
    elements = t.stride(0) if t.shape[0] > 1 else t.shape[1]
    return elements * t.element_size()


def _base(t: Tensor) -> int:
    base = t.data_ptr()
    if base % STRIDE_BYTES:  # torch.compile traces past checks.check_place
        raise ArgumentError("data_ptr() of an operand", hex(base), f"a multiple of {STRIDE_BYTES}")
    return base


def _rows(t: Tensor) -> Map:
    """t: [M, C]; boxes of 64 rows."""
    size = t.element_size()
    return Map(_base(t), (t.shape[1], t.shape[0]), (_row_bytes(t),), box(size), size)


def _ragged(t: Tensor) -> Map:
    row, size = _row_bytes(t), t.element_size()
    dims = (t.shape[1], ROWS, t.shape[0] + 1, 1)
    return Map(_base(t) - ROWS * row, dims, (row, row, row), box(size, rank=4), size)


def _matrices(w: Tensor, rows: int = ROWS) -> Map:
    """w: [E, P, R, C]; boxes of so many rows."""
    return Map(
        _base(w),
        tuple(w.shape[::-1]),
        map_strides(w),
        box(w.element_size(), rows, 4),
        w.element_size(),
    )
