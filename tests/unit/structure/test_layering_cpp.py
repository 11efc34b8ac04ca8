"""C++ folders include lower ones only, and no header includes itself in the end: docs/architecture.md."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[3] / "csrc"

# lowest first; folders of one line may not include each other
LAYERS = [
    ("fibers", "base"),
    ("layout", "schedule"),
    ("arch",),
    ("protocol", "act"),
    ("cta",),
    ("formats",),
    ("gemm", "epilogue"),
    ("roles",),
    ("kernels",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
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


def wrong_layers(graph: dict[str, list[str]]) -> list[str]:
    wrong = []
    for path, targets in graph.items():
        for target in targets:
            here, there = folder_of(path), folder_of(target)
            if here != there and LEVEL[there] >= LEVEL[here]:
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
        ("megamoe/roles/routes.cuh", "megamoe/roles/plan.cuh", cycles),
    ],
)
def test_the_checks_see_a_violation(path, target, check):
    graph = includes()
    assert not check(graph)
    graph[path].append(target)
    assert check(graph)
