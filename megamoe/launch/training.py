"""Fill what a training launch needs in addition: the state of its call and, for backward, the other operands.

    train      arguments.fill_static, fill_weights, fill_pointers; fill_train_state
    backward   once: arguments.fill_static; fill_backward, fill_backward_weights. In each call: fill_train_state,
               fill_gradients, fill_backward_call. Weight gradients of stashed passes: fill_stashed_weights

Each direction needs its own Args, because the operands that they share are at different addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.table import BF16, SCALE_GROUP
from megamoe.formats.quantization import rows_of_blocks
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.launch import layout
from megamoe.launch.arguments import Plan, fill_call, fill_packed, fill_sizes
from megamoe.launch.table import (
    Encoder,
    Row,
    address_of,
    backward_rows,
    gradient_operands,
    gradient_rows,
    hs_map,
    master_rows,
    matrices_rows,
    plane_maps,
    set_map,
    set_maps,
    transposed_rows,
    weight_rows,
    write,
)

_TRAINING_STATE = ("header", "tokens", "tokens_scale")


def fill_train_state(args: Any, plan: Plan, base: int, encoder: Encoder) -> None:
    """Point the launch at the state of a call that trains: the address of memory that holds plan.train_state."""
    if base % 16:
        raise ArgumentError("state", hex(base), "16-byte aligned storage")
    p = plan.strided
    for name, region in plan.train_state.items():  # not by at(): each call of Python counts here
        if name != "gu":  # in maps only
            setattr(args.state if name in _TRAINING_STATE else args, name, base + region.offset)
    gu = base + plan.train_state["gu"].offset
    set_maps(args.gu, plane_maps(gu, plan.pool_rows, p.activation.planes, p.intermediate), encoder)


def fill_backward(args: Any, plan: Plan, base: int, encoder: Encoder, stash: int = 0) -> None:
    """Turn what fill_static filled into a backward launch: its pool, its GEMMs' operands, its tables.

    base: address of memory for plan.backward. stash: of memory for plan.stash, for rows of weight gradients; 0: none.
    """
    p = plan.strided
    # Args has the workspace's address nowhere.
    address = plan.workspace.at(int(args.y_rows) - plan.workspace["y_rows"].offset)
    address |= {"hs": address["h"]}  # unless it has memory of its own
    address |= plan.backward.at(base)
    if stash:
        address |= plan.stash.at(stash)
        if not p.formats.x.scaled:  # dy is pulled as it is kept
            address["x_pool"] = address["dy_rows"]
    if p.formats.dy != p.formats.x:
        address["x_pool"], args.window_x = address["dy_rows"], plan.window["window_dy"].offset
    own, args.x_pool = args.own, address["x_pool"]
    for name in ("x_rows", "row_weight", "d_s", "expert_rows", "grads_ready", "scheduled"):
        setattr(own, name, address[name])
    if p.formats.dy.scaled:
        own.dy_rows = address["dy_rows"]
    if p.formats.packed:
        args.expanded.panels, args.expanded.ready = address["matrices"], address["matrices_ready"]
        args.expanded.rooms = plan.backward["matrices"].shape[0]
    if plan.transposes:
        for name in ("row_tokens", *layout.TRANSPOSED_SCALES):
            setattr(own, name, address[name])
    set_map(args.hs, encoder(*hs_map(plan, address["hs"])))
    write(args, backward_rows(plan, address), encoder)


def operands_of_weights(plan: Plan, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a launch has multiplied for weight gradients by pool row: x_rows, dy_rows [M, H], dgu [M, P*I], hs.

    views: regions of both its workspaces; where x has no scales, the workspace has dy_rows and hs by other names.
    """
    if not plan.transposes:
        elsewhere = {} if plan.problem.formats.x.scaled else {"dy_rows": "x_pool", "hs": "h"}
        names = "dy_rows", "x_rows", "dgu", "hs"
        return {name: views[elsewhere.get(name, name)].flatten(1) for name in names}
    p, blocks = plan.problem, plan.pool_rows // layout.BLOCK_ROWS
    found = {}
    for name, region, width in (
        ("x_rows", "x_rows", p.hidden),
        ("dy_rows", "dy_rows", p.hidden),
        ("dgu", "dgu_columns", p.intermediate),
        ("hs", "hs", p.intermediate),
    ):
        q, scale = views[region], views[f"{region}_scale"]
        if name in ("x_rows", "hs"):
            scale = scale.t().repeat_interleave(SCALE_GROUP, dim=1)
        planes = p.activation.planes if name == "dgu" else 1
        rows = rows_of_blocks(q, scale[:blocks]).unflatten(1, (planes, -1))
        found[name] = rows[..., :width].flatten(1)
    return found


def fill_backward_weights(
    args: Any, plan: Plan, weights: ExpertWeights | TransposedWeights, encoder: Encoder
) -> None:
    """Fill the weights of a backward launch. A rank without experts gets maps that are never used.

    weights: bf16 w13 and w2, of any strides that TMA takes, packed ones, or in FP8 transposed ones; with a contiguous
        b13.
    """
    if isinstance(weights, TransposedWeights):
        forward, rows = weights.forward, transposed_rows(plan.problem, weights, args.y_rows)
    elif plan.problem.formats.packed:
        forward, rows = weights, matrices_rows(plan.problem, weights, args.expanded.panels)
        fill_packed(args.expanded, reversed(weight_rows(plan.problem, weights, args.y_rows)))
    else:
        forward, rows = weights, master_rows(plan.problem, weights, args.y_rows)
    write(args, rows, encoder)
    args.own.b2 = address_of(forward.b2)


def fill_gradients(
    args: Any,
    plan: Plan,
    encoder: Encoder,
    targets: Mapping[str, Tensor],
    *,
    accumulate: bool = False,
    stashes: bool = False,
    other: int = 0,
) -> list[Row]:
    """Fill which experts' gradients a backward launch makes, and where it puts them.

    targets: by name of the weights, those that are wanted. w13: [L, P*I, H] or [L, P, I, H], w2: [L, H, I], any strides
        that TMA takes, both bf16 or both fp32. b13: [L, P*I], b2: [L, H] fp32, contiguous.
    accumulate: add to what they hold. stashes: no experts' gradients, but the rows for all of them. other: any legal
        address; 0: that of y_rows.
    Returns the rows of the table that it has filled.
    """
    sizes = {targets[name].element_size() for name in ("w13", "w2") if name in targets}
    if len(sizes) > 1:
        raise ArgumentError("dw13 and dw2", sizes, "elements of one size")
    for name in targets.keys() & {"b13", "b2"}:
        db = targets[name]
        if db.dtype != torch.float32 or not db.is_contiguous():
            raise ArgumentError(f"d{name}", f"{db.dtype}, strides {db.stride()}", "contiguous fp32")
    size = sizes.pop() if sizes else BF16.bytes
    rows = gradient_rows(plan.problem, targets, other or args.y_rows, size, stashes)
    write(args, rows, encoder)
    args.own.dw_bytes, args.own.accumulate = size, accumulate
    return rows


def move_gradients(
    args: Any, rows: Sequence[Row], encoder: Encoder, targets: Mapping[str, Tensor]
) -> None:
    """Point a launch at other tensors like those that fill_gradients() was given. rows: that it returned."""
    for row, of_w, of_b in zip(rows, ("w13", "w2"), ("b13", "b2"), strict=True):
        if of_w in targets:
            assert row.out is not None
            row.out = [row.out[0]._replace(base=targets[of_w].data_ptr())]
            row.bias = address_of(targets.get(of_b))
    write(args, rows, encoder)


def stash_zeros(plan: Plan, device: torch.device) -> Tensor | None:
    """Return the scales that fill_stashed_weights() gives to experts without rows, fp32; None: there are no scales."""
    if not plan.transposes:
        return None
    hidden, width = layout.transposed_widths(plan.strided)
    columns = max(hidden, plan.strided.activation.planes * width)
    return torch.zeros(columns, dtype=torch.float32, device=device)


def fill_stashed_weights(
    args: Any,
    plan: Plan,
    encoder: Encoder,
    passes: Sequence[int],
    targets: Mapping[str, Tensor],
    *,
    accumulate: bool,
    zeros: Tensor | None = None,
) -> None:
    """Fill a launch that makes the experts' gradients of passes that were kept.

    passes: an address of plan.stash for each, at most layout.max_stashed_passes() of them. targets, accumulate: as
        fill_gradients takes them. zeros: of stash_zeros().
    """
    own = args.own
    own.zeros = address_of(zeros)
    fill_sizes(args, plan)
    own.num_passes = len(passes)
    for to, base in zip(own.passes, passes, strict=False):
        at = plan.stash.at(base)
        dw13, dw2 = gradient_operands(plan, at)
        assert dw13.a is not None
        assert dw2.a is not None
        set_maps(to.dgu, dw13.a, encoder)
        for name, operand in (("dy", dw2.a[0]), ("x", dw13.b), ("hs", dw2.b)):
            assert operand is not None
            set_map(getattr(to, name), encoder(*operand))
        for i, gemm in enumerate((dw13, dw2)):
            to.a_scale[i], to.b_scale[i] = gemm.a_scale, gemm.b_scale
        for name in ("row_weight", "header", "chunk_prefix"):
            setattr(to, name, at[name])
    fill_gradients(args, plan, encoder, targets, accumulate=accumulate, other=passes[0])


def fill_backward_call(
    args: Any,
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    dx: Tensor,
    d_topk_weights: Tensor,
    num_tokens_device: Tensor | None = None,
) -> None:
    """Fill the tensors of a backward call. The routing weights come from the state.

    dy, x, dx: [T, H] bf16; topk_ids: [T, K]; d_topk_weights: [T, K] fp32; all contiguous. Where own.only_weights says
    so, equal on all ranks, dx and d_topk_weights are not written, unless the launch is given up.
    """
    fill_call(args, dy, topk_ids, d_topk_weights, dx, num_tokens_device)
    args.topk_weights = None
    if x.data_ptr() % 16:
        raise ArgumentError("x", hex(x.data_ptr()), "16-byte aligned storage")
    args.own.x = x.data_ptr()
    args.own.d_topk_weights = d_topk_weights.data_ptr()
