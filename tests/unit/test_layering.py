"""Imports follow docs/architecture.md: a module imports lower layers only; files stay readable."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megamoe"

# lowest first; units of one line may not import each other
LAYERS = [
    ("errors", "uncompiled", "full_fp32"),
    (
        "env",
        "transforms",
        "formats.table",
        "formats.planes",
        "formats.joined",
        "formats.quantized",
        "formats.versions",
    ),
    ("config",),
    ("backends.order", "backends.statistics", "formats.fp4"),
    ("formats.mxfp4", "formats.nvfp4"),
    ("formats.quantization", "backends.reference", "checkpoints"),
    ("formats.weights", "jit"),
    ("formats.cache", "backends.staged", "backends.gradients", "memory.panels"),
    ("memory.layout",),
    ("memory.arguments", "memory.transport", "memory.launches"),
    ("memory.window", "memory.training", "backends.emulated_rank"),
    ("backends.kernels", "backends.reserve", "backends.emulation"),
    ("backends.mega_training", "backends.emulate", "ops"),
    ("backends.mega",),
    ("frontend.agreement",),
    ("frontend.functional", "frontend.placement"),
    ("frontend.replicas",),
    ("frontend.runtime", "frontend.main_grad"),
    ("frontend.backward",),
    ("frontend.delayed",),
    ("frontend.autograd",),
    ("frontend.known", "frontend.rows", "frontend.experts"),
    ("frontend.shards", "frontend.quantized", "frontend.optimizers"),
    ("frontend.moves",),
    ("frontend.layer", "frontend.initial"),
    ("frontend.placed_module",),
    ("frontend.module",),
    ("adapters.host_activations", "adapters.host_parameters"),
    ("adapters.host_windows", "adapters.host_patches"),
    ("frontend.training", "frontend.report", "frontend.shared_experts"),
    ("adapters.transformers_weights",),
    ("adapters.transformers", "adapters.megatron_experts", "adapters.torchtitan_experts"),
    ("adapters.vllm_experts",),
    ("adapters.megatron", "adapters.torchtitan", "adapters.sglang", "adapters.vllm"),
    ("adapters.vllm_plugin", "adapters.flashinfer"),
    ("testing",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FOLDERS = {name.split(".")[0] for name in LEVEL if "." in name}  # their modules are units


def files():
    found = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "jit").rglob("*.py"))
    return [p for p in found if p.parent != PACKAGE or p.name != "__init__.py"]


def unit_of(parts):
    """The layer's name of a module: backends, reference, gemm -> backends.reference; jit, cache -> jit."""
    return ".".join(parts[: 2 if parts[0] in FOLDERS else 1])


def unit_of_file(path):
    if (ROOT / "jit") in path.parents:
        return "jit"
    return unit_of(path.relative_to(PACKAGE).with_suffix("").parts)


def imported_units(tree):
    """Yield (unit, line) of every import of this package, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, *parts = alias.name.split(".")
                if package == "megamoe":
                    yield (unit_of(parts) if parts else "megamoe"), node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            package, *parts = (node.module or "").split(".")
            if package == "megamoe":
                for alias in node.names:
                    yield unit_of([*parts, alias.name]), node.lineno


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    if path.name == "__init__.py" and path.parent.name in FOLDERS:
        assert not list(imported_units(ast.parse(path.read_text()))), "a folder is not a layer"
        return
    unit = unit_of_file(path)
    assert unit in LEVEL, f"{unit} has no layer: add it here and to docs/architecture.md"
    wrong = []
    for target, line in imported_units(ast.parse(path.read_text())):
        if target == unit:
            continue
        if target not in LEVEL or LEVEL[target] >= LEVEL[unit]:
            wrong.append(f"line {line}: {unit} imports {target}")
    assert not wrong, "; ".join(wrong)


def test_the_oracle_shares_no_arithmetic():
    for path in (PACKAGE / "backends" / "reference").glob("*.py"):
        units = {unit for unit, _ in imported_units(ast.parse(path.read_text()))}
        # a mark, a record of counts, a pair of tensors, a switch of torch's, and exceptions
        shared = {
            "backends.order",
            "backends.statistics",
            "formats.quantized",
            "full_fp32",
            "errors",
        }
        assert units <= {"backends.reference", "config"} | shared, path.name


def test_nothing_that_the_oracle_judges_computes_by_it():
    found = {
        unit_of_file(path)
        for path in files()
        for unit, _ in imported_units(ast.parse(path.read_text()))
        if unit == "backends.reference"
    }
    # what judges, and what sends weights between ranks as the oracle does
    assert found - {"backends.reference"} == {"testing", "backends.emulate"}


def test_the_checker_sees_a_violation():
    text = "def f():\n    from megamoe.frontend.module import MegaMoE\nimport megamoe.env"
    assert set(imported_units(ast.parse(text))) == {("env", 3), ("frontend.module", 2)}


def test_test_files_have_names_of_their_own():
    """pytest imports them by their bare names, so that two of one name cannot be collected together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
