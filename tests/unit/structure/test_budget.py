"""Lines of code are two budgets, of what ships and of what tests it: docs/decisions.md (0020) says what raises them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp", ".inc"}
# The kernel's source on a CPU: no user runs it, tests do.
EQUIPMENT = (
    "csrc/fibers",
    "csrc/megamoe/arch/host",
    "csrc/megamoe/protocol/host_memory.h",
    "megamoe/backends/emulate",
    "megamoe/testing",
)
BUDGETS = {"product": 34_480, "equipment": 3_636}


def lines() -> dict[str, int]:
    found = dict.fromkeys(BUDGETS, 0)
    for folder in ("megamoe", "jit", "csrc"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SUFFIXES:
                tests = str(path.relative_to(ROOT)).startswith(EQUIPMENT)
                found["equipment" if tests else "product"] += len(path.read_text().splitlines())
    return found


@pytest.mark.parametrize("kind", BUDGETS)
def test_code_stays_within_its_budget(kind: str) -> None:
    assert all((ROOT / place).exists() for place in EQUIPMENT)
    assert 0 < lines()[kind] <= BUDGETS[kind]
    said = (ROOT / "docs" / "decisions.md").read_text().partition("### 0020")[2]
    assert f"{BUDGETS[kind]:,}" in said
