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
from megamoe.jit import abi
from megamoe.jit.source import TILE
from megamoe.launch.arguments import Encoder, set_map

Scales = tuple[Tensor | None, Tensor | None]
_ROWS, _HALF = abi.WARPGROUP_ROWS, abi.TILES[TILE].half_columns


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
    gemm = args.gemm[0]
    gemm.n, gemm.k = w.shape[3], w.shape[2]
    if x.dim() == 3:
        for p in range(2):
            set_map(args.training.dgu_rows[p], _rows(encode, x[:, p]))
    else:
        set_map(gemm.a, _rows(encode, x))
    by_k = w.stride(3) != 1
    set_map(gemm.b, _k_major(encode, w.transpose(2, 3)) if by_k else _n_major(encode, w))
    set_map(gemm.out, _ragged(encode, out))
    gemm.bias = _pointer(bias)
    _fill_scales(args, *scales)


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
    gemm = args.gemm[0]
    gemm.n, gemm.k = w.shape[2:]
    set_map(gemm.a, _rows(encode, x))
    set_map(gemm.b, _k_major(encode, w))
    set_map(gemm.out, _ragged(encode, h))
    gemm.bias = _pointer(bias)
    for p in range(0 if gu is None else w.shape[1]):
        set_map(args.training.gu[p], _ragged(encode, gu[:, p]))
    _fill_scales(args, *scales, h_scale)


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
    gemm, training = args.gemm[0], args.training
    gemm.n, gemm.k = w.shape[2], w.shape[1]
    set_map(gemm.a, _rows(encode, dy))
    set_map(gemm.b, _n_major(encode, w.unsqueeze(1)))
    for p in range(gu.shape[1]):
        set_map(training.gu[p], _rows(encode, gu[:, p]))
        set_map(training.dgu[p], _ragged(encode, dgu[:, p]))
    set_map(training.hs, _ragged(encode, h))


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
    _fill_rows(args, offs, out.shape[0], [])
    args.grouped.num_rows = a.shape[0]
    gemm, training, size = args.gemm[0], args.training, out.element_size()
    gemm.n, gemm.k = a.shape[1], b.shape[1]
    set_map(gemm.a, _rows(encode, a))
    set_map(gemm.b, _n_major(encode, b[None, None]))
    set_map(args.grouped.tails_a, _rows(encode, tails[0]))
    set_map(args.grouped.tails_b, _n_major(encode, tails[1][None, None]))
    dw = out.unsqueeze(1)
    set_map(training.dw[0], encode(*_place(dw), (abi.SLOT_K_BYTES // size, _ROWS, 1, 1), size))
    training.weights_wanted, training.dw_bytes, training.accumulate = 1, size, accumulate
    training.db13 = _pointer(sums)


def _fill_rows(args: Any, offs: Tensor | None, num_experts: int, outputs: list[Any]) -> None:
    args.num_local_experts = num_experts
    args.grouped.ends = _pointer(offs)
    for i, out in enumerate(t for t in outputs if t is not None):
        args.grouped.num_rows = out.shape[0]
        args.grouped.cleared[i] = out.data_ptr()
        args.grouped.cleared_row_bytes[i] = out[0].numel() * out.element_size()


def _fill_scales(
    args: Any, of_a: Tensor | None, of_b: Tensor | None, of_out: Tensor | None = None
) -> None:
    gemm = args.gemm[0]
    gemm.a_scale, gemm.b_scale, gemm.out_scale = map(_pointer, (of_a, of_b, of_out))
    for scale in (of_a, of_out):
        if scale is not None:
            args.pool_rows = scale.shape[1]


def _fill_activation(args: Any, act: Activation) -> None:
    args.act_alpha, args.act_limit, args.act_up_offset = act.alpha, act.limit, act.up_offset


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _row_bytes(t: Tensor) -> int:
    """Bytes between rows; of a single row, any that a map takes."""
    elements = t.stride(0) if t.shape[0] > 1 else t.shape[1]
    return elements * t.element_size()


def _base(t: Tensor) -> int:
    base = t.data_ptr()
    if base % STRIDE_BYTES:  # torch.compile traces past checks.check_place
        raise ArgumentError("data_ptr() of an operand", hex(base), f"a multiple of {STRIDE_BYTES}")
    return base


def _box(t: Tensor) -> int:
    return abi.SLOT_K_BYTES // t.element_size()


def _rows(encode: Encoder, t: Tensor) -> bytes:
    """t: [M, C]; boxes of 64 rows."""
    dims, strides = (t.shape[1], t.shape[0]), (_row_bytes(t),)
    return encode(_base(t), dims, strides, (_box(t), _ROWS), t.element_size())


def _ragged(encode: Encoder, t: Tensor) -> bytes:
    row = _row_bytes(t)
    dims = (t.shape[1], _ROWS, t.shape[0] + 1, 1)
    base = _base(t) - _ROWS * row
    return encode(base, dims, (row, row, row), (_box(t), _ROWS, 1, 1), t.element_size())


def _place(w: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return _base(w), tuple(w.shape[::-1]), map_strides(w)


def _k_major(encode: Encoder, w: Tensor) -> bytes:
    """w: [E, P, N, K]."""
    return encode(*_place(w), (_box(w), _HALF, 1, 1), w.element_size())


def _n_major(encode: Encoder, w: Tensor) -> bytes:
    """w: [E, P, K, N]."""
    return encode(*_place(w), (_box(w), _ROWS, 1, 1), w.element_size())
