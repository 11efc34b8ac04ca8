"""The programs of README.md and docs/*.md; the second word of a fence says what runs it (unit/docs/test_pages.py)."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return what stands behind the opening fence of each block of a page, and the block."""
    return FENCE.findall((ROOT / page).read_text())


def programs(page: str, tag: str = "") -> list[str]:
    """Return the blocks of Python with this second word, in the order of the page."""
    return [text for kind, text in blocks(page) if kind == f"python {tag}".strip()]
