"""Read csrc/megamoe/layout/args.h as ctypes: launch arguments, FaultRecord, RouteCell, StateHeader, Edge; tile shapes.

The header is the only definition. It is read line by line, one field per line. tests/unit/jit/test_abi.py compares
every offset with a C++ compiler's, and each cubin contains the size of its argument, which module.py checks.
"""

from __future__ import annotations

import ctypes
import enum
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from megamoe.core.errors import AbiMismatch
from megamoe.jit import paths

_SCALARS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}
_STRUCT = re.compile(
    r"^(?:template <int (\w+)>\n)?struct\s+(?:alignas\((\d+)\)\s+)?(\w+)\s*\{[^\n]*\n(.*?)^\};",
    re.MULTILINE | re.DOTALL,
)
_FIELD = re.compile(r"^(?:const\s+)?(\w+(?:<\d+>)?)\s*(\*?)\s+(\w+)(?:\[(\w+)\])?;$")
_TEMPLATE = re.compile(r"\b(\w+)<(\d+)>")
_TILE = re.compile(r"^using (\w+) = TileShape<(\d+), (\d+), (\d+), (\d+)>;", re.MULTILINE)
_ROLE = re.compile(r'^constexpr Role \w+ = \{"(\w+)", (\d+), (\d+)\};', re.MULTILINE)
_CONSTANT = re.compile(r"^constexpr\s+\w+\s+(\w+)\s*=\s*(\d+);", re.MULTILINE)
_GEMMS = re.compile(r"^enum class GemmId : int \{([^}]*)\};", re.MULTILINE)
_ENUM = re.compile(r"^enum class Edge[^{]*\{(.*?)^\};", re.MULTILINE | re.DOTALL)


def read_text(header: str = "layout/args.h") -> str:
    """Return a header of csrc/megamoe."""
    return (paths.CSRC / "megamoe" / header).read_text()


def parse(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the structures of the header as ctypes classes, and its integer constants."""
    constants = {name: int(value) for name, value in _CONSTANT.findall(text)}
    types: dict[str, Any] = dict(_SCALARS)
    structures: dict[str, Any] = {}
    alignments: dict[str, int] = {}
    templates: dict[str, tuple[str, str, int]] = {}  # name -> parameter, body, alignment

    def make(name: str, body: str, alignment: int, values: Mapping[str, int]) -> None:
        fields = _fields(body, types, {**constants, **values})
        types[name] = structures[name] = _structure(name, fields, alignment, alignments)

    for parameter, alignment, name, body in _STRUCT.findall(text):
        if parameter:
            templates[name] = parameter, body, int(alignment or 0)
            continue
        for template, value in _TEMPLATE.findall(body):
            if f"{template}<{value}>" not in types and template in templates:
                of, inner, unit = templates[template]
                make(f"{template}<{value}>", inner, unit, {of: int(value)})
        make(name, body, int(alignment or 0), {})
    return structures, constants


def _fields(
    body: str, types: Mapping[str, Any], constants: Mapping[str, int]
) -> list[tuple[str, str, Any]]:
    """Return (name, type name, ctypes type) of each line of a structure."""
    fields = []
    for raw in body.splitlines():
        line = re.sub(r"\s*\*\s*", "* ", raw.split("//")[0].strip())
        if not line:
            continue
        match = _FIELD.match(line)
        if match is None:
            raise AbiMismatch(f"layout/args.h: cannot read the field {raw.strip()!r}")
        type_name, pointer, name, count = match.groups()
        ctype: Any
        if pointer:
            ctype = ctypes.c_void_p
        elif type_name in types:
            ctype = types[type_name]
        else:
            raise AbiMismatch(f"layout/args.h: unknown type {type_name} of {name}")
        if count:
            ctype = ctype * (int(count) if count.isdigit() else constants[count])
        fields.append((name, "" if pointer else type_name, ctype))
    return fields


def _structure(
    name: str, fields: list[tuple[str, str, Any]], alignment: int, alignments: dict[str, int]
) -> Any:
    """Build the class. ctypes knows no alignas before Python 3.13, so padding fields stand in for it."""
    laid_out: list[tuple[str, Any]] = []
    offset, widest = 0, max(alignment, 1)

    def pad_to(unit: int) -> None:
        nonlocal offset
        gap = -offset % unit
        if gap:
            laid_out.append((f"_pad{offset}", ctypes.c_uint8 * gap))
            offset += gap

    for field, type_name, ctype in fields:
        unit = alignments.get(type_name, ctypes.alignment(ctype))
        widest = max(widest, unit)
        pad_to(unit)
        laid_out.append((field, ctype))
        offset += ctypes.sizeof(ctype)
    pad_to(widest)
    alignments[name] = widest
    # Without slots a name that the header has not would become an attribute of its own, in silence.
    found: dict[str, Any] = {"_fields_": laid_out, "alignment": widest, "__slots__": ()}
    if any(field == "args" for field, _ in laid_out):  # what all launches have
        found["_anonymous_"] = ("args",)
    return type(name, (ctypes.Structure,), found)


class TileShape(NamedTuple):
    """A shape of csrc/megamoe/schedule/tile_shape.h."""

    rows: int  # of a block
    half_columns: int
    num_slots: int
    num_output_slots: int


STRUCTURES, CONSTANTS = parse(read_text())
Args: Any = STRUCTURES["Args"]
# The argument of each kind of launch, whose first member is Args: its fields are those of the whole, too.
LAUNCHES: dict[str, Any] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Args")).lower(): structure
    for name, structure in STRUCTURES.items()
    if hasattr(structure, "args")
}
FaultRecord: Any = STRUCTURES["FaultRecord"]
RouteCell: Any = STRUCTURES["RouteCell"]
StateHeader: Any = STRUCTURES["StateHeader"]
TensorMap: Any = STRUCTURES["TensorMap"]
_edges = re.findall(r"^\s*(\w+)\s*=\s*(\d+)", _ENUM.search(read_text())[1], re.MULTILINE)  # type: ignore[index]
Edge: Any = enum.IntEnum("Edge", {name: int(value) for name, value in _edges})  # type: ignore[misc]
MAX_RANKS = CONSTANTS["max_ranks"]
# (name, first warp, warps) of each role
ROLES = [(n, int(a), int(b)) for n, a, b in _ROLE.findall(read_text("cta/warps.h"))]
# The GEMMs of a launch, in the order of its table.
GEMMS = re.findall(r"\w+", _GEMMS.search(read_text("schedule/order.h"))[1])  # type: ignore[index]
_shapes = read_text("schedule/tile_shape.h")
TILES = {name: TileShape(*map(int, numbers)) for name, *numbers in _TILE.findall(_shapes)}
_sizes = {name: int(value) for name, value in _CONSTANT.findall(_shapes)}
WARPGROUP_ROWS, SLOT_K_BYTES = _sizes["warpgroup_rows"], _sizes["slot_k_bytes"]
SMALL_BOX_ROWS = _sizes["small_box_rows"]


def field_names(structure: Any) -> list[str]:
    """Return the fields that the header has, without padding."""
    return [field[0] for field in structure._fields_ if not field[0].startswith("_pad")]


def aligned(structure: Any) -> Any:
    """Return a zeroed instance whose address has the structure's alignment."""
    buffer = bytearray(ctypes.sizeof(structure) + structure.alignment)
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return structure.from_buffer(buffer, -start % structure.alignment)


def pointer(owner: Any, offset: int) -> Any:
    """Return the pointer at an offset of a structure, as a number."""
    return ctypes.c_uint64.from_address(ctypes.addressof(owner) + offset)


def fault_fields(record: Any) -> dict[str, Any]:
    """Return a FaultRecord as a dict, edge and role by name; what errors.fault_to_error takes."""
    fields = {name: int(getattr(record, name)) for name in field_names(FaultRecord)}
    edges = {int(edge): edge.name for edge in Edge}
    edge = edges.get(fields["edge"], f"edge {fields['edge']}")
    return {**fields, "edge": edge, "role": role_name(fields["role"])}


def role_name(warp: int) -> str:
    """Name the role of a warp of the kernel."""
    for name, first, count in ROLES:
        if first <= warp < first + count:
            return f"{name} {(warp - first) // 4}" if count > 4 else name  # by warpgroup
    return f"warp {warp}"
