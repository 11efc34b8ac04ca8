"""Windows of a host's layers: all of one size share one, since one each would take hundreds of MB each."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.config import Problem
from megamoe.frontend.functional import choose
from megamoe.memory.window import Window, WindowSpec

_windows: dict[Any, Window] = {}


def shared_window(
    problem: Problem, group: Any, device: torch.device, backend: str, options: dict[str, Any]
) -> dict[str, Window]:
    """Return the option `window` for a layer of this process where the kernel runs, nothing elsewhere. Collective."""
    if device.type != "cuda" or options.get("window") is not None:
        return {}
    if choose(backend, problem, group, device, options) != "mega":
        return {}
    key = WindowSpec.of(problem), group, device
    if key not in _windows:
        _windows[key] = Window(problem, group, device=device)
    return {"window": _windows[key]}


def close_windows() -> None:
    """Close all of them, after their layers. Collective."""
    for window in _windows.values():
        window.close()
    _windows.clear()
