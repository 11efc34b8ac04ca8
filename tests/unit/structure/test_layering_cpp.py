"""C++ folders include lower ones only, and no header includes itself in the end: docs/architecture.md."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[3] / "csrc"

# A file may include what stands in its own folder and in those before it.
ROOMS = [
    "fibers", "base", "layout", "schedule", "arch", "protocol", "act", "cta",
    "formats", "gemm", "epilogue", "fp4", "rows", "roles", "kernels",
]  # fmt: skip
# fibers know nothing of the rest, and only arch/host knows them
LEVEL = {name: level for level, name in enumerate(ROOMS)}
# What names the wing's work outside of it: the other forms, who chooses, an edge, bytes of the launch.
WHO_KNOWS_FP4 = {
    "megamoe/kernels/dequantize_mxfp4.cuh",  # a pass over its bytes
    "megamoe/layout/passes.h",
    "megamoe/gemm/forms.cuh",
    "megamoe/kernels/forward.cuh",
    "megamoe/kernels/backward.cuh",
    "megamoe/layout/args.h",
    "megamoe/protocol/edges.h",
}
# What a CPU compiler, Python or the model checker reads by itself: no machine behind it.
NO_MACHINE = ("layout/args.h", "schedule/order.h", "protocol/edges.h", "protocol/ring.h")


def folder_of(path: str) -> str:
    """megamoe/roles/load.cuh -> roles, fibers/machine.h -> fibers."""
    return path.removeprefix("megamoe/").split("/")[0]


def includes() -> dict[str, list[str]]:
    """Return what each file of csrc/ includes of csrc/, as paths from there."""
    files = [p for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cpp")]
    found = {}
    for path in files:
        quoted = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
        found[path.relative_to(CSRC).as_posix()] = quoted
    return found


def machine_in_headers(texts: dict[str, str]) -> list[str]:
    """Return what is no plain header though it is called `.h`: a thread index, asm, or an include of a .cuh."""
    return [
        path
        for path, text in texts.items()
        if path.endswith(".h") and re.search(r'\barch::|\basm\b|include "[^"]+\.cuh"', text)
    ]


def plain_headers() -> dict[str, str]:
    """Return the text of each file but the CPU's own: arch/host and the memory on fibers."""
    own = ("megamoe/arch/host/", "megamoe/protocol/host_memory.h", "fibers/")
    paths = {path: CSRC / path for path in includes() if not path.startswith(own)}
    return {path: file.read_text() for path, file in paths.items()}


def test_headers_called_h_know_no_thread_and_no_asm():
    texts = plain_headers()
    assert len(texts) > 60
    assert not machine_in_headers(texts)
    texts["megamoe/layout/args.h"] += "int lane = arch::lane_idx();"
    assert machine_in_headers(texts) == ["megamoe/layout/args.h"]


def test_who_knows_fp4():
    """The wing has one door: what else names it chooses it, or holds its bytes."""
    outside = {
        path
        for path, text in plain_headers().items()
        if not path.startswith("megamoe/fp4/")
        and re.search(r"fp4|FP4|[Pp]anel|[Ee]xpanded\b", text)
    }
    assert outside <= WHO_KNOWS_FP4


def wrong_layers(graph: dict[str, list[str]]) -> list[str]:
    wrong = []
    for path, targets in graph.items():
        for target in targets:
            here, there = folder_of(path), folder_of(target)
            if LEVEL[there] > LEVEL[here]:
                wrong.append(f"{path} includes {target}")
    return wrong


def cycles(graph: dict[str, list[str]]) -> list[str]:
    """Return each file that reaches itself."""
    return [path for path in graph if path in reached(graph, path)]


def reached(graph: dict[str, list[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += graph[path]
    return found


def test_includes_go_down():
    graph = includes()
    assert len(graph) > 30
    assert {folder_of(path) for path in graph} == set(LEVEL), "a folder has no layer, or is gone"
    assert {target for targets in graph.values() for target in targets} <= set(graph)
    assert not wrong_layers(graph)
    assert not cycles(graph)


def test_some_headers_know_no_machine():
    graph = includes()
    for path in NO_MACHINE:
        folders = {folder_of(p) for p in reached(graph, f"megamoe/{path}")}
        assert not folders & {"arch", "fibers"}, path


def test_the_fiber_machine_knows_nothing_of_the_kernel():
    words = re.compile(
        r"\bmegamoe\b|\bArgs\b|\bEdge\b|FaultRecord|\bexpert|\bMEGAMOE_", re.IGNORECASE
    )
    for path in (CSRC / "fibers").glob("*.h"):
        assert not words.findall(path.read_text()), path.name


@pytest.mark.parametrize(
    ("path", "target", "check"),
    [
        ("megamoe/gemm/mainloop.cuh", "megamoe/roles/math.cuh", wrong_layers),
        ("fibers/machine.h", "megamoe/layout/args.h", wrong_layers),
        ("megamoe/gemm/mainloop.cuh", "megamoe/epilogue/plain.cuh", wrong_layers),
        ("megamoe/rows/routes.cuh", "megamoe/rows/plan.cuh", cycles),
    ],
)
def test_the_checks_see_a_violation(path, target, check):
    graph = includes()
    assert not check(graph)
    graph[path].append(target)
    assert check(graph)
