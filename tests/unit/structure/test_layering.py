"""Imports go down: fourteen rooms, one folder each. docs/architecture.md says what each knows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megamoe"

# A module may import from its own room and from those before it.
ROOMS = [
    "core",
    "formats",
    "group",
    "jit",
    "launch",
    "window",
    "backends",
    "ops",
    "experts",
    "layer",
    "nn",
    "adapters",
    "checkpoints",
    "testing",
]


IMPORT = ast.Import | ast.ImportFrom


def files():
    found = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "jit").rglob("*.py"))
    return [p for p in found if p.parent != PACKAGE or p.name != "__init__.py"]


def room_of_file(path):
    return "jit" if ROOT / "jit" in path.parents else path.relative_to(PACKAGE).parts[0]


def imports(tree, ours="megamoe"):
    """Yield (module below ours, line) of every import of this package, also those inside functions and by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            package, _, module = getattr(node.args[0], "value", "").partition(".")
            if package == ours:
                yield module, node.lineno
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, module = alias.name.partition(".")
                if package == ours:
                    yield module, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            package, _, module = (node.module or "").partition(".")
            if package == ours:
                for alias in node.names:
                    yield f"{module}.{alias.name}".lstrip("."), node.lineno


def imports_of(path, ours="megamoe"):
    return imports(ast.parse(path.read_text()), ours)


def violations(room, found):
    """Return what a module of the room must not import."""
    below = ROOMS[: ROOMS.index(room) + 1]
    return [f"line {line}: {m}" for m, line in found if m.split(".")[0] not in below]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    assert room_of_file(path) in ROOMS, "no such room: see docs/architecture.md"
    assert not violations(room_of_file(path), imports_of(path))


def cycles(graph):
    """Return each module that reaches itself."""
    found = []
    for start in graph:
        seen, todo = set(), list(graph[start])
        while todo:
            module = todo.pop()
            if module not in seen and module in graph:
                seen.add(module)
                todo += graph[module]
        found += [start] if start in seen else []
    return found


def module_graph():
    """Return what each module imports when it is imported itself."""
    graph = {}
    for path in files():
        of_jit = ROOT / "jit" in path.parents
        parts = path.relative_to(ROOT if of_jit else PACKAGE).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        top = [n for n in ast.parse(path.read_text()).body if isinstance(n, IMPORT)]
        graph[name] = [m for m, _ in imports(ast.Module(top, []))]
    known = set(graph)
    return {
        name: {m if m in known else m.rpartition(".")[0] for m in found} - {name}
        for name, found in graph.items()
    }


def test_no_module_reaches_itself():
    graph = module_graph()
    assert not cycles(graph)
    graph["core.errors"] = {"nn.module"}
    assert "core.errors" in cycles(graph)


def test_a_module_that_is_imported_by_its_name_is_seen():
    by_name = ast.parse('import_module("megamoe.jit.quantize")')
    assert violations("formats", imports(by_name)) == ["line 1: jit.quantize"]
    assert not violations("launch", imports(by_name))


def test_no_module_of_bench_reaches_itself():
    paths = {
        p.relative_to(ROOT / "bench").with_suffix(""): p for p in (ROOT / "bench").rglob("*.py")
    }
    graph = {".".join(name.parts): imports_of(path, "bench") for name, path in paths.items()}
    graph = {
        name: {m if m in graph else m.rpartition(".")[0] for m, _ in found}
        for name, found in graph.items()
    }
    assert len(graph) > 40
    assert not cycles(graph)
    graph["timing"] |= {"sweep"}
    assert {"timing", "sweep", "layers"} <= set(cycles(graph))


def test_the_oracle_shares_no_arithmetic():
    # how ranks meet and gather, records of calls and counts, a switch of torch's, the problem, and exceptions
    shared = {
        "group",
        "backends.call",
        "backends.gathered",
        "backends.statistics",
        "formats.quantized",
        "core.full_fp32",
        "core.errors",
        "core.config",
    }
    for path in (PACKAGE / "backends" / "reference").glob("*.py"):
        for module, line in imports_of(path):
            known = any(module.startswith(name) for name in {*shared, "backends.reference"})
            assert known, f"{path.name}, line {line}: {module}"


def test_nothing_that_the_oracle_judges_computes_by_it():
    found = {
        path.relative_to(PACKAGE).with_suffix("").parts[:2]
        for path in files()
        for module, _ in imports_of(path)
        if module.startswith("backends.reference") and room_of_file(path) != "testing"
    }
    assert found == {("backends", "reference"), ("backends", "select")}  # the table of backends


def of_the_checkout(path, text):
    """Return what a file must not import: nothing imports a command or a test, and bench only bench and megamoe."""
    commands = {p.stem for p in (ROOT / "tools").glob("*.py")}
    foreign = {"tools", "tests", *commands} - ({"command"} if path.parts[0] == "tools" else set())
    if path.parts[0] in ("megamoe", "jit"):
        foreign |= {"bench"}
    found = []
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"line {node.lineno}: {n}" for n in names if n.split(".")[0] in foreign]
    return found


def test_a_command_is_short():
    lengths = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "tools").glob("*.py")}
    assert {name for name, lines in lengths.items() if lines > 80} == set()


@pytest.mark.parametrize("place", ["megamoe", "jit", "bench", "tools"])
def test_nothing_imports_commands_or_tests_and_no_product_imports_bench(place):
    for path in (ROOT / place).rglob("*.py"):
        assert not of_the_checkout(path.relative_to(ROOT), path.read_text()), path


def test_the_checker_of_the_checkout_sees_a_violation():
    text = "import tests.pages\nfrom bench import ops\ndef f():\n    from soak import main\nimport command"

    def wrong(place):
        return of_the_checkout(Path(place) / "x.py", text)

    assert wrong("tools") == ["line 1: tests.pages", "line 4: soak"]
    assert wrong("bench") == ["line 1: tests.pages", "line 5: command", "line 4: soak"]
    assert wrong("jit") == [
        "line 1: tests.pages",
        "line 2: bench",
        "line 5: command",
        "line 4: soak",
    ]


def test_the_checker_sees_a_violation():
    text = "def f():\n    from megamoe.layer.module import MegaMoE\nimport megamoe.core.env"
    found = sorted(imports(ast.parse(text)))
    assert found == [("core.env", 3), ("layer.module.MegaMoE", 2)]
    assert violations("ops", found) == ["line 2: layer.module.MegaMoE"]
    assert not violations("layer", found)


def test_test_files_have_names_of_their_own():
    """pytest imports them by their bare names, so that two of one name cannot be collected together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_rooms_of_the_tests_are_those_of_the_code():
    unit = ROOT / "tests" / "unit"
    found = {p.name for p in unit.iterdir() if p.is_dir() and any(p.glob("test_*.py"))}
    assert found - {"tools", "docs", "structure"} <= set(ROOMS)


def test_nothing_looks_at_its_callers():
    """What a function does depends on its arguments, not on who calls it."""
    looks = re.compile(r"_getframe|currentframe|\.f_back\b|inspect\.stack")
    assert not [p for p in files() if looks.search(p.read_text())]
    assert looks.search("sys._getframe(1).f_back")
