"""What all adapters do alike: refuse what no layer could be, open a layer at a first call, share its window, close it.

An adapter says how its library's parameters are read, what of the library's configuration no layer follows, and where
it hooks in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from megamoe.backends.select import check_options, resolve, window_of
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.core.uncompiled import uncompiled
from megamoe.group.group import ALONE, Group, Together
from megamoe.layer.layer import Layer
from megamoe.window.window import Window, WindowSpec

MAX_TOKENS = 8192  # of a call, where neither the library nor its user says

_windows: dict[Any, tuple[Window, list[int]]] = {}  # with how many layers use it

at_first_call = uncompiled(
    "megamoe layers are made by a first call: make one before torch.compile(fullgraph=True)"
)


def check(
    backend: str, options: dict[str, Any], trains: Problem | None = None
) -> tuple[str, dict[str, Any]]:
    """Return backend and options, as a library's user stated them for megamoe.Layer.

    Raises ConfigError for those that no layer could have, and for a problem `trains` whose precision does not.
    """
    if trains is not None and not trains.formats.trains:
        expected = "'bf16' or 'fp8', of bf16 parameters"
        raise ConfigError("precision", repr(trains.precision), expected)
    check_options(Problem(128, 128, 1, 1), None, options)
    resolve(backend)
    return backend, options


class Ranks(TypedDict):
    """The arguments of a Problem that a process group has."""

    ep_size: int
    rank: int


def ranks_of(group: Any) -> Ranks:
    """Return ep_size and rank of a Problem over a process group; None: this rank holds all experts."""
    if group is None:
        return {"ep_size": 1, "rank": 0}
    return {"ep_size": dist.get_world_size(group), "rank": dist.get_rank(group)}


class LibraryLayer(Layer):
    """A layer in the place of a library's experts; those of one size share a window, which takes hundreds of MB.

    problem: as megamoe.Layer takes it; what only this rank may refuse belongs into a function that makes it.
    group: the process group of problem.ep_size ranks; None: alone. device: of the experts.
    backend, options: those of check(). more: further arguments of megamoe.Layer.
    Attributes: borrowed, what return_window() takes of a layer that is dropped without close(); made_for, for adapters
    that replace a layer when its module changes.
    Collective.
    """

    made_for: Any = None

    def __init__(
        self,
        problem: Problem | Callable[[Any], Problem],
        group: Any,
        device: torch.device,
        backend: str,
        options: dict[str, Any],
        **more: Any,
    ) -> None:
        group = ALONE if ranks_of(group)["ep_size"] == 1 else group
        super().__init__(problem, group, backend=backend, **more, **options)
        # After the checks of what ranks may differ in, which raise before memory is taken.
        self.borrowed = borrow_window(self.problem, self.ranks, device, backend, options)
        self._options = options | self.borrowed

    def close(self) -> None:
        """Free what it holds, its window with the last that uses it. Collective."""
        super().close()
        return_window(self.borrowed)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:  # type: ignore[override]
        """Leave nothing to a copy of its module, whose first call makes one."""


class LibraryLayers(dict[Any, LibraryLayer]):
    """Layers by what they are for. Copies have none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LibraryLayers:
        return LibraryLayers()

    def __reduce__(self) -> tuple[Any, ...]:
        return LibraryLayers, ()

    def close(self) -> None:
        """Free what they hold; calls make them anew. Collective."""
        for layer in self.values():
            layer.close()
        self.clear()


def together(layer: Layer | None, group: Any = None) -> Together:
    """Return a context that raises an error of its block on all ranks, which wait in a call of `layer`.

    group: where there is no layer yet, the process group that the others make one on; None: alone.
    """
    if layer is not None:
        return layer.together()
    return Group.of(ALONE if group is None else group).together("a new layer")


class LibraryModule:
    """A library's module of experts with a layer of its own: `_open(device)` returns a new one, for a first call."""

    _layer: LibraryLayer | None = None
    _open: Callable[[torch.device], LibraryLayer]

    def _opened(self, device: torch.device) -> LibraryLayer:
        """Return the layer. Collective where there is none."""
        return self._layer or self._make(device)

    @at_first_call
    def _make(self, device: torch.device) -> LibraryLayer:
        self._layer = self._open(device)
        return self._layer

    def close(self) -> None:
        """Free what the layer holds; a call makes it anew. Collective."""
        if self._layer is not None:
            self._layer.close()
            self._layer = None


def close_in(model: torch.nn.Module) -> None:
    """Close the modules of a model. Collective."""
    for module in model.modules():
        if isinstance(module, LibraryModule):
            module.close()


def borrow_window(
    problem: Problem, group: Any, device: torch.device, backend: str, options: Mapping[str, Any]
) -> dict[str, Window]:
    """Return the option `window` for a layer where the kernel runs, nothing elsewhere. Collective."""
    found = window_of(backend, problem, Group.of(group), device, options)
    if found is None or options.get("window") is not None:
        return {}
    problem, group = found
    key = WindowSpec.of(problem), group, device
    if key not in _windows:
        _windows[key] = Window(problem, group, device=device, agreed=True), [0]  # by window_of()
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
    borrowed.clear()
