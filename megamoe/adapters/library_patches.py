"""Replace names in a library's modules, and restore them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megamoe.core.errors import ConfigError

_MISSING = object()


class Patches:
    """What install() of an adapter has set in the library's modules, and what was there before.

    Attributes: made, what install() has returned, None before it and after undo().
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self.made: Any = None

    def check_none(self) -> None:
        """Raise ConfigError where install() was called before."""
        if self.made is not None:
            raise ConfigError("install()", "called again", "one call, or uninstall() before")

    def put(self, made: Any, new: Sequence[tuple[Any, str, Any]]) -> None:
        """Set attributes until undo(). made: what install() is about to return. new: module, name and value of each."""
        for module, name, value in new:
            self._before.append((module, name, getattr(module, name, _MISSING)))
            setattr(module, name, value)
        self.made = made

    def undo(self) -> None:
        """Set all of them back."""
        while self._before:
            module, name, value = self._before.pop()
            if value is _MISSING:
                delattr(module, name)
            else:
                setattr(module, name, value)
        self.made = None


def found(library: str, module: Any, name: str) -> Any:
    """Return a module's attribute. library: its version. Raises ConfigError where it has none."""
    value = getattr(module, name, None)
    if value is None:
        raise ConfigError(f"{module.__name__}.{name}", "missing", library)
    return value
