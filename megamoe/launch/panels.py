"""Place packed weights that are expanded in memory, for tiles of more than 64 rows: csrc/megamoe/fp4/expand.cuh.

A panel is the weights of a tile, 256 columns and all of K, as slots of 256 rows of 128 bytes. A room holds the panels
of one expert, those of w13 first.
"""

from __future__ import annotations

from megamoe.core.config import Problem
from megamoe.core.table import BF16
from megamoe.jit import abi
from megamoe.jit.source import TILE

TILE_COLUMNS = 2 * abi.TILES[TILE].half_columns
# Launches whose experts have more rows than that in the mean have panels: docs/fp4.md, "Expanded once, in memory".
MEAN_ROWS = 640
# Bytes of rooms, for experts whose weights are made while others' are used; at least so many rooms, though.
# Measured with dsv3, two are too few (25 % slower); 1 GB is no gain.
EXPANDED_BYTES, LEAST_ROOMS = 32 << 20, 5


def above(problem: Problem) -> int:
    """Return the rows of a launch's first pass above which it has panels."""
    return MEAN_ROWS * problem.num_local_experts(problem.rank)


def least_tokens(problem: Problem) -> int:
    """Return the tokens of a rank from which on an even load gives experts that many rows."""
    return MEAN_ROWS * problem.num_experts // (problem.ep_size * problem.top_k) + 1


def rooms(problem: Problem, pool_rows: int) -> int:
    """Return for how many experts the workspace holds panels; 0 where no launch can have so many rows."""
    local = problem.num_local_experts(problem.rank)
    routes = problem.ep_size * problem.max_tokens * problem.top_k
    if min(pool_rows, routes) <= above(problem):
        return 0
    _, slots = _of_expert(problem)
    fit = EXPANDED_BYTES // (slots * TILE_COLUMNS * abi.SLOT_K_BYTES)
    return min(max(fit, LEAST_ROOMS), local)


def matrices_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of backward's rooms, bf16: experts, their matrices (w2 and the planes of w13), numbers."""
    matrices, numbers = 1 + problem.activation.planes, problem.hidden * problem.intermediate
    fit = EXPANDED_BYTES // (matrices * numbers * BF16.bytes)
    local = problem.num_local_experts(problem.rank)
    return min(max(fit, LEAST_ROOMS), local), matrices, numbers


def shape(problem: Problem, pool_rows: int) -> tuple[int, int]:
    """Return the shape of all rooms: rows, numbers in 128 bytes."""
    _, slots = _of_expert(problem)
    rows = rooms(problem, pool_rows) * slots * TILE_COLUMNS
    return rows, abi.SLOT_K_BYTES // problem.formats.x.bytes


def ready_shape(problem: Problem) -> tuple[int, int]:
    """Return the shape of the counts of what is there: local experts, panels of each."""
    panels, _ = _of_expert(problem)
    return problem.num_local_experts(problem.rank), panels


def _of_expert(p: Problem) -> tuple[int, int]:
    """Return the panels of an expert, and their slots."""
    slot_k = abi.SLOT_K_BYTES // p.formats.x.bytes
    panels13 = -(-p.intermediate * p.activation.planes // TILE_COLUMNS)
    panels2 = -(-p.hidden // TILE_COLUMNS)
    slots = panels13 * -(-p.hidden // slot_k) + panels2 * -(-p.intermediate // slot_k)
    return panels13 + panels2, slots
