"""Decide which pairs of a launch stay in step, by shape and machine.

Pairs of CTAs that share a weight tile or rows wait for each other before they load it (csrc/megamoe/schedule/order.h),
so memory is read once for all of them. That is faster if memory bandwidth is the limit and L2 no longer holds what a
later pair reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megamoe.core.config import Problem
from megamoe.core.errors import MegaMoEError
from megamoe.jit import abi
from megamoe.jit.source import TILE
from megamoe.launch.panels import TILE_COLUMNS

PAIR_CTAS, MAX_RUN = 2, 16  # pair_ctas, max_run of csrc/megamoe/schedule/order.h
# Rows of an expert in the mean from which on pairs meet: in launches of fewer, each weight tile has one reader.
MEAN_ROWS = 192
MAX_CELLS = 1 << 23  # a cell's number, shifted by 8, fits int32


@dataclass(frozen=True)
class Meet:
    """How pairs meet: Meet of csrc/megamoe/layout/args.h, where the members are explained."""

    many: int = 4
    cycles: int = 170  # about a seventh of what a slot takes
    mean_rows: int = MEAN_ROWS


# Pairs meet on GPUs up to this bandwidth, in layers of these precisions whose experts have at least so many bytes. An
# H100 has 3352 GB/s, an H200 4917, where GEMMs are the limit and meetings gain nothing. FP8 reads half as much: it
# gains where the experts of a round do not fit into L2 together (dsv3: 44 MB each), and loses elsewhere. Figures:
# docs/decisions.md, 0019.
MAX_GB_PER_S = 4000
LEAST_EXPERT_BYTES = {"bf16": 0, "fp8": 40 << 20, "fp8_channel": 40 << 20}


def units_of_block(p: Problem) -> int:
    """Return the units of gemm1 that a block of rows has."""
    return -(-p.activation.planes * p.intermediate // (PAIR_CTAS * TILE_COLUMNS))


def chosen(p: Problem, gb_per_s: float) -> Meet | None:
    """Return how the pairs of a layer meet on a GPU with such a bandwidth, or None: 0 stands for no GPU."""
    size = (p.activation.planes + 1) * p.hidden * p.intermediate * p.formats.w.bytes
    least = LEAST_EXPERT_BYTES.get(p.precision)
    fits = least is not None and size >= least and 0 < gb_per_s <= MAX_GB_PER_S
    return Meet() if fits else None


def fill(field: Any, came: int, p: Problem, pool_rows: int, gb_per_s: float) -> None:
    """Fill the launch argument `meet`. came: address of the region."""
    meet = chosen(p, gb_per_s)
    cells = pool_rows // abi.TILES[TILE].rows * units_of_block(p)
    field.came = came
    if meet is None or p.formats.w.packed > 1 or cells > MAX_CELLS:
        field.rows = 0
        return
    field.rows = meet.mean_rows * p.num_local_experts(p.rank)
    field.cycles, field.many = meet.cycles, meet.many


def bandwidth() -> float:
    """Return GB/s of the current device's memory, 0 where torch uses none."""
    if not torch.cuda.is_initialized():
        return 0.0
    from megamoe.jit.driver import device_attribute

    ordinal = torch.cuda.current_device()
    try:
        khz = device_attribute(ordinal, "MEMORY_CLOCK_RATE")
        bits = device_attribute(ordinal, "GLOBAL_MEMORY_BUS_WIDTH")
    except MegaMoEError:
        return 0.0
    return 2 * khz * bits / 8e6  # two transfers a clock
