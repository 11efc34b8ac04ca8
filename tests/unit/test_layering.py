"""Imports follow docs/architecture.md: a module imports lower layers only; files stay readable."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megamoe"

# lowest first; modules of one line may import each other only if they are the same module
LAYERS = [
    ("errors",),
    ("env",),
    ("config",),
    ("reference", "weights"),
    ("staged", "layout", "jit"),
    ("arguments", "transport"),
    ("window",),
    ("mega", "emulate"),
    ("functional",),
    ("autograd",),
    ("module",),
    ("testing",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MAX_LINES = 350


def files():
    found = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "jit").rglob("*.py"))
    return [path for path in found if path != PACKAGE / "__init__.py"]


def unit_of(path):
    """The layer's name of a file: megamoe/reference/gemm.py -> reference, jit/cache.py -> jit."""
    if (ROOT / "jit") in path.parents:
        return "jit"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(tree):
    """Yield (unit, line) of every import of this package, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "megamoe":
                    yield (parts[1] if len(parts) > 1 else "megamoe"), node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            parts = (node.module or "").split(".")
            if parts[0] != "megamoe":
                continue
            if len(parts) > 1:
                yield parts[1], node.lineno
            else:
                for alias in node.names:
                    yield alias.name, node.lineno


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    unit = unit_of(path)
    assert unit in LEVEL, f"{unit} has no layer: add it here and to docs/architecture.md"
    wrong = []
    for target, line in imported_units(ast.parse(path.read_text())):
        if target == unit:
            continue
        if target not in LEVEL or LEVEL[target] >= LEVEL[unit]:
            wrong.append(f"line {line}: {unit} imports {target}")
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_the_oracle_shares_no_arithmetic():
    for path in (PACKAGE / "reference").glob("*.py"):
        units = {unit for unit, _ in imported_units(ast.parse(path.read_text()))}
        assert units <= {"reference", "config"}, path.name


def test_the_checker_sees_a_violation():
    tree = ast.parse("def f():\n    from megamoe.module import MegaMoE\nimport megamoe.env")
    assert list(imported_units(tree)) == [("env", 3), ("module", 2)] or set(
        imported_units(tree)
    ) == {("env", 3), ("module", 2)}
