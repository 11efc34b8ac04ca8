"""Compute the regions of window, workspace and a call's state. No other file computes an offset.

The window is symmetric memory. The workspace is ordinary memory with contents for one launch. The state is what a call
saves to rebuild the workspace's tables. A training call saves more, and its backward pass has its own workspace.

Regions have the names of the fields of Args, State and Backward in csrc/megamoe/layout/args.h, which explains each.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

import torch

from megamoe.core.config import CHUNK_TOKENS, Problem
from megamoe.core.errors import ConfigError, WorkspaceTooSmall
from megamoe.core.table import SCALE_GROUP
from megamoe.formats.weights import expected_weights
from megamoe.jit import abi
from megamoe.jit.source import TILE
from megamoe.launch import meetings, panels
from megamoe.launch.panels import TILE_COLUMNS

ALIGNMENT = 256
BLOCK_ROWS = abi.TILES[TILE].rows
WARPGROUP_ROWS = abi.WARPGROUP_ROWS  # a launch that trains fills an expert's rows up to a multiple
SLACK = 1.25  # of the default pool over an even load

_Spec = tuple[str, tuple[int, ...], torch.dtype]
_P = ParamSpec("_P")


@dataclass(frozen=True)
class Region:
    """A range of bytes, seen as a row-major array. Unsigned cells appear as int32, which torch can index."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes without the padding behind it."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.offset + self.bytes

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """memory: [bytes] uint8 that holds all regions -> this one, as a view."""
        return memory[self.offset : self.end].view(self.dtype).view(self.shape)


class Regions(dict[str, Region]):
    """The regions of one piece of memory, by name. bytes: of all of them."""

    bytes = 0

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """memory: [bytes] uint8 -> every region, as a view."""
        return {name: region.view(memory) for name, region in self.items()}

    def at(self, base: int) -> dict[str, int]:
        """Return the address of every region of memory that begins at `base`."""
        return {name: base + region.offset for name, region in self.items()}

    def zero(self, memory: torch.Tensor, names: Iterable[str]) -> None:
        """Zero the regions of these names."""
        for name in names:
            self[name].view(memory).zero_()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _regions(specs: Callable[_P, Iterator[_Spec]]) -> Callable[_P, Regions]:
    """Make a function that yields name, shape and dtype of regions return their Regions, one behind the other."""

    @wraps(specs)
    def place(*args: _P.args, **kwargs: _P.kwargs) -> Regions:
        made = Regions()
        for name, shape, dtype in specs(*args, **kwargs):
            made[name] = region = Region(made.bytes, shape, dtype)
            made.bytes = _round_up(region.end, ALIGNMENT)
        return made

    return place


# --- the window: symmetric memory, the same offsets on every rank ---

# A partial of few tokens goes in slices, each with a flag of its own: sum_slices_of in csrc/megamoe/schedule/order.h.
LEAST_READY_CELLS = 8192

# Flags that carry an epoch; a reset zeroes them on all ranks.
WINDOW_CONTROL = ("window_abort", "window_routes", "window_staged", "window_ready")


def check_window(problem: Problem) -> None:
    """Raise ConfigError for more ranks or tokens than a window has room for."""
    if (reason := problem.why_no_window()) is not None:
        raise ConfigError(reason)


# max_few_tokens and max_pushed_tokens of csrc/megamoe/cta/smem.h
FEW_TOKENS, PUSHED_TOKENS = 64, 256


def few_kernel(problem: Problem, pool_rows: int) -> str:
    """Return the kernel of forwards of few tokens, of one rank or of several, or "". Its h stands in x_pool."""
    p = problem
    if p.ep_size == 1:  # half a block of rows an expert
        kernel, fits = "few", p.intermediate <= 2 * p.hidden
    else:
        kernel, fits = "push", p.intermediate <= p.hidden <= 32768 and p.top_k <= 16
        fits &= p.num_experts <= 512 * p.ep_size and pool_rows >= few_pool_rows(p)
    return kernel if fits and kernel in p.formats.few else ""


def few_tokens(problem: Problem) -> int:
    """Return how many tokens a rank may have in a launch of few tokens."""
    return min(FEW_TOKENS, PUSHED_TOKENS // problem.ep_size)


def few_ids_shift(problem: Problem) -> int:
    """Return the logarithm of the words that a token's ids take, two in each."""
    return (-(-problem.top_k // 2) - 1).bit_length()


def few_pool_rows(problem: Problem) -> int:
    """Return the rows of a pool that holds any launch of few tokens over several ranks, or 0 where none is."""
    p = problem
    if p.ep_size == 1 or "push" not in p.formats.few:
        return 0
    routes = p.ep_size * min(few_tokens(p), p.max_tokens) * p.top_k
    return _round_up(routes + 32 * p.num_local_experts(p.rank), BLOCK_ROWS)


@_regions
def window_regions(p: Problem) -> Iterator[_Spec]:
    """Return the regions of one rank's window. They depend on nothing that differs between ranks.

    A backward launch stages dy where others stage x, once no rank reads what the launch before it staged; in
    window_dy if the formats differ.
    """
    check_window(p)
    ranks, tokens, top_k, hidden = p.ep_size, p.max_tokens, p.top_k, p.hidden
    # Whether a rank has given up; 1 + the rank whose host did, if it was one: Window.abort()
    yield "window_abort", (2,), torch.int32
    yield "window_routes", (2, ranks, 4), torch.int32  # RouteCell is four words
    yield "window_staged", (ranks,), torch.int32
    yield "window_ready", (ranks, max(tokens, LEAST_READY_CELLS)), torch.int32
    yield "window_ids", (2, tokens, top_k), torch.int32
    yield "window_weights", (2, tokens, top_k), torch.float32
    yield "window_d_weights", (tokens, top_k), torch.float32
    x = p.formats.x
    yield "window_x", (tokens, x.width(hidden)), x.dtype
    if x.scaled:
        yield "window_x_scale", x.scale_shape(tokens, hidden), torch.float32
    if x != p.formats.dy:
        yield "window_dy", (tokens, hidden), torch.bfloat16
    yield "window_partials", (ranks, tokens, hidden), torch.bfloat16
    if "push" in p.formats.few and ranks > 1:  # what ranks push in launches of few tokens
        few, words = few_tokens(p), (1 << few_ids_shift(p)) + top_k
        yield "window_few_words", (2, ranks, 1 + few * words), torch.int64
        yield "window_few_x", (ranks, few, x.width(hidden)), x.dtype
        yield "window_few_x_scale", (ranks, *x.scale_shape(few, hidden)), torch.float32
        yield "window_few_x_ready", (ranks, few), torch.int32


# --- the workspace: ordinary memory of one rank ---

# A block's number, shifted by 8, has to fit int32: csrc/megamoe/rows/plan.cuh
MAX_POOL_ROWS = (1 << 30) - BLOCK_ROWS

# Cells that must be zero when no launch is in flight.
WORKSPACE_CONTROL = (
    *("epoch", "ids_ticket", "x_ticket", "exit_ticket", "fault_ticket"),
    *("arrivals", "generation", "joined", "members"),
)
DONE = ("gemm1_done", "gemm2_done")
WORKSPACE_RESET = WORKSPACE_CONTROL + DONE


def max_chunks(problem: Problem) -> int:
    """Return C, the chunks of all home ranks together."""
    return problem.ep_size * -(-problem.max_tokens // CHUNK_TOKENS)


def _check_pool(problem: Problem, pool_rows: int) -> None:
    least = min_pool_rows(problem)
    if not isinstance(pool_rows, int):
        raise ConfigError("pool_rows", repr(pool_rows), "an int or None")
    if pool_rows < least or pool_rows % BLOCK_ROWS:
        raise WorkspaceTooSmall(
            f"pool_rows is {pool_rows}, expected a multiple of {BLOCK_ROWS} and at least {least}: "
            f"one chunk of {CHUNK_TOKENS} tokens, each local expert padded to whole blocks"
        )
    if pool_rows > MAX_POOL_ROWS:
        raise ConfigError("pool_rows", pool_rows, f"at most {MAX_POOL_ROWS}")


@_regions
def workspace_regions(p: Problem, rows: int) -> Iterator[_Spec]:
    """Return the regions of this rank's workspace for a pool of M = `rows` rows."""
    _check_pool(p, rows)
    blocks, x, h = rows // BLOCK_ROWS, p.formats.x, p.formats.h
    for cell in WORKSPACE_CONTROL:
        yield cell, (1,), torch.int32
    yield "route_rows", (max_chunks(p) * CHUNK_TOKENS, p.top_k), torch.int32
    yield "pool_routes", (rows,), torch.int32
    yield "block_table", (blocks, 2), torch.int32
    yield "rows_ready", (blocks,), torch.int32
    yield "came", (blocks, meetings.units_of_block(p)), torch.int32
    # Of blocks and, behind them, of experts, which launches of few tokens leave zeros.
    for cell in DONE:
        yield cell, (blocks + p.num_local_experts(p.rank),), torch.int32
    yield "x_pool", (rows, x.width(p.hidden)), x.dtype
    if x.scaled:
        yield "x_pool_scale", x.scale_shape(rows, p.hidden)[::-1], torch.float32
    yield "h", (rows, h.width(p.intermediate)), h.dtype
    if h.scaled:
        yield "h_scale", h.scale_shape(rows, p.intermediate)[::-1], torch.float32
    yield "y_rows", (rows, p.hidden), torch.bfloat16
    if p.formats.panels:
        yield "panel_ready", panels.ready_shape(p), torch.int32
        if panels.rooms(p, rows):
            yield "panels", panels.shape(p, rows), x.dtype


# Cells of backward's part that must be zero when no launch is in flight; a reset zeroes them.
BACKWARD_CONTROL = ("grads_ready",)
# Zeroed when they are made: an expert without rows multiplies zeros by scales that nobody has written.
TRANSPOSED_SCALES = ("x_rows_scale", "hs_scale", "dy_rows_scale", "dgu_columns_scale")


@_regions
def backward_regions(p: Problem, rows: int, weight_gradients: str = "bf16") -> Iterator[_Spec]:
    """Return the regions that a backward launch needs beside the workspace, in memory of its own.

    dy's rows in the format of x are the workspace's x_pool. Where x has no scales, they are dy_rows too, and hs is the
    workspace's h, which has the same format. Packed weights have no gradients, and if x is e4m3, dy is dy_rows.
    weight_gradients: "e4m3": what they multiply is transposed, blocks of 128 rows as [columns, 128].
    """
    _check_pool(p, rows)
    planes = p.activation.planes
    for cell in BACKWARD_CONTROL:
        yield cell, (1,), torch.int32
    yield "scheduled", (3,), torch.int32
    yield "expert_rows", (p.num_local_experts(p.rank), 2), torch.int32
    yield "row_weight", (rows,), torch.float32
    yield "d_s", (rows, -(-p.intermediate // TILE_COLUMNS) + 1), torch.float32
    yield "dgu", (rows, planes, p.intermediate), torch.bfloat16
    if p.formats.packed:
        yield "matrices_ready", (p.num_local_experts(p.rank), 2), torch.int32
        yield "matrices", panels.matrices_shape(p), torch.bfloat16
    if p.formats.dy.scaled:
        x, (_, groups) = p.formats.x, p.formats.x.scale_shape(rows, p.intermediate)
        yield "dgu_rows", (rows, planes, p.intermediate), x.dtype
        yield "dgu_scale", (planes * groups, rows), torch.float32
    if weight_gradients == "e4m3":
        yield from _transposed(p, rows)
        return
    yield "x_rows", (rows, p.hidden), torch.bfloat16
    if p.formats.x.scaled:
        yield "dy_rows", (rows, p.hidden), torch.bfloat16
    if p.formats.h.scaled:
        yield "hs", (rows, p.intermediate), torch.bfloat16


def transposed_widths(p: Problem) -> tuple[int, int]:
    """Return the columns of transposed blocks, of x and dy, and of hs and each plane of dgu."""
    return _round_up(p.hidden, SCALE_GROUP), _round_up(p.intermediate, SCALE_GROUP)


def _transposed(p: Problem, rows: int) -> Iterator[_Spec]:
    """Yield what weight gradients in e4m3 multiply; the scales have one block more, for experts without rows."""
    blocks, planes, dtype = rows // BLOCK_ROWS, p.activation.planes, p.formats.x.dtype
    hidden, width = transposed_widths(p)
    yield "row_tokens", (rows,), torch.int32
    yield "x_rows", (blocks, hidden, BLOCK_ROWS), dtype
    yield "dy_rows", (blocks, hidden, BLOCK_ROWS), dtype
    yield "dgu_columns", (blocks, planes * width, BLOCK_ROWS), dtype
    yield "hs", (blocks, width, BLOCK_ROWS), dtype
    yield "x_rows_scale", (hidden // SCALE_GROUP, blocks + 1), torch.float32
    yield "hs_scale", (width // SCALE_GROUP, blocks + 1), torch.float32
    yield "dy_rows_scale", (blocks + 1, hidden), torch.float32
    yield "dgu_columns_scale", (blocks + 1, planes * width), torch.float32


# --- what a backward pass stashes, where weight gradients of several are made in one launch ---


@_regions
def stash_regions(p: Problem, rows: int, weight_gradients: str = "bf16") -> Iterator[_Spec]:
    """Return the regions that a backward launch fills in place of the workspace's, and a copy of what places its rows.

    A row has 2 * (2 * H + (P + 1) * I) + 4 bytes in every precision; with weight_gradients "e4m3" about half.
    """
    _check_pool(p, rows)
    yield "row_weight", (rows,), torch.float32
    if weight_gradients == "e4m3":
        yield from (spec for spec in _transposed(p, rows) if spec[0] != "row_tokens")
    else:
        yield "dgu", (rows, p.activation.planes, p.intermediate), torch.bfloat16
        yield "x_rows", (rows, p.hidden), torch.bfloat16
        yield "dy_rows", (rows, p.hidden), torch.bfloat16
        yield "hs", (rows, p.intermediate), torch.bfloat16
    yield "header", _header(), torch.int32
    yield from (spec for spec in _state(p) if spec[0] == "chunk_prefix")


def max_stashed_passes(problem: Problem) -> int:
    """Return how many passes a launch makes weight gradients of at most."""
    entries = abi.CONSTANTS["max_stashed_entries"] // (problem.num_local_experts(problem.rank) + 1)
    return min(abi.CONSTANTS["max_stashed_passes"], entries)


# --- the state: of one call on one rank ---


def _state(p: Problem) -> Iterator[_Spec]:
    """Return the regions of a call's state: its routes, from which every pass can be planned again.

    Written before it is read in each launch, so its memory may be anything.
    """
    chunks = max_chunks(p)
    yield "route_ids", (chunks * CHUNK_TOKENS, p.top_k), torch.int32
    yield "route_weights", (chunks * CHUNK_TOKENS, p.top_k), torch.float32
    yield "chunk_prefix", (p.num_local_experts(p.rank), chunks + 1), torch.int32


state_regions = _regions(_state)


@_regions
def train_state_regions(p: Problem, rows: int) -> Iterator[_Spec]:
    """Return the regions of the state of a call that trains: what backward needs besides x, weights and routes.

    Forward writes all that backward reads of it, so its memory may be anything.
    """
    _check_pool(p, rows)
    x = p.formats.x
    yield "header", _header(), torch.int32
    yield from _state(p)
    yield "gu", (rows, p.activation.planes, p.intermediate), torch.bfloat16
    # Without scales own tokens are not saved: backward reads them from x.
    slots = p.ep_size if x.scaled else p.ep_size - 1
    yield "tokens", (slots, p.max_tokens, x.width(p.hidden)), x.dtype
    if x.scaled:
        yield "tokens_scale", (slots, *x.scale_shape(p.max_tokens, p.hidden)), torch.float32


def _header() -> tuple[int]:
    return (ctypes.sizeof(abi.StateHeader) // 4,)


def train_state_used(problem: Problem, pool_rows: int) -> int:
    """Return the bytes that a full batch writes of the state when every choice of distinct experts is as likely."""
    p, regions = problem, train_state_regions(problem, pool_rows)
    local, experts = p.num_local_experts(p.rank), p.num_experts
    rows_of_expert = _round_up(-(-p.ep_size * p.max_tokens * p.top_k // experts), WARPGROUP_ROWS)
    filled = min(local * rows_of_expert / pool_rows, 1.0)
    k = min(p.top_k, experts)
    # How likely a token names one of our experts.
    named = 1 - math.comb(experts - local, k) / math.comb(experts, k)
    share = {"gu": filled, "tokens": named, "tokens_scale": named}
    return round(sum(region.bytes * share.get(name, 1.0) for name, region in regions.items()))


def min_pool_rows(problem: Problem) -> int:
    """Return the least pool: the rows of one chunk, and a partial block for each local expert.

    A token may name one expert in several of its K places, so a chunk can have 32 * K rows whatever
    L is.
    """
    padding = BLOCK_ROWS * max(problem.num_local_experts(problem.rank), 1)
    return _round_up(problem.top_k * CHUNK_TOKENS, BLOCK_ROWS) + padding


def worst_pool_rows(problem: Problem) -> int:
    """Return the pool that holds every launch in one pass (when a token's experts are distinct)."""
    local = problem.num_local_experts(problem.rank)
    rows = problem.ep_size * problem.max_tokens * min(problem.top_k, local)
    rows = _round_up(rows + BLOCK_ROWS * local, BLOCK_ROWS)
    return max(rows, min_pool_rows(problem), few_pool_rows(problem))


def default_pool_rows(problem: Problem) -> int:
    """Return a pool for an even load and a quarter more. Less even launches take several passes."""
    local = problem.num_local_experts(problem.rank)
    routes = problem.ep_size * problem.max_tokens * problem.top_k
    expected = math.ceil(routes * SLACK * local / problem.num_experts)
    rows = _round_up(expected + BLOCK_ROWS * local, BLOCK_ROWS)
    least = max(min_pool_rows(problem), few_pool_rows(problem))
    return max(min(rows, worst_pool_rows(problem), MAX_POOL_ROWS), least)


def memory_report(
    problem: Problem, pool_rows: int | None = None, weight_gradients: str = "bf16"
) -> dict[str, Any]:
    """Return the bytes of one rank's buffers; "text" holds the same as a table, "line" the sums.

    A window may be shared by many layers, a workspace belongs to one. Weights are not counted.
    weight_gradients: the layer's option.
    """
    rows = default_pool_rows(problem) if pool_rows is None else pool_rows
    worst, trains = worst_pool_rows(problem), problem.formats.trains
    memories = {
        "window": window_regions(problem),
        "workspace": workspace_regions(problem, rows),
        "state": state_regions(problem),
        **dict.fromkeys(("backward", "stash", "train_state", "train_state_worst"), Regions()),
    }
    if trains:
        memories |= {
            "backward": backward_regions(problem, rows, weight_gradients),
            "stash": stash_regions(problem, rows, weight_gradients),
            "train_state": train_state_regions(problem, rows),
            "train_state_worst": train_state_regions(problem, max(worst, rows)),
        }
    copies = 0
    if problem.formats.w.scaled:
        stored = expected_weights(problem).items()
        copies = sum(math.prod(s) * d.itemsize for name, (s, d) in stored if name[0] == "w")

    def sizes(*names: str) -> dict[str, int]:
        return {name: region.bytes for of in names for name, region in memories[of].items()}

    report: dict[str, Any] = {
        **{f"{name}_bytes": regions.bytes for name, regions in memories.items()},
        "copies_bytes": copies,
        "transposes_bytes": copies if problem.formats.transposes else 0,
        "train_state_used_bytes": train_state_used(problem, rows) if trains else 0,
        "pool_rows": rows,
        "worst_pool_rows": worst,
        "regions": sizes("window", "workspace", "state"),
        "training_regions": sizes("train_state", "backward"),
    }
    mib = {name: f"{size / 2**20:.1f} MiB" for name, size in report.items() if "bytes" in name}
    used, largest = mib["train_state_used_bytes"], mib["train_state_worst_bytes"]
    of_call = f"used at even load {used}, in one pass at worst {largest}"
    lines = [
        f"window (symmetric)  {mib['window_bytes']:>14}",
        f"workspace           {mib['workspace_bytes']:>14}, {rows} pool rows (worst case {worst})",
        f"state of a call     {mib['state_bytes']:>14}",
        f"quantized weights   {mib['copies_bytes']:>14}",
        *_largest(report["regions"]),
    ]
    training = [
        "training adds",
        f"their transposes    {mib['transposes_bytes']:>14}; with transposes='made' once per device",
        f"backward's workspace{mib['backward_bytes']:>14}",
        f"state of a call     {mib['train_state_bytes']:>14}, {of_call}",
        f"with delay_wgrad='keep', a pass that waits, in place of its state {mib['stash_bytes']}",
        *_largest(report["training_regions"]),
    ]
    report["text"] = "\n".join(lines + (training if trains else []))
    report["line"] = (
        f"memory of rank {problem.rank}: window {mib['window_bytes']}, workspace {mib['workspace_bytes']}, "
        f"{rows} pool rows (worst case {worst}), state of a call {mib['state_bytes']}"
    )
    if trains:
        report["line"] += (
            f"; training: backward's workspace {mib['backward_bytes']}, "
            f"state of a call {mib['train_state_bytes']} ({of_call}), or kept of it {mib['stash_bytes']}"
        )
    return report


def _largest(sizes: dict[str, int]) -> list[str]:
    """Return a line for each region of a MiB or more."""
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return [f"  {name:17} {size / 2**20:10.1f} MiB" for name, size in largest if size >= 2**20]
