"""Fills the argument block of a grouped launch: csrc/megamoe/kernels/grouped.cuh, one function a stage.

Tensors are checked. Maps of outputs are ragged: dimensions (columns, 64, rows + 1, 1), the distance between rows in
both of the middle ones, and a base 64 rows before the tensor. A box that begins at 64 - n, row + n covers rows row ..
row + n - 1 (csrc/megamoe/cta/blocks.cuh). For stores alone: loads through such a map touch what lies there.
"""

from __future__ import annotations

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

Scales = tuple[Tensor | None, Tensor | None]


def fill_product(
    args: Any,
    encode: Encoder,
    x: Tensor,
    w: Tensor,
    offs: Any,
    out: Tensor,
    bias: Tensor | None,
    scales: Scales = (None, None),
) -> None:
    """x: [M, K] or in planes of K [M, P, K], w: [E, P, K, N], either major, out: [M, N], bias: [E, N] fp32.

    scales: of x, by block, and of w, with e4m3.
    """
    _fill_rows(args, offs, w.shape[0], [out])
    by_k = w.stride(3) != 1
    row = Row(
        "gemm1",
        a=[_rows(x)] if x.dim() == 2 else [_rows(x[:, p]) for p in range(2)],
        b=_k_major(w.transpose(2, 3)) if by_k else _n_major(w),
        out=[_ragged(out)],
        bias=address_of(bias),
        n=w.shape[3],
        k=w.shape[2],
    )
    _write(args, encode, row, scales)


def fill_activation(
    args: Any,
    encode: Encoder,
    x: Tensor,
    w: Tensor,
    offs: Any,
    h: Tensor,
    gu: Tensor | None,
    bias: Tensor | None,
    activation: Activation,
    scales: Scales = (None, None),
    h_scale: Tensor | None = None,
) -> None:
    """x: [M, H], w: [E, P, I, H], h: [M, I], gu: [M, P, I] or None, bias: [E, P*I] fp32.

    scales: of x, by block, and of w, with e4m3. h_scale: of h, by block, where that is e4m3.
    """
    _fill_rows(args, offs, w.shape[0], [h, gu])
    _fill_activation(args, activation)
    n, k = w.shape[2:]
    row = Row(
        "gemm1", a=[_rows(x)], b=_k_major(w), out=[_ragged(h)], bias=address_of(bias), n=n, k=k
    )
    if gu is not None:
        set_maps(args.gu, [_ragged(gu[:, p]) for p in range(w.shape[1])], encode)
    _write(args, encode, row, scales, h_scale)


def fill_gradient(
    args: Any,
    encode: Encoder,
    dy: Tensor,
    w: Tensor,
    gu: Tensor,
    offs: Any,
    dgu: Tensor,
    h: Tensor,
    activation: Activation,
) -> None:
    """dy: [M, H], w: [E, H, I], gu, dgu: [M, P, I], h: [M, I]."""
    _fill_rows(args, offs, w.shape[0], [dgu, h])
    _fill_activation(args, activation)
    planes = range(gu.shape[1])
    out = [_ragged(dgu[:, p]) for p in planes]
    b = _n_major(w.unsqueeze(1))
    _write(args, encode, Row("gemm1", a=[_rows(dy)], b=b, out=out, n=w.shape[2], k=w.shape[1]))
    set_maps(args.gu, [_rows(gu[:, p]) for p in planes], encode)
    set_map(args.hs, encode(*_ragged(h)))


def fill_weights(
    args: Any,
    encode: Encoder,
    a: Tensor,
    b: Tensor,
    tails: tuple[Tensor, Tensor],
    offs: Any,
    out: Tensor,
    sums: Tensor | None,
    accumulate: bool,
) -> None:
    """a: [M, N1], b: [M, N2], out: [E, N1, N2] bf16 or fp32, sums: of a's columns [E, N1] fp32 or None.

    tails: of a and b, see tails.py.
    """
    own, size = args.own, out.element_size()
    args.num_local_experts = out.shape[0]
    own.ends, own.num_rows = address_of(offs), a.shape[0]
    own.dw_bytes, own.accumulate = size, accumulate
    set_map(own.tails_b, encode(*_n_major(tails[1][None, None])))
    row = Row(
        "dw13",
        a=[_rows(a), _rows(tails[0])],
        b=_n_major(b[None, None]),
        out=[Map(*_place(out.unsqueeze(1)), box(size, rank=4), size)],
        bias=address_of(sums),
        m=a.shape[1],
        n=b.shape[1],
    )
    _write(args, encode, row)


def _fill_rows(args: Any, offs: Tensor | None, num_experts: int, outputs: list[Any]) -> None:
    args.num_local_experts = num_experts
    own = args.own
    own.ends = address_of(offs)
    for i, out in enumerate(t for t in outputs if t is not None):
        own.num_rows = out.shape[0]
        own.cleared[i] = out.data_ptr()
        own.cleared_row_bytes[i] = out[0].numel() * out.element_size()


def _write(
    args: Any,
    encode: Encoder,
    row: Row,
    scales: Scales = (None, None),
    of_out: Tensor | None = None,
) -> None:
    """Write the launch's only row. scales: of A, by block, and of B; of_out: of out, by block."""
    row.a_scale, row.b_scale, row.out_scale = map(address_of, (*scales, of_out))
    for scale in (scales[0], of_out):
        if scale is not None:
            args.pool_rows = scale.shape[1]
    write(args, [row], encode)


def _fill_activation(args: Any, act: Activation) -> None:
    args.act_alpha, args.act_limit, args.act_up_offset = act.alpha, act.limit, act.up_offset


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


def _place(w: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return _base(w), tuple(w.shape[::-1]), map_strides(w)


def _k_major(w: Tensor) -> Map:
    """w: [E, P, N, K]."""
    return Map(*_place(w), box(w.element_size(), HALF, 4), w.element_size())


def _n_major(w: Tensor) -> Map:
    """w: [E, P, K, N]."""
    return Map(*_place(w), box(w.element_size(), rank=4), w.element_size())
