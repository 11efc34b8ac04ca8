"""Kernels with a flaw, which a test has to see."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megamoe.jit import paths


def names(flaws: dict[str, tuple[str, str, str]]) -> list[str]:
    """Return the names. One that the sources have outgrown is an error already where tests are collected."""
    for name, (file, old, _) in flaws.items():
        assert (paths.CSRC / "megamoe" / file).read_text().count(old) == 1, (name, file, old)
    return list(flaws)


def plant(flaw: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the kernel be compiled from sources with a flaw: in a file, something replaced."""
    source, (file, old, new) = folder / "csrc", flaw
    shutil.copytree(paths.CSRC, source)
    header = source / "megamoe" / file
    header.write_text(header.read_text().replace(old, new))
    monkeypatch.setattr(paths, "CSRC", source)
