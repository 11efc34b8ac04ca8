"""Lines of product code are a budget: it is raised by a line in docs/decisions.md (0020), not by the way."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAX_LINES = 33_480
SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp", ".inc"}


def lines(*folders):
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    assert len(files) > 100
    return sum(len(path.read_text().splitlines()) for path in files)


def test_product_code_stays_within_its_budget():
    assert lines("megamoe", "jit", "csrc") <= MAX_LINES
    said = (ROOT / "docs" / "decisions.md").read_text().partition("### 0020")[2]
    assert f"{MAX_LINES:,}" in said
