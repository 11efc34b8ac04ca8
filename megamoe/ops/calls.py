"""Recognize calls like earlier ones: they skip checks and, without gradients, repeat what the earlier one launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megamoe.core.planes import IN_MEMORY, STRIDE_BYTES, SUSPECT_BELOW
from megamoe.core.transforms import records, watched
from megamoe.launch.launches import allocator, current_stream_handle, launch_lock, on_device

F = TypeVar("F", bound=Callable[..., Any])
MAX_VALIDATED = 4096
margins: list[int] = []  # SMs that machines.sm_margin() leaves


class Plan:
    """What a call without gradients did: it allocated memory and launched kernels.

    It is complete if each tensor of a launch or result was an argument or allocated by new_empty() below. Torch's own
    operations have other results, so a call that needs some has no complete plan.
    """

    def __init__(self, given: tuple[Any, ...]) -> None:
        self._tensors: list[Any] = [*given]  # while it is recorded
        self._made: list[tuple[Any, ...]] = []
        self._launches: list[tuple[Any, list[int | None]]] = []
        self._device, self._results = torch.device("cpu"), [0]
        self.complete = True

    def allocated(self, t: Tensor) -> None:
        self._tensors.append(t)
        self._made.append((tuple(t.shape), t.stride(), t.dtype))

    def launched(self, device: torch.device, kept: Any, tensors: tuple[Tensor | None, ...]) -> None:
        """kept: the argument block, see machines.py."""
        self._device = device
        self._launches.append((kept, [t if t is None else self._place(t) for t in tensors]))

    def end(self, found: Any) -> None:
        """found: what the call returned."""
        self._is_one = isinstance(found, Tensor)
        self._results = [self._place(t) for t in ((found,) if self._is_one else found)]
        self.complete &= bool(self._launches)
        self._tensors = []

    def _place(self, t: Tensor) -> int:
        places = [i for i, other in enumerate(self._tensors) if other is t]
        self.complete &= len(places) == 1
        return places[0] if places else 0

    def repeat(self, given: tuple[Any, ...]) -> Any:
        """Do it again with other arguments of the same geometry."""
        device = self._device
        with launch_lock, on_device(device):
            new = allocator(device.type == "cuda")
            tensors = [*given, *[new(*of) for of in self._made]]
            for kept, places in self._launches:
                kept.move([0 if i is None else tensors[i].data_ptr() for i in places])
                kept.launcher.launch(current_stream_handle(device.index))
        results = [tensors[i] for i in self._results]
        return results[0] if self._is_one else tuple(results)


class _Call(threading.local):
    """What this thread runs. known: a call like one that was validated. plan: that is recorded."""

    known = False
    plan: Plan | None = None


call, _validated = _Call(), dict[Any, Plan | None]()


def new_empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Allocate memory on the device of `like`."""
    made = like.new_empty(*shape, dtype=dtype)
    if call.plan is not None:
        call.plan.allocated(made)
    return made


def validates(function: F) -> F:
    """Skip what is `unless_known` in calls like earlier ones: in shapes, strides, types, devices and options."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or watched() or torch._C._get_tracing_state():
            return function(*args, **options)
        given = (*args, *options.values())
        key: Any = (function.__name__, *margins[-1:], *options, *map(_facts, given))
        try:
            call.known, plan = key in _validated, _validated.get(key)
        except TypeError:  # an argument of a wrong type, which the checks name
            return function(*args, **options)
        plain = not records([t for t in given if isinstance(t, Tensor)])
        if plain and plan is not None and plan.complete:
            return plan.repeat(given)
        try:
            call.plan = plan = Plan(given) if plain and plan is None else None
            found = function(*args, **options)
        finally:
            call.known, call.plan = False, None
        if plan is not None:
            plan.end(found)
        if len(_validated) == MAX_VALIDATED:
            _validated.clear()
        _validated[key] = plan or _validated.get(key)
        return found

    return cast(F, run)


def _facts(value: Any) -> Any:
    """Return what the checks read of an argument: with one that may have been freed, or not be aligned, its place."""
    if type(value) not in IN_MEMORY or value.layout != torch.strided or value.is_nested:
        return (type(value), value) if not isinstance(value, Tensor) else [value]
    place = value.data_ptr()
    suspect = place < SUSPECT_BELOW or place % STRIDE_BYTES
    return [value] if suspect else (value.shape, value.stride(), value.dtype, value.device)


def unless_known(check: Callable[..., None]) -> Any:
    """Make a check one that validates() skips."""
    return wraps(check)(lambda *args, **given: None if call.known else check(*args, **given))
