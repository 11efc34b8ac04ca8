"""Describe a grouped launch and fill its argument block: csrc/megamoe/kernels/grouped.cuh.

The tensors are already validated. A block depends on their geometry and, in the places that fill() returns, on their
addresses. So it is kept, and a later launch of the same geometry changes these places alone.

The tensor maps of outputs are ragged: their dimensions are (columns, 64, rows + 1, 1), both middle dimensions have the
distance between rows as stride, and the base is 64 rows before the tensor. A box that begins at (64 - n, row + n)
covers the rows row .. row + n - 1 (csrc/megamoe/cta/blocks.cuh). Use such a map only for stores: a load would touch the
memory before the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import STRIDE_BYTES, map_strides
from megamoe.jit import abi
from megamoe.launch.table import BLOCK, HALF, ROWS, Encoder, Map, box, set_map
from megamoe.ops.groups import Groups
from megamoe.ops.operands import Operands, by_k


class Place(NamedTuple):
    """Where a block has the address of a tensor: in a tensor map, or as a pointer."""

    tensor: int  # which of a launch's tensors()
    field: Any
    map: Map | None = None  # its base is relative to the tensor


@dataclass(slots=True)
class Gemm:
    """Rows times their experts' matrices, and what its epilogue reads and leaves.

    out: [M, N]. bias: [E, P*N] fp32. gu: [M, P*N], pre-activations that are left, or that a gradient `reads`: then out
    is the gradient of them, and h [M, N] is made again. interleaved: their gate and up columns alternate. out_scale: by
    block, of e4m3. row_scale: [M] fp32, factors of h; d_scale: parts of their gradients [M, ceil(I/256) + 1], zeros.
    transposed: e4m3 of h, which takes the place of `h`, its scales, and of a gradient the same of out, or empty.
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
    reads: bool = False
    transposed: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor | None, ...]:
        (x, w, *scales, _), offs = self.operands, self.groups.offs
        of = *scales, self.bias, self.out_scale, offs, self.row_scale, self.d_scale
        h, h_scale, out, out_scale = (*self.transposed, None, None, None, None)[:4]
        return x, w, self.out, self.gu, self.h if h is None else h, *of, out, h_scale, out_scale

    def fill(self, args: Any) -> list[Place]:
        """Fill a zeroed `abi.LAUNCHES["grouped"]`, except addresses; return their places."""
        (x, w, x_scale, _, of_w), act, gu, h = self.operands, self.activation, self.gu, self.h
        own, gemm = args.own, args.gemm[0]
        matrices = w.mT.view(len(w), of_w, w.shape[2] // of_w, w.shape[1])  # [E, P, N, K]
        args.num_local_experts, own.num_rows = len(w), len(x)
        own.row_alignment = self.groups.alignment
        gemm.n, gemm.k = matrices.shape[2:]
        if act is not None:
            args.act_alpha, args.act_limit, args.act_up_offset = act.alpha, act.limit, act.up_offset
        for scale in (x_scale, self.out_scale):
            if scale is not None:
                args.pool_rows = scale.shape[1]
        b = _matrices(matrices, HALF) if by_k(w) else _matrices(matrices.transpose(2, 3))
        planes = 1 if act is None or self.interleaved else act.planes
        places = [
            Place(0, gemm.a[0], *_rows(x)),
            Place(1, gemm.b, b),
            *_maps(2, gemm.out, _ragged(self.out, planes if self.reads else 1)),
            *_pointers(5, gemm, "a_scale", "b_scale", "bias", "out_scale"),
            *_pointers(9, own, "ends", "row_weight", "d_s"),
        ]
        if gu is not None:
            places += _maps(3, args.gu, (_rows if self.reads else _ragged)(gu, planes))
        if h is not None:
            places.append(Place(4, args.hs, *_ragged(h)))
        maps = (4, args.hs, "hs_scale"), (12, gemm.a[1], "dgu_columns_scale")
        blocks = zip(self.transposed[::2], maps, strict=False)
        for i, (q, (tensor, field, name)) in enumerate(blocks):
            places.append(Place(tensor, field, *_rows(q.flatten(0, 1))))
            places.append(Place(tensor, abi.pointer(own.blocks, 8 * i)))
            places += _pointers(13 + i, own, name)
        for i, (tensor, t) in enumerate(((2, self.out), (4, h) if self.reads else (3, gu))):
            if t is not None:
                own.cleared_row_bytes[i] = t.shape[1] * t.element_size()
                places.append(Place(tensor, abi.pointer(own.cleared, 8 * i)))
        return places


@dataclass(slots=True)
class Outer:
    """Sums of the outer products of each expert's rows.

    a: [M, N1], b: [M, N2], bf16, or transposed in e4m3. rest: of bf16 the tails of both, see groups.py; of e4m3 the
    scales of both. out: [E, N1, N2] bf16 or fp32. sums: of a's columns [E, N1] fp32.
    """

    a: Tensor
    b: Tensor
    rest: tuple[Tensor, Tensor]
    groups: Groups
    out: Tensor
    sums: Tensor | None
    accumulate: bool

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.a, self.b, *self.rest, self.out, self.groups.offs, self.sums

    def fill(self, args: Any) -> list[Place]:
        """Fill a zeroed `abi.LAUNCHES["grouped_weights"]`, except addresses; return their places."""
        own, gemm, out, a, b = args.own, args.gemm[0], self.out, self.a, self.b
        args.num_local_experts, gemm.m, gemm.n = out.shape
        own.num_rows, own.row_alignment = len(a), self.groups.alignment
        own.dw_bytes, own.accumulate = out.element_size(), self.accumulate
        if a.dim() == 3:  # no more blocks than there are come of so many rows
            own.num_rows, args.pool_rows = BLOCK * (len(a) - len(out) + 1) - 1, BLOCK * len(a)
            places = [
                Place(0, gemm.a[0], *_rows(a.flatten(0, 1))),
                Place(1, gemm.b, _matrices(b[:, None, : gemm.n], HALF)),
                *_pointers(2, gemm, "a_scale", "b_scale"),
            ]
        else:
            places = [
                Place(0, gemm.a[0], *_rows(a)),
                Place(1, gemm.b, _matrices(b[None, None])),
                Place(2, gemm.a[1], *_rows(self.rest[0])),
                Place(3, own.tails_b, _matrices(self.rest[1][None, None])),
            ]
        return [
            *places,
            Place(4, gemm.out[0], _matrices(out.unsqueeze(1))),
            *_pointers(5, own, "ends"),
            *_pointers(6, gemm, "bias"),
        ]


def _maps(tensor: int, fields: Any, maps: Sequence[Map]) -> list[Place]:
    """Return the places of maps by plane."""
    return [Place(tensor, fields[i], of) for i, of in enumerate(maps)]


def _pointers(first: int, owner: Any, *names: str) -> list[Place]:
    """Return the places of members, of one tensor after the other."""
    members = enumerate(getattr(type(owner), name).offset for name in names)
    return [Place(first + i, abi.pointer(owner, offset)) for i, offset in members]


def write(places: Sequence[Place], addresses: Sequence[int], encode: Encoder) -> None:
    """Put the tensors' addresses into the block."""
    for tensor, field, of in places:
        if of is None:
            field.value = addresses[tensor]
        else:
            set_map(field, encode(addresses[tensor] + of.base, *of[1:]))


def addresses_of(launch: Gemm | Outer) -> list[int]:
    """Return the addresses of a launch's tensors, 0 for None."""
    found = [0 if t is None else t.data_ptr() for t in launch.tensors()]
    for base in found[:5]:  # that have maps
        if base % STRIDE_BYTES:  # torch.compile traces past checks.check_place
            expected = f"a multiple of {STRIDE_BYTES}"
            raise ArgumentError("data_ptr() of an operand", hex(base), expected)
    return found


def _rows(t: Tensor, planes: int = 1, ragged: bool = False) -> list[Map]:
    """t: [M, P*C] -> maps of each plane; boxes of 64 rows."""
    size, (rows, width) = t.element_size(), t.shape
    row = (t.stride(0) if rows > 1 else width) * size  # of a single row, any that a map takes
    c = width // planes
    dims = (c, ROWS, rows + 1, 1) if ragged else (c, rows)
    strides, of_box = (row,) * (len(dims) - 1), box(size, rank=len(dims))
    first = -ROWS * row * ragged
    return [Map(first + p * c * size, dims, strides, of_box, size) for p in range(planes)]


def _ragged(t: Tensor, planes: int = 1) -> list[Map]:
    return _rows(t, planes, ragged=True)


def _matrices(w: Tensor, rows: int = ROWS) -> Map:
    """w: [E, P, R, C]; boxes of so many rows."""
    size = w.element_size()
    return Map(0, tuple(w.shape[::-1]), map_strides(w), box(size, rows, 4), size)
