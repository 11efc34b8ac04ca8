"""Kernels with a flaw, which a test has to see."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megamoe.backends.emulate.emulation import EmulationError
from megamoe.core.errors import ProtocolTimeout
from megamoe.jit import paths

Flaw = tuple[str, str, str]  # in a file, something replaced
# How a run shows it: another result, what the machine does not allow, or a wait without end.
SEEN = AssertionError, EmulationError, ProtocolTimeout


def spoiled(flaw: Flaw, source: Path) -> tuple[Path, str]:
    """Return the file below `source`, and its text with the flaw."""
    file, old, new = flaw
    header = source / "megamoe" / file
    text = header.read_text()
    assert text.count(old) == 1, (file, old)
    return header, text.replace(old, new)


def names(flaws: dict[str, Flaw]) -> list[str]:
    """Return the names. One that the sources have outgrown is an error already where tests are collected."""
    for flaw in flaws.values():
        spoiled(flaw, paths.CSRC)
    return list(flaws)


def plant(flaw: Flaw, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the kernel be compiled from sources with a flaw."""
    source = folder / "csrc"
    shutil.copytree(paths.CSRC, source)
    header, text = spoiled(flaw, source)
    header.write_text(text)
    monkeypatch.setattr(paths, "CSRC", source)
