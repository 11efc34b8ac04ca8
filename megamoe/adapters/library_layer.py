"""Share what all adapters do: validate options, open a layer at the first call, share its window, close it.

Each adapter adds how to read its library's parameters, which configurations no layer supports, and where to hook in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megamoe.backends.select import Opening, check_options, resolve, window_of
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.core.planes import is_dtensor
from megamoe.core.uncompiled import uncompiled
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import ALONE, Group, Together
from megamoe.layer.layer import Layer
from megamoe.window.window import Window, WindowSpec

_ANY = Problem(128, 128, 1, 1)  # default of check()
MAX_TOKENS = 8192  # of a call, where neither the library nor its user says

_windows: dict[Any, tuple[Window, list[int]]] = {}  # with how many layers use it

at_first_call = uncompiled(
    "megamoe layers are made by a first call: make one before torch.compile(fullgraph=True)"
)


def check(
    backend: str,
    options: dict[str, Any],
    problem: Problem = _ANY,
    trains: bool = False,
    equal_shares: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Validate and return the backend and options that a library's user passed for megamoe.Layer.

    problem: the layer's; by default, before it is known, BF16 with 8192 tokens. trains: True: the precision must train.
    equal_shares: True: all ranks must have the same number of experts.
    Raises ConfigError for options that such a layer does not support, and for a problem that does not fit.
    """
    if equal_shares and problem.num_experts % problem.ep_size:
        expected = f"a multiple of {problem.ep_size}, the ranks"
        raise ConfigError("num_experts", problem.num_experts, expected)
    if trains and (problem.formats.packed or not problem.formats.trains):
        expected = "'bf16' or 'fp8', of bf16 parameters"
        raise ConfigError("precision", repr(problem.precision), expected)
    of_backend = {name: value for name, value in options.items() if name != "transposes"}
    check_options(replace(problem, num_experts=1, ep_size=1, rank=0), None, of_backend)
    resolve(backend)
    return backend, options


def ranks_of(group: Any) -> dict[str, Any]:
    """Return ep_size and rank of a process group, as Problem takes them; None: this rank holds all experts."""
    if group is None:
        return {"ep_size": 1, "rank": 0}
    return {"ep_size": dist.get_world_size(group), "rank": dist.get_rank(group)}


class LibraryLayer(Layer):
    """Replace a library's experts by a layer. Layers of one size share a window of hundreds of MB. Collective.

    The attribute `borrowed` is what return_window() takes if a layer is dropped without close(). Adapters use
    `made_for` to replace a layer when its module changes, and `weights_of` to read a module of the library.

    Args:
        problem: As for megamoe.Layer. Pass a function if only this rank may reject the problem.
        group: The process group of problem.ep_size ranks; None: one rank.
        device: Device of the experts.
        backend, options: As check() returns them.
        more: Further arguments of megamoe.Layer.
    """

    made_for: Any = None
    weights_of: Callable[[Any], ExpertWeights]

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
        self.borrowed = borrow_window(self.problem, self.ranks, device, backend, self._options)
        self._options |= self.borrowed

    def close(self) -> None:
        """Free the layer's memory, and the window if no other layer uses it. Collective."""
        super().close()
        return_window(self.borrowed)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:  # type: ignore[override]
        """Copy to None: the first call of the copied module creates its own layer."""


class LibraryLayers(dict[Any, LibraryLayer]):
    """Map keys to layers. A copy is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LibraryLayers, ()

    def quantize_experts(self, module: Any, follows: bool) -> None:
        """Do as megamoe.quantize_experts(), for the module of these layers. FSDP2's shards are left alone."""
        if not any(map(is_dtensor, module.parameters(recurse=False))):
            for layer in self.values():
                layer.quantize(layer.weights_of(module), follows)

    def close(self) -> None:
        """Free the memory of all layers. The next calls create new ones. Collective."""
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
    """Give a library's module of experts its own layer: `_open(device)` returns a new one at the first call."""

    _layer: LibraryLayer | None = None
    _open: Callable[[torch.device], LibraryLayer]

    def _opened(self, device: torch.device) -> LibraryLayer:
        """Return the layer. Collective if there is none yet."""
        return self._layer or self._make(device)

    @at_first_call
    def _make(self, device: torch.device) -> LibraryLayer:
        self._layer = self._open(device)
        return self._layer

    def close(self) -> None:
        """Free the layer's memory. The next call creates a new layer. Collective."""
        if self._layer is not None:
            self._layer.close()
            self._layer = None


def close_in(model: torch.nn.Module) -> None:
    """Close the layers of a model's modules. Collective."""
    for module in model.modules():
        if isinstance(module, LibraryModule):
            module.close()


def borrow_window(
    problem: Problem, group: Any, device: torch.device, backend: str, options: Mapping[str, Any]
) -> dict[str, Window]:
    """Return the option `window` for a layer if the kernel runs it, else an empty dict. Collective."""
    found = window_of(Opening(backend, problem, Group.of(group), device, options))
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
    """Return a borrowed window after its layer was closed. The last layer closes the window. Collective."""
    for key, (window, users) in list(_windows.items()):
        if window is borrowed.get("window"):
            users[0] -= 1
            if not users[0]:
                del _windows[key]
                window.close()
    borrowed.clear()
