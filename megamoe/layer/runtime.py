"""Hold what a layer's handle stands for: its backend, and its copies of the weights in other formats."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.call import Backend
from megamoe.core.config import Problem
from megamoe.core.errors import MegaMoEError
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.group.group import Group, Together
from megamoe.launch.cache import QuantizedCache
from megamoe.layer.signature import Signatures


class Turns(type(threading.RLock())):  # type: ignore[misc]  # the type has no public name
    """A lock by which threads take turns. Copies and pickles are locks of their own."""

    def __reduce__(self) -> Any:
        return Turns, ()


@dataclass(eq=False)
class Runtime:
    """Hold what a call needs besides tensors. The operators' table has a weak reference; the layer owns it."""

    problem: Problem
    group: Group
    backend: Backend
    cache: QuantizedCache = field(default_factory=QuantizedCache)
    signatures: Signatures = field(default_factory=Signatures)  # of calls of its operators
    handle: Tensor = field(init=False)  # [] int64 on the CPU
    # Copies are made and used, and launches enqueued, by one thread at a time.
    lock: Any = field(default_factory=Turns)
    state_bytes: int = field(init=False)  # that a forward keeps
    quantizes: bool = field(init=False)  # whether weights may be masters of what is stored
    transposes: bool = field(init=False)  # whether backward multiplies transposes of what is stored
    as_forward: bool = field(init=False)  # whether backward is given what forward was
    mean_over: int = 1  # ranks that gradients of weights are divided by
    together: Together = field(init=False)  # for errors in a call, before the ranks meet

    def __post_init__(self) -> None:
        number = next(_numbers)
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        self.state_bytes = self.backend.state_bytes
        formats = self.problem.formats
        self.quantizes, self.transposes = formats.w.scaled, formats.transposes
        self.as_forward = self.backend.recomputes or formats.packed
        backend = self.backend  # not self: a cycle would keep a closed runtime in the table
        self.together = self.group.together("a first call", lambda: backend)
        _runtimes[number] = self

    def weights(self, given: ExpertWeights, trains: bool = False) -> ExpertWeights:
        """Return the weights that the forward pass reads: FP8 masters are quantized once per version.

        trains: True: a backward pass of the backend follows, which reads transposed().
        """
        if self.quantizes and given.w13_scale is None:
            return self.cache.weights(self.problem, given, trains and self.transposes)
        return given

    def transposed(self, given: ExpertWeights) -> TransposedWeights | None:
        """Return the transposes that the backward pass multiplies; None: it multiplies the weights themselves."""
        if self.transposes:
            return self.cache.transposed(self.problem, given)
        return None


_numbers = itertools.count(1)
_runtimes: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()


def runtime_of(handle: Tensor) -> Runtime:
    """Return the runtime of a handle."""
    runtime = _runtimes.get(int(handle))
    if runtime is None:
        raise MegaMoEError(f"the layer of handle {int(handle)} is closed or was deleted")
    return runtime
