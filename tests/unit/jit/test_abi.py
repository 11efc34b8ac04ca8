"""layout/args.h as Python reads it against what a C++ compiler makes of it."""

import ctypes
import json
import subprocess

import pytest

from megamoe.core.errors import AbiMismatch
from megamoe.jit import abi, paths

STRUCTURES = tuple(abi.STRUCTURES)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Sizes, alignments and offsets according to g++."""
    lines = []
    for name in STRUCTURES:
        lines.append(
            f'printf("\\"{name}\\": {{\\"\\": [%zu, %zu]", sizeof({name}), alignof({name}));'
        )
        for field in abi.field_names(abi.STRUCTURES[name]):
            at = f"{name}, {field}"
            lines.append(
                f'printf(", \\"{field}\\": [%zu, %zu]", offsetof({at}), sizeof({name}::{field}));'
            )
        lines.append(f'printf("}}%s", "{name}" == std::string("{STRUCTURES[-1]}") ? "" : ",");')
    edges = "".join(
        f'printf("%s\\"{e.name}\\": %u", {int(e)} ? "," : "", (unsigned)Edge::{e.name});'
        for e in abi.Edge
    )
    source = (
        '#include "megamoe/layout/args.h"\n#include <cstdio>\n#include <string>\nusing namespace megamoe;\n'
        'int main() {\nprintf("{");\n'
        + "\n".join(lines)
        + f'\nprintf(", \\"Edge\\": {{"); {edges}\nprintf("}}}}");\n}}\n'
    )
    folder = tmp_path_factory.mktemp("abi")
    (folder / "offsets.cpp").write_text(source)
    command = [
        "g++",
        "-std=c++17",
        "-Wno-invalid-offsetof",
        f"-I{paths.CSRC}",
        "offsets.cpp",
        "-o",
        "offsets",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return json.loads(
        subprocess.run([folder / "offsets"], capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.parametrize("name", STRUCTURES)
def test_offsets_equal_the_compilers(compiled, name):
    structure = abi.STRUCTURES[name]
    expected = dict(compiled[name])
    assert [ctypes.sizeof(structure), structure.alignment] == expected.pop("")
    ours = {
        field: [getattr(structure, field).offset, getattr(structure, field).size]
        for field in abi.field_names(structure)
    }
    assert ours == expected


def test_edges_equal_the_compilers(compiled):
    assert {edge.name: int(edge) for edge in abi.Edge} == compiled["Edge"]


def test_no_field_is_missed():
    """Every line of the header that ends a declaration became a field."""
    body = abi.read_text().split("struct Args {")[1].split("\n};")[0]
    declared = [line.split("//")[0] for line in body.splitlines()]
    assert len(abi.field_names(abi.Args)) == sum(line.count(";") for line in declared)


def test_unreadable_field_is_an_error():
    with pytest.raises(AbiMismatch, match="two, fields"):
        abi.parse("struct Args {\n    int32_t two, fields;\n};\n")
    with pytest.raises(AbiMismatch, match="unknown type"):
        abi.parse("struct Args {\n    Strange field;\n};\n")


def test_alignment_needs_padding():
    big = "struct alignas(64) Big {\n    uint64_t w[2];\n};\n"
    text = big + "struct Args {\n    int32_t a;\n    Big b;\n    int32_t c;\n};\n"
    structures, _ = abi.parse(text)
    assert structures["Big"].alignment == 64
    assert structures["Args"].b.offset == 64
    assert ctypes.sizeof(structures["Args"]) == 192  # Big is padded to 64


def test_aligned_instances():
    for _ in range(20):
        args = abi.aligned(abi.LAUNCHES["forward"])
        assert ctypes.addressof(args) % 64 == 0
        assert bytes(args) == bytes(ctypes.sizeof(args))


def test_a_name_that_the_header_has_not_is_refused():
    args = abi.aligned(abi.LAUNCHES["backward"])
    args.rows_in = args.own.x = args.gemm[4].k = 1
    for structure in (args, args.own, args.gemm[0], args.state):
        with pytest.raises(AttributeError, match="training"):
            structure.training = 1


def test_roles_are_the_warps_of_a_cta():
    warps = [warp for _, first, count in abi.ROLES for warp in range(first, first + count)]
    assert warps == list(range(16))
    names = [abi.role_name(warp) for warp in (0, 1, 2, 3, 4, 7, 8, 11, 12, 15, 16)]
    assert names == [
        *("load_a", "load_b", "store", "scheduler", "transport", "transport"),
        *("math 0", "math 0", "math 1", "math 1", "warp 16"),
    ]


def test_fault_fields_name_the_edge():
    record = abi.FaultRecord(edge=int(abi.Edge.rows_ready), peer=3, expected=128)
    fields = abi.fault_fields(record)
    assert (fields["edge"], fields["peer"], fields["expected"]) == ("rows_ready", 3, 128)
