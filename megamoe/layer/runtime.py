"""Hold what a layer's handle stands for: its backend, and its copies of the weights in other formats."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.call import Backend
from megamoe.core.config import Problem
from megamoe.core.errors import MegaMoEError
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import Group
from megamoe.launch.cache import QuantizedCache
from megamoe.layer.signature import Signatures


class Turns(type(threading.RLock())):  # type: ignore[misc]  # the type has no public name
    """A lock by which threads take turns. Copies and pickles are locks of their own."""

    def __reduce__(self) -> Any:
        return Turns, ()


class Runtime:
    """Hold what a call needs besides tensors. The operators' table has a weak reference; the layer owns it."""

    mean_over = 1  # ranks that gradients of weights are divided by

    def __init__(
        self,
        problem: Problem,
        group: Group,
        backend: Backend,
        cache: QuantizedCache | None = None,
        lock: Any = None,
    ) -> None:
        self.problem, self.group, self.backend = problem, group, backend
        self.cache = cache or QuantizedCache()
        self.signatures = Signatures()  # of calls of its operators
        # Copies are made and used, and launches enqueued, by one thread at a time.
        self.lock = lock or Turns()
        self.state_bytes = backend.state_bytes  # that a forward keeps
        # Whether weights may be masters of what is stored, whether backward multiplies transposes of that, and whether
        # it is given what forward was.
        self.quantizes = problem.formats.w.scaled
        self.transposes = problem.formats.transposes
        self.as_forward = backend.recomputes or problem.formats.packed
        # For errors in a call, before the ranks meet. Not by self: a cycle would keep a closed runtime in the table.
        self.together = group.together("a first call", lambda: backend)
        number = next(_numbers)
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")  # []
        _runtimes[number] = self

    def weights(self, given: ExpertWeights, trains: bool = False) -> ExpertWeights:
        """Return the weights that the forward pass reads: FP8 masters are quantized once per version.

        trains: True: a backward pass of the backend follows, which reads their transposes.
        """
        if self.quantizes and given.w13_scale is None:
            return self.cache.weights(self.problem, given, trains and self.transposes)
        return given


_numbers = itertools.count(1)
_runtimes: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()


def runtime_of(handle: Tensor) -> Runtime:
    """Return the runtime of a handle."""
    runtime = _runtimes.get(int(handle))
    if runtime is None:
        raise MegaMoEError(f"the layer of handle {int(handle)} is closed or was deleted")
    return runtime
