"""Fills what a launch that trains has besides: the state of its call, and for backward the other operands.

A `train` launch: arguments.fill_static, fill_weights, fill_call, and fill_train_state here. A `backward` launch:
arguments.fill_static; fill_backward and fill_masters, in FP8 fill_turned, here, once for each layer and set of
weights; fill_train_state, fill_gradients and fill_backward_call for each call. Args must be its own: what the two
directions share lies elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import plane_strides
from megamoe.core.table import BF16
from megamoe.formats.weights import ExpertWeights, TurnedWeights
from megamoe.jit import abi
from megamoe.jit.source import TILE
from megamoe.launch.arguments import Encoder, Plan, fill_call, set_map

_BOX_ROWS = abi.WARPGROUP_ROWS
_TRAINING_STATE = ("header", "tokens", "tokens_scale")


def _box(size: int, rank: int, rows: int = _BOX_ROWS) -> tuple[int, ...]:
    return (abi.SLOT_K_BYTES // size, rows, *[1] * (rank - 2))


def _plane_maps(
    encoder: Encoder, base: int, rows: int, planes: int, columns: int, size: int = BF16.bytes
) -> tuple[bytes, bytes]:
    """Return the maps of [rows, planes, columns] by plane; without a second plane, the first one's twice.

    size: bytes of an element.
    """
    row = columns * size
    maps = [
        encoder(base + p * row, (columns, rows), (planes * row,), _box(size, 2), size)
        for p in range(planes)
    ]
    return maps[0], maps[-1]


def fill_train_state(args: Any, plan: Plan, base: int, encoder: Encoder) -> None:
    """Point the launch at the state of a call that trains: the address of memory that holds plan.train_state."""
    if base % 16:
        raise ArgumentError("state", hex(base), "16-byte aligned storage")
    p, training = plan.strided, args.training
    for name, region in plan.train_state.items():
        if name in _TRAINING_STATE:
            setattr(training, name, base + region.offset)
        elif name != "gu":  # in maps only
            setattr(args, name, base + region.offset)
    gu = base + plan.train_state["gu"].offset
    planes = p.activation.planes
    for field, data in zip(
        training.gu, _plane_maps(encoder, gu, plan.pool_rows, planes, p.intermediate), strict=True
    ):
        set_map(field, data)


def fill_backward(args: Any, plan: Plan, base: int, encoder: Encoder) -> None:
    """Turn what fill_static filled into a backward launch: its pool, its GEMMs' operands, its tables.

    base: address of plan.backward_bytes.
    """
    p, training, rows = plan.strided, args.training, plan.pool_rows
    hidden, width, planes = p.hidden, p.intermediate, p.activation.planes
    address = {name: base + region.offset for name, region in plan.backward.items()}
    x_rows, dy_rows = address["x_rows"], address.get("dy_rows", args.x_pool)
    hs = address.get("hs") or _workspace_base(args, plan) + plan.workspace["h"].offset
    for name in ("x_rows", "row_weight", "d_s", "expert_rows", "grads_ready", "dealt"):
        setattr(training, name, address[name])

    def rows_map(at: int, columns: int, rank: int = 2, size: int = BF16.bytes) -> bytes:
        row = columns * size
        dims, strides = (columns, rows, *[1] * (rank - 2)), (row,) + (row * rows,) * (rank - 2)
        return encoder(at, dims, strides, _box(size, rank), size)

    def set_planes(maps: Any, name: str, size: int) -> None:
        found = _plane_maps(encoder, address[name], rows, planes, width, size)
        for field, data in zip(maps, found, strict=True):
            set_map(field, data)

    set_planes(training.dgu, "dgu", BF16.bytes)
    set_map(training.hs, rows_map(hs, width))
    set_map(training.dy_rows_map, rows_map(dy_rows, hidden))
    set_map(training.b[0], rows_map(x_rows, hidden, rank=4))
    set_map(training.b[1], rows_map(hs, width, rank=4))
    first, second = args.gemm
    first.n, first.k, second.n, second.k = width, hidden, hidden, width
    pool = rows_map(args.x_pool, hidden, size=p.formats.x.bytes)
    set_map(first.a, pool)
    set_map(second.out, rows_map(args.y_rows, hidden))  # dx_rows
    for gemm in (first, second):
        gemm.a_scale = gemm.b_scale = gemm.bias = gemm.out_scale = None
    if p.formats.x.scaled:
        training.dy_rows = dy_rows
        set_planes(training.dgu_rows, "dgu_rows", p.formats.x.bytes)
        set_map(training.x_rows_map, pool)
        first.a_scale = args.x_pool_scale
        first.out_scale = second.a_scale = address["dgu_scale"]
    else:
        set_planes(training.dgu_rows, "dgu", BF16.bytes)
        set_map(training.x_rows_map, rows_map(x_rows, hidden))


def _workspace_base(args: Any, plan: Plan) -> int:
    """Return the address of the workspace, which Args has nowhere: h is in maps only."""
    return int(args.y_rows) - plan.workspace["y_rows"].offset


def fill_masters(args: Any, plan: Plan, weights: ExpertWeights, encoder: Encoder) -> None:
    """Fill the weights of a backward launch. A rank without experts gets maps that are never used.

    weights: bf16 w13 and w2, of any strides that TMA takes, and with a contiguous b13.
    """
    p, training = plan.problem, args.training
    local, planes = p.num_local_experts(p.rank), p.activation.planes
    half = abi.TILES[TILE].half_columns
    maps = []
    for name, w, w_planes in (("w2", weights.w2, 1), ("w13", weights.w13, planes)):
        if w.dtype != BF16.dtype:
            raise ArgumentError(f"weights.{name}.dtype", w.dtype, "bf16 masters, for backward")
        height, width = (p.hidden, p.intermediate) if name == "w2" else (p.intermediate, p.hidden)
        dims = (width, height, w_planes, max(local, 1))
        base, strides = _place_of(f"weights.{name}", w, w_planes, args.y_rows, width, local)
        maps.append((base, dims, strides))
    for gemm, (base, dims, strides) in zip(args.gemm, maps, strict=True):
        set_map(gemm.b, encoder(base, dims, strides, _box(BF16.bytes, 4), BF16.bytes))
    set_map(training.w13, encoder(*maps[1], _box(BF16.bytes, 4, half), BF16.bytes))
    for name in ("b13", "b2"):
        bias = getattr(weights, name)
        setattr(training, name, None if bias is None else bias.data_ptr())


def fill_turned(args: Any, plan: Plan, turned: TurnedWeights, encoder: Encoder) -> None:
    """Do as fill_masters for a layer with e4m3 weights.

    turned: of weights with a contiguous b13.
    """
    p, training, forward = plan.problem, args.training, turned.forward
    local, planes, size = p.num_local_experts(p.rank), p.activation.planes, p.formats.w.bytes
    box = _box(size, 4, abi.TILES[TILE].half_columns)

    def weights_map(name: str, w: Tensor, n: int, k: int, w_planes: int) -> bytes:
        base, strides = _place_of(f"turned.{name}", w, w_planes, args.y_rows, k, local)
        return encoder(base, (k, n, w_planes, max(local, 1)), strides, box, size)

    h, i = p.hidden, p.intermediate
    set_map(args.gemm[0].b, weights_map("w2", turned.w2, i, h, 1))
    set_map(args.gemm[1].b, weights_map("w13", turned.w13, h, i, planes))
    set_map(training.w13, weights_map("forward.w13", forward.w13, i, h, planes))
    args.gemm[0].b_scale = turned.w2_scale.data_ptr()
    args.gemm[1].b_scale = turned.w13_scale.data_ptr()
    assert forward.w13_scale is not None
    training.w13_scale = forward.w13_scale.data_ptr()
    for name in ("b13", "b2"):
        bias = getattr(forward, name)
        setattr(training, name, None if bias is None else bias.data_ptr())


def _place_of(
    name: str, w: Tensor, planes: int, other: int, width: int, local: int
) -> tuple[int, tuple[int, ...]]:
    """Return a matrix' address and strides in bytes, or without local experts any legal ones."""
    if not local:
        return other, (width * w.element_size(),) * 3
    base = w.data_ptr()
    if base % 16:
        raise ArgumentError(name, hex(base), "16-byte aligned storage")
    return base, plane_strides(w, planes)


def fill_gradients(
    args: Any,
    plan: Plan,
    encoder: Encoder,
    *,
    dw13: Tensor | None,
    dw2: Tensor | None,
    db13: Tensor | None = None,
    db2: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Fill where a backward launch puts the experts' gradients; None: not wanted.

    dw13: [L, P*I, H] or [L, P, I, H], dw2: [L, H, I], any strides that TMA takes, both bf16 or both fp32. db13:
    [L, P*I], db2: [L, H] fp32, contiguous. accumulate: add to what they hold.
    """
    p, training = plan.problem, args.training
    local, planes = p.num_local_experts(p.rank), p.activation.planes
    sizes = {t.element_size() for t in (dw13, dw2) if t is not None}
    if len(sizes) > 1:
        raise ArgumentError("dw13 and dw2", sizes, "elements of one size")
    size = sizes.pop() if sizes else BF16.bytes
    wanted = 0
    for i, (name, dw, w_planes, height, width) in enumerate(
        (
            ("dw13", dw13, planes, p.intermediate, p.hidden),
            ("dw2", dw2, 1, p.hidden, p.intermediate),
        )
    ):
        dims = (width, height, w_planes, max(local, 1))
        base, strides = args.y_rows, (width * size,) * 3  # any legal ones
        if dw is not None:
            wanted |= 1 << i
            base, strides = _place_of(name, dw, w_planes, args.y_rows, width, local)
        set_map(training.dw[i], encoder(base, dims, strides, _box(size, 4), size))
    training.weights_wanted, training.dw_bytes, training.accumulate = wanted, size, accumulate
    for name, db in (("db13", db13), ("db2", db2)):
        if db is not None and (db.dtype != torch.float32 or not db.is_contiguous()):
            raise ArgumentError(name, f"{db.dtype}, strides {db.stride()}", "contiguous fp32")
        setattr(training, name, None if db is None else db.data_ptr())


def fill_backward_call(
    args: Any,
    *,
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    dx: Tensor,
    d_topk_weights: Tensor,
    num_tokens_device: Tensor | None = None,
    only_weights: bool = False,
) -> None:
    """Fill the tensors of a backward call. The routing weights come from the state.

    dy, x, dx: [T, H] bf16; topk_ids: [T, K]; d_topk_weights: [T, K] fp32; all contiguous.
    only_weights: dx and d_topk_weights are not written, unless the launch is given up. The same on all ranks.
    """
    fill_call(args, dy, topk_ids, d_topk_weights, dx, num_tokens_device)
    args.topk_weights = None
    if x.data_ptr() % 16:
        raise ArgumentError("x", hex(x.data_ptr()), "16-byte aligned storage")
    args.training.x = x.data_ptr()
    args.training.d_topk_weights = d_topk_weights.data_ptr()
    args.training.only_weights = only_weights
