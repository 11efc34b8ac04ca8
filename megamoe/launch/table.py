"""Build the table of a launch: one row for each of its GEMMs, see csrc/megamoe/layout/args.h.

Each list of rows contains what is known at one time: the pool's part when a layer is created, the weights' part when
they are passed, and the gradients' part in each call. A field that is None leaves the argument unchanged. write()
writes a list into a launch's argument. Tests compare the same lists.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import plane_strides
from megamoe.core.table import BF16, SCALE_GROUP
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.jit import abi
from megamoe.jit.source import TILE
from megamoe.launch import panels
from megamoe.launch.layout import transposed_widths

# (base, dims, strides in bytes of all but the innermost, box, bytes of an element) -> 128 bytes.
# dims and box are innermost first.
Encoder = Callable[[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int], bytes]
ROWS, HALF = abi.WARPGROUP_ROWS, abi.TILES[TILE].half_columns  # of boxes
BLOCK = abi.TILES[TILE].rows
Place = tuple[int, tuple[int, ...]]  # of a matrix: address, strides in bytes
Shape = tuple[int, int, int, int]  # L, planes, rows, columns


class Map(NamedTuple):
    """A tensor map: what an Encoder takes."""

    base: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    size: int  # bytes of an element


@dataclass(slots=True)
class Row:
    """What is known of a GEMM, by its name in GemmId. Lists are by plane: the last map stands for further planes.

    Pointers are addresses, 0 for null.
    """

    gemm: str
    a: list[Map] | None = None
    out: list[Map] | None = None
    a_small: Map | None = None
    b: Map | None = None
    a_scale: int | None = None
    b_scale: int | None = None
    bias: int | None = None
    out_scale: int | None = None
    done: int | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None


def write(args: Any, rows: Sequence[Row], encoder: Encoder) -> None:
    """Put what rows say into a launch's argument, one of abi.LAUNCHES."""
    table = args.gemm
    for row in rows:
        # All of GEMMS, the first two, the next two (dw13 and dw2 alone), or one.
        gemm = table[abi.GEMMS.index(row.gemm) % len(table)]
        for name in Row.__slots__[1:]:
            value = getattr(row, name)
            if isinstance(value, Map):
                set_map(getattr(gemm, name), encoder(*value))
            elif isinstance(value, list):
                set_maps(getattr(gemm, name), value, encoder)
            elif value is not None:
                setattr(gemm, name, value)


def set_maps(fields: Any, maps: Sequence[Map], encoder: Encoder) -> None:
    """Fill an array of maps, one a plane; without a second plane the first one's is put there twice."""
    for i in range(len(fields)):
        set_map(fields[i], encoder(*maps[min(i, len(maps) - 1)]))


def set_map(field: Any, data: bytes) -> None:
    if len(data) != ctypes.sizeof(field):
        raise ValueError(f"a tensor map has {ctypes.sizeof(field)} bytes, not {len(data)}")
    ctypes.memmove(ctypes.addressof(field), data, len(data))


# --- maps ---


def box(size: int, rows: int = ROWS, rank: int = 2) -> tuple[int, ...]:
    """Return a box of 128 bytes a row."""
    return (abi.SLOT_K_BYTES // size, rows, *[1] * (rank - 2))


def rows_map(
    base: int, rows: int, columns: int, size: int, box_rows: int = ROWS, rank: int = 2
) -> Map:
    """Return the map of [rows, columns], contiguous, behind rank - 2 dimensions of one."""
    row = columns * size
    dims, strides = (columns, rows, *[1] * (rank - 2)), (row, *[row * rows] * (rank - 2))
    return Map(base, dims, strides, box(size, box_rows, rank), size)


def plane_maps(
    base: int, rows: int, planes: int, columns: int, size: int = BF16.bytes
) -> list[Map]:
    """Return the maps of [rows, planes, columns], contiguous, by plane."""
    row = columns * size
    return [
        Map(base + p * row, (columns, rows), (planes * row,), box(size), size)
        for p in range(planes)
    ]


def matrix_map(place: Place, shape: Shape, size: int, box_rows: int) -> Map:
    """Return the map of weights or their gradient."""
    experts, planes, height, width = shape
    dims = (width, height, planes, max(experts, 1))
    return Map(place[0], dims, place[1], box(size, box_rows, 4), size)


def _repeated(stride: int) -> tuple[int, ...]:
    """Return strides between rows, planes and experts for a map that is never used: any legal ones."""
    return stride, stride, stride


def shapes_of(p: Problem) -> dict[str, Shape]:
    """Return the shapes of w13 and w2."""
    local = p.num_local_experts(p.rank)
    return {
        "w13": (local, p.activation.planes, p.intermediate, p.hidden),
        "w2": (local, 1, p.hidden, p.intermediate),
    }


def place_of(name: str, w: Tensor, shape: Shape, other: int) -> Place:
    """Return a matrix' place; without local experts `other` and any legal strides."""
    if not shape[0]:
        return other, _repeated(shape[-1] * w.element_size())
    base = w.data_ptr()
    if base % 16:
        raise ArgumentError(name, hex(base), "16-byte aligned storage")
    return base, plane_strides(w, shape[1])


# --- rows ---


def forward_rows(plan: Any, address: Mapping[str, int]) -> list[Row]:
    """Rows of a forward launch, also of one that trains, without weights. address: of the workspace's regions."""
    p, rows = plan.strided, plan.pool_rows
    x, h = p.formats.x, p.formats.h

    def maps(name: str, width: int, size: int) -> dict[str, Any]:
        whole = rows_map(address[name], rows, width, size)
        return {"a": [whole], "a_small": whole._replace(box=box(size, abi.SMALL_BOX_ROWS))}

    of_x, of_h = (
        maps("x_pool", x.width(p.hidden), x.bytes),
        maps("h", h.width(p.intermediate), h.bytes),
    )
    y = rows_map(address["y_rows"], rows, p.hidden, BF16.bytes)
    h_scale = address.get("h_scale")
    return [
        Row("gemm1", **of_x, out=of_h["a"], a_scale=address.get("x_pool_scale"), out_scale=h_scale,
            done=address["gemm1_done"], n=p.intermediate, k=p.hidden),
        Row("gemm2", **of_h, out=[y], a_scale=h_scale, done=address["gemm2_done"],
            n=p.hidden, k=p.intermediate),
    ]  # fmt: skip


def transposed_map(
    base: int, blocks: int, columns: int, box_rows: int = ROWS, rank: int = 2
) -> Map:
    """Return the map of [blocks, columns, 128] e4m3: of rank 2 with all columns as rows, of 4 with blocks outermost."""
    if rank == 2:
        return rows_map(base, blocks * columns, SCALE_GROUP, 1, box_rows)
    block = SCALE_GROUP * columns
    dims, strides = (SCALE_GROUP, columns, 1, blocks), (SCALE_GROUP, block, block)
    return Map(base, dims, strides, box(1, box_rows, rank), 1)


def hs_map(plan: Any, base: int) -> Map:
    """Return the map that gemm1 of backward stores hs by."""
    if not plan.transposes:
        return rows_map(base, plan.pool_rows, plan.strided.intermediate, BF16.bytes)
    return transposed_map(base, plan.pool_rows // BLOCK, transposed_widths(plan.strided)[1])


def gradient_operands(plan: Any, address: Mapping[str, int]) -> list[Row]:
    """Rows of dw13 and dw2: what they multiply. address: of the regions of a workspace, or of a stash."""
    p, rows = plan.strided, plan.pool_rows
    if not plan.transposes:
        dgu = plane_maps(address["dgu"], rows, p.activation.planes, p.intermediate)
        dy_rows = address["dy_rows"] if "dy_rows" in address else address["x_pool"]
        dy = rows_map(dy_rows, rows, p.hidden, BF16.bytes)
        x = rows_map(address["x_rows"], rows, p.hidden, BF16.bytes, rank=4)
        hs = rows_map(address["hs"], rows, p.intermediate, BF16.bytes, rank=4)
        return [Row("dw13", a=dgu, b=x), Row("dw2", a=[dy], b=hs)]
    blocks, (hidden, width) = rows // BLOCK, transposed_widths(p)
    dgu_t = transposed_map(address["dgu_columns"], blocks, p.activation.planes * width)
    dy_t = transposed_map(address["dy_rows"], blocks, hidden)
    x_t = transposed_map(address["x_rows"], blocks, hidden, HALF, 4)
    hs_t = transposed_map(address["hs"], blocks, width, HALF, 4)
    scale = {name: address[f"{name}_scale"] for name in ("dgu_columns", "x_rows", "dy_rows", "hs")}
    return [
        Row("dw13", a=[dgu_t], b=x_t, a_scale=scale["dgu_columns"], b_scale=scale["x_rows"]),
        Row("dw2", a=[dy_t], b=hs_t, a_scale=scale["dy_rows"], b_scale=scale["hs"]),
    ]


def backward_rows(plan: Any, address: Mapping[str, int]) -> list[Row]:
    """Rows of a backward launch, without weights and gradients. address: of both workspaces' regions."""
    p, rows = plan.strided, plan.pool_rows
    hidden, width, planes, x = p.hidden, p.intermediate, p.activation.planes, p.formats.dy
    dgu = plane_maps(address["dgu"], rows, planes, width)
    pool = recomputed = rows_map(address["x_pool"], rows, hidden, x.bytes)
    scale, dgu_scale, dgu_rows = address.get("x_pool_scale"), address.get("dgu_scale"), dgu
    if x.scaled:
        dgu_rows = plane_maps(address["dgu_rows"], rows, planes, width, x.bytes)
    else:
        recomputed = rows_map(address["x_rows"], rows, hidden, BF16.bytes)
    return [
        Row("gemm1", a=[pool], out=dgu, a_scale=scale, out_scale=dgu_scale,
            done=address["gemm1_done"], n=width, k=hidden),
        Row("gemm2", a=dgu_rows, out=[rows_map(address["y_rows"], rows, hidden, BF16.bytes)],
            a_scale=dgu_scale, done=address["gemm2_done"], n=hidden, k=width),
        *gradient_operands(plan, address),
        Row("recompute", a=[recomputed], out=dgu, a_scale=scale, n=width, k=hidden),
    ]  # fmt: skip


def weight_rows(problem: Problem, weights: ExpertWeights, other: int) -> list[Row]:
    """Rows of a forward launch: weights, scales, biases. A rank without experts gets maps that are never used.

    weights: with a contiguous b13, see ExpertWeights.with_flat_bias. other: any legal address.
    """
    stored, shapes = problem.formats.w, shapes_of(problem)
    # h's numbers have as many bytes
    inner = stored.width(abi.SLOT_K_BYTES // problem.formats.x.bytes)
    found = []
    for gemm, name, w, scale, bias in (
        ("gemm1", "w13", weights.w13, weights.w13_scale, weights.b13),
        ("gemm2", "w2", weights.w2, weights.w2_scale, weights.b2),
    ):
        shape = *shapes[name][:3], stored.width(shapes[name][3])
        place, b_scale = place_of("weights", w, shape, other), address_of(scale)
        if (stored.block_scales > 1 or stored.whole_rows) and b_scale % 16:  # read by vectors
            raise ArgumentError("weights' scales", hex(b_scale), "16-byte aligned storage")
        b = matrix_map(place, shape, stored.bytes, HALF)._replace(box=(inner, HALF, 1, 1))
        found.append(Row(gemm, b=b, b_scale=b_scale, bias=address_of(bias)))
    return found


def master_rows(problem: Problem, weights: ExpertWeights, other: int) -> list[Row]:
    """Rows of a backward launch in BF16: weights as they lie, MN-major, and w13 as forward has it, for recompute.

    weights: bf16 w13 and w2, of any strides that TMA takes, and with a contiguous b13. other: any legal address.
    """
    found, shapes = [], shapes_of(problem)
    for gemm, name, box_rows in (
        ("gemm1", "w2", ROWS),
        ("gemm2", "w13", ROWS),
        ("recompute", "w13", HALF),
    ):
        w: Tensor = getattr(weights, name)
        if w.dtype != BF16.dtype:
            raise ArgumentError(f"weights.{name}.dtype", w.dtype, "bf16 masters, for backward")
        place = place_of(f"weights.{name}", w, shapes[name], other)
        found.append(Row(gemm, b=matrix_map(place, shapes[name], BF16.bytes, box_rows)))
    found[-1].bias = address_of(weights.b13)
    return found


def matrices_rows(problem: Problem, weights: ExpertWeights, matrices: int) -> list[Row]:
    """Rows of a backward launch with packed weights: as master_rows(), of a few experts that it expands at a time.

    weights: with a contiguous b13. matrices: address of panels.matrices_shape().
    """
    p = problem
    rooms, of_room, numbers = panels.matrices_shape(p)
    room = of_room * numbers * BF16.bytes
    found = []
    for gemm, height, width, first, planes, scale, box_rows in (
        ("gemm1", p.hidden, p.intermediate, 0, 1, weights.w2_scale, ROWS),
        ("gemm2", p.intermediate, p.hidden, 1, of_room - 1, weights.w13_scale, ROWS),
        ("recompute", p.intermediate, p.hidden, 1, of_room - 1, weights.w13_scale, HALF),
    ):
        place = matrices + first * numbers * BF16.bytes, (width * 2, numbers * 2, room)
        shape = (rooms, planes, height, width)
        b = matrix_map(place, shape, BF16.bytes, box_rows)
        found.append(Row(gemm, b=b, b_scale=address_of(scale)))
    found[-1].bias = address_of(weights.b13)
    return found


def transposed_rows(problem: Problem, transposed: TransposedWeights, other: int) -> list[Row]:
    """Rows of a backward launch in FP8: transposed copies, and w13 as forward has it, for recompute.

    transposed: of weights with a contiguous b13. other: any legal address.
    """
    p, forward, size = problem, transposed.forward, problem.formats.w.bytes
    local, planes, h, i = p.num_local_experts(p.rank), p.activation.planes, p.hidden, p.intermediate
    assert forward.w13_scale is not None
    found = []
    for gemm, name, w, scale, shape in (
        ("gemm1", "transposed.w2", transposed.w2, transposed.w2_scale, (local, 1, i, h)),
        ("gemm2", "transposed.w13", transposed.w13, transposed.w13_scale, (local, planes, h, i)),
        ("recompute", "forward.w13", forward.w13, forward.w13_scale, (local, planes, i, h)),
    ):
        b = matrix_map(place_of(name, w, shape, other), shape, size, HALF)
        found.append(Row(gemm, b=b, b_scale=scale.data_ptr()))
    found[-1].bias = address_of(forward.b13)
    return found


def gradient_rows(
    problem: Problem, targets: Mapping[str, Tensor], other: int, size: int, stashes: bool = False
) -> list[Row]:
    """Rows of a backward launch: where it puts the experts' gradients, and which are wanted.

    targets: those. w13: [L, P*I, H] or [L, P, I, H], w2: [L, H, I], of elements of `size` bytes; b13, b2: fp32.
    stashes: none now, and all of what they are made of. other: any legal address.
    """
    found = []
    for of_w, shape in shapes_of(problem).items():
        name = f"d{of_w}"
        dw, db = targets.get(of_w), targets.get(of_w.replace("w", "b"))
        place = other, _repeated(shape[-1] * size)
        if dw is not None:
            shape = *shape[:3], dw.shape[-1]  # fewer columns where nobody wants them
            place = place_of(name, dw, shape, other)
        out = matrix_map(place, shape, size, ROWS)
        wanted = shape[2] if stashes or dw is not None else 0
        width = 0 if stashes else shape[3]
        found.append(Row(name, out=[out], bias=address_of(db), m=wanted, n=width))
    return found


def address_of(t: Tensor | None) -> int:
    """Return a tensor's address, 0 for none."""
    return 0 if t is None else t.data_ptr()
