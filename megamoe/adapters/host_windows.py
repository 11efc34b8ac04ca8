"""Windows of a host's layers: all of one size share one, since one each would take hundreds of MB each."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.core.config import Problem
from megamoe.layer.functional import choose
from megamoe.window.window import Window, WindowSpec

_windows: dict[Any, tuple[Window, list[int]]] = {}  # with how many layers use it


def borrow_window(
    problem: Problem, group: Any, device: torch.device, backend: str, options: dict[str, Any]
) -> dict[str, Window]:
    """Return the option `window` for a layer where the kernel runs, nothing elsewhere. Collective."""
    chosen = choose(backend, problem, group, device, options)
    if chosen != "mega" or options.get("window") is not None:
        return {}
    key = WindowSpec.of(problem), group, device
    if key not in _windows:
        _windows[key] = Window(problem, group, device=device), [0]
    window, users = _windows[key]
    users[0] += 1
    return {"window": window}


def return_window(borrowed: dict[str, Window]) -> None:
    """Give back what borrow_window returned, once its layer is closed; the last one closes the window. Collective."""
    for key, (window, users) in list(_windows.items()):
        if window is borrowed.get("window"):
            users[0] -= 1
            if not users[0]:
                del _windows[key]
                window.close()
