"""Kernels with a flaw, which a test has to see."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megamoe.jit import paths


def plant(flaw: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the kernel be compiled from sources with a flaw: in a file, something replaced."""
    source, (file, old, new) = folder / "csrc", flaw
    shutil.copytree(paths.CSRC, source)
    header = source / "megamoe" / file
    assert header.read_text().count(old) == 1
    header.write_text(header.read_text().replace(old, new))
    monkeypatch.setattr(paths, "CSRC", source)
