"""Fill the launch argument block, with the same code for GPU and emulator."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.formats.weights import ExpertWeights
from megamoe.jit import abi
from megamoe.launch import layout, meetings, panels
from megamoe.launch.layout import Regions
from megamoe.launch.table import (
    HALF,
    Encoder,
    Row,
    forward_rows,
    rows_map,
    set_map,
    weight_rows,
    write,
)

LAYER_HASH = 0x9E3779B1  # odd: no two of 2^32 layers of one configuration hash alike
# The pointers of a call are adjacent in Args and written at once, because a field costs 0.1 us.
_CALL, _CALL_FIELDS = (
    struct.Struct("<6Q"),
    ("rows_in", "topk_ids", "topk_weights", "num_tokens_device", "rows_out", "in_scale"),
)
_CALL_OFFSET = abi.Args.rows_in.offset
assert all(getattr(abi.Args, n).offset == _CALL_OFFSET + 8 * i for i, n in enumerate(_CALL_FIELDS))
PROFILE_SLOTS = 80  # int64 of a CTA, see csrc/megamoe/cta/profile.cuh


def _regions(make: Callable[[Plan], Regions]) -> cached_property[Regions]:
    """Return an attribute of Plan that is made at its first use."""
    return cached_property(make)


@dataclass(frozen=True)
class Plan:
    """Hold the layout of one layer on one rank, which does not change between launches.

    window_tokens: max_tokens of the window, which larger layers may share. It determines all strides.
    window, workspace, ...: the regions of each memory, see layout.py. backward: of its workspace, which is separate
    memory. stash: of the rows that a backward pass stashes for weight gradients of several passes.
    """

    problem: Problem
    pool_rows: int
    window_tokens: int = 0  # 0: the problem's own
    weight_gradients: str = "bf16"  # their operands, an option of the layer

    @property
    def transposes(self) -> bool:
        """True if weight gradients multiply transposed e4m3, not bf16 rows."""
        return self.weight_gradients == "e4m3"

    @cached_property
    def strided(self) -> Problem:
        """The problem with the window's max_tokens."""
        return replace(self.problem, max_tokens=self.window_tokens or self.problem.max_tokens)

    window = _regions(lambda p: layout.window_regions(p.strided))
    workspace = _regions(lambda p: layout.workspace_regions(p.strided, p.pool_rows))
    state = _regions(lambda p: layout.state_regions(p.strided))
    train_state = _regions(lambda p: layout.train_state_regions(p.strided, p.pool_rows))
    backward = _regions(
        lambda p: layout.backward_regions(p.strided, p.pool_rows, p.weight_gradients)
    )
    stash = _regions(lambda p: layout.stash_regions(p.strided, p.pool_rows, p.weight_gradients))

    @cached_property
    def state_offset(self) -> int:
        """Offset in the workspace's memory of the state of calls that have no state of their own."""
        return self.workspace.bytes

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace and of the state after it."""
        return self.state_offset + self.state.bytes

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return views of every region of the workspace and its state. memory: [workspace_bytes] uint8."""
        return self.workspace.views(memory) | self.state.views(memory[self.state_offset :])


def fill_static(
    args: Any,
    plan: Plan,
    encoder: Encoder,
    windows: Sequence[int],
    workspace: int,
    layer: int = 0,
    **fields: int,
) -> None:
    """Fill the arguments that all launches of a layer share: sizes, regions, the maps over the workspace.

    args: a zeroed argument of abi.LAUNCHES. For backward, fill_backward() fills the table.
    windows: addresses of the windows of all ranks, as mapped here. workspace: of memory of plan.workspace_bytes. It
        also holds the state of calls without fill_state().
    layer: number of the layer in its window. It is part of the hash, so ranks notice different orders of calls.
    fields: of Args. timeout_ns; fault, profile: addresses. step_blocks: 0: the kernel chooses.
        epoch: address of the epoch cell, if layers share a window; by default the workspace's own.
        join_ns: how long a launch waits for SMs that other kernels hold. Then it runs on fewer. 0: it needs all CTAs.
        peers_ns: how long it waits, on all of its SMs, for a peer's launch to begin. Then it leaves half of them to
        others.
    """
    p, address = plan.strided, plan.workspace.at(workspace)
    for name in address.keys() & set(abi.field_names(abi.Args)):
        setattr(args, name, address[name])
    fill_state(args, plan, workspace + plan.state_offset)
    for name, value in fields.items():
        setattr(args, name, value)
    for rank, base in enumerate(windows):
        args.window[rank] = base
    for name, region in plan.window.items():
        for target in (args, getattr(args, "own", None)):
            if hasattr(target, name):
                setattr(target, name, region.offset)
    if isinstance(args, abi.LAUNCHES["push"]):
        args.own.tokens, args.own.ids_shift = layout.few_tokens(p), layout.few_ids_shift(p)
    fill_sizes(args, plan)
    args.abort = args.window[p.rank] + args.window_abort
    args.ready_cells = plan.window["window_ready"].shape[1]
    # A given step length selects the order by steps, without meetings.
    gb_per_s = 0.0 if args.step_blocks else meetings.bandwidth()
    meetings.fill(args.meet, address["came"], p, plan.pool_rows, gb_per_s)
    args.config_hash = (p.fingerprint() + layer * LAYER_HASH) & 0xFFFFFFFF
    act = p.activation
    args.act_alpha, args.act_limit, args.act_up_offset = act.alpha, act.limit, act.up_offset

    if not isinstance(args, abi.LAUNCHES["backward"]):
        write(args, forward_rows(plan, address), encoder)
    if isinstance(args, abi.LAUNCHES["packed"]):
        _fill_expanded(args, plan, address, encoder)


def fill_sizes(args: Any, plan: Plan) -> None:
    """Fill the sizes of the problem and of the pool."""
    p = plan.strided
    for name in ("max_tokens", "rank", "num_experts", "top_k", "hidden", "intermediate"):
        setattr(args, name, getattr(p, name))
    args.num_ranks, args.expert_begin = p.ep_size, p.expert_begin(p.rank)
    args.num_local_experts = p.num_local_experts(p.rank)
    args.pool_rows, args.max_chunks = plan.pool_rows, layout.max_chunks(p)


def _fill_expanded(args: Any, plan: Plan, address: dict[str, int], encoder: Encoder) -> None:
    """Fill the addresses of expanded weights, for launches that may have some."""
    expanded, region = args.expanded, plan.workspace.get("panels")
    expanded.ready, expanded.above = address["panel_ready"], panels.above(plan.strided)
    if region is None:
        return
    expanded.panels, expanded.rooms = address["panels"], panels.rooms(plan.strided, plan.pool_rows)
    rows, columns = region.shape
    of_panels = rows_map(address["panels"], rows, columns, region.dtype.itemsize, HALF)
    set_map(expanded.map, encoder(*of_panels))


def fill_state(args: Any, plan: Plan, base: int) -> None:
    """Point the launch at the state of its call. base: address of memory for plan.state."""
    for name, address in plan.state.at(base).items():
        setattr(args, name, address)


def fill_weights(args: Any, plan: Plan, weights: ExpertWeights, encoder: Encoder) -> None:
    """Fill the weights: maps, scales, biases. A rank without experts gets maps that are never used.

    weights: with a contiguous b13, see ExpertWeights.with_flat_bias.
    """
    rows = weight_rows(plan.problem, weights, args.x_pool)
    write(args, rows, encoder)
    if isinstance(args, abi.LAUNCHES["packed"]):
        fill_packed(args.expanded, rows)


def fill_packed(expanded: Any, rows: Iterable[Row]) -> None:
    """Fill the addresses of packed weights. rows: of weight_rows(), in the order of the launch's GEMMs."""
    for i, row in enumerate(rows):
        assert row.b is not None
        expanded.packed[i] = row.b.base
        expanded.row_bytes[i], expanded.plane_bytes[i], expanded.expert_bytes[i] = row.b.strides


def fill_call(
    args: Any,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    y: Tensor,
    num_tokens_device: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> None:
    """Fill the tensors of a call."""
    args.num_tokens, args.ids_are_int64 = x.shape[0], topk_ids.dtype == torch.int64
    fill_pointers(args, x, topk_ids, topk_weights, y, num_tokens_device, x_scale)


def fill_pointers(
    args: Any,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    y: Tensor,
    num_tokens_device: Tensor | None,
    x_scale: Tensor | None = None,
) -> None:
    """Fill the addresses of a call whose shapes and types have not changed."""
    source, target = x.data_ptr(), y.data_ptr()
    if (source | target) % 16:
        raise ArgumentError("x or out", hex(source), "16-byte aligned storage")
    count = 0 if num_tokens_device is None else num_tokens_device.data_ptr()
    ids, scores = topk_ids.data_ptr(), topk_weights.data_ptr()
    scale = 0 if x_scale is None else x_scale.data_ptr()
    _CALL.pack_into(args, _CALL_OFFSET, source, ids, scores, count, target, scale)
